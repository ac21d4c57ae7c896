"""A run that was killed after a commit ends with the bits of an undisturbed one, for every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flare_sparse.checkpoint.store import Store
from flare_sparse.federation import RoundRecord
from flare_sparse.methods import METHODS
from flare_sparse.rehearsal import rehearse
from flare_sparse.server import digest


class Killed(BaseException):
    """The process is gone."""


def stores(folder: Path) -> Callable[[str], Store]:
    return lambda end: Store(folder / end, {"run": "0" * 16})


def killed_after(commits: int) -> Callable[[RoundRecord], None]:
    seen: list[RoundRecord] = []

    def on_round(record: RoundRecord) -> None:
        seen.append(record)
        if len(seen) == commits:
            raise Killed

    return on_round


def run(bench: Any, name: str, folder: Path, **more: Any) -> Any:
    """With sites, desks and loop of its own, as after a restart; returns digest, judgement, rounds, messages."""
    settings = {"fraction": 0.2} if name == "topk_ef" else {}
    method = bench.method(name, **settings)
    outcome, ledger = rehearse(method, bench.weights, bench.sites(), bench.task.metric, stores=stores(folder), **more)
    best = (outcome.best.round, outcome.best.metrics)
    return digest(outcome.weights), outcome.judgement, best, [timeless(r) for r in outcome.rounds], ledger.lines


def timeless(record: RoundRecord) -> dict[str, Any]:
    return {k: v for k, v in asdict(record).items() if k not in ("seconds", "committed_at")}


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", METHODS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(name: str, values: str, bench: Any, tmp_path: Path) -> None:
    """The model, every judgement, every round and every message of the ledger, whichever commit was the last."""
    whole = run(bench, name, tmp_path / "whole", values=values)
    for commits in range(1, len(whole[3])):
        folder = tmp_path / str(commits)
        with pytest.raises(Killed):
            run(bench, name, folder, values=values, on_round=killed_after(commits))
        assert run(bench, name, folder, values=values, resume=True) == whole


@pytest.mark.parametrize("name", METHODS)
def test_sites_that_lost_their_checkpoints_are_sent_everything(name: str, bench: Any, tmp_path: Path) -> None:
    """Only what a method keeps at a site is gone then; all else ends in the same model."""
    whole = run(bench, name, tmp_path / "whole")
    with pytest.raises(Killed):
        run(bench, name, tmp_path / "cut", on_round=killed_after(1))
    for site in ("site-1", "site-2", "site-3"):
        Store(tmp_path / "cut" / site, {}).drop()
    resumed = run(bench, name, tmp_path / "cut", resume=True)
    assert (resumed[0] == whole[0]) is (name != "topk_ef")


def test_a_run_that_is_not_resumed_starts_afresh(bench: Any, tmp_path: Path) -> None:
    whole = run(bench, "topk_ef", tmp_path / "whole")
    with pytest.raises(Killed):
        run(bench, "topk_ef", tmp_path / "cut", on_round=killed_after(2))
    assert run(bench, "topk_ef", tmp_path / "cut") == whole


def test_the_sites_may_be_a_question_ahead_of_the_server(bench: Any, tmp_path: Path) -> None:
    """The server died between the sites' answers and its commit: they go back to what they were before the question."""
    whole = run(bench, "topk_ef", tmp_path / "whole")
    with pytest.raises(Killed):
        run(bench, "topk_ef", tmp_path / "cut", on_round=killed_after(2))
    Store(tmp_path / "cut" / "server", {}).drop(2)
    assert run(bench, "topk_ef", tmp_path / "cut", resume=True) == whole
