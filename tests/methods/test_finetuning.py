"""Fine-tuning after the last round: each site chooses its pull by validation, and its own model stays there."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from local_federation import LocalFederation, Upload
from toy import Toy, ToyBench

from flare_sparse.core.checkpoint.store import STEPPED_BACK, Store
from flare_sparse.core.errors import FlareSparseError, MetricsError, RoundFailed
from flare_sparse.core.exchange import EVALUATE, Patch, Request
from flare_sparse.core.mask import Mask
from flare_sparse.core.needs import Need, find_need
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.method import describe_site_model
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.support.adaptation import PersonalTrainingDiverged
from flare_sparse.methods.support.averaging import FINETUNE, FineTuning, fine_tune
from flare_sparse.rounds.endpoints.events import SERVER
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.tasks.task import VALIDATION
from flare_sparse.training import Site, SitePrivacy, TrainingConfig
from flare_sparse.training.personal import PERSONAL

AVERAGING = ["fedavg", "fedavg_ft", "neurosfl", "fedsparsify"]
STRENGTHS = (0.0, 0.5, 5.0)
CHOICE = {"epochs": 6, "lr": 0.05, "proximal": STRENGTHS}
TRAINING = {"optimizer": "sgd", "lr": 0.05, "batch_size": 8}


def build(name: str, folder: Path | None = None, personal: Any = (), **settings: Any) -> LocalFederation:
    bench = ToyBench(Toy(), validation=6, personal=personal)
    return LocalFederation(
        name,
        bench,
        rules=RoundRules(min_sites=3),
        stores=lambda end: None if folder is None else Store(folder / end, {}),
        **{"training": TRAINING, **({"finetune": CHOICE} if name in AVERAGING else {}), **settings},
    )


def open_site(personal: Any = (), validation: int = 6) -> tuple[ToyBench, Site]:
    bench = ToyBench(Toy(), validation=validation, personal=personal)
    site = bench.site(1)
    site.weights = bench.weights.clone()
    site.receive({})
    return bench, site


@pytest.mark.parametrize("personal", [(), "norms"])
def test_site_takes_the_model_with_the_best_metric_on_validation_examples(personal: Any) -> None:
    trainings = FineTuning(**CHOICE).list_trainings(TrainingConfig(**TRAINING), 4)
    assert [training.proximal for training in trainings] == [5.0, 0.5, 0.0]
    candidates = []
    for training in [None, *trainings]:
        bench, site = open_site(personal)
        full = Mask.full(bench.layout.size)
        weights = site.weights if training is None else site.train(site.weights, full, training, 4)
        metrics = site.evaluate(weights)
        candidates.append((metrics[f"{VALIDATION}mse"], metrics["mse"], weights, site.memory.get(PERSONAL)))
    assert len({value for value, *_ in candidates}) == 4
    best = min(candidates, key=lambda candidate: candidate[0])
    bench, site = open_site(personal)
    chosen = fine_tune(site, Mask.full(bench.layout.size), trainings, 4)
    assert torch.equal(chosen, best[2])
    assert site.evaluate(chosen)["mse"] == best[1]
    if personal:
        assert torch.equal(site.memory[PERSONAL], best[3])


def test_site_whose_metrics_stay_at_home_chooses_the_same_model_without_its_test_examples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainings = FineTuning(**CHOICE).list_trainings(TrainingConfig(**TRAINING), 4)
    bench, site = open_site()
    full = Mask.full(bench.layout.size)
    expected = fine_tune(site, full, trainings, 4)
    silent = bench.site(1, privacy=SitePrivacy(sends_metrics=False))
    silent.weights = bench.weights.clone()
    sizes, evaluate = [], bench.task.evaluate

    def count_examples(network: Any, dataset: Any) -> dict[str, float]:
        sizes.append(len(dataset))
        return evaluate(network, dataset)

    monkeypatch.setattr(bench.task, "evaluate", count_examples)
    assert torch.equal(fine_tune(silent, full, trainings, 4), expected)
    assert sizes == [silent.trainer.num_validation_examples] * 4


def test_site_keeps_the_received_model_where_fine_tuning_harms_it() -> None:
    bench, site = open_site("norms")
    harmful = FineTuning(epochs=3, lr=3.0, proximal=(0.0, 0.1)).list_trainings(
        TrainingConfig(optimizer="sgd", clip_norm=1e3), 2
    )
    assert fine_tune(site, Mask.full(bench.layout.size), harmful, 2) is site.weights
    assert PERSONAL not in site.memory, "nor does anything of the trials stay"


def test_strength_that_diverges_is_no_candidate() -> None:
    settings = TrainingConfig(**TRAINING)
    strengths = {**CHOICE, "proximal": (0.0, 0.5, 5e3)}
    trainings = FineTuning(**strengths).list_trainings(settings, 4)
    bench, site = open_site("norms")
    full = Mask.full(bench.layout.size)
    with pytest.raises(
        PersonalTrainingDiverged, match=r"lower method\.finetune\.lr or .*proximal: the loss is .* step"
    ):
        fine_tune(site, full, trainings[:1], 4)
    chosen = fine_tune(open_site("norms")[1], full, trainings, 4)
    assert torch.equal(chosen, fine_tune(open_site("norms")[1], full, trainings[1:], 4))
    bench, site = open_site("norms")
    assert fine_tune(site, full, trainings[:1] * 2, 4) is site.weights
    assert PERSONAL not in site.memory


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_the_last_step_made_infinite_are_no_candidate(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, site = open_site(validation=0)
    full, trainings = Mask.full(bench.layout.size), FineTuning(**CHOICE).list_trainings(TrainingConfig(), 2)
    monkeypatch.setattr(site, "train", lambda start, *_: torch.full_like(start, value))
    assert fine_tune(site, full, trainings, 2) is site.weights
    with pytest.raises(PersonalTrainingDiverged, match="the last step ends in weights that are not finite"):
        fine_tune(site, full, trainings[:1], 2)


def test_received_model_that_the_site_keeps_is_not_blamed_on_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, site = open_site()
    method, full = bench.method("fedavg", rounds=3, finetune=CHOICE), Mask.full(bench.layout.size)
    monkeypatch.setattr(site, "evaluate", Mock(side_effect=MetricsError("NaN")))
    for own, error in ((site.weights, MetricsError), (site.weights.clone(), PersonalTrainingDiverged)):
        monkeypatch.setattr("flare_sparse.methods.support.averaging.fine_tune", lambda *_, own=own: own)
        with pytest.raises(error):
            method.answer(Request(FINETUNE, 4, Patch(site.weights, full), full), site)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"finetune": {"epochs": 6, "lr": 0.05, "proximal": 5e3}}),
        ("fedavg_one_step", {"adapt_lr": 1e38}),
        ("metagater", {"adapt_lr": 1e38}),
    ],
)
def test_own_training_that_diverges_blames_no_update(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    federation = build(name, tmp_path, **settings)
    exchange = federation._exchange

    def reply_with_code(name: str, attempt: Any) -> Any:
        try:
            return exchange(name, attempt)
        except FlareSparseError as error:
            return error.code

    federation._exchange = reply_with_code  # type: ignore[method-assign]
    with pytest.raises(RoundFailed, match=r"diverged in their own training after the last round: lower its") as caught:
        federation.run()
    assert "harmful" not in str(caught.value)
    assert [record.round for record in federation.records] == [1, 2, 3]
    assert Store(tmp_path / SERVER, {}).list_numbers(STEPPED_BACK) == []


def test_site_without_validation_examples_takes_the_strongest_pull() -> None:
    bench, site = open_site(validation=0)
    full, trainings = Mask.full(bench.layout.size), FineTuning(**CHOICE).list_trainings(TrainingConfig(), 2)
    chosen = fine_tune(site, full, trainings, 2)
    assert torch.equal(chosen, open_site(validation=0)[1].train(bench.weights, full, trainings[0], 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGING)
def test_rounds_and_bytes_are_those_without_fine_tuning_and_the_metrics_of_each_sites_own_model(name: str) -> None:
    tuned, plain = build(name), build("fedavg" if name == "fedavg_ft" else name, finetune=None)
    outcome, expected = tuned.run(), plain.run()
    assert torch.equal(outcome.weights, expected.weights)
    assert [line.payload_bytes for line in tuned.ledger.lines] == [line.payload_bytes for line in plain.ledger.lines]
    assert {line.kind for line in tuned.ledger.lines} - {line.kind for line in plain.ledger.lines} == {FINETUNE}
    for site in tuned.sites.values():
        assert site.evaluated is not None
        own = site.evaluated[1]
        assert site.evaluate(own)["mse"] == outcome.evaluation.sites[site.name]["mse"]
        # A site's model has no entries beyond those of the run's.
        assert not (own[~outcome.mask.bits] != 0).any()
    better = [outcome.evaluation.sites[s]["validation_mse"] <= expected.evaluation.sites[s]["validation_mse"]
              for s in tuned.sites]  # fmt: skip
    assert all(better), "the received model is a candidate"
    assert len({compute_digest(site.evaluated[1]) for site in tuned.sites.values() if site.evaluated}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "neurosfl"])
def test_lost_final_update_is_repeated_to_the_same_bits(name: str, tmp_path: Path) -> None:
    expected = build(name, tmp_path / "plain", "norms")
    outcome = expected.run()
    lossy = build(name, tmp_path / "lossy", "norms")
    lost: list[str] = []

    def lose_once(upload: Upload) -> Upload | None:
        if upload.request.kind == FINETUNE and upload.site not in lost:
            lost.append(upload.site)
            # The process dies after its answer: the retry starts from the checkpoint.
            lossy.restart_site(upload.site)
            return None
        return upload

    lossy.change_message = lose_once
    assert lossy.run().evaluation == outcome.evaluation
    assert len(lost) == 3
    for name_of_site, site in expected.sites.items():
        again = lossy.sites[name_of_site]
        assert site.evaluated is not None
        assert again.evaluated is not None
        assert torch.equal(again.evaluated[1], site.evaluated[1])


def test_site_does_not_fine_tune_for_a_server_whose_job_does_not_provide_for_it() -> None:
    bench = ToyBench()
    plain, tuned = bench.method("fedavg"), bench.method("fedavg", finetune={"epochs": 1})
    assert [method.count_requests(FINETUNE, 4) for method in (plain, tuned)] == [0, 1]
    assert tuned.count_requests(FINETUNE, 3) == 0
    assert plain.count_requests(EVALUATE, 4) == 1


@pytest.mark.slow
def test_new_site_fine_tunes_the_model_of_a_finished_run() -> None:
    federation = build("fedavg", personal="norms")
    outcome = federation.run()
    newcomer = federation.bench.site(9)
    newcomer.weights = outcome.weights.clone()
    newcomer.receive({})
    before = newcomer.evaluate(outcome.weights)[f"{VALIDATION}mse"]
    own = federation.method.adapt(newcomer, outcome.mask)
    assert newcomer.evaluate(own)[f"{VALIDATION}mse"] < before


def test_settings_say_what_the_model_of_a_site_is() -> None:
    def describe(name: str, **settings: Any) -> str:
        return describe_site_model(METHODS[name].Config.model_validate(settings))

    assert describe("fedavg") == ""
    assert describe("fedavg", finetune=CHOICE) == describe("fedavg_ft", personal="norms") == "fine-tuned at the site"
    assert describe("fedavg", personal="norms").startswith("the run's model with")
    needs = METHODS["fedsparsify"].Config.model_validate({"finetune": {}}).needs()
    assert find_need(needs, Need.MORE_READS)
    assert find_need(METHODS["fedavg"].Config.model_validate({"finetune": CHOICE}).needs(), Need.PACKAGE_STEPS)
    assert not find_need(METHODS["fedavg_ft"].Config().needs(), Need.PACKAGE_STEPS)
