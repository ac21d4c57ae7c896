"""Server optimisers, the average over rounds, schedules and FedProx's pull as settings of methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from local_federation import LocalFederation, Upload
from pydantic import ValidationError

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.needs import Need, find_need
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.support.averaging import FineTuning
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.run import Course, run_locally
from flare_sparse.training.loop import TrainingDiverged
from flare_sparse.wire.stage import Reply

AVERAGING = ["fedavg", "fedavg_ft", "neurosfl", "fedsparsify"]
YOGI = {"server": {"optimizer": "yogi", "lr": 0.05}, "model_average": {"kind": "ema", "start": 0}}
SGD = {"optimizer": "sgd", "lr": 0.05}


class Killed(BaseException):
    """Ends the run as a kill of the process would."""


def run(bench: Any, name: str, folder: Path, *, killed_after: int | None = None, resume: bool = False) -> str:
    """Return the digest of the final model of a run with checkpoints."""
    commits = []

    def on_round(record: Any) -> None:
        commits.append(record)
        if len(commits) == killed_after:
            raise Killed

    outcome, _ = run_locally(
        bench.method(name, **YOGI),
        bench.weights,
        bench.sites(),
        bench.task.metric,
        course=Course(stores=lambda end: Store(folder / end, {}), resume=resume, on_round=on_round),
    )
    return compute_digest(outcome.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGING)
def test_moments_and_average_survive_a_kill_after_any_commit(name: str, bench: Any, tmp_path: Path) -> None:
    expected = run(bench, name, tmp_path / "uninterrupted")
    assert expected != bench.compute_digest(name)
    for commits in range(1, 4):
        folder = tmp_path / str(commits)
        with pytest.raises(Killed):
            run(bench, name, folder, killed_after=commits)
        assert run(bench, name, folder, resume=True) == expected


class Diverging(LocalFederation):
    """Sites that reply with the code of their error, as in FLARE."""

    def _exchange(self, name: str, attempt: Attempt) -> Reply | None:
        try:
            return super()._exchange(name, attempt)
        except TrainingDiverged as error:
            return error.code


def test_step_back_discards_what_a_harmful_update_did_to_moments_and_average(tmp_path: Path) -> None:
    def run_poisoned(folder: str, poisons: int) -> str:
        remaining = iter(range(poisons))

        def poison(upload: Upload) -> Upload:
            if (upload.site, upload.attempt.round) == ("site-3", 2) and next(remaining, None) is not None:
                return upload.with_values(torch.full_like(upload.update.patch.values, 1e20))
            return upload

        federation = Diverging(
            "fedavg",
            rules=RoundRules(min_sites=2, max_norm_ratio=None),
            stores=lambda end: Store(tmp_path / folder / end, {}),
            rounds=4,
            server={"optimizer": "momentum"},
            model_average={"kind": "ema", "start": 0},
        )
        federation.change_update = poison
        return compute_digest(federation.run().weights)

    assert run_poisoned("harmed", 1) == run_poisoned("clean", 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("neurosfl", {}), ("fedsparsify", {"sparsity": 0.8})])
def test_average_is_the_result_in_place_of_the_last_model_and_keeps_off_what_is_off(
    name: str, settings: dict[str, Any], bench: Any
) -> None:
    """It is the mean of the models that the rounds ended with, on the entries that are on at the end."""
    models: list[torch.Tensor] = []
    plain = bench.method(name, rounds=4, **settings)
    learn = plain.learn

    def record_model(state: Any, contributions: Any) -> Any:
        state = learn(state, contributions)
        models.append(state.weights)
        return state

    plain.learn = record_model
    last = run_locally(plain, bench.weights, bench.sites(), bench.task.metric)[0]
    swa = {"model_average": {"kind": "swa", "start": 0.5}}
    outcome, _ = run_locally(
        bench.method(name, rounds=4, **settings, **swa), bench.weights, bench.sites(), bench.task.metric
    )
    assert outcome.mask == last.mask
    assert not outcome.weights[~last.mask.bits].any()
    expected = (models[-2] + models[-1]) / 2 * last.mask.bits
    torch.testing.assert_close(outcome.weights, expected)
    assert outcome.evaluation != last.evaluation


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_schedule_reaches_the_training_of_every_method(name: str, bench: Any) -> None:
    cosine = {"schedule": {"kind": "cosine"}}
    # MetaGater's model of two rounds is that of its first training, whose rate both have.
    plain, scheduled = (bench.run(name, rounds=3, training=SGD | other)[0] for other in ({}, cosine))
    assert scheduled.evaluation != plain.evaluation
    scheduled, divided = (bench.run(name, rounds=2, training=SGD | other)[0] for other in (cosine, {"lr_decay": 0.5}))
    assert scheduled.evaluation == divided.evaluation
    assert torch.equal(scheduled.weights, divided.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name != "per_fedavg"])
def test_pull_to_the_received_model_reaches_the_training_of_every_method(name: str, bench: Any) -> None:
    # In the first step of a round the weights are those received, which nothing pulls away from.
    steps = {"local_steps": 3} if "local_steps" in METHODS[name].Config.model_fields else {}
    plain, pulled = (
        bench.run(name, rounds=2, training={**SGD, "proximal": strength}, **steps)[0] for strength in (0.0, 2.0)
    )
    assert plain.evaluation != pulled.evaluation


def test_run_that_averages_from_a_share_of_its_rounds_cannot_be_continued(bench: Any) -> None:
    from_half, from_start = (
        find_need(
            bench.method("fedavg", model_average={"kind": "ema", "start": start}).config.needs(), Need.NUMBER_OF_ROUNDS
        )
        for start in (0.5, 0)
    )
    assert from_half is not None
    assert "model_average.start" in from_half.reason
    assert from_start is None


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("neurosfl", {"server": {"lr": 2}, "scores": "individual_snip"}, "needs one mask for all sites"),
    ],
)
def test_step_that_is_not_defined_is_refused(name: str, settings: dict[str, Any], message: str, bench: Any) -> None:
    with pytest.raises((ValidationError, ConfigError), match=message):
        bench.method(name, **settings)


def test_site_whose_delta_would_freeze_an_optimizer_is_rejected() -> None:
    federation = LocalFederation(
        "fedavg", rules=RoundRules(min_sites=2, max_norm_ratio=None), server={"optimizer": "adam", "lr": 0.01}
    )

    def poison(upload: Upload) -> Upload:
        is_hostile = (upload.site, upload.attempt.round) == ("site-3", 1)
        return upload.with_values(torch.full_like(upload.update.patch.values, 1e25)) if is_hostile else upload

    federation.change_update = poison
    outcome = federation.run()
    assert federation.records[0].rejected == {"site-3": "E_RANGE"}
    assert torch.isfinite(outcome.state.memory.variance).all()


def test_fine_tuning_has_its_own_rate_and_pull_or_those_of_the_last_round() -> None:
    method = METHODS["fedavg_ft"].Config.model_validate(
        {
            "rounds": 5,
            "training": {"lr": 0.1, "lr_decay": 0.5, "proximal": 0.3, "schedule": {"kind": "cosine"}},
            "finetune": {"epochs": 4, "lr": 0.02, "proximal": 2.0},
        }
    )
    (training,) = method.finetune.list_trainings(method.get_training(6), 6)
    assert training.compute_learning_rate(6) == pytest.approx(0.02)
    assert (training.epochs, training.proximal) == (4, 2.0)
    (plain,) = FineTuning(epochs=4).list_trainings(method.get_training(6), 6)
    assert plain.compute_learning_rate(6) == method.get_training(5).compute_learning_rate(5)
    assert plain.proximal == 0.3


@pytest.mark.slow
def test_pull_keeps_the_fine_tuned_model_near_the_global_one(bench: Any) -> None:
    free, pulled = (
        bench.run("fedavg_ft", training={**SGD, "epochs": 3}, finetune={"epochs": 20, "proximal": strength})[0]
        for strength in (0.0, 10.0)
    )
    assert torch.equal(free.weights, pulled.weights)
    before = bench.run("fedavg", training={**SGD, "epochs": 3})[0].evaluation.sites
    distances = [
        sum(abs(outcome.evaluation.sites[site]["mse"] - before[site]["mse"]) for site in before)
        for outcome in (free, pulled)
    ]
    assert distances[1] < 0.5 * distances[0]
