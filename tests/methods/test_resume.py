"""A run that was killed after a commit ends with the bits of an undisturbed one, for every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flare_sparse.checkpoint.store import Store
from flare_sparse.endpoints.server import Attempt, ServerEndpoint
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.federation import Federation, Reply, RoundRecord, RoundRules
from flare_sparse.local.run import deliver, run_locally
from flare_sparse.methods import METHODS
from flare_sparse.params import compute_digest
from flare_sparse.wire.ledger import Ledger


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
    outcome, ledger = run_locally(
        method, bench.weights, bench.sites(), bench.task.metric, stores=stores(folder), **more
    )
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


class Lossy:
    """A run whose every round needs all three sites, over a line that can lose answers; each end keeps checkpoints.

    Args:
        bench: makes sites and methods.
        name: of the method.
        values: number format.
        folder: of the checkpoints.
        losing: after how many commits the last site's first answer is lost.
        killed_after: after so many commits the server dies with the answers of the second attempt in its hands.
        anew: a site's process ends with every answer: it has what is on its disk.
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
        settings = {"fraction": 0.2} if name == "topk_ef" else {}
        self.bench, self.values, self.folder = bench, values, folder
        self.method = bench.method(name, **settings)
        self.losing, self.killed_after, self.anew = losing, killed_after, anew
        self.commits = self.calls = 0
        self.server = ServerEndpoint(self.method.layout, "0" * 16, values, Ledger())
        self.endpoints = self._desks()

    def _desks(self) -> dict[str, SiteEndpoint]:
        kept = stores(self.folder)
        return {n: SiteEndpoint(s, self.method, "0" * 16, self.values, kept(n)) for n, s in self.bench.sites().items()}

    def run(self, *, resume: bool = False) -> Any:
        federation = Federation(
            self.method,
            self.server,
            self.bench.task.metric,
            RoundRules(min_sites=3),
            self._committed,
            stores(self.folder)("server"),
        )
        greet = lambda names: {name: self.endpoints[name].build_hello() for name in names}  # noqa: E731
        outcome = federation.run(
            self.bench.weights, lambda: sorted(self.endpoints), self._carry, handshake=greet, resume=resume
        )
        return facts(outcome, self.server.ledger)

    def _committed(self, record: RoundRecord) -> None:
        self.commits, self.calls = self.commits + 1, 0

    def _carry(self, question: Attempt) -> Mapping[str, Reply]:
        if self.anew:
            self.endpoints = self._desks()
        replies = dict(deliver(question, self.server, self.endpoints))
        self.calls += 1
        if self.calls == 1 and self.losing(self.commits):
            del replies[max(replies)]
        elif self.commits == self.killed_after:
            raise Killed
        return replies


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


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", METHODS)
def test_an_attempt_that_failed_leaves_no_trace(name: str, values: str, bench: Any, tmp_path: Path) -> None:
    """In every round the first attempt fails; its answers were given up, so the sites give the same ones again. Nor
    does it matter that the server dies in the second attempt of a round, before its commit.
    """
    whole = run(bench, name, tmp_path / "whole", values=values)
    failed = Lossy(bench, name, values, tmp_path / "failed", losing=lambda commits: True).run()
    assert failed[:3] == whole[:3]
    assert {record["attempts"] for record in failed[3]} == {2}
    cut, at = tmp_path / "cut", min(1, len(whole[3]) - 1)
    with pytest.raises(Killed):
        Lossy(bench, name, values, cut, losing=lambda commits: commits == at, killed_after=at).run()
    assert Lossy(bench, name, values, cut).run(resume=True) == whole


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_a_site_that_is_started_anew_knows_which_answer_was_given_up(values: str, bench: Any, tmp_path: Path) -> None:
    """As in a simulator with fewer processes than sites: between the attempts a site has only what is on its disk."""
    whole = run(bench, "topk_ef", tmp_path / "whole", values=values)
    failed = Lossy(bench, "topk_ef", values, tmp_path / "failed", losing=lambda commits: True, anew=True).run()
    assert failed[:3] == whole[:3]


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_killed_in_the_last_of_three_attempts(values: str, bench: Any, tmp_path: Path) -> None:
    """However often a round is asked, what a site was before it stays on the disk."""
    whole = run(bench, "topk_ef", tmp_path / "whole", values=values)
    cut = Lossy(bench, "topk_ef", values, tmp_path / "cut", killed_after=1)
    lossy = cut._carry

    def twice_lost(question: Attempt) -> Mapping[str, Reply]:
        if cut.commits == 1 and cut.calls < 2:
            cut.calls += 1
            replies = dict(deliver(question, cut.server, cut.endpoints))
            return {site: reply for site, reply in replies.items() if site != "site-3"}
        return lossy(question)

    cut._carry = twice_lost  # type: ignore[method-assign]
    with pytest.raises(Killed):
        cut.run()
    assert Lossy(bench, "topk_ef", values, tmp_path / "cut").run(resume=True) == whole


@pytest.mark.parametrize("name", METHODS)
def test_sites_that_lost_their_checkpoints_are_sent_everything(name: str, bench: Any, tmp_path: Path) -> None:
    """Only what a method keeps at a site is gone then; all else ends in the same model."""
    whole = run(bench, name, tmp_path / "whole")
    with pytest.raises(Killed):
        run(bench, name, tmp_path / "cut", on_round=killed_after(1))
    for site in ("site-1", "site-2", "site-3"):
        Store(tmp_path / "cut" / site, {}).delete()
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
    Store(tmp_path / "cut" / "server", {}).delete(2)
    assert run(bench, "topk_ef", tmp_path / "cut", resume=True) == whole
