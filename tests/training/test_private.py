"""Private training: gradients of single subjects over the live entries, and nothing of the data beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toy import Lookup

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.privacy.dp.account import Budget, BudgetSpent, PrivacyAccount
from flare_sparse.privacy.dp.accounting import SamplingPlan, compute_epsilon
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.mechanism import SiteMechanism
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task
from flare_sparse.training import LocalTask, Site, SitePrivacy, TrainingConfig, build_site
from flare_sparse.training.private import PrivateTraining, check_private_network, group_subjects


class Counter(nn.Module):
    """A layer that writes what it has seen into a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()
        return x


class Branch(nn.Module):
    """A layer whose code branches on its data, which torch.func cannot vectorize."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.detach().sum()) > 0 else x


class Linear(Task):
    metric = Metric("mse", "", "min")
    extra: tuple[nn.Module, ...] = ()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.GroupNorm(1, 3), nn.Tanh(), *self.extra, nn.Linear(3, 1))

    def load(self, data: SiteData, seed: int) -> Examples:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mse": float((predictions - targets).square().mean())}


X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(24, 1, generator=torch.Generator().manual_seed(1))
TRAINING = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=6, epochs=2)
BY_TWO = tuple(f"s{i // 2}" for i in range(24))


def open_task(
    task: Task | None = None, subjects: tuple[str, ...] = (), rows: slice = slice(None)
) -> tuple[LocalTask, torch.Tensor]:
    """Return the task at a site, and its initial weights."""
    task = task or Linear()
    torch.manual_seed(3)
    module = task.model()
    layout = Layout.from_module(module)
    data = TensorDataset(X[rows].clone(), Y[rows].clone())
    start = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()])).detach()
    examples = Examples(data, data, train_subjects=subjects[rows])
    return LocalTask.open("site-1", task, examples, layout, 1), start


def build_mechanism(local: LocalTask, account: PrivacyAccount | None = None, **settings: float) -> SiteMechanism:
    config = PrivacyConfig.model_validate(settings or {"noise_multiplier": 1.0})
    plan = SamplingPlan.build(local.examples.count_train_subjects(), 6, 2, 3)
    return SiteMechanism(config, plan, account or PrivacyAccount(), "a" * 16, "job")


def open_site(
    task: Task | None = None, account: PrivacyAccount | None = None, **settings: float
) -> tuple[Site, torch.Tensor]:
    local, start = open_task(task)
    site = build_site(local, privacy=SitePrivacy(build_mechanism(local, account, **settings)))
    site.weights = start
    return site, start


def open_training(local: LocalTask, start: torch.Tensor, mask: Mask, **settings: float) -> PrivateTraining:
    """Return the training of a request whose plan is that of the job."""
    local.model.load(start)
    mechanism, examples = build_mechanism(local, **settings), local.examples
    records = group_subjects(examples.n_train, examples.train_subjects)
    question = mechanism.open(start, mask, mechanism.plan, 1, ())
    return PrivateTraining(question, local, records, TRAINING.batch_size, torch.Generator())


def compute_reference(local: LocalTask, start: torch.Tensor, mask: Mask, records: tuple[int, ...]) -> torch.Tensor:
    """Gradient of the mean loss of some records, one by one, by autograd."""
    model, full = local.model, Mask.full(mask.size)
    gradient = torch.zeros(model.layout.num_parameters)
    for record in records:
        model.load(start)
        model.set_training_mode()
        loss = local.task.loss(model.module, (X[[record]], Y[[record]]))
        gradient += model.compute_live_gradient([loss], model.find_live(full), None)
    return (gradient / len(records))[mask.bits[: gradient.numel()]]


def test_examples_that_count_for_a_policy_do_not_depend_on_the_secret_sample() -> None:
    local, start = open_task(subjects=BY_TWO)
    mechanism = build_mechanism(local)
    site = build_site(local, privacy=SitePrivacy(mechanism))
    once = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=3, epochs=1)
    counts = set()
    for number in range(5):
        mechanism.account.secret = bytes([number]) * 32
        site.trainer.reset_usage()
        site.train(start, Mask.full(start.numel()), once, 1, steps=2)
        counts.add((site.trainer.usage.examples, site.trainer.usage.batches))
    # Two lots of three of the twelve subjects, who have two records each.
    assert counts == {(12, 2)}


@pytest.mark.parametrize(
    "extra",
    [(), (Branch(),), (Lookup(nn.Embedding, 3, sparse=True),)],
    ids=["vectorized", "one record at a time", "sparse gradient"],
)
@pytest.mark.parametrize("subjects", [(), BY_TWO], ids=["records", "subjects"])
def test_gradient_of_a_subject_is_that_of_its_own_records_over_the_live_entries(
    extra: tuple[nn.Module, ...], subjects: tuple[str, ...]
) -> None:
    task = Linear()
    task.extra = extra
    local, start = open_task(task, subjects)
    mask = Mask(torch.rand(start.numel(), generator=torch.Generator().manual_seed(2)) < 0.5)
    training = open_training(local, start, mask)
    # 7 subjects: with two records each, more records than are in memory at once.
    rows = training._compute_rows([0, 2, 3, 4, 5, 7, 11], local.model.find_live(mask))
    assert rows.shape == (7, mask.count)
    for row, subject in zip(rows, [0, 2, 3, 4, 5, 7, 11], strict=True):
        records = (2 * subject, 2 * subject + 1) if subjects else (subject,)
        expected = compute_reference(local, start, mask, records)
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-6)


def test_lot_of_any_size_has_the_clipped_sum_of_its_subjects() -> None:
    local, start = open_task(subjects=BY_TWO)
    mask = Mask.full(start.numel())
    training = open_training(local, start, mask, noise_multiplier=1e-9, clip=0.1)
    live = local.model.find_live(mask)
    rows = training._compute_rows(list(range(12)), live).double()
    clipped = rows * (0.1 / rows.norm(dim=1).clamp_min(0.1))[:, None]
    noisy = training.compute_gradient([list(range(12))], 1, live, None)
    torch.testing.assert_close(noisy.double(), clipped.sum(0) / 6, rtol=1e-4, atol=1e-7)
    assert float(training.compute_gradient([[]], 1, live, None).abs().max()) < 1e-8


def test_sites_that_differ_by_one_subject_have_sums_that_differ_by_at_most_clip() -> None:
    mask_bits = torch.rand(open_task()[1].numel(), generator=torch.Generator().manual_seed(5)) < 0.7
    sums = []
    # The last subject has four records: all of them go.
    subjects = (*BY_TWO[:20], "last", "last", "last", "last")
    for rows in (slice(None), slice(0, 20)):
        local, start = open_task(subjects=subjects, rows=rows)
        mask = Mask(mask_bits)
        training = open_training(local, start, mask, noise_multiplier=1e-12, clip=0.05)
        everyone = list(range(local.examples.count_train_subjects()))
        sums.append(training.compute_gradient([everyone], 1, local.model.find_live(mask), None) * 6)
    change = float((sums[0] - sums[1]).norm())
    # Its gradient is longer than the bound, so that the bound is reached.
    assert 0.0499 < change <= 0.05 * (1 + 1e-5)


def test_training_changes_live_entries_only_and_is_the_same_when_asked_again() -> None:
    account = PrivacyAccount()
    site, start = open_site(account=account)
    mask = Mask(torch.rand(start.numel(), generator=torch.Generator().manual_seed(4)) < 0.5)
    first = site.train(start, mask, TRAINING, 1)
    assert torch.equal(first[~mask.bits], start[~mask.bits])
    assert bool((first[mask.bits] != start[mask.bits]).all())
    assert torch.equal(open_site(account=account)[0].train(start, mask, TRAINING, 1), first)
    assert [entry.steps for entry in account.read().entries] == [8]
    # Without the site's secret the seed of the job does not give the same numbers.
    assert not torch.isclose(open_site()[0].train(start, mask, TRAINING, 1)[mask.bits], first[mask.bits]).any()


@pytest.mark.long
def test_resumed_site_spends_as_much_as_one_that_never_stopped(tmp_path: Path) -> None:
    weights: list[torch.Tensor] = []
    for folder, restarts in (("once", False), ("restarted", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "secret.key").write_bytes(bytes(32))
        site, start = open_site(account=PrivacyAccount(tmp_path / folder), epsilon=4.0)
        current = start
        for t in (1, 2, 3):
            trained = site.train(current, Mask.full(start.numel()), TRAINING, t)
            if restarts:
                site, _ = open_site(account=PrivacyAccount(tmp_path / folder), epsilon=4.0)
                assert torch.equal(site.train(current, Mask.full(start.numel()), TRAINING, t), trained)
            current = trained
        weights.append(current)
        mechanism = site.trainer.mechanism
        assert mechanism is not None
        assert 3.98 <= mechanism.compute_spent() <= 4.0
        assert len(mechanism.account.read().entries) == 3
    assert torch.equal(*weights)


@pytest.mark.slow
def test_site_abstains_when_its_policys_budget_is_spent() -> None:
    charge = SamplingPlan.build(24, 6, 2, 1).build_charge(1.0)
    account = PrivacyAccount(None, Budget(compute_epsilon([charge], 1e-5), 1e-5))
    site, start = open_site(account=account)
    mask = Mask.full(start.numel())
    site.train(start, mask, TRAINING, 1)
    with pytest.raises(BudgetSpent, match=r"epsilon of this site's policy, over all jobs"):
        site.train(start, mask, TRAINING, 2)


def test_what_a_pass_writes_into_buffers_does_not_leave() -> None:
    task = Linear()
    task.extra = (Counter(),)
    site, start = open_site(task)
    trained = site.train(start, Mask.full(start.numel()), TRAINING, 1)
    assert site.layout.tensors[-1].name.endswith("seen")
    assert float(trained[-1]) == float(start[-1]) == 0


def test_subject_whose_gradient_is_not_finite_counts_as_zero() -> None:
    site, start = open_site(noise_multiplier=1e-9)
    site.trainer.examples.train[3][0].fill_(float("nan"))
    trained = site.train(start, Mask.full(start.numel()), TRAINING, 1)
    assert bool(torch.isfinite(trained).all())


def test_reads_outside_the_mechanism_are_refused() -> None:
    site, start = open_site()
    refusal = "privacy: the method computes scores of gradients from .*choose fedavg, fedsparsify or neurosfl$"
    with pytest.raises(ConfigError, match=refusal):
        next(site.trainer.compute_gradients(start, 4, 1, 0))
    with pytest.raises(ConfigError, match="steps in stages"):
        site.trainer.step_in_stages(start, [], TRAINING)
    with pytest.raises(ConfigError, match="activations of units"):
        site.trainer.observe_units(start, [], lambda name, values: None)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm3d(48), r"'1' \(BatchNorm3d\) normalises by the whole minibatch.*nn\.GroupNorm\(24, 48\)"),
        (nn.InstanceNorm1d(8, track_running_stats=True), "keeps running statistics of the data"),
    ],
)
def test_layer_that_mixes_subjects_is_refused_with_its_replacement(layer: nn.Module, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_private_network(nn.Sequential(nn.Identity(), layer))
    check_private_network(nn.Sequential(nn.GroupNorm(2, 8), nn.InstanceNorm1d(8), nn.LayerNorm(8)))


def test_private_scores_are_those_of_clipped_gradients_and_are_charged() -> None:
    """All subjects in every lot, and hardly any noise: the mean of the clipped gradients of the scored entries."""
    account = PrivacyAccount()
    site, start = open_site(account=account, noise_multiplier=1e-6, clip=0.3)
    scored = Mask(torch.rand(start.numel(), generator=torch.Generator().manual_seed(2)) < 0.5)
    training = TrainingConfig(batch_size=24)
    mean = torch.zeros(scored.count)
    for record in range(24):
        gradient = compute_reference(open_task()[0], start, scored, (record,))
        mean += gradient * min(1.0, 0.3 / float(gradient.norm())) / 24
    expected = scored.put(mean, torch.zeros(start.numel())) * start
    scores = site.trainer.compute_private_gradient(start, scored, training, 2) * start
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(site.trainer.compute_private_gradient(start, scored, training, 2) * start, scores)
    # Twice the same question: one charge, of two steps.
    (entry,) = account.read().entries
    assert (entry.round, entry.steps, entry.sample_rate) == (0, 2, 1.0)


def test_noise_of_scores_has_the_scale_of_the_mechanism() -> None:
    site, start = open_site(noise_multiplier=50.0, clip=0.3)
    ones = torch.ones_like(start)
    scores = site.trainer.compute_private_gradient(ones, Mask.full(start.numel()), TrainingConfig(batch_size=24), 4)
    # Four lots of 24 subjects halve the deviation of one.
    assert float(scores.std()) == pytest.approx(50 * 0.3 / 24 / 2, rel=0.5)
    again = site.trainer.compute_private_gradient(ones, Mask.full(start.numel()), TrainingConfig(batch_size=24), 4)
    assert torch.equal(scores, again)
