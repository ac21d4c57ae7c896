"""``federation.round_minutes``: an attempt ends with the sites that have replied, if they meet the quorum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import pytest
import toy
from local_federation import LocalFederation
from pydantic import ValidationError

from flare_sparse.config.schema import FederationConfig
from flare_sparse.core.errors import MissingBase, RoundFailed
from flare_sparse.core.params import compute_digest
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.run import Course, run_locally
from flare_sparse.wire.stage import Reply


def test_site_that_exceeds_the_time_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sites of one process take turns: the slow one must not use up the time of those after it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("flare_sparse.rounds.local.run.time", SimpleNamespace(monotonic=lambda: clock.now))
    bench = toy.ToyBench()
    sites = bench.sites(3)
    evaluate = sites["site-1"].evaluate

    def evaluate_slowly(*args: object) -> dict[str, float]:
        clock.now += 90
        return evaluate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sites["site-1"], "evaluate", evaluate_slowly)
    rules = RoundRules(min_sites=2, round_minutes=1, quarantine_after=0)
    outcome, _ = run_locally(
        bench.method("fedavg"), bench.weights, sites, bench.task.metric, course=Course(rules=rules)
    )
    assert [record.timed_out for record in outcome.rounds] == [["site-1"]] * len(outcome.rounds)
    without = LocalFederation("fedavg", bench, rules=rules)
    without.is_silent = lambda site, attempt: site == "site-1"
    assert compute_digest(outcome.weights) == compute_digest(without.run().weights)


class TimedFederation(LocalFederation):
    """Records the time of each attempt; two of three sites reply in the first attempts of a round."""

    def deliver(self, attempt: Attempt) -> Mapping[str, Reply]:
        self.seconds = [*getattr(self, "seconds", []), attempt.seconds]
        return super().deliver(attempt)


def test_round_below_the_quorum_is_retried_with_the_whole_time() -> None:
    federation = TimedFederation("fedavg", rules=RoundRules(min_sites=3, retries=1, round_minutes=1))
    federation.is_silent = lambda site, attempt: (site, attempt.round) == ("site-2", 2)
    with pytest.raises(RoundFailed, match="timed out: site-2"):
        federation.run()
    assert federation.seconds == pytest.approx([60, 60, 60], abs=1)


def test_full_model_of_a_site_without_base_shares_the_time_of_its_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10_000, 10))
    clock: Iterator[int] = ticks
    monkeypatch.setattr("flare_sparse.rounds.federation.rounds.time", SimpleNamespace(monotonic=lambda: next(clock)))
    federation = TimedFederation("topk_ef", rules=RoundRules(round_minutes=1), rounds=2)
    federation.change_message = lambda upload: (
        MissingBase("E_NOT_HELD", "base", "a base", "none", upload.site)
        if (upload.attempt.sequence, upload.site) == (1, "site-1")
        else upload
    )
    federation.run()
    assert federation.seconds[:2] == [50, 40]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"round_minutes": 120}, "raise task_timeout_s to 7200 or more"),
        ({"round_minutes": 0.05, "request_interval_s": 4}, r"round_minutes \(3 s\), before a site polls"),
        ({"round_minutes": 0}, "greater than 0"),
    ],
)
def test_contradictory_times_are_refused(settings: dict[str, float], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        FederationConfig(**settings)
    assert FederationConfig(round_minutes=60).round_s == 3600
