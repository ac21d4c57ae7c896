"""Model files: written models are read back, small where few entries are live; damaged and foreign ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.mask import Mask, top_k
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.results.runs.model_files import (
    FORMAT,
    describe_model,
    read_mask,
    read_model,
    save_model,
)

LAYOUT = Layout(
    (TensorSpec("a", (300, 20), "weight"), TensorSpec("b", (300,), "bias"), TensorSpec("m", (20,), "buffer"))
)


def draw_model(density: float, seed: int = 1) -> tuple[torch.Tensor, Mask]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(LAYOUT.size, generator=generator)
    live = top_k(torch.rand(LAYOUT.size, generator=generator), round(density * LAYOUT.size))
    return torch.where(live.bits, weights, 0.0), live


@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_saved_model_and_its_live_entries_are_read_back_bit_for_bit(density: float, tmp_path: Path) -> None:
    weights, live = draw_model(density)
    save_model(tmp_path / "m", LAYOUT, weights, live)
    assert torch.equal(read_model(tmp_path / "m", LAYOUT).view(torch.int32), weights.view(torch.int32))
    assert read_mask(tmp_path / "m", LAYOUT) == live


def test_file_has_the_bytes_of_live_values_and_of_the_cheapest_selection(tmp_path: Path) -> None:
    """At 1 %: 63 values and about a byte each for their places; the header takes about 450 bytes."""
    weights, live = draw_model(0.01)
    save_model(tmp_path / "m", LAYOUT, weights, live)
    tensors = load_file(tmp_path / "m")
    assert tensors["values"].numel() <= 4 * live.count
    assert tensors["selection"].numel() < 2 * live.count
    save_model(tmp_path / "dense", LAYOUT, weights, Mask.full(LAYOUT.size))
    assert load_file(tmp_path / "dense").keys() == {"a", "b", "m"}
    assert (tmp_path / "m").stat().st_size < 0.04 * (tmp_path / "dense").stat().st_size


def test_live_zeros_negative_zeros_and_values_of_entries_that_are_off_are_kept(tmp_path: Path) -> None:
    weights, live = draw_model(0.1)
    weights[live.indices[0]] = 0.0
    save_model(tmp_path / "m", LAYOUT, weights, live)
    assert read_mask(tmp_path / "m", LAYOUT) == live
    for value in (-0.0, 3.0):
        weights[(~live).indices[0]] = value
        save_model(tmp_path / "m", LAYOUT, weights, live)
        assert torch.equal(read_model(tmp_path / "m", LAYOUT).view(torch.int32), weights.view(torch.int32))
        assert read_mask(tmp_path / "m", LAYOUT) == live


def test_model_without_a_mask_is_small_where_most_entries_are_zero_and_finite(tmp_path: Path) -> None:
    weights, live = draw_model(0.1)
    save_model(tmp_path / "m", LAYOUT, weights)
    assert read_mask(tmp_path / "m", LAYOUT) == live
    weights[0] = torch.nan
    save_model(tmp_path / "m", LAYOUT, weights)
    assert torch.equal(load_file(tmp_path / "m")["a"].flatten().isnan(), weights[:6000].isnan())


def test_eight_bits_are_within_the_rounding_of_a_block_and_buffers_exact(tmp_path: Path) -> None:
    weights, live = draw_model(0.2)
    save_model(tmp_path / "exact", LAYOUT, weights, live)
    save_model(tmp_path / "m", LAYOUT, weights, live, "int8")
    found = read_model(tmp_path / "m", LAYOUT)
    assert float((found - weights).abs().max()) <= 2 * float(weights.abs().max()) * (1 + 2**-7) / 255
    assert torch.equal(found[-20:], weights[-20:])
    assert not bool(found[~live.bits].any())
    assert (tmp_path / "m").stat().st_size < 0.5 * (tmp_path / "exact").stat().st_size


def test_equal_models_make_equal_files(tmp_path: Path) -> None:
    """Safetensors orders the metadata by a hash that differs from one call to the next."""
    for density in (1.0, 0.1):
        for number in range(20):
            save_model(tmp_path / f"{number}.safetensors", LAYOUT, *draw_model(density))
        assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1


def test_summary_counts_parameters_live_ones_and_those_of_each_layer() -> None:
    _, live = draw_model(0.1)
    size = describe_model(LAYOUT, live)
    assert size["parameters"] == 6300
    assert size["live"] == int(live.bits[:6300].sum())
    assert size["layers"] == {"a": [int(live.bits[:6000].sum()), 6000]}


def test_model_of_another_network_or_program_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_model(file, LAYOUT, *draw_model(0.1))
    with pytest.raises(ConfigError, match="the base model under the adapters"):
        read_model(file, Layout(LAYOUT.tensors, base_model_digest="0" * 64))
    save_file({"a": torch.zeros(3)}, file)
    with pytest.raises(ConfigError, match=r"layout is None.*flare-sparse run did not write"):
        read_model(file, LAYOUT)
    save_file({"a": torch.zeros(3)}, file, {"layout": LAYOUT.fingerprint})
    with pytest.raises(ConfigError, match=r"tensor 'a': expected \('F32', \(300, 20\)\), found \('F32', \(3,\)\)"):
        read_model(file, LAYOUT)
    save_file({"a": torch.zeros(3)}, file, {"layout": LAYOUT.fingerprint, "format": "flare-sparse model 2"})
    with pytest.raises(ConfigError, match=f"expected the format '{FORMAT}', found 'flare-sparse model 2'"):
        read_mask(file, LAYOUT)
    file.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model(file, LAYOUT)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model(tmp_path / "none.safetensors", LAYOUT)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, model = tmp_path_factory.mktemp("files"), draw_model(0.1)
    save_model(folder / "sparse", LAYOUT, *model)
    save_model(folder / "int8", LAYOUT, *model, "int8")
    save_model(folder / "dense", LAYOUT, draw_model(1.0)[0])
    return {file.name: file for file in folder.iterdir()}


@given(
    kind=st.sampled_from(["sparse", "int8", "dense"]), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7),
    is_cut=st.booleans(),
)  # fmt: skip
def test_every_flipped_bit_and_every_cut_is_one_error_or_the_same_model(
    written: dict[str, Path], kind: str, place: float, bit: int, *, is_cut: bool
) -> None:
    """The same model: a flipped bit of the spaces after the header, or of a field that no reader needs."""
    data, broken = bytearray(written[kind].read_bytes()), written[kind].with_suffix(".broken")
    offset = int(place * len(data))
    if is_cut:
        del data[offset:]
    else:
        data[offset] ^= 1 << bit
    broken.write_bytes(data)
    expected = read_model(written[kind], LAYOUT)
    try:
        found = read_model(broken, LAYOUT)
    except ConfigError as error:
        assert str(error).startswith(str(broken))  # noqa: PT017
    else:
        assert not is_cut
        assert torch.equal(found, expected)


@given(
    changes=st.dictionaries(
        st.sampled_from(["selection", "values", "scalars", "live", "sha256", "format", "layout"]),
        st.sampled_from(["", "-1", "9" * 30, "shared", "gaps", "csr", "bitmap", "dense", "int8", "float32", "0"]),
        min_size=1,
    ),
    sections=st.fixed_dictionaries({}, optional={
        "selection": st.binary(max_size=40), "values": st.binary(max_size=40), "more": st.binary(max_size=3),
    }),
)  # fmt: skip
def test_forged_header_or_section_is_refused_whatever_it_claims(
    written: dict[str, Path], changes: dict[str, str], sections: dict[str, bytes]
) -> None:
    data = written["sparse"].read_bytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors = load_file(written["sparse"])
    parts = {name: torch.tensor(list(content), dtype=torch.uint8) for name, content in sections.items()}
    forged = written["sparse"].with_suffix(".forged")
    save_file({**tensors, **parts}, forged, {**metadata, **changes})
    try:
        found = read_model(forged, LAYOUT)
    except ConfigError as error:
        assert str(error).startswith(str(forged))  # noqa: PT017
    else:
        assert {**metadata, **changes} == metadata
        assert torch.equal(found, read_model(written["sparse"], LAYOUT))
