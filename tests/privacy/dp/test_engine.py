"""A user's own loop with Opacus' engine: what it charges, what it refuses, and what its noise is."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus.accountants import PRVAccountant
from scripts import load_script
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flare_sparse.client import make_private, masked
from flare_sparse.core.errors import ConfigError
from flare_sparse.privacy.dp.account import Budget, BudgetSpent, PrivacyAccount
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.mechanism import LEAST_NOISE
from flare_sparse.privacy.dp.scripts import PRIVACY_VARIABLE, ScriptBudget

DELTA = 1e-5
# Of Opacus' hooks at a first layer, whose inputs need no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


@pytest.fixture
def open_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that writes the budget of a job into the job's folder, as a site does."""

    def write(limit: Budget | None = None, run: str = "run", **privacy: Any) -> ScriptBudget:
        config = PrivacyConfig(unit="record", delta=DELTA, **privacy)
        budget = ScriptBudget(config, PrivacyAccount(tmp_path / "kit", limit), 3, run, "job")
        monkeypatch.setenv(PRIVACY_VARIABLE, budget.write(tmp_path / "jobs" / run / "budget.json"))
        return budget

    return write


def build_loop(records: int = 40, batch_size: int = 8, epochs: int = 1) -> tuple[nn.Module, Any, DataLoader[Any]]:
    inputs = torch.randn(records, 3, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)
    net = nn.Linear(3, 1)
    private = make_private(net, torch.optim.SGD(net.parameters(), lr=0.1), loader, epochs=epochs)
    assert private[0] is net
    return net, private[1], private[2]


def train_epoch(net: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> int:
    steps = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
        steps += 1
    return steps


def test_budget_of_no_folder_is_refused_as_nothing_would_be_charged(open_budget: Any) -> None:
    open_budget(noise_multiplier=1.0)
    file = Path(os.environ[PRIVACY_VARIABLE])
    content = json.loads(file.read_text())
    assert content["account"].keys() == {"folder", "limit"}
    file.write_text(json.dumps({**content, "account": {**content["account"], "folder": None}}))
    with pytest.raises(ConfigError, match="no folder of the account"):
        ScriptBudget.read()


@pytest.mark.long
def test_epsilon_of_a_loop_is_the_one_of_opacus_for_the_same_steps(open_budget: Any) -> None:
    budget = open_budget(epsilon=2.0)
    net, optimizer, loader = build_loop(epochs=2)
    assert list(net.state_dict()) == ["weight", "bias"]
    steps = sum(train_epoch(net, optimizer, loader) for _ in range(3 * 2))
    assert steps == 3 * 2 * 5
    (charge,) = {entry.charge for entry in budget.account.read().entries}
    accountant = PRVAccountant()
    accountant.history = [(charge.noise_multiplier, 1 / 5, steps)]
    assert budget.compute_spent() == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)
    assert 1.98 < budget.compute_spent() <= 2.0
    assert budget.noise_multiplier >= LEAST_NOISE
    # A round more than the job has.
    with pytest.raises(BudgetSpent, match=r"privacy\.epsilon is 2 at delta"):
        train_epoch(net, optimizer, loader)


@pytest.mark.slow
def test_spent_budget_of_the_site_refuses_also_without_the_folder_of_the_job(open_budget: Any, tmp_path: Path) -> None:
    limit = Budget(1.0, DELTA)
    budget = open_budget(limit, noise_multiplier=3.0)
    net, optimizer, loader = build_loop()
    rounds = 0
    with pytest.raises(BudgetSpent, match="epsilon of this site's policy, over all jobs"):  # noqa: PT012
        for rounds in range(50):  # noqa: B007
            train_epoch(net, optimizer, loader)
    assert 1 < rounds < 49
    spent, weights = budget.compute_spent(), net.weight.detach().clone()
    assert 0.5 < spent <= 1.0
    shutil.rmtree(tmp_path / "jobs")
    again = open_budget(limit, run="another", noise_multiplier=3.0)
    net, optimizer, loader = build_loop()
    with pytest.raises(BudgetSpent):
        train_epoch(net, optimizer, loader)
    assert again.compute_spent() == 0
    assert not torch.equal(net.weight, weights)


def test_steps_beyond_an_epoch_and_jobs_without_a_budget_are_refused(
    open_budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_budget(noise_multiplier=1.0)
    net, optimizer, loader = build_loop()
    kept = list(loader)
    for inputs, targets in kept:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    optimizer.zero_grad()
    nn.functional.mse_loss(net(kept[0][0]), kept[0][1]).backward()
    with pytest.raises(ConfigError, match="a step beyond those of the epoch"):
        optimizer.step()
    with pytest.raises(ConfigError, match="normalises by the whole minibatch"):
        make_private(nn.BatchNorm1d(3), optimizer, loader)
    monkeypatch.delenv(PRIVACY_VARIABLE)
    with pytest.raises(ConfigError, match="this job has no budget"):
        build_loop()


def test_step_is_the_mean_of_clipped_gradients_and_noise_that_never_repeats(open_budget: Any) -> None:
    """With one minibatch every record takes part in every step; its gradient is computed by hand."""
    open_budget(noise_multiplier=1e-9, clip=0.5)
    net, optimizer, loader = build_loop(4, 4)
    weights, bias = net.weight.detach().clone(), net.bias.detach().clone()
    ((inputs, targets),) = [loader.dataset[:]]
    expected = torch.zeros(4)
    for row, target in zip(inputs, targets, strict=True):
        slope = 2 * (weights[0] @ row + bias - target)
        gradient = torch.cat([slope * row, slope])
        expected += gradient * min(1.0, 0.5 / float(gradient.norm())) / 4
    train_epoch(net, optimizer, loader)
    moved = torch.cat([(weights - net.weight).flatten(), bias - net.bias]) / 0.1
    assert torch.allclose(moved, expected, atol=1e-5)
    counter = optimizer.counter
    first = counter.draw_noise(torch.zeros(3), 1, 0)
    assert torch.equal(first, counter.draw_noise(torch.zeros(3), 1, 0))
    assert not torch.equal(first, counter.draw_noise(torch.ones(3), 1, 0))
    counter.charge_epoch()
    assert not torch.equal(first, counter.draw_noise(torch.zeros(3), 1, 0))


def test_entries_that_are_off_keep_their_values_with_noise(open_budget: Any) -> None:
    from types import SimpleNamespace

    from flare_sparse.training.script_exchange import TRAINABLE

    open_budget(noise_multiplier=1.0)
    net, optimizer, loader = build_loop()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    on = torch.tensor([[True, False, False]])
    with masked(net, optimizer, SimpleNamespace(params=start, meta={TRAINABLE: {"weight": on}})):
        train_epoch(net, optimizer, loader)
    assert torch.equal(net.weight[~on], start["weight"][~on])
    assert not torch.equal(net.weight[on], start["weight"][on])


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "is_exceeded"), [(1.0, False), (0.02, True)])
def test_bound_of_canaries_is_below_the_epsilon_that_is_charged(
    noise: float, is_exceeded: bool, open_budget: Any
) -> None:
    """Canaries are coordinates of their own; with hardly any noise the attack contradicts a smaller claim."""
    budget = open_budget(noise_multiplier=noise)
    count = 400
    is_included = np.random.default_rng(1).random(count) < 0.5
    rows = torch.eye(count)[torch.from_numpy(is_included)]
    loader = DataLoader(TensorDataset(rows, torch.ones(len(rows), 1)), batch_size=len(rows) // 2)
    net = nn.Linear(count, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
    _, optimizer, private = make_private(net, optimizer, loader)
    for _ in range(4):
        train_epoch(net, optimizer, private)
    bound = load_script("experiments/canary_bound").bound_epsilon(net.weight.detach()[0].numpy(), is_included, DELTA)
    (charge,) = {entry.charge for entry in budget.account.read().entries}
    # What four times the noise would have cost: a claim that is too small.
    claimed = PRVAccountant()
    claimed.history = [(4.0, charge.sample_rate, 4 * charge.steps)]
    assert 0 < bound.epsilon < budget.compute_spent()
    assert not is_exceeded or bound.epsilon > claimed.get_epsilon(DELTA)


def test_step_with_a_closure_is_charged_and_noised_as_lightning_takes_it(open_budget: Any) -> None:
    """Lightning takes an iterator that it does not use, and gives the backward pass to ``optimizer.step``."""
    budget = open_budget(noise_multiplier=1.5)
    net, optimizer, loader = build_loop()
    iter(loader)
    assert not budget.account.read().entries
    before = net.weight.detach().clone()

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        return loss

    steps = 0
    for inputs, targets in loader:
        optimizer.step(lambda inputs=inputs, targets=targets: train(inputs, targets))
        steps += 1
    (entry,) = budget.account.read().entries
    assert entry.charge.steps == steps == 5
    assert optimizer.counter.left == 0
    assert not torch.equal(net.weight, before)
    with pytest.raises(ConfigError, match="a step beyond those of the epoch"):
        optimizer.step(lambda: train(inputs, targets))


def join_minibatches(net: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> None:
    inputs, targets = map(torch.cat, zip(*loader, strict=True))
    nn.functional.mse_loss(net(inputs), targets).backward()
    optimizer.step()


def accumulate(net: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> None:
    for number, (inputs, targets) in enumerate(loader, 1):
        nn.functional.mse_loss(net(inputs), targets).backward()
        if number % 4 == 0:
            optimizer.step()


def differentiate_twice(net: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> None:
    for inputs, targets in loader:
        nn.functional.mse_loss(net(inputs), targets).backward()
        net(inputs).sum().backward()
        optimizer.step()


def step_twice(net: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> None:
    for inputs, targets in loader:
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()


def repeat_records(net: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> None:
    for inputs, targets in loader:
        nn.functional.mse_loss(net(inputs.repeat(2, 1)), targets.repeat(2, 1)).backward()
        optimizer.step()


def use_another_loader(net: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> None:
    for inputs, targets in DataLoader(loader.dataset, batch_size=8):
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()


def change_the_loader(net: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> None:
    loader.batch_sampler.sample_rate = 0.9  # type: ignore[attr-defined]
    train_epoch(net, optimizer, loader)


def cycle(net: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> None:
    for inputs, targets in islice(itertools.cycle(loader), 12):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()


def use_accelerate(net: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> None:
    from accelerate import Accelerator

    train_epoch(net, *Accelerator(cpu=True).prepare(optimizer, loader))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (join_minibatches, "join no minibatches"),
        (accumulate, "4 backward passes in one step"),
        (differentiate_twice, "2 backward passes in one step"),
        (step_twice, "wait for one have none"),
        (repeat_records, "join no minibatches"),
        (use_another_loader, "a step beyond those of the epoch"),
        (change_the_loader, "at a sampling rate of 0.9 now"),
        (cycle, "a step beyond those of the epoch"),
        (use_accelerate, "a step beyond those of the epoch"),
    ],
)
def test_step_of_anything_but_one_minibatch_of_the_loader_is_refused(loop: Any, message: str, open_budget: Any) -> None:
    budget = open_budget(noise_multiplier=1.0)
    private = build_loop()
    before = [parameter.detach().clone() for parameter in private[0].parameters()]
    with pytest.raises(ConfigError, match=message):
        loop(*private)
    charged = sum(entry.charge.steps for entry in budget.account.read().entries)
    assert private[1].counter.left >= 0
    if charged == 0:
        assert all(map(torch.equal, before, private[0].parameters()))


def test_loop_that_reads_ahead_skips_steps_or_ends_early_is_charged_whole_epochs(open_budget: Any) -> None:
    budget = open_budget(noise_multiplier=1.0)
    net, optimizer, loader = build_loop()
    ahead = iter(loader)
    waiting = [next(ahead), next(ahead)]
    for _ in range(3):
        inputs, targets = waiting.pop(0)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
        waiting.append(next(ahead))
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader):
            if number == 3:
                break
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs), targets).backward()
            if number != 1:
                optimizer.step()
    assert [entry.charge.steps for entry in budget.account.read().entries] == [5, 5, 5]
