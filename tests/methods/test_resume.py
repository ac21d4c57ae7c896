"""A resumed run ends with the bits of an uninterrupted one, for every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from local_federation import LocalFederation

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.registry import METHODS
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.federation.records import RoundRecord
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.run import Course, Transport, run_locally
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.stage import Reply

BOTH_WAYS = {"fraction": 0.2, "down": 0.3, "decay": 0.8}
"""Settings of top-k with a residual at each end."""


class Killed(BaseException):
    """Ends the run as a kill of the process would."""


def stores(folder: Path) -> Callable[[str], Store]:
    return lambda end: Store(folder / end, {"run": "0" * 16})


def killed_after(commits: int) -> Callable[[RoundRecord], None]:
    seen: list[RoundRecord] = []

    def on_round(record: RoundRecord) -> None:
        seen.append(record)
        if len(seen) == commits:
            raise Killed

    return on_round


def run(bench: Any, name: str, folder: Path, values: Any = "float32", *, resume: bool = False, **watched: Any) -> Any:
    """Run with new sites, endpoints and loop, as after a restart; return digest, evaluation, rounds and messages."""
    settings = BOTH_WAYS if name == "topk_ef" else {}
    method = bench.method(name, **settings)
    outcome, ledger = run_locally(
        method, bench.weights, bench.sites(), bench.task.metric, transport=Transport(values),
        course=Course(stores=stores(folder), resume=resume, **watched),
    )  # fmt: skip
    return facts(outcome, ledger)


def facts(outcome: Any, ledger: Ledger) -> Any:
    best = (outcome.best.round, outcome.best.metrics)
    return (
        compute_digest(outcome.weights),
        outcome.evaluation,
        best,
        [timeless(r) for r in outcome.rounds],
        ledger.lines,
    )


class Lossy(LocalFederation):
    """A run whose rounds need all three sites, over a link that loses replies; both ends keep checkpoints.

    Args:
        bench: builds sites and methods.
        name: name of the method.
        values: number format on the wire.
        folder: folder of the checkpoints.
        losing: whether the last site's first reply of a round is lost, by number of commits.
        killed_after: number of commits after which the server is killed, having received the second attempt.
        anew: a site's process restarts for every attempt and has only its checkpoint.
    """

    def __init__(
        self,
        bench: Any,
        name: str,
        values: Any,
        folder: Path,
        losing: Callable[[int], bool] = lambda commits: False,
        killed_after: int | None = None,
        *,
        anew: bool = False,
    ):
        settings = BOTH_WAYS if name == "topk_ef" else {}
        rules = RoundRules(min_sites=3)
        super().__init__(name, bench, rules=rules, values=values, stores=stores(folder), **settings)
        self.losing, self.killed_after, self.anew = losing, killed_after, anew
        self.commits = self.calls = 0
        self.on_round = self._committed

    def run(self, *, resume: bool = False) -> Any:
        outcome = super().run(handshake=self.build_hellos, resume=resume)
        return facts(outcome, self.ledger)

    def _committed(self, record: RoundRecord) -> None:
        self.commits, self.calls = self.commits + 1, 0

    def deliver(self, attempt: Attempt) -> Mapping[str, Reply]:
        if self.anew:
            for site in self.endpoints:
                self.restart_site(site)
        replies = dict(super().deliver(attempt))
        self.calls += 1
        if self.calls == 1 and self.losing(self.commits):
            del replies[max(replies)]
        elif self.commits == self.killed_after:
            raise Killed
        return replies


def timeless(record: RoundRecord) -> dict[str, Any]:
    return {k: v for k, v in asdict(record).items() if k not in ("seconds", "committed_at")}


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("name", METHODS)
def test_resumed_run_equals_the_uninterrupted_one(name: str, values: str, bench: Any, tmp_path: Path) -> None:
    """Model, evaluations, rounds and messages are equal, whichever commit was the last."""
    uninterrupted = run(bench, name, tmp_path / "uninterrupted", values)
    for commits in range(1, len(uninterrupted[3])):
        folder = tmp_path / str(commits)
        with pytest.raises(Killed):
            run(bench, name, folder, values, on_round=killed_after(commits))
        assert run(bench, name, folder, values, resume=True) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("name", METHODS)
def test_failed_attempt_leaves_no_trace(name: str, values: str, bench: Any, tmp_path: Path) -> None:
    """The first attempt of every round fails, and the sites repeat their updates in the second.

    The same holds where the server is killed in the second attempt of a round, before its commit.
    """
    uninterrupted = run(bench, name, tmp_path / "uninterrupted", values)
    failed = Lossy(bench, name, values, tmp_path / "failed", losing=lambda commits: True).run()
    assert failed[:3] == uninterrupted[:3]
    assert {record["attempts"] for record in failed[3]} == {2}
    cut, at = tmp_path / "cut", min(1, len(uninterrupted[3]) - 1)
    with pytest.raises(Killed):
        Lossy(bench, name, values, cut, losing=lambda commits: commits == at, killed_after=at).run()
    assert Lossy(bench, name, values, cut).run(resume=True) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "bfloat16", "int4"])
def test_restarted_site_knows_which_update_was_discarded(values: str, bench: Any, tmp_path: Path) -> None:
    """As in a simulator with fewer processes than sites: between attempts a site has only its checkpoint."""
    uninterrupted = run(bench, "topk_ef", tmp_path / "uninterrupted", values)
    failed = Lossy(bench, "topk_ef", values, tmp_path / "failed", losing=lambda commits: True, anew=True).run()
    assert failed[:3] == uninterrupted[:3]


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "bfloat16", "int4"])
def test_kill_in_the_last_of_three_attempts_leaves_no_trace(values: str, bench: Any, tmp_path: Path) -> None:
    """However often a round is retried, a site keeps the checkpoint from before it."""
    uninterrupted = run(bench, "topk_ef", tmp_path / "uninterrupted", values)
    cut = Lossy(bench, "topk_ef", values, tmp_path / "cut", killed_after=1)
    deliver = cut.deliver

    def lose_two_attempts(attempt: Attempt) -> Mapping[str, Reply]:
        if cut.commits == 1 and cut.calls < 2:
            cut.calls += 1
            replies = LocalFederation.deliver(cut, attempt)
            return {site: reply for site, reply in replies.items() if site != "site-3"}
        return deliver(attempt)

    cut.deliver = lose_two_attempts  # type: ignore[method-assign]
    with pytest.raises(Killed):
        cut.run()
    assert Lossy(bench, "topk_ef", values, tmp_path / "cut").run(resume=True) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_sites_without_checkpoints_receive_the_full_model(name: str, bench: Any, tmp_path: Path) -> None:
    """Only a method that keeps something at its sites ends with another model."""
    uninterrupted = run(bench, name, tmp_path / "uninterrupted")
    with pytest.raises(Killed):
        run(bench, name, tmp_path / "cut", on_round=killed_after(1))
    for site in ("site-1", "site-2", "site-3"):
        Store(tmp_path / "cut" / site, {}).delete()
    resumed = run(bench, name, tmp_path / "cut", resume=True)
    assert (resumed[0] == uninterrupted[0]) is (name != "topk_ef")


@pytest.mark.slow
def test_run_without_resume_starts_anew(bench: Any, tmp_path: Path) -> None:
    uninterrupted = run(bench, "topk_ef", tmp_path / "uninterrupted")
    with pytest.raises(Killed):
        run(bench, "topk_ef", tmp_path / "cut", on_round=killed_after(2))
    assert run(bench, "topk_ef", tmp_path / "cut") == uninterrupted


def test_sites_may_be_one_attempt_ahead_of_the_server(bench: Any, tmp_path: Path) -> None:
    """The server was killed between the sites' updates and its commit: they go back to the previous checkpoint."""
    uninterrupted = run(bench, "topk_ef", tmp_path / "uninterrupted")
    with pytest.raises(Killed):
        run(bench, "topk_ef", tmp_path / "cut", on_round=killed_after(2))
    Store(tmp_path / "cut" / "server", {}).delete(2)
    assert run(bench, "topk_ef", tmp_path / "cut", resume=True) == uninterrupted
