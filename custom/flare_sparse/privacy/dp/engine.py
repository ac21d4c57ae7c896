"""DP-SGD in a training loop of the user's own, with the engine of Opacus: single records, noise of the site's secret.

An epoch is charged to the site's ledger before its first minibatch is read, and a step that no epoch was charged for is
refused. So a script that is killed has spent what it began, and none has taken a step for free. A step is charged for
one minibatch of the loader, whose records each enter its sum once: a step of any other gradients is refused.
"""

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import GradSampleHooks
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...core.errors import ConfigError
from .account import Budget, build_entry
from .accounting import Charge, SamplingPlan
from .scripts import ScriptBudget
from .secret import derive_key, draw_normal


@dataclass
class StepCounter:
    """Charges epochs and counts their steps; shared by the loader and the optimiser of a loop.

    Attributes:
        budget: the job's budget at this site.
        charge: what one epoch costs.
        limit: the job's own budget; None: the job gives the noise instead.
        left: steps that are charged and not taken yet.
        read: records of each minibatch that was read and has had no step; a loop may read ahead.
        question: random name of the last epoch, which keys its noise: an epoch that is repeated, as after a crash, has
            new noise and is charged again.
    """

    budget: ScriptBudget
    charge: Charge
    limit: Budget | None
    left: int = field(default=0, init=False)
    question: str = field(default="", init=False)
    read: list[int] = field(default_factory=list, init=False)

    def charge_epoch(self) -> None:
        """Charge an epoch, on disk when the call returns.

        Raises:
            BudgetSpent: it would exceed a budget.
        """
        self.question = secrets.token_hex(32)
        run, job = self.budget.run, self.budget.job
        # The loop does not know the number of the round.
        self.budget.account.charge(build_entry(run, job, 0, self.question, "", self.charge), self.limit)
        self.left, self.read = self.charge.steps, []

    def match_minibatch(self, records: int) -> None:
        """Find the minibatch of a step, which no later step may use.

        Args:
            records: number of records whose gradients were computed.

        Raises:
            ConfigError: no epoch was charged for the step, or no minibatch with so many records waits for one.
        """
        if not self.left:
            raise ConfigError(
                "make_private: a step beyond those of the epoch; take one step for each minibatch of the returned "
                "loader, and loop over the loader again for each epoch"
            )
        if records not in self.read:
            waiting = ", ".join(map(str, self.read)) or "none"
            raise ConfigError(
                f"make_private: a step with the gradients of {records} records, but the minibatches of the returned "
                f"loader that wait for one have {waiting}; compute the loss of one minibatch of the loader, once, take "
                "one step for it, and join no minibatches"
            )
        # Drop also the minibatches before it, which had no step and get none: reading them was charged.
        del self.read[: self.read.index(records) + 1]

    def count_step(self) -> int:
        """Return the number of the next step within its epoch."""
        self.left -= 1
        return self.charge.steps - self.left

    def draw_noise(self, clipped_sum: Tensor, step: int, place: int) -> Tensor:
        """Return standard normal noise of the shape of a sum; it is keyed by the sum, as in ``mechanism.py``."""
        digest = hashlib.sha256(clipped_sum.detach().cpu().contiguous().view(torch.uint8).numpy().data).digest()
        key = derive_key(self.budget.account.secret, "loop", self.question, step, place, digest)
        return draw_normal(key, clipped_sum.numel()).reshape(clipped_sum.shape).to(clipped_sum)


class ChargedLoader(DPDataLoader):  # type: ignore[misc]
    """Opacus' loader of Poisson samples, whose every pass is charged before its first minibatch."""

    counter: StepCounter

    def __iter__(self) -> Iterator[Any]:
        # A generator: Lightning takes an iterator only to see that there is one, which must cost nothing.
        sampler = self.batch_sampler
        if (len(sampler), sampler.sample_rate) != (self.counter.charge.steps, self.counter.charge.sample_rate):
            raise ConfigError(
                f"make_private: the loader has {len(sampler)} minibatches at a sampling rate of "
                f"{sampler.sample_rate:g} now, and {self.counter.charge.steps} at {self.counter.charge.sample_rate:g} "
                "were planned; call make_private once, with the loader as it is trained with"
            )
        self.counter.charge_epoch()
        for minibatch in super().__iter__():
            self.counter.read.append(_count_records(minibatch))
            yield minibatch


class SecretNoiseOptimizer(DPOptimizer):  # type: ignore[misc]
    """Opacus' optimiser; it clips, and the noise comes from the site's secret in place of torch's generator.

    Its ``noise_multiplier`` is 0, so that Opacus adds no noise of its own.
    """

    counter: StepCounter

    def clip_and_accumulate(self) -> None:
        """Clip the gradients of single records; one that is not finite counts as zero where it is not.

        Raises:
            ConfigError: they are not those of one backward pass over one minibatch.
        """
        for parameter in self.params:
            rows = parameter.grad_sample
            passes = rows if isinstance(rows, list) else [rows]
            if len(passes) > 1:
                raise ConfigError(
                    f"make_private: the gradients of {len(passes)} backward passes in one step; a record would move "
                    "the sum by more than its noise hides, and a step of several minibatches costs more than is "
                    "charged. Add the losses before one backward pass, take a step for each minibatch "
                    "(accumulate_grad_batches and gradient_accumulation_steps: 1), and give the loader a larger "
                    "batch_size"
                )
            passes[0].nan_to_num_(0.0, 0.0, 0.0)
        self.counter.match_minibatch(len(passes[0]))
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        """Set the gradients to the clipped sums with noise."""
        step = self.counter.count_step()
        super().add_noise()
        std = self.counter.charge.noise_multiplier * self.max_grad_norm
        for place, parameter in enumerate(self.params):
            parameter.grad.add_(self.counter.draw_noise(parameter.grad, step, place), alpha=std)


def _count_records(minibatch: Any) -> int:
    """Return the number of records of a minibatch: the length of its first tensor, as Opacus counts them."""
    if isinstance(minibatch, Tensor):
        return len(minibatch)
    parts = minibatch.values() if isinstance(minibatch, Mapping) else minibatch
    return next((_count_records(part) for part in parts if isinstance(part, Tensor | Mapping | list | tuple)), 0)


def make_private(
    budget: ScriptBudget, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], epochs: int
) -> tuple[SecretNoiseOptimizer, ChargedLoader]:
    """Attach Opacus' hooks to a network, and return the optimiser and the loader to train it with.

    Args:
        budget: the job's budget at this site.
        model: the network; it stays the object that it is, with the names of its ``state_dict()``.
        optimizer: the user's optimiser of its parameters.
        loader: the user's loader; its length decides the sampling rate, as in Opacus.
        epochs: passes over the loader in one training of the job, from which the noise is computed.

    Raises:
        ConfigError: no noise keeps the budget.
    """
    batches = len(loader)
    generator = torch.Generator()
    # The sample never leaves the site, so a generator whose state could be computed from its output serves here.
    generator.manual_seed(secrets.randbits(63))
    private_loader = ChargedLoader.from_data_loader(loader, generator=generator)
    # Otherwise an empty first minibatch is a list that no script expects.
    private_loader.collate_fn.first_batch = loader.collate_fn([loader.dataset[0]])
    # One record of as many as there are minibatches: the sampling rate of Opacus.
    plan = SamplingPlan(batches, 1, epochs * len(private_loader), budget.trainings)
    noise = budget.config.choose_noise(plan)
    charge, limit = Charge(noise, plan.sample_rate, len(private_loader)), budget.config.build_budget(plan, noise)
    # Hooks only: a wrapper would rename the tensors that the script exchanges.
    GradSampleHooks(model)
    private = SecretNoiseOptimizer(
        optimizer,
        noise_multiplier=0.0,
        max_grad_norm=budget.config.clip,
        expected_batch_size=max(1, int(len(loader.dataset) * plan.sample_rate)),  # type: ignore[arg-type]
    )
    private.counter = private_loader.counter = StepCounter(budget, charge, limit)
    return private, private_loader
