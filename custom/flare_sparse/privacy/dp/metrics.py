"""Metrics of a site's test and validation subjects, released with noise and charged to these subjects."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .account import Budget, PrivacyAccount, build_entry
from .accounting import Charge, SamplingPlan, solve_noise_multiplier
from .config import PrivacyConfig
from .secret import derive_key, draw_normal


@dataclass(frozen=True)
class MetricRelease:
    """The release of the metrics of one site in one run.

    Each metric of each subject is clipped to its bound. The sum over the subjects has Gaussian noise and is divided by
    their number, which leaves exactly. Training, test and validation subjects of a job are different people, so each
    part has the whole budget of the job (parallel composition, McSherry 2009); over all jobs everything is added.

    Attributes:
        config: settings of the job, with bounds of the metrics.
        releases: evaluated models of the job.
        account: the site's secret and ledger.
        run, job: id of the run and name of the job.
    """

    config: PrivacyConfig
    releases: int
    account: PrivacyAccount
    run: str
    job: str

    @property
    def bounds(self) -> dict[str, float]:
        """Largest value of each metric of one subject, by name."""
        return dict(sorted((self.config.metric_bounds or {}).items()))

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise as a multiple of what one subject can change.

        Raises:
            ConfigError: no noise keeps the budget.
        """
        return self.config.choose_noise(lambda epsilon, delta: _solve(epsilon, delta, self.releases))

    def compute_spent(self) -> float:
        """Return the epsilon that the run has charged this site's subjects so far."""
        return self.account.compute_spent(self.run, self.config.delta)

    def release(self, part: str, weights: Tensor, subjects: Sequence[str], values: Tensor) -> dict[str, float]:
        """Return the noisy metrics of one part, which are charged when the call returns.

        The same model has the same metrics and is charged once.

        Args:
            part: ``test`` or ``validation``.
            weights: ``(P,)`` the evaluated model.
            subjects: names of the examples, which with the model decide the question.
            values: ``(n, k)`` metrics of each subject, in the order of :attr:`bounds`; undefined ones are NaN.

        Raises:
            BudgetSpent: the charge would exceed a budget.
        """
        bounds = torch.tensor(list(self.bounds.values()), dtype=torch.float64)
        # An undefined metric counts as the bound: as an error, or as the upper limit of a score.
        shares = (values.double() / bounds).nan_to_num(1.0, 1.0, 0.0).clamp(0, 1)
        question = hashlib.sha256(repr((self.run, part, self.bounds, tuple(subjects), len(values))).encode())
        question.update(weights.detach().cpu().contiguous().numpy().data)
        total = shares.sum(0)
        # Keyed by the sum, as the noise of a gradient is.
        digest = hashlib.sha256(total.numpy().data).digest()
        key = derive_key(self.account.secret, "metrics", question.hexdigest(), digest)
        sigma = self.noise_multiplier
        # One subject changes the k shares by a vector of at most this length.
        sensitivity = math.sqrt(len(bounds))
        noisy = (total + sigma * sensitivity * draw_normal(key, len(bounds))) / len(values) * bounds
        entry = build_entry(
            self.run, self.job, 0, question.hexdigest(), hashlib.sha256(noisy.numpy().data).hexdigest(),
            Charge(sigma, 1.0, 1), part,
        )  # fmt: skip
        budget = None if self.config.epsilon is None else Budget(self.config.epsilon, self.config.delta)
        self.account.charge(entry, budget)
        return dict(zip(self.bounds, noisy.tolist(), strict=True))


@cache
def _solve(epsilon: float, delta: float, releases: int) -> float:
    # Every subject takes part in every release.
    return solve_noise_multiplier(epsilon, delta, SamplingPlan(1, 1, 1, releases))
