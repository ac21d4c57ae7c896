"""Validation examples choose the best model and end a run early; test examples choose nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from local_federation import LocalFederation, Upload
from toy import ToyBench

from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.core.params import compute_digest
from flare_sparse.rounds.federation.records import Evaluation, Outcome
from flare_sparse.rounds.federation.rules import EarlyStopping, RoundRules, SiteHistory

NAMES = ["fedavg", "neurosfl", "fedsparsify", "dispfl", "fedavg_ft", "topk_ef", "scbfwp"]


def report(metrics: dict[str, float], site: str = "a") -> Contribution:
    return Contribution(site, Patch.empty(1), "metrics", 1, metrics)


def test_best_model_has_the_best_validation_metric_and_not_the_best_test_metric() -> None:
    validation = [9.0, 5.0, 3.0, 4.0, 2.0, 6.0, 7.0]
    federation = LocalFederation("fedavg", ToyBench(validation=4), rounds=6)

    def claim(upload: Upload) -> Upload:
        evaluated = upload.attempt.round - 1
        metrics = {"mse": float(100 - evaluated), "test_examples": 8.0}
        return replace(upload, metrics={**metrics, "validation_mse": validation[evaluated], "validation_examples": 4.0})

    federation.change_update = claim
    outcome = federation.run()
    assert outcome.best.round == 4, "the test metric is best after round 6"
    assert outcome.best.metrics == {
        "mse": 96.0, "test_examples": 24.0, "validation_mse": 2.0, "validation_examples": 12.0
    }  # fmt: skip
    model = LocalFederation("fedavg", ToyBench(validation=4), rounds=4).run()
    assert compute_digest(outcome.best.model.to_vector()) == compute_digest(model.weights)


def test_run_without_validation_examples_has_no_best_model_and_the_same_final_model() -> None:
    outcome = LocalFederation("fedavg", ToyBench()).run()
    assert (outcome.best.round, outcome.best.model) == (-1, None)
    assert "validation_mse" not in outcome.evaluation.overall
    # Validation examples are drawn after the others, so training sees the same ones.
    validated = LocalFederation("fedavg", ToyBench(validation=4)).run()
    assert validated.best.round >= 0
    assert torch.equal(validated.weights, outcome.weights)


@pytest.mark.slow
def stop_after(patience: int) -> RoundRules:
    return RoundRules(early_stopping=EarlyStopping(patience=patience))


@pytest.mark.parametrize("name", NAMES)
def test_run_ends_after_so_many_models_without_a_better_one(name: str) -> None:
    federation = LocalFederation(name, ToyBench(validation=4), rules=stop_after(2), rounds=8)
    values = iter([9.0, 5.0, 6.0, 7.0, *[8.0] * 90])
    current: dict[int, float] = {}

    def claim(upload: Upload) -> Upload:
        if not upload.metrics:
            return upload
        value = current.setdefault(upload.attempt.sequence, 0.0) or next(values)
        current[upload.attempt.sequence] = value
        return replace(upload, metrics={**upload.metrics, "validation_mse": value})

    federation.change_update = claim
    outcome = federation.run()
    assert outcome.stopped_after is not None
    assert outcome.stopped_after == outcome.best.round + 3 < 8
    assert outcome.rounds[-1].round == 9, "the last request is that of round 9, which every site's copy of the job has"
    assert outcome.rounds[-1].evaluated_round == outcome.stopped_after
    assert not outcome.rounds[-1].rejected
    shorter = LocalFederation(name, ToyBench(validation=4), rounds=outcome.stopped_after).run()
    if name not in ("fedsparsify", "dispfl"):
        assert torch.equal(outcome.weights, shorter.weights), "the schedules of the other two depend on the rounds"


@pytest.mark.parametrize(("start", "is_averaged"), [(0.5, False), (0.0, True)])
def test_stopped_run_says_so_where_its_last_model_is_the_best_and_not_averaged(start: float, is_averaged: bool) -> None:
    average = {"kind": "ema", "start": start}
    federation = build_federation({"site-1": [9.0, 5, 6, 7, 8, 8, 8, 8, 8]}, patience=2, model_average=average)
    claim = federation.change_update
    federation.change_update = lambda upload: (
        claim(upload)
        if upload.attempt.round < 9
        else replace(upload, metrics={**upload.metrics, "validation_mse": 1.0})
    )
    outcome = federation.run()
    assert (outcome.stopped_after, outcome.best.round, outcome.best.metrics["validation_mse"]) == (4, 4, 1.0)
    assert (outcome.state.memory.average is not None) == is_averaged
    notes = [(event.round, event.site, event.event) for event in outcome.events]
    assert notes == ([] if is_averaged else [(9, "server", "ended_early")])
    if notes:
        assert "(model_average.start 0.5 of 8 rounds)" in outcome.events[0].detail


def test_run_is_stopped_by_metrics_of_few_models_only_once_the_next_ones_are_known() -> None:
    federation = LocalFederation("fedavg", ToyBench(validation=4), rules=stop_after(2), rounds=16)
    values = {0: 9.0, 4: 5.0, 8: 6.0}

    def claim(upload: Upload) -> Upload:
        value = values.get(upload.attempt.round - 1)
        return replace(upload, metrics={} if value is None else {**upload.metrics, "validation_mse": value})

    federation.change_update = claim
    outcome = federation.run()
    assert (outcome.best.round, outcome.stopped_after) == (4, 9)


def test_run_that_gets_better_is_not_stopped() -> None:
    federation = LocalFederation("fedavg", ToyBench(validation=4), rules=stop_after(1), rounds=4)
    federation.change_update = lambda upload: replace(
        upload, metrics={**upload.metrics, "validation_mse": float(9 - upload.attempt.round)}
    )
    outcome = federation.run()
    assert (outcome.stopped_after, outcome.best.round, len(outcome.rounds)) == (None, 4, 5)


def build_federation(values: dict[str, list[float]], patience: int | None = None, **settings: Any) -> LocalFederation:
    """Return a federation whose sites report these values for the models of round 0, 1, and so on."""
    stopping = None if patience is None else EarlyStopping(patience=patience)
    rules = RoundRules(early_stopping=stopping, retries=0)
    rounds = len(values["site-1"]) - 1
    federation = LocalFederation(
        "fedavg", ToyBench(validation=4), sites=len(values), rules=rules, rounds=rounds, **settings
    )

    def claim(upload: Upload) -> Upload:
        # The last request is that of the round after the last one, also where the run stopped earlier.
        evaluated = upload.attempt.round - 1
        return replace(upload, metrics={**upload.metrics, "validation_mse": values[upload.site][evaluated]})

    federation.change_update = claim
    return federation


def test_model_evaluated_at_an_easy_site_alone_is_not_the_best_one() -> None:
    sampled = build_federation({"site-1": [1.0] * 7, "site-2": [5.0] * 7}, participation=0.5)
    outcome = sampled.run()
    assert {tuple(record.sites_asked) for record in outcome.rounds[:-1]} == {("site-1",), ("site-2",)}
    assert (outcome.best.round, outcome.best.metrics["validation_mse"]) == (6, 3.0), "only the last one met all sites"
    assert outcome.best.metrics["validation_examples"] == 8


def test_model_evaluated_without_a_hard_site_neither_is_the_best_one_nor_ends_the_run() -> None:
    federation = build_federation({"site-1": [9.0, 8, 1, 1, 1, 7, 6], "site-2": [20.0] * 7}, patience=2)
    federation.is_silent = lambda site, attempt: site == "site-2" and attempt.round in (3, 4, 5)
    outcome = federation.run()
    assert [sorted(record.evaluation.sites) for record in outcome.rounds[2:5]] == [["site-1"]] * 3
    assert (outcome.stopped_after, outcome.best.round) == (None, 6)
    assert outcome.best.metrics["validation_mse"] == 13


@pytest.mark.parametrize(("last", "best"), [(7.0, 4), (8.5, 1)])
def test_last_model_is_compared_at_the_remaining_sites_after_the_loss_of_one(last: float, best: int) -> None:
    federation = build_federation({"site-1": [9.0, 8, 1, 1, last], "site-2": [1.0] * 5}, patience=2)
    federation.is_silent = lambda site, attempt: site == "site-2" and attempt.round > 2
    outcome = federation.run()
    assert (outcome.best.round, outcome.stopped_after) == (best, None)


@pytest.mark.parametrize(("later", "best", "stopped"), [([6.0, 5.0, *[5.5] * 9], 7, 11), ([8.5] * 11, 1, 9)])
def test_models_are_compared_without_a_site_that_is_lost_for_good(later: list[float], best: int, stopped: int) -> None:
    values = [9.0, 8.0, *[1.0] * 4, *later]
    federation = build_federation({"site-1": values, "site-2": [1.0] * len(values)}, patience=3)
    federation.is_silent = lambda site, attempt: site == "site-2" and attempt.round > 2
    outcome = federation.run()
    assert (outcome.best.round, outcome.stopped_after) == (best, stopped)
    sites = {"site-1"} if best > 1 else {"site-1", "site-2"}
    assert set(outcome.best.evaluation.sites) == sites


def test_site_that_returns_makes_no_worse_model_the_best_one() -> None:
    values = [9.0, 8, 7, 7, 7, 7, 6, 2, *[30] * 7]
    federation = build_federation({"site-1": values, "site-2": [1.0] * len(values)}, patience=3)
    federation.is_silent = lambda site, attempt: site == "site-2" and 3 <= attempt.round <= 9
    outcome = federation.run()
    assert (outcome.best.round, outcome.stopped_after) == (7, 11)
    assert outcome.best.metrics["validation_mse"] == 2


def test_site_that_is_not_sampled_is_not_lost() -> None:
    values = {"site-1": [1.0] * 31, "site-2": [5.0] * 31}
    outcome = build_federation(values, participation=0.5).run()
    asked = [record.sites_asked[0] for record in outcome.rounds[:-1]]
    runs = [len(list(group)) for _, group in itertools.groupby(asked)]
    assert max(runs) >= 5, "a site is missing in five evaluations"
    assert outcome.best.round == 30, "only the last model met all sites"


def test_validation_metrics_are_weighted_by_validation_examples() -> None:
    first = {"mse": 1.0, "test_examples": 1.0, "validation_mse": 10.0, "validation_examples": 3.0}
    second = {"mse": 2.0, "test_examples": 3.0, "validation_mse": 20.0, "validation_examples": 1.0}
    evaluation = Evaluation.from_contributions([report(first), report(second, "b")])
    assert evaluation.overall == {
        "mse": 1.75, "test_examples": 4.0, "validation_mse": 12.5, "validation_examples": 4.0
    }  # fmt: skip
    only = Evaluation.from_contributions([report({"validation_mse": 10.0, "validation_examples": 3.0})])
    assert only.overall == {"validation_mse": 10.0, "validation_examples": 3.0, "test_examples": 0}


def test_number_of_validation_examples_must_stay_near_the_registered_one() -> None:
    history = SiteHistory().register(report({"mse": 1.0, "test_examples": 20.0, "validation_examples": 10.0}))
    assert history.evaluated["validation_examples"] == {"a": 10.0}
    assert history.find_violation(report({"validation_examples": 11.0}), RoundRules()) is None
    assert history.find_violation(report({"validation_examples": 2.0**52}), RoundRules()) == "E_METRICS"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_models_between_two_evaluations_are_not_evaluated_and_the_run_is_the_same(name: str) -> None:
    def run(**settings: int) -> Outcome:
        return LocalFederation(name, ToyBench(validation=4), rounds=5, **settings).run()

    every, fewer = run(), run(evaluate_every=2)
    evaluated = {line.evaluated_round for line in fewer.rounds if line.evaluation.overall}
    assert evaluated == {0, 2, 4, 5}, "the initial model, every second one, and the last one"
    assert torch.equal(fewer.weights, every.weights)
    assert fewer.evaluation == every.evaluation
    assert fewer.best.round in evaluated
    assert [line.bytes_up for line in fewer.rounds] == [line.bytes_up for line in every.rounds]
