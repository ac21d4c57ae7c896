"""Updates of a round that do not fit into the server's memory wait in files, with the same bits in every run."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from local_federation import LocalFederation
from skips import require
from torch import Tensor

from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.privacy.secure_aggregation.stage import SumRules
from flare_sparse.rounds.endpoints.update_store import UpdateStore
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.stage import Questions
from flare_sparse.wire.steps import Step, unpack_message

MAPS = Path("/proc/self/maps")
SGD = {"optimizer": "sgd", "lr": 0.01}


def is_in_file(tensor: Tensor) -> bool:
    """Whether the memory of a tensor belongs to a file without a name."""
    require(MAPS.exists(), "the list of mapped files of a process: run on Linux")
    for line in MAPS.read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.endswith("(deleted)")
    return False


def measure_memory(patches: list[Patch]) -> int:
    """Return the bytes of updates that are in memory; a mask that several of them share counts once."""
    tensors = {id(tensor): tensor for patch in patches for tensor in (patch.values, patch.mask.bits)}
    return sum(t.numel() * t.element_size() for t in tensors.values() if not is_in_file(t))


def run(method: str, window: int | None, sites: int = 4, **settings: Any) -> tuple[Any, LocalFederation, list[Patch]]:
    """Return the outcome of two rounds, the federation and the updates of the last training round."""
    settings = {"rounds": 2, "training": SGD, **settings}
    federation = LocalFederation(method, sites=sites, rules=RoundRules(max_norm_ratio=20), **settings)
    if window is not None:
        federation.server.updates = UpdateStore(window)
    patches: dict[str, Patch] = {}
    decode = federation.server.decode

    def record(site: str, *arguments: Any) -> Any:
        contribution = decode(site, *arguments)
        if contribution.content != "metrics":
            patches[site] = contribution.patch
        return contribution

    federation.server.decode = record  # type: ignore[method-assign]
    return federation.run(), federation, list(patches.values())


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedavg", {"server": {"optimizer": "adam", "lr": 0.01}}),
    ("fedsparsify", {}),
    ("neurosfl", {}),
    ("metagater", {}),
    ("topk_ef", {}),
    ("scbf", {}),
    ("scbf", {"aggregation": "mean"}),
    ("dispfl", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), SETTINGS)
def test_updates_in_files_end_in_the_same_bits(method: str, settings: dict[str, Any]) -> None:
    expected, plain, _ = run(method, None, **settings)
    outcome, federation, patches = run(method, 0, **settings)
    assert torch.equal(outcome.weights, expected.weights)
    assert outcome.mask == expected.mask
    assert [r.evaluation for r in federation.records] == [r.evaluation for r in plain.records]
    assert [line.payload_bytes for line in federation.ledger.lines] == [
        line.payload_bytes for line in plain.ledger.lines
    ]
    assert all(is_in_file(patch.values) for patch in patches)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "shares_mask"), [("fedavg", True), ("topk_ef", False)])
def test_memory_of_a_round_does_not_grow_with_the_sites(method: str, *, shares_mask: bool) -> None:
    """A window of 6 updates holds those of 6 sites; those of 12 sites wait in files, with their selections."""
    _, _, plain = run(method, None, sites=2)
    own = 0 if shares_mask else plain[0].mask.size + 8 * plain[0].mask.count
    window = 6 * (own + 4 * plain[0].mask.count)
    mask_bytes = plain[0].mask.size if shares_mask else 0
    for sites in (6, 12):
        _, _, patches = run(method, window, sites=sites)
        assert len(patches) == sites
        assert measure_memory(patches) <= window + mask_bytes
        assert any(is_in_file(patch.values) for patch in patches) == (sites == 12)


@pytest.mark.parametrize("window", [None, 0])
def test_update_rejected_after_all_have_arrived_is_not_in_the_sum(window: int | None) -> None:
    """The norm of an update is compared with those of all others, so it is rejected when the last one is there."""

    def run_with(factor: float) -> tuple[Any, LocalFederation]:
        federation = LocalFederation("fedavg", sites=4, rules=RoundRules(max_norm_ratio=20), rounds=1, training=SGD)
        if window is not None:
            federation.server.updates = UpdateStore(window)
        federation.change_update = lambda upload: (
            upload.with_values(upload.update.patch.values * factor) if upload.site == "site-1" else upload
        )
        return federation.run(), federation

    outcome, federation = run_with(1e6)
    assert federation.records[0].rejected == {"site-1": "E_NORM"}
    silent = LocalFederation("fedavg", sites=4, rounds=1, training=SGD)
    silent.is_silent = lambda site, attempt: site == "site-1" and attempt.round == 1
    assert torch.equal(outcome.weights, silent.run().weights)


def test_retry_divides_the_window_among_the_sites_of_the_first_attempt() -> None:
    store, patch = UpdateStore(400), Patch(torch.ones(10), Mask.full(10))
    store.set_num_sites(10, is_retry=False)
    assert store.keep(patch, patch.mask).source is patch.source
    store.set_num_sites(2, is_retry=True)
    long = Patch(torch.ones(11), Mask.full(11))
    assert store.keep(long, long.mask).source is not long.source
    store.set_num_sites(2, is_retry=False)
    assert store.keep(long, long.mask).source is long.source


def test_updates_share_the_mask_that_they_had_to_have_and_the_empty_one() -> None:
    store, mask = UpdateStore(), Mask(torch.tensor([True, False, True]))
    own = Mask(mask.bits.clone())
    assert store.keep(Patch(torch.ones(2), own), mask).mask is mask
    assert store.keep(Patch.empty(3), mask) is store.keep(Patch.empty(3), None)


def test_selection_of_an_update_is_the_same_in_a_file() -> None:
    patch = Patch(torch.tensor([1.5, -2.0]), Mask(torch.tensor([True, False, False, True, False])))
    stored = UpdateStore(0).keep(patch, None)
    assert stored.mask == patch.mask
    assert stored.mask.fingerprint == patch.mask.fingerprint
    assert stored.mask.indices.tolist() == [0, 3]
    assert stored.to_vector().tolist() == [1.5, 0, 0, -2, 0]


def test_update_stays_in_memory_if_it_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    patch = Patch(torch.ones(3), Mask.full(3))
    with caplog.at_level(logging.WARNING):
        assert UpdateStore(0, tmp_path / "missing").keep(patch, patch.mask) is patch
    assert "stays in memory" in caplog.text


def test_files_have_no_names_and_no_descriptors(tmp_path: Path) -> None:
    store, mask = UpdateStore(0, tmp_path), Mask.full(3)
    kept = [store.keep(Patch(torch.full((3,), float(number)), mask), mask) for number in range(2000)]
    assert not list(tmp_path.iterdir())
    assert [patch.values[0].item() for patch in kept] == list(range(2000))


@pytest.mark.slow
def test_server_holds_one_padded_message_at_a_time() -> None:
    """Of four sites' padded values, the one that is added and the one that arrives are in memory."""
    federation = LocalFederation("fedavg", sites=4, rules=RoundRules(min_sites=3), stage=SumRules(8.0), rounds=1)
    alive: list[int] = []

    def deliver(questions: Questions) -> Iterator[tuple[str, Any]]:
        references = []
        for site, question in questions.messages.items():
            answer = federation.stages[site].answer(question).copy()
            references.append(weakref.ref(answer))
            if unpack_message(question, "server")[0] == Step.VALUES:
                gc.collect()
                alive.append(sum(reference() is not None for reference in references))
            yield site, answer

    federation.yield_sum_replies = deliver  # type: ignore[method-assign]
    federation.run()
    assert len(alive) == 4
    assert max(alive) <= 2
