"""A run with differential privacy: spent epsilon by round in the record, and a site that abstains when it is spent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from toy import Plain, ToyBench

from flare_sparse.assemble import plan_sampling
from flare_sparse.federation import RoundRules
from flare_sparse.local.run import run_locally
from flare_sparse.privacy.account import Budget, PrivacyAccount
from flare_sparse.privacy.accounting import SamplingPlan, compute_epsilon
from flare_sparse.privacy.config import PrivacyConfig
from flare_sparse.privacy.mechanism import SiteMechanism
from flare_sparse.report.tables import build_privacy
from flare_sparse.runs.folder import RunFacts, RunFolder
from flare_sparse.runs.results import RunResult
from flare_sparse.task import Metric
from flare_sparse.training import Site
from flare_sparse.wire.ledger import Ledger

CONFIG = PrivacyConfig(noise_multiplier=4.0)
# Every subject in every step, for which the accountant takes a millisecond.
TRAINING = {"batch_size": 64, "epochs": 2}
PLAN = SamplingPlan.build(24, 64, 2, 3)


def spend(trainings: int) -> float:
    return compute_epsilon([PLAN.build_charge(4.0, trainings)], CONFIG.delta)


def build_sites(bench: ToyBench, limits: dict[str, Budget | None]) -> dict[str, Site]:
    sites = {}
    for number, (name, limit) in enumerate(limits.items(), start=1):
        sites[name] = bench.site(number)
        sites[name].mechanism = SiteMechanism(CONFIG, PLAN, PrivacyAccount(None, limit), "a" * 16, "job")
    return sites


@pytest.mark.parametrize("method", ["fedavg", "fedsparsify", "neurosfl"])
def test_record_has_the_spent_epsilon_and_the_run_goes_on_without_a_site_whose_budget_is_spent(
    method: str, tmp_path: Path
) -> None:
    bench = ToyBench(Plain())
    sites = build_sites(bench, {"site-1": None, "site-2": Budget(spend(2), CONFIG.delta)})
    settings = {"scores": "random", "random_layers": "erk"} if method == "neurosfl" else {}
    facts = RunFacts("a" * 16, "job", method, 1, 3, Metric("mse", "", "min"), "", privacy=CONFIG)
    ledger = Ledger()
    folder = RunFolder(tmp_path, facts, bench.layout, ledger)
    outcome, _ = run_locally(
        bench.method(method, training=TRAINING, **settings), bench.weights, sites, facts.metric,
        rules=RoundRules(retries=0), on_round=folder.commit, ledger=ledger,
    )  # fmt: skip
    summary = folder.finish(outcome)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    both, one = ({"site-1": spend(t), "site-2": spend(t)} for t in (1, 2)), {"site-1": spend(3)}
    # The last request evaluates, and tells what was spent before it.
    assert [line["spent_epsilon"] for line in lines] == [*both, one, {"site-1": spend(3), "site-2": spend(2)}]
    assert lines[2]["rejected"] == {"site-2": "E_BUDGET"}
    assert all("epsilon" not in metrics for line in lines for metrics in line["site_metrics"].values())
    assert "epsilon" not in summary["final"]["metrics"]
    assert summary["privacy"] == {
        **CONFIG.model_dump(),
        "spent": {"site-1": spend(3), "site-2": spend(2)},
        "outside_budget": ["number of training examples", "metrics"],
    }
    (tmp_path / "config.yaml").write_text("{}")
    table = build_privacy([RunResult.read(tmp_path)])
    assert table is not None
    assert [row[2] for row in table.rows] == [f"{spend(3):.2f}", f"{spend(2):.2f}"]


def test_metrics_stay_at_the_site_if_the_job_says_so() -> None:
    bench = ToyBench(Plain())
    sites = build_sites(bench, {"site-1": None})
    sites["site-1"].sends_metrics = False
    outcome, _ = run_locally(bench.method("fedavg", training=TRAINING), bench.weights, sites, bench.task.metric)
    assert outcome.evaluation.overall == {}
    assert outcome.rounds[-1].spent_epsilon == {"site-1": spend(3)}


@pytest.mark.parametrize(("scores", "lots"), [("snip", 2), ("iter_snip", 3), ("individual_snip", 2)])
def test_scores_are_charged_before_the_first_training(scores: str, lots: int) -> None:
    bench = ToyBench(Plain())
    steps = {"iter_snip": "progressive", "iterations": 3, "saliency_batches": 1} if scores == "iter_snip" else {}
    method = bench.method(
        "neurosfl", training=TRAINING, scores=scores, sparsity=0.5, **{"saliency_batches": 2, **steps}
    )
    plan = plan_sampling(method, 24)
    assert plan == replace(PLAN, score_steps=lots)
    assert plan.build_job_charge(4.0).steps == lots + 3 * PLAN.steps
    site = bench.site(1)
    account = PrivacyAccount()
    site.mechanism = SiteMechanism(CONFIG, plan, account, "a" * 16, "job")
    outcome, _ = run_locally(method, bench.weights, {"site-1": site}, bench.task.metric)
    spent = [record.spent_epsilon["site-1"] for record in outcome.rounds if record.kind == "train"]
    expected = [compute_epsilon([plan.build_job_charge(4.0, t)], CONFIG.delta) for t in (1, 2, 3)]
    assert spent == pytest.approx(expected, rel=1e-6)
    assert [entry.round for entry in account.read().entries] == [0] * (lots if scores == "iter_snip" else 1) + [1, 2, 3]
