"""A finished run that continues with more rounds ends with the bits of a run that had them from the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.needs import Need, find_need
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.registry import METHODS
from flare_sparse.results.runs.continuation import FINAL, copy_checkpoints, keep_final_checkpoints
from flare_sparse.rounds.federation.records import RoundRecord
from flare_sparse.rounds.local.run import Course, Transport, run_locally

SETTINGS: dict[str, dict[str, Any]] = {
    "topk_ef": {"fraction": 0.2},
    "fedavg": {"model_average": {"kind": "swa", "start": 0}},
    "scbfwp": {"prunings": 1},
    "fawp": {"prunings": 1},
    "dispfl": {"initial_drop_fraction": 0},
    "fedsparsify": {"sparsity": 0.5, "initial_sparsity": 0.5},
}
"""Settings with which the rounds of a method do not depend on their number."""
REFUSED = {
    "fedsparsify": ({}, "the schedule has reached 0.9 after 2 rounds"),
    "dispfl": ({}, "falls to 0 over method.rounds"),
    "local_only": ({}, "no common model"),
    "scbfwp": ({"prunings": 3}, "pruning was not complete"),
    "fawp": ({"target_pruned_fraction": 0.9}, "pruning was not complete"),
}


def run(
    bench: Any, name: str, rounds: int, stores: Callable[[str], Store], values: Any, *, resume: bool = False
) -> Any:
    """Run with new sites and endpoints; return digest, evaluations, rounds and messages."""
    method = bench.method(name, rounds=rounds, participation=0.7, **SETTINGS.get(name, {}))
    outcome, ledger = run_locally(
        method,
        bench.weights,
        bench.sites(),
        bench.task.metric,
        transport=Transport(values=values),
        course=Course(stores=stores, resume=resume),
    )
    best = (outcome.best.round, outcome.best.metrics)
    return (
        compute_digest(outcome.weights),
        outcome.evaluation,
        best,
        [drop_times(r) for r in outcome.rounds],
        ledger.lines,
    )


def drop_times(record: RoundRecord) -> dict[str, Any]:
    # MetaGater's last model has another mask than the one that the next round would send.
    return {k: v for k, v in asdict(record).items() if k not in ("seconds", "committed_at", "sparsity")}


def open_stores(folder: Path, rounds: int) -> Callable[[str], Store]:
    return lambda end: Store(folder / "job" / end, {"rounds": rounds})


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "local_only"])
def test_two_rounds_and_two_more_are_four_at_once(name: str, values: str, bench: Any, tmp_path: Path) -> None:
    run(bench, name, 2, open_stores(tmp_path / "short" / "checkpoints", 2), values)
    keep_final_checkpoints(tmp_path / "short" / "checkpoints")
    stores = open_stores(tmp_path / "long", 4)
    copy_checkpoints(tmp_path / "short" / FINAL / "job", stores)
    continued = run(bench, name, 4, stores, values, resume=True)
    assert continued == run(bench, name, 4, open_stores(tmp_path / "once", 4), values)
    final = (tmp_path / "short" / FINAL / "job").iterdir()
    kept = {folder.name: len(Store(folder, {}).list_numbers()) for folder in final}
    # The last update of a site may be one that did not count: it starts from the memory before it.
    assert kept.pop("server") == 1
    assert set(kept.values()) <= {1, 2}


@pytest.mark.parametrize("name", METHODS)
def test_method_with_a_schedule_over_all_rounds_says_why_it_cannot_continue(name: str, bench: Any) -> None:
    def explain(settings: dict[str, Any]) -> str | None:
        need = find_need(bench.method(name, rounds=2, **settings).config.needs(), Need.NUMBER_OF_ROUNDS)
        return need and need.reason

    assert (explain(SETTINGS.get(name, {})) is None) == (name != "local_only")
    if name in REFUSED:
        settings, reason = REFUSED[name]
        assert reason in (explain(settings) or "")
