"""A number format of another distribution: one sign a value, one scale a tensor, as signSGD with error feedback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from local_federation import LocalFederation
from toy import ToyBench

from flare_sparse.config.loading import load_config, parse_job, serialize_job
from flare_sparse.core.errors import ConfigError
from flare_sparse.wire import formats

SIGNS = '''
from dataclasses import dataclass
import numpy as np
import torch
from flare_sparse.core.errors import RejectedMessage
from flare_sparse.core.needs import Need
from flare_sparse.wire.number_format import (
    CodedValues, NumberFormat, add_residual, require_finite, take_reference
)

@dataclass(frozen=True, kw_only=True)
class Signs(NumberFormat):
    """The mean magnitude of each tensor (float32), and a bit for each value."""

    def compute_min_bytes(self, scalars):
        return -(-scalars // 8)

    def measure(self, buffer, scalars, layout):
        return 4 * len(layout.tensors) + -(-scalars // 8)

    def seal(self, patch, coding, out=None):
        residual, values = add_residual(patch, coding.residual)
        target = (values - take_reference(patch.mask, coding.base_vector)).numpy()
        require_finite(torch.from_numpy(target), "values as signs")
        tensors = find_tensors(patch.mask, coding.layout)
        sums, counts = (np.bincount(tensors, w, len(coding.layout.tensors)) for w in (np.abs(target), None))
        scales = (sums / np.maximum(counts, 1)).astype("<f4")
        section = np.concatenate([scales.view(np.uint8), np.packbits(target < 0)])
        received = self.open(section, patch.mask, coding.layout, coding.base_vector)
        return CodedValues(section, patch.mask.put(values - received, residual), received)

    def open(self, section, mask, layout, base_vector):
        end = 4 * len(layout.tensors)
        scales = np.frombuffer(section[:end].tobytes(), "<f4").copy()
        require_finite(torch.from_numpy(scales), "scales")
        bits = np.unpackbits(section[end:])
        if (scales < 0).any() or bits[mask.count:].any():
            raise RejectedMessage("E_CANON", "values", "scales from 0 and zero padding", "others")
        steps = np.where(bits[:mask.count], -1, 1).astype(np.float32) * scales[find_tensors(mask, layout)]
        return take_reference(mask, base_vector) + torch.from_numpy(steps)

def find_tensors(mask, layout):
    numbers = np.repeat(np.arange(len(layout.tensors)), [spec.size for spec in layout.tensors])
    return numbers[mask.bits.numpy()]

SIGNS = Signs(code=128, rounding=1.0, sends_differences=True, takes=Need.EXACT_MODEL)
TAKEN = Signs(code=5, sends_differences=True)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an installed distribution that has the format."""
    info = tmp_path / "signs-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: signs\nVersion: 1.2\n")
    entries = "sign1 = signs:SIGNS\ntaken = signs:TAKEN\nother = signs:Signs\n"
    (info / "entry_points.txt").write_text(f"[flare_sparse.formats]\n{entries}")
    (tmp_path / "signs.py").write_text(SIGNS)
    monkeypatch.syspath_prepend(tmp_path)
    rows = dict(formats.FORMATS)
    yield tmp_path
    sys.modules.pop("signs", None)
    formats.FORMATS.clear()
    formats.FORMATS.update(rows)


def write_job(folder: Path, name: str, method: str = "fedavg") -> Path:
    file = folder / "job.yaml"
    file.write_text(f"name: job\nmethod: {{name: {method}}}\ntask: {{name: brain_age}}\nwire: {{values: {name}}}\n")
    return file


def test_job_names_the_format_of_a_distribution_and_a_run_has_a_bit_a_value(folder: Path) -> None:
    config = load_config(write_job(folder, "sign1"))
    assert parse_job(serialize_job(config)).wire.values == "sign1"
    bench = ToyBench()
    # Vectors of both ends are compared after every message.
    federation = LocalFederation("fedavg", bench, values="sign1", rounds=6)
    outcome = federation.run()
    assert not any(record.rejected or record.timed_out for record in federation.records)
    size = bench.layout.size
    updates = [line for line in federation.ledger.lines if line.content == "weights" and line.direction == "up"]
    assert {line.values for line in updates} == {"sign1"}
    section = 4 * len(bench.layout.tensors) + -(-size // 8)
    assert {line.payload_bytes for line in updates} == {128 + -(-section // 8) * 8}
    plain = LocalFederation("fedavg", bench, rounds=6).run()
    start = bench.weights
    assert float((outcome.weights - plain.weights).norm()) < float((plain.weights - start).norm())
    assert bool(torch.isfinite(outcome.weights).all())


def test_needs_of_the_format_are_those_of_its_row(folder: Path) -> None:
    with pytest.raises(ConfigError, match="sites train from a rounded model, but method dssgd"):
        load_config(write_job(folder, "sign1", "dssgd"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "wire.values: found 'nowhere'; expected one of float32, float16"),
        ("taken", r"'taken' of signs \(signs:TAKEN\) has the code 5, the code of int8; expected a free one"),
        ("other", "expected an instance of a subclass of NumberFormat"),
    ],
)
def test_format_that_cannot_be_used_is_refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write_job(folder, name))
