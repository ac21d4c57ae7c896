"""A run with differential privacy: spent epsilon by round in the record, and a site that abstains when it is spent."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_federation import LocalFederation, Upload
from opacus.accountants import PRVAccountant
from toy import Plain, ToyBench

from flare_sparse.config.assemble import plan_sampling
from flare_sparse.core.checkpoint.store import Store
from flare_sparse.privacy.dp.account import LEDGER_FILE, Budget, PrivacyAccount, read_ledger
from flare_sparse.privacy.dp.accounting import SamplingPlan, compute_epsilon
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.mechanism import SiteMechanism
from flare_sparse.results.report.tables import build_privacy
from flare_sparse.results.runs.results import RunResult
from flare_sparse.rounds.federation.records import RoundRecord
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.run import Course, run_locally
from flare_sparse.training import Site, SitePrivacy
from flare_sparse.wire.ledger import Ledger

CONFIG = PrivacyConfig(noise_multiplier=4.0)
# Every subject in every step, for which the accountant takes a millisecond.
TRAINING = {"batch_size": 64, "epochs": 2}
PLAN = SamplingPlan.build(24, 64, 2, 3)


def spend(trainings: int) -> float:
    return compute_epsilon([PLAN.build_charge(4.0, trainings)], CONFIG.delta)


def build_sites(bench: ToyBench, limits: dict[str, Budget | None], **metrics: Any) -> dict[str, Site]:
    sites = {}
    for number, (name, limit) in enumerate(limits.items(), start=1):
        mechanism = SiteMechanism(CONFIG, PLAN, PrivacyAccount(None, limit), "a" * 16, "job")
        sites[name] = bench.site(number, privacy=SitePrivacy(mechanism, **metrics))
    return sites


@pytest.mark.parametrize("method", ["fedavg", "fedsparsify", "neurosfl"])
def test_record_has_the_spent_epsilon_and_the_run_goes_on_without_a_site_whose_budget_is_spent(
    method: str, tmp_path: Path
) -> None:
    bench = ToyBench(Plain())
    sites = build_sites(bench, {"site-1": None, "site-2": Budget(spend(2), CONFIG.delta)})
    settings = {"scores": "random", "random_layers": "erk"} if method == "neurosfl" else {}
    built, ledger = bench.method(method, training=TRAINING, **settings), Ledger()
    folder = bench.open_record(tmp_path, built, ledger, privacy=CONFIG)
    outcome, _ = run_locally(
        built,
        bench.weights,
        sites,
        bench.task.metric,
        ledger=ledger,
        course=Course(rules=RoundRules(retries=0), on_round=folder.commit),
    )
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
    sites = build_sites(bench, {"site-1": None}, sends_metrics=False)
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
    account = PrivacyAccount()
    site = bench.site(1, privacy=SitePrivacy(SiteMechanism(CONFIG, plan, account, "a" * 16, "job")))
    outcome, _ = run_locally(method, bench.weights, {"site-1": site}, bench.task.metric)
    spent = [record.spent_epsilon["site-1"] for record in outcome.rounds if record.kind == "train"]
    expected = [compute_epsilon([plan.build_job_charge(4.0, t)], CONFIG.delta) for t in (1, 2, 3)]
    assert spent == pytest.approx(expected, rel=1e-6)
    assert [entry.round for entry in account.read().entries] == [0] * (lots if scores == "iter_snip" else 1) + [1, 2, 3]


class Killed(BaseException):
    """Ends the run as a kill of the process would."""


@pytest.mark.slow
@pytest.mark.parametrize("loses", ["nothing", "replies", "the server", "a site", "all three"])
def test_rounds_retries_and_resumption_are_one_long_accountant(loses: str, tmp_path: Path) -> None:
    """A reply is lost in every round, the server is killed after round 1, and the site forgets all but its files."""
    bench, training = ToyBench(Plain()), {"batch_size": 6, "epochs": 2}
    plan = SamplingPlan.build(24, 6, 2, 3)

    def build(commits: int | None) -> LocalFederation:
        account = PrivacyAccount(tmp_path / "privacy")
        privacy = SitePrivacy(SiteMechanism(CONFIG, plan, account, "a" * 16, "job"))
        sites = {"site-1": bench.site(1, privacy=privacy)}
        federation = LocalFederation(
            "fedavg", bench, sites=sites, stores=lambda end: Store(tmp_path / end, {"run": "0" * 16}), training=training
        )

        def lose_first_reply(upload: Upload) -> Upload | None:
            if loses in ("replies", "all three") and upload.attempt.round not in lost:
                lost.append(upload.attempt.round)
                return None
            return upload

        def kill(_: RoundRecord) -> None:
            if len(federation.records) == commits:
                raise Killed

        federation.change_message, federation.on_round = lose_first_reply, kill
        return federation

    lost: list[int] = []
    if loses in ("the server", "a site", "all three"):
        with pytest.raises(Killed):
            build(1).run()
        if loses != "the server":
            shutil.rmtree(tmp_path / "site-1")
    outcome = build(None).run(resume=loses in ("the server", "a site", "all three"))
    accountant = PRVAccountant()
    for _ in range(3 * plan.steps):
        accountant.step(noise_multiplier=4.0, sample_rate=plan.sample_rate)
    assert len(read_ledger(tmp_path / "privacy" / LEDGER_FILE).entries) == 3
    assert outcome.rounds[-1].spent_epsilon["site-1"] == accountant.get_epsilon(CONFIG.delta)
    assert len(lost) == (4 if loses in ("replies", "all three") else 0)
