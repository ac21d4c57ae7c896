"""ComBat as the first layer of a network: scanner effects are removed by statistics of all sites and of the own site.

Johnson, Li and Rabinovic 2007, "Adjusting batch effects in microarray expression data using empirical Bayes methods",
Biostatistics 8:118; for imaging Fortin et al. 2017, NeuroImage 161:149. Distributed as by Chen et al. 2022, "Privacy-
preserving harmonization via distributed ComBat", NeuroImage 248:118822, but in one exchange: the sums of squares and
products about the means of each site add up to those of one table of all sites. docs/algorithms.md, section 1.16.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .scaling import StatisticsLayer, join_rows, split_rows

TOLERANCE = 1e-4
"""Relative change of the empirical Bayes estimates at which their iteration ends, as in the authors' programs."""
MOST_ITERATIONS = 1000


@dataclass(frozen=True)
class Moments:
    """Statistics of the rows of one site, or of all sites.

    Attributes:
        count: ``(d,)`` number of rows.
        mean: ``(d,)``.
        squares: ``(d,)`` sums of squares about the site's own mean; of all sites: their sum.
        products: ``(p, d)`` sums of products with each covariate about the site's own means; of all sites: their sum.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor
    products: Tensor


class Harmonizer(StatisticsLayer):
    """Remove the shift and the scale that each site has in each input, and standardise the inputs.

    An input ``y`` becomes ``(z - gamma) / delta + x beta / sigma``, which is ComBat's result minus the mean ``alpha``,
    divided by ``sigma``; ``z = (y - alpha - x beta) / sigma``. Covariates ``x`` are inputs whose effects on the others
    are kept, such as sex; they are standardised, and so is an input that the covariates determine. An input that is
    constant at each site loses the mean of the own site; inputs that are not harmonised pass unchanged.

    ``statistics`` ``(5 + 2 p, d)`` are those of all sites, ``site`` those of the own site; the latter stay there. Until
    both are set, inputs pass unchanged.

    Args:
        harmonized: which of the ``d`` inputs are harmonised.
        covariates: positions of the ``p`` covariates.
        clip: largest absolute value of a harmonised input; None: no bound.
    """

    site_tensors = ("site",)
    site: Tensor

    def __init__(self, harmonized: Sequence[bool], covariates: Sequence[int], clip: float | None = None):
        super().__init__(5 + 2 * len(covariates), len(harmonized))
        self.harmonized, self.covariates, self.clip = tuple(harmonized), tuple(covariates), clip
        self.register_buffer("site", torch.zeros_like(self.statistics))
        self._fit: tuple[tuple[list[Any], list[Any]], list[Any]] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the harmonised inputs ``(B, d)``."""
        if not bool(self.statistics.any()) or not bool(self.site.any()):
            return inputs
        return self.harmonize(inputs.double()).float()

    def harmonize(self, inputs: Tensor) -> Tensor:
        """Return the harmonised inputs ``(B, d)`` in float64."""
        pooled, covariates = self._unpack(self.statistics), list(self.covariates)
        fit = self._get_fit()
        beta, (sigma, gamma, delta) = fit[: len(covariates)], fit[len(covariates) :]
        # Each chosen input is one of three: harmonised, constant at each site, or determined by the covariates.
        chosen = torch.tensor(self.harmonized, device=sigma.device)
        is_harmonized = self._find_harmonized(sigma)
        is_constant = chosen & (pooled.squares == 0)
        is_standardized = chosen & ~is_harmonized & ~is_constant
        is_standardized[covariates] = True
        divisor = torch.where(is_harmonized, sigma, 1.0)
        effects = (inputs[:, covariates] - pooled.mean[covariates]) @ beta
        z = (inputs - pooled.mean - effects) / divisor
        harmonized = (z - gamma) / delta + effects / divisor
        # Such as a parameter of the scanner: all that differs between sites is removed.
        harmonized = torch.where(is_constant, inputs - self._unpack(self.site).mean, harmonized)
        if self.clip is not None:
            harmonized = harmonized.clamp(-self.clip, self.clip)
        result = torch.where(is_harmonized | is_constant, harmonized, inputs)
        scale = (pooled.squares / pooled.count.clamp_min(1)).sqrt()
        standardized = (inputs - pooled.mean) / torch.where(scale > 0, scale, 1.0)
        return torch.where(is_standardized, standardized, result)

    def _get_fit(self) -> Tensor:
        """Return ``(p + 3, d)``: effects of the covariates, deviations within sites, shift and scale of the own site.

        They are computed again only where the statistics have changed since the last time.
        """
        # Numbers, not tensors: a tensor of a pass within torch.func or in inference mode is of no use in another pass,
        # and a buffer that is a view of a vector has the version and the address of the vector.
        statistics = self.statistics.tolist(), self.site.tolist()
        if self._fit is None or self._fit[0] != statistics:
            pooled, own = self._unpack(self.statistics), self._unpack(self.site)
            beta, sigma = self._fit_covariates(pooled)
            is_harmonized = self._find_harmonized(sigma)
            divisor = torch.where(is_harmonized, sigma, 1.0)
            gamma, delta = self._estimate_site_effects(own, pooled, beta, divisor, is_harmonized)
            self._fit = statistics, torch.vstack([beta, sigma, gamma, delta]).tolist()
        return torch.tensor(self._fit[1], dtype=torch.float64, device=self.statistics.device)

    def _find_harmonized(self, sigma: Tensor) -> Tensor:
        """Return which inputs ``(d,)`` are harmonised: those that are to be, and vary within sites."""
        return torch.tensor(self.harmonized, device=sigma.device) & (sigma > 0)

    def _fit_covariates(self, pooled: Moments) -> tuple[Tensor, Tensor]:
        """Return the effects of the covariates ``(p, d)`` and the standard deviations ``(d,)`` within sites."""
        # Least squares with an intercept per site: the normal equations of rows centred at their site's means.
        gram = pooled.products[:, list(self.covariates)]
        beta = torch.linalg.pinv(gram, hermitian=True) @ pooled.products
        squares = (pooled.squares - (beta * pooled.products).sum(0)).clamp_min(0)
        # A column that does not vary within any site leaves rounding errors.
        squares = torch.where(squares > 1e-12 * pooled.squares, squares, 0.0)
        return beta, (squares / pooled.count.clamp_min(1)).sqrt()

    def _estimate_site_effects(
        self, own: Moments, pooled: Moments, beta: Tensor, sigma: Tensor, is_harmonized: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return shift and scale ``(d,)`` of the own site, by empirical Bayes over the harmonised inputs."""
        covariates = list(self.covariates)
        shift, scale = torch.zeros_like(sigma), torch.ones_like(sigma)
        count, features = own.count, int(is_harmonized.sum())
        # One row has no deviation, and one input no distribution of shifts.
        if float(count.max()) < 2 or features < 2:
            return shift, scale
        gamma = (own.mean - pooled.mean - (own.mean[covariates] - pooled.mean[covariates]) @ beta) / sigma
        gram = own.products[:, covariates]
        squares = own.squares - 2 * (beta * own.products).sum(0) + (beta * (gram @ beta)).sum(0)
        squares = squares.clamp_min(0) / sigma.square()
        chosen = is_harmonized
        gamma_star, square_star = _shrink(gamma[chosen], squares[chosen], float(count.max()))
        # Inputs that are constant at this site have a shift but no scale to remove.
        shift[chosen], scale[chosen] = gamma_star, torch.where(square_star > 0, square_star.sqrt(), 1.0)
        return shift, scale

    def compute_statistics(self, inputs: Tensor) -> Tensor:
        """Return the statistics ``(5 + 2 p, d)`` of some inputs ``(n, d)``."""
        # Nothing is said of the other inputs.
        used = torch.tensor(self.harmonized)
        used[list(self.covariates)] = True
        values = torch.where(used, inputs.double(), 0.0)
        count = torch.full((values.shape[1],), float(len(values)), dtype=torch.float64)
        mean = values.mean(0) if len(values) else torch.zeros(values.shape[1], dtype=torch.float64)
        centered = values - mean
        products = centered[:, list(self.covariates)].T @ centered
        return self._pack(Moments(count, mean, centered.square().sum(0), products))

    def pool_statistics(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the statistics of all sites, with squares and products about the mean of each site."""
        sites = [self._unpack(part) for part in parts]
        sums = torch.stack([torch.vstack([s.count, s.count * s.mean, s.squares, s.products]) for s in sites]).sum(0)
        return self._pack(Moments(sums[0], sums[1] / sums[0].clamp_min(1), sums[2], sums[3:]))

    def is_valid(self, statistics: Tensor, examples: int) -> bool:
        """Return whether statistics can be those of ``examples`` examples."""
        moments = self._unpack(statistics)
        is_count = (moments.count == examples).all() | (statistics == 0).all()
        is_square = ((moments.squares >= 0) & ((moments.count > 1) | (moments.squares == 0))).all()
        # Apply the inequality of Cauchy and Schwarz, with room for the rounding of both sides.
        largest = (moments.squares[list(self.covariates), None] * moments.squares[None, :]).sqrt() * (1 + 1e-6)
        is_product = (moments.products.abs() <= largest + 1e-30).all()
        return bool(is_count & is_square & is_product)

    def _pack(self, moments: Moments) -> Tensor:
        return join_rows(moments.count, [moments.mean, moments.squares, *moments.products])

    def _unpack(self, statistics: Tensor) -> Moments:
        count, (mean, squares, *products) = split_rows(statistics)
        shape = (0, statistics.shape[1])
        return Moments(count, mean, squares, torch.stack(products) if products else mean.new_zeros(shape))


def _shrink(gamma: Tensor, squares: Tensor, count: float) -> tuple[Tensor, Tensor]:
    """Return the empirical Bayes estimates of a site's shifts and squared scales ``(f,)`` (Johnson et al., 3.2).

    Args:
        gamma: ``(f,)`` mean of the standardised values of each feature.
        squares: ``(f,)`` their sums of squares about this mean.
        count: number of rows.
    """
    delta = squares / (count - 1)
    prior_mean, prior_variance = gamma.mean(), gamma.var()
    mean, variance = delta.mean(), delta.var()

    def shrink_shifts(delta: Tensor) -> Tensor:
        precision = count * prior_variance + delta
        # Equal shifts of an input that is constant at this site: the weights of both means are 0.
        return torch.where(precision > 0, (count * prior_variance * gamma + delta * prior_mean) / precision, prior_mean)

    # All squared scales are equal: their prior is a point, and only the shifts shrink.
    if float(variance) == 0:
        return shrink_shifts(delta), delta
    shape, rate = (2 * variance + mean.square()) / variance, (mean * variance + mean**3) / variance
    old_gamma, old_delta = gamma, delta
    for _ in range(MOST_ITERATIONS):
        new_gamma = shrink_shifts(old_delta)
        deviations = squares + count * (gamma - new_gamma).square()
        new_delta = (0.5 * deviations + rate) / (count / 2 + shape - 1)
        # The clamp avoids 0 / 0 = NaN, which would never pass the tolerance.
        changes = (
            (new_gamma - old_gamma).abs() / old_gamma.abs().clamp_min(1e-12),
            (new_delta - old_delta).abs() / old_delta,
        )
        old_gamma, old_delta = new_gamma, new_delta
        if max(float(change.max()) for change in changes) <= TOLERANCE:
            break
    return old_gamma, old_delta
