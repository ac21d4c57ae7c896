"""One site's mechanism: which subjects take part in a step, the noise, and the charge of a training.

Every random number is keyed by the site's secret and by all that decides an answer. A question asked again has the same
answer, and one that differs in anything has independent noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...core.mask import Mask
from .account import Budget, Entry, PrivacyAccount, build_entry
from .accounting import Charge, SamplingPlan
from .config import PrivacyConfig
from .secret import derive_key, draw_normal, draw_uniform

LEAST_NOISE = 0.5
"""Noise multiplier from which the noise alone hides single subjects; below, a step tells nearly for certain of one.

A job may name a budget of any size; with nearly no noise it must not turn off what else protects a subject.
"""


@dataclass(frozen=True)
class SiteMechanism:
    """The mechanism of one site in one run.

    Attributes:
        config: settings of the job.
        plan: sampling of the job's ordinary trainings, from which the noise is computed.
        account: the site's secret and ledger.
        run, job: id of the run and name of the job.
    """

    config: PrivacyConfig
    plan: SamplingPlan
    account: PrivacyAccount
    run: str
    job: str

    @cached_property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise as a multiple of the clipping norm.

        Raises:
            ConfigError: no noise keeps the budget.
        """
        return self.config.choose_noise(self.plan)

    @property
    def budget(self) -> Budget | None:
        """Budget of the run; None if the job gives the noise instead."""
        return self.config.build_budget(self.plan, self.noise_multiplier)

    def compute_spent(self) -> float:
        """Return the epsilon that the run has charged this site's subjects so far."""
        return self.account.compute_spent(self.run, self.config.delta)

    def open(
        self, start: Tensor, trainable: Mask, plan: SamplingPlan, t: int, labels: Sequence[object]
    ) -> PrivateQuery:
        """Return the mechanism of one training, if the budgets allow it.

        Args:
            start: ``(P,)`` initial weights.
            trainable: entries that train.
            plan: sampling of this training.
            t: round.
            labels: all else that decides the answer, such as settings and identifiers of the examples.

        Raises:
            BudgetSpent: the training would exceed a budget.
        """
        digest = hashlib.sha256(repr((self.run, t, plan, self.config, *labels)).encode())
        for tensor in (start, trainable.bits):
            digest.update(_get_bytes(tensor))
        charge = plan.build_charge(self.noise_multiplier)
        question = PrivateQuery(self, plan, charge, t, digest.hexdigest())
        self.account.check(question.build_entry(""), self.budget)
        return question


@dataclass(frozen=True)
class PrivateQuery:
    """The mechanism of one training.

    Attributes:
        mechanism: the site's mechanism.
        plan: sampling of this training.
        charge: what its answer costs.
        round: round of the request.
        digest: digest of all that decides the answer, except for the examples' values.
    """

    mechanism: SiteMechanism
    plan: SamplingPlan
    charge: Charge
    round: int
    digest: str

    def sample_subjects(self, step: int) -> list[int]:
        """Return the subjects of a step, in order; each takes part with the plan's probability, so there may be none.

        The sample is secret, as the noise is: the accounting assumes that only the site knows it. Another answer to the
        same question, as after a change of the data, has the same sample; the account charges it so.
        """
        key = derive_key(self.mechanism.account.secret, "sample", self.digest, step)
        chosen = draw_uniform(key, self.plan.subjects) < self.plan.sample_rate
        return [int(index) for index in chosen.nonzero().flatten()]

    def privatize(self, clipped_sum: Tensor, step: int) -> Tensor:
        """Return the mean gradient of a step: clipped sum and noise, divided by the expected number of subjects.

        Args:
            clipped_sum: float64 ``(n,)`` sum of clipped gradients.
            step: number of the step.

        Returns:
            float64 ``(n,)``.
        """
        # Keyed by the sum, too: equal noise on two sums, as of a site whose examples changed, would reveal their
        # difference. (As the nonce of deterministic signatures, RFC 6979.)
        total = clipped_sum.cpu().contiguous()
        digest = hashlib.sha256(_get_bytes(total)).digest()
        key = derive_key(self.mechanism.account.secret, "noise", self.digest, step, digest)
        std = self.charge.noise_multiplier * self.mechanism.config.clip
        noisy = total.add(draw_normal(key, total.numel()), alpha=std) / self.plan.lot_size
        return noisy.to(clipped_sum.device)

    def record(self, values: Tensor) -> None:
        """Charge the subjects for an answer, once; on disk when the call returns.

        Raises:
            BudgetSpent: the charge would exceed a budget, or cannot be written.
        """
        answer = hashlib.sha256(_get_bytes(values)).hexdigest()
        self.mechanism.account.charge(self.build_entry(answer), self.mechanism.budget)

    def build_entry(self, answer: str) -> Entry:
        """Return the ledger's entry of an answer, given its digest."""
        return build_entry(self.mechanism.run, self.mechanism.job, self.round, self.digest, answer, self.charge)


def clip_rows(rows: Tensor, clip: float) -> Tensor:
    """Return the sum, float64 ``(n,)``, of rows ``(k, n)`` that are shortened to an L2 norm.

    A row that is not finite counts as zero: one subject must not decide more than ``clip`` allows.
    """
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    factors = torch.where(torch.isfinite(norms), (clip / norms.clamp_min(clip)), 0.0)
    # In float64, so that rounding does not add to the norm; nan times zero is nan.
    return (torch.nan_to_num(rows, 0.0, 0.0, 0.0).double() * factors[:, None]).sum(0)


def _get_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is on a CPU."""
    return tensor.detach().cpu().contiguous().numpy().data
