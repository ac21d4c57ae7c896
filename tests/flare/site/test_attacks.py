"""A hostile server reads single patients out of answers: what it reads without a policy, and with each preset.

The server builds models of its own instead of aggregated ones. The site is real: its endpoint, task and guards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.utils.task_utils import apply_filters
from torch import Tensor

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.config.policy.policy import PRESETS, Policy, read_policy
from flare_sparse.core.errors import RequestRefused
from flare_sparse.core.exchange import EVALUATE, Assignment, Contribution, Patch, Request, UpdateSpec
from flare_sparse.core.mask import Mask
from flare_sparse.flare.executor import EncodeUpdate
from flare_sparse.flare.payload import UPDATE, update_to_dxo
from flare_sparse.flare.session import SiteSession
from flare_sparse.flare.site.guards import SiteLastGate, SiteResultPolicy
from flare_sparse.methods.method import SCORE
from flare_sparse.methods.registry import METHODS
from flare_sparse.privacy.dp.account import PrivacyAccount
from flare_sparse.privacy.dp.accounting import SamplingPlan
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.mechanism import SiteMechanism
from flare_sparse.rounds.endpoints.request_log import RequestLog
from flare_sparse.rounds.endpoints.server import ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.tasks.table import TableTask
from flare_sparse.tasks.task import SiteData
from flare_sparse.training import LocalTask, SitePrivacy, build_site
from flare_sparse.wire.ledger import Ledger

MEDICATIONS, UNITS = 240, 64
ROUNDS = 1000
RUN = "0" * 16


class Victim:
    """A hospital with 120 patients and the server of its job, which may send any model."""

    def __init__(
        self,
        folder: Path,
        preset: str | None,
        units: int = UNITS,
        method: str = "fedavg",
        terms: dict[str, Any] | None = None,
        noise_multiplier: float | None = None,
        rounds: int = ROUNDS,
    ):
        (folder / "local").mkdir()
        (folder / "run").mkdir()
        if preset:
            policy = yaml.safe_load(PRESETS[preset].read_text()) | (terms or {})
            (folder / "local" / "flare_sparse_policy.yaml").write_text(yaml.safe_dump(policy))
        generator = np.random.default_rng(3)
        codes = (generator.random((120, MEDICATIONS)) < 0.05).astype(np.uint8)
        np.savez(folder / "stays.npz", med=codes, died=generator.integers(0, 2, 120), stay=np.arange(120))
        task = TableTask(
            {
                "kind": "binary",
                "target": "died",
                "features": [f"med_{{0..{MEDICATIONS - 1}}}"],
                "id": "stay",
                "scaling": "none",
                "model": {"name": "mlp", "hidden": (units, 32)},
            }
        )
        examples = task.load(SiteData("site-1", folder / "stays.npz"), 1)
        self.train_rows = {tuple(row.tolist()) for row in examples.train.tensors[0]}
        self.test_rows = {tuple(row.tolist()) for row in examples.test.tensors[0]}
        self.survivors = examples.train.tensors[0][examples.train.tensors[1].flatten() == 0]
        self.layout, self.weights = build_initial_model(task, 1)
        training = {"epochs": 1, "batch_size": 32, "optimizer": "sgd", "lr": 0.01}
        settings: dict[str, Any] = {"rounds": rounds, "training": training}
        if method == "neurosfl":
            settings = {"rounds": rounds, "training": {**training, "batch_size": 16}, "saliency_batches": None}
        self.method = METHODS[method](METHODS[method].Config.model_validate(settings), self.layout, 1)
        self.server = ServerEndpoint(self.layout, RUN, "float32", Ledger())
        terms = read_policy(folder / "local" / "flare_sparse_policy.yaml")
        limits = {name: getattr(terms, name) for name in ("max_starts", "max_model_change")}
        requests = RequestLog(RUN, self.method.count_requests, attempts=3, **limits)
        session = SiteSession()
        session.build_initial_weights = lambda fl_ctx: self.weights  # type: ignore[method-assign]
        privacy = None
        if noise_multiplier is not None:
            config = PrivacyConfig(noise_multiplier=noise_multiplier)
            plan, account = SamplingPlan.build(len(examples.train), 32, 1, ROUNDS), PrivacyAccount()
            account.secret = bytes(32)
            privacy = SitePrivacy(SiteMechanism(config, plan, account, RUN, "job"))
        site = build_site(LocalTask.open("site-1", task, examples, self.layout, 1), privacy=privacy)
        self.endpoint = session._endpoint = SiteEndpoint(site, self.method, RUN, "float32", requests=requests)
        workspace = SimpleNamespace(
            get_site_config_dir=lambda: str(folder / "local"), get_run_dir=lambda job: str(folder / "run")
        )
        engine = SimpleNamespace(
            get_component=lambda name: session, get_workspace=lambda: workspace, fire_event=lambda *event: None
        )
        self.fl_ctx = FLContextManager(engine=engine, identity_name="site-1", job_id="job").new_context()
        self.fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)

    def ask(self, kind: str, t: int, weights: Tensor) -> Contribution | None:
        """Return the site's answer to a request, as it leaves the site; None if the site refuses."""
        full = Mask.full(self.layout.size)
        request = Request(kind, t, Patch.from_vector(weights, full), full)
        expected = UpdateSpec("scores" if kind == SCORE else "weights")
        attempt = self.server.encode_requests({"site-1": Assignment(request, expected)})
        try:
            received = self.endpoint.receive(attempt.messages["site-1"])
        except RequestRefused:
            return None
        update = self.endpoint.answer(received)
        reply = update_to_dxo(update, self.layout).to_shareable()
        reply[UPDATE] = (received, update)
        scope = SimpleNamespace(task_result_filters={"out": [SiteResultPolicy()]})
        self.fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True, sticky=False)
        reply = apply_filters(
            "task_result_filters", reply, self.fl_ctx, {"exchange/out": [EncodeUpdate()]}, "exchange", "out"
        )
        self.fl_ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
        SiteLastGate().handle_event(EventType.AFTER_TASK_RESULT_FILTER, self.fl_ctx)
        if reply.get_return_code() != ReturnCode.OK:
            return None
        dxo = from_shareable(reply)
        return self.server.decode("site-1", dxo.data["message"], dxo.meta["examples"], dxo.meta["metrics"])


def join_tensors(*tensors: Tensor) -> Tensor:
    """Return the vector of a model with these tensors, in the order of the layout."""
    return torch.cat([tensor.flatten() for tensor in tensors])


class MetricsAttack:
    """Reads the row of one patient from Brier scores of models made for the question, each chosen by the last answers.

    The attacker knows how to separate the patient from all others. A logit of 0 contributes 0.25 whatever the outcome;
    one far from 0 contributes 0 or 1. Scores rounded to hundredths are enough for that, at 24 patients.

    Args:
        victim: the site.
        rounds: requests whose answers have metrics, as far as the attacker knows the policy.
    """

    def __init__(self, victim: Victim, rounds: Iterable[tuple[str, int]]):
        self.victim, self.rounds, self.questions = victim, iter(rounds), 0
        generator = torch.Generator().manual_seed(5)
        # Whole numbers, so that the sums are exact and every patient has another one.
        self.direction = torch.randint(0, 512, (MEDICATIONS,), generator=generator).float()
        self.row = min(victim.test_rows)
        self.patient = float(torch.tensor(self.row).float() @ self.direction)
        self.known: dict[int, int] = {}
        assert victim.ask("train", 1, victim.weights) is not None

    def has_any(self, codes: Tensor) -> bool:
        """Return whether the patient takes any of some medications.

        Raises:
            RequestRefused: no metrics leave any more.
        """
        first, first_bias = torch.zeros(UNITS, MEDICATIONS), torch.zeros(UNITS)
        second, second_bias, third = torch.zeros(32, UNITS), torch.zeros(32), torch.zeros(1, 32)
        # Above the number of codes of any patient, so that only the one whose sum is between the limits gets past it.
        height = 32.0
        steps = ((-0.5, 0.25, 1), (-0.5, -0.25, -1), (0.5, 0.25, -1), (0.5, -0.25, 1))
        for unit, (limit, shift, sign) in enumerate(steps):
            first[unit], first_bias[unit] = self.direction, shift - limit - self.patient
            second[0, unit] = 2 * sign * height
        first[4, codes], second[0, 4], second_bias[0], third[0, 0] = 1.0, 1.0, -height, 60.0
        model = join_tensors(first, first_bias, second, second_bias, third, torch.zeros(1))
        reply = self.victim.ask(*next(self.rounds), model)
        if reply is None or "brier" not in reply.metrics:
            raise RequestRefused("no metrics")
        self.questions += 1
        # A survivor adds 0.75 of a patient, another one takes 0.25 away.
        return round(4 * (reply.metrics["brier"] - 0.25) * len(self.victim.test_rows)) != 0

    def read_codes(self, codes: Tensor, *, is_any: bool | None = None) -> None:
        """Find which of some medications the patient takes, by halving those of which it takes any."""
        if is_any is None:
            is_any = self.has_any(codes)
        if not is_any or len(codes) == 1:
            self.known |= dict.fromkeys(codes.tolist(), int(is_any))
            return
        first, second = codes.tensor_split(2)
        before = sum(self.known.values())
        self.read_codes(first)
        # If none is in the first half, one is in the second.
        self.read_codes(second, is_any=None if sum(self.known.values()) > before else True)

    def run(self) -> int:
        """Read until no metrics leave any more, and return how many entries of the row are known."""
        with suppress(RequestRefused):
            for codes in torch.arange(MEDICATIONS).split(15):
                self.read_codes(codes)
        assert all(self.row[code] == value for code, value in self.known.items())
        return len(self.known)


def list_answered(preset: str | None, rounds: int) -> Iterator[tuple[str, int]]:
    """Yield the requests of a job whose answers have metrics: trainings, and the last one with other models."""
    policy = Policy() if preset is None else read_policy(PRESETS[preset])
    yield from (("train", t) for t in range(2, rounds + 1) if policy.allows_metrics(t, rounds, 1))
    yield from repeat((EVALUATE, rounds + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "rounds", "questions", "medications"),
    [
        ("careful", 50, 19, 2),
        ("careful", 500, 19, 2),
        ("strict", 50, 9, 1),
        ("strict", 500, 9, 1),
        pytest.param("open", 50, 44, 6, marks=pytest.mark.long),
        pytest.param("open", 500, 49, 6, marks=pytest.mark.long),
    ],
)
def test_metrics_of_chosen_models_reveal_no_test_row_in_a_run_of_any_length(
    preset: str, rounds: int, questions: int, medications: int, tmp_path: Path
) -> None:
    victim = Victim(tmp_path, preset, rounds=rounds, terms={"max_upload_share": 1.0})
    attack = MetricsAttack(victim, list_answered(preset, rounds))
    assert attack.run() < MEDICATIONS
    assert (attack.questions, sum(attack.known.values()), sum(attack.row)) == (questions, medications, 7)


@pytest.mark.slow
def test_metrics_of_chosen_models_reveal_a_test_row_without_limits_and_not_in_the_lifetime_of_a_site(
    tmp_path: Path,
) -> None:
    terms = {"max_evaluations": None, "max_lifetime_questions": None}
    attack = MetricsAttack(Victim(tmp_path, "careful", terms=terms), list_answered(None, ROUNDS))
    assert attack.run() == MEDICATIONS
    lifetimes = {name: read_policy(file).max_lifetime_questions or 0 for name, file in PRESETS.items()}
    assert lifetimes["strict"] < lifetimes["careful"] < attack.questions == 56 < lifetimes["open"]


def reconstruct_training_rows(victim: Victim, scales: Tensor) -> set[tuple[int, ...]]:
    """Return the rows read from one training answer to a model whose units differ in single patients.

    Args:
        victim: the site.
        scales: weight of each unit in the next layer; the change of a unit is proportional to it.
    """
    units, generator = len(scales), torch.Generator().manual_seed(5)
    direction = 1e-4 * torch.randint(1, 500, (MEDICATIONS,), generator=generator)
    # The attacker knows how many medications patients take, not which: a bin of the projection for each unit.
    sample = (torch.rand(20_000, MEDICATIONS, generator=generator) < 0.05).float() @ direction
    thresholds = sample.quantile(torch.arange(units) / units)
    second, third = 0.03 * UNITS / units * scales.expand(32, -1), torch.full((1, 32), 1 / 32)
    model = join_tensors(direction.expand(units, -1), -thresholds, second, torch.zeros(32), third, torch.zeros(1))
    # Not in round 1, whose model a site can verify.
    reply = victim.ask("train", 2, model)
    if reply is None:
        return set()
    changes = victim.layout.unflatten((reply.patch.to_vector() - model).double().float())
    weight, bias = (changes[victim.layout.tensors[number].name] for number in (0, 1))
    weight = torch.cat([weight / scales[:, None], torch.zeros(1, MEDICATIONS)])
    bias = torch.cat([bias / scales, torch.zeros(1)])
    first, second = torch.combinations(torch.arange(units + 1)).T
    quotients = (weight[first] - weight[second]) / (bias[first] - bias[second])[:, None]
    return {tuple(row) for row in quotients[torch.isfinite(quotients).all(1)].round().int().tolist()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "largest"),
    [(None, 1.0), (None, 2.0), ("open", 1.0), ("open", 2.0), ("careful", 2.0), ("strict", 2.0)],
)
def test_training_with_a_chosen_model_reveals_training_rows_only_without_a_policy(
    preset: str | None, largest: float, tmp_path: Path
) -> None:
    victim = Victim(tmp_path, preset, units=2 * UNITS)
    # Units of different weight differ in single patients only after a division by their weights.
    scales = torch.tensor([1.0, largest]).repeat(UNITS)
    found = reconstruct_training_rows(victim, scales) & victim.train_rows
    assert len(victim.train_rows) == 96
    assert len(found) > 48 if preset is None else not found


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, 20.0])
def test_model_far_from_the_last_one_is_refused_by_the_limit_on_its_change_alone(
    factor: float | None, tmp_path: Path
) -> None:
    """After an honest first round; ``withhold_isolated`` and all other limits are off."""
    victim = Victim(tmp_path, "open", 2 * UNITS, terms={"withhold_isolated": False, "max_model_change": factor})
    honest = victim.ask("train", 1, victim.weights)
    assert honest is not None
    found = reconstruct_training_rows(victim, torch.ones(2 * UNITS)) & victim.train_rows
    assert len(found) > 48 if factor is None else not found
    # Asked again, it is as far from the last accepted model; that of an average is accepted.
    assert (victim.ask("train", 2, torch.zeros(victim.layout.size)) is None) == (factor is not None)
    assert victim.ask("train", 3, victim.weights * 0.5 + honest.patch.values * 0.5) is not None


class ThresholdAttack:
    """Trains models whose units all pass the patients above one threshold, of whom only survivors have a gradient.

    The attacker knows how to separate the patients: by a projection in which each has another value.
    """

    def __init__(self, victim: Victim):
        self.victim, generator = victim, torch.Generator().manual_seed(5)
        self.direction = 1e-4 * torch.randint(1, 500, (MEDICATIONS,), generator=generator)
        values = (victim.survivors.float() @ self.direction).unique()
        self.thresholds = (values[1:] + values[:-1]) / 2
        self.rounds = iter(range(2, ROUNDS))
        assert victim.ask("train", 1, victim.weights) is not None

    def sum_survivors(self, threshold: Tensor) -> Tensor | None:
        """Return the change ``(medications + 1,)`` of a unit and its bias; None if the site refuses."""
        second, third = torch.full((32, UNITS), 0.03), torch.full((1, 32), 1 / 32)
        first, bias, risk = self.direction.expand(UNITS, -1), -threshold.expand(UNITS), torch.tensor([6.0])
        model = join_tensors(first, bias, second, torch.zeros(32), third, risk)
        reply = self.victim.ask("train", next(self.rounds), model)
        if reply is None:
            return None
        changes = self.victim.layout.unflatten(reply.patch.to_vector() - model)
        weight, bias = (changes[self.victim.layout.tensors[number].name][0] for number in (0, 1))
        return torch.cat([weight.flatten(), bias.flatten()]).double()

    def is_read(self, change: Tensor | None, tolerance: float = 0.5) -> bool:
        """Whether the change is that of one patient, whose inputs are whole numbers."""
        if change is None or not float(change[-1]):
            return False
        row = change[:-1] / change[-1]
        return any(float((row - patient).abs().max()) < tolerance for patient in self.victim.survivors)


@pytest.mark.parametrize(("preset", "is_read"), [(None, True), ("open", False), ("careful", False)])
def test_model_that_only_one_patient_moves_reveals_the_row_only_without_a_policy(
    preset: str | None, *, is_read: bool, tmp_path: Path
) -> None:
    attack = ThresholdAttack(Victim(tmp_path, preset))
    assert attack.is_read(attack.sum_survivors(attack.thresholds[-1])) is is_read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "terms", "noise_multiplier", "is_read"),
    [
        (None, {}, None, True),
        ("careful", {}, None, True),
        ("careful", {"max_model_change": 20.0}, None, False),
        ("strict", {"max_upload_share": 1.0}, None, False),
        ("careful", {"epsilon": 8.0}, 4.0, False),
    ],
)
def test_difference_of_two_rounds_reveals_rows_unless_models_may_not_jump_or_answers_have_noise(
    preset: str | None, terms: dict[str, Any], noise_multiplier: float | None, *, is_read: bool, tmp_path: Path
) -> None:
    """Each answer alone is a sum over many patients; from one to the next, one of them is gone."""
    attack = ThresholdAttack(Victim(tmp_path, preset, terms=terms, noise_multiplier=noise_multiplier))
    first, second = (attack.sum_survivors(threshold) for threshold in attack.thresholds[20:22])
    assert not attack.is_read(first)
    assert (first is not None and second is not None and attack.is_read(first - second)) is is_read


@pytest.mark.long
@pytest.mark.parametrize(("noise_multiplier", "is_withheld"), [(4.0, False), (0.00001, True)])
def test_noise_of_a_job_replaces_the_withholding_of_units_only_if_it_hides_a_subject(
    noise_multiplier: float, *, is_withheld: bool, tmp_path: Path
) -> None:
    """What is withheld depends on the data and would undo differential privacy; a job could name any budget."""
    attacks = []
    for preset in (None, "careful"):
        folder = tmp_path / str(preset)
        folder.mkdir()
        attacks.append(ThresholdAttack(Victim(folder, preset, noise_multiplier=noise_multiplier)))
    # The one patient above the last threshold has a gradient only in rounds whose minibatch holds it.
    last = attacks[0].thresholds[-1:]
    for threshold in last.expand(32) if is_withheld else attacks[0].thresholds.flip(0)[:8]:
        change, answer = (attack.sum_survivors(threshold) for attack in attacks)
        assert change is not None
        assert answer is not None
        # A mean of two patients, which is not withheld, may round to the row of one.
        assert not attacks[1].is_read(answer, 0.1)
        if not is_withheld:
            assert torch.equal(answer, change)
        elif attacks[0].is_read(change, 0.1):
            assert not answer.any()
            break
    else:
        assert not is_withheld, "no answer reveals a patient, so there was nothing to withhold"


def reconstruct_scored_rows(victim: Victim, units: int) -> set[tuple[int, ...]]:
    """Return the rows read from the scores of a model whose units differ in single survivors.

    A score divided by its weight is a sum of inputs. The risk is near 1, so that only survivors have a gradient.
    """
    generator = torch.Generator().manual_seed(5)
    direction = 1 + torch.rand(MEDICATIONS, generator=generator)
    sample = (torch.rand(20_000, MEDICATIONS, generator=generator) < 0.05).float() @ direction
    thresholds = sample.quantile(torch.arange(units) / units)
    second, third = torch.full((32, units), 1e-4), torch.full((1, 32), 1 / 32)
    risk = torch.tensor([6.0])
    model = join_tensors(direction.expand(units, -1), -thresholds, second, torch.zeros(32), third, risk)
    reply = victim.ask(SCORE, 0, model)
    if reply is None:
        return set()
    scores = victim.layout.unflatten(reply.patch.to_vector())[victim.layout.tensors[0].name] / direction
    differences = (scores - torch.cat([scores[1:], torch.zeros(1, MEDICATIONS)])).clamp_min(0)
    shares = differences / differences.amax(1, keepdim=True).clamp_min(1e-30)
    return {tuple(row) for row in shares.round().int().tolist()}


@pytest.mark.parametrize(
    ("preset", "terms", "is_open"),
    [
        (None, {}, True),
        ("open", {"verify_initial_model": False}, True),
        ("careful", {"verify_initial_model": False}, True),
        ("open", {}, False),
        ("careful", {}, False),
    ],
)
def test_scores_of_a_chosen_model_reveal_training_rows_unless_the_model_is_verified(
    preset: str | None, terms: dict[str, Any], *, is_open: bool, tmp_path: Path
) -> None:
    victim = Victim(tmp_path, preset, 2 * UNITS, "neurosfl", terms)
    found = reconstruct_scored_rows(victim, 2 * UNITS) & victim.train_rows
    assert len(found) > 20 if is_open else not found


def test_scores_of_the_initial_model_leave_with_every_preset_that_allows_scores(tmp_path: Path) -> None:
    for preset in ("open", "careful"):
        (tmp_path / preset).mkdir()
        victim = Victim(tmp_path / preset, preset, method="neurosfl")
        reply = victim.ask(SCORE, 0, victim.weights)
        assert reply is not None
        assert float(reply.patch.values.max()) > 0
