"""Standardisation inside a network: of inputs by statistics of all sites, of the target by those of each site."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.mask import Mask
from ..core.params import Layout

STATISTICS: Final = "statistics"
"""Kind and content of the exchange in which a network receives the statistics of its inputs."""
OUTER_EDGE = 3.0
"""Standard deviations at which the outer bins of an encoded number end."""
ROWS = 5
"""Rows of statistics: count, mean and its rest, standard deviation and its rest."""


class StatisticsLayer(nn.Module, ABC):
    """First layer of a network with statistics of the inputs at all sites, which are exchanged before round 1.

    Args:
        rows: number of statistics of an input.
        columns: number of inputs.

    Attributes:
        statistics: ``(rows, columns)``; zero until they are set. The first row has numbers of values.
    """

    statistics: Tensor

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.register_buffer("statistics", torch.zeros(rows, columns))

    @abstractmethod
    def compute_statistics(self, inputs: Tensor) -> Tensor:
        """Return the statistics ``(rows, columns)`` of some inputs ``(n, columns)``."""

    def describe_site(self, inputs: Tensor) -> Tensor:
        """Return the statistics of a site's own inputs, which stay there."""
        return self.compute_statistics(inputs)

    @abstractmethod
    def pool_statistics(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the statistics of all values together, from those of their parts."""

    @abstractmethod
    def is_valid(self, statistics: Tensor, examples: int) -> bool:
        """Return whether statistics can be those of some of ``examples`` examples."""


class InputScaler(StatisticsLayer):
    """Standardise the inputs of a network; a missing input, NaN, becomes 0, the center.

    ``statistics`` ``(5, d)`` has for each input the number of values, their mean and their standard deviation (division
    by the number). A float32 and the rest that it rounds off hold 48 bits of the latter two, so that the pooled
    statistics are those of one table of all sites. Until the statistics are set, inputs pass unchanged.

    Args:
        scaled: which of the ``d`` inputs are standardised; the others, such as categories, pass unchanged.
        clip: largest absolute value of a standardised input; None: no bound.
    """

    def __init__(self, scaled: Sequence[bool], clip: float | None = None):
        super().__init__(ROWS, len(scaled))
        self.scaled, self.clip = tuple(scaled), clip

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the standardised inputs ``(B, d)``; an input that does not vary is centered only."""
        count, mean, mean_rest, deviation, deviation_rest = self.statistics
        spread = torch.where(deviation > 0, deviation + deviation_rest, 1.0)
        # The rest is subtracted second: added to the mean first, float32 would round it off again.
        scaled = (inputs - mean - mean_rest) / spread
        if self.clip is not None:
            # An input that never varied has no unit, but a value far from its center is an outlier all the same.
            is_bounded = count.any() & torch.tensor(self.scaled, device=count.device)
            scaled = torch.where(is_bounded, scaled.clamp(-self.clip, self.clip), scaled)
        return torch.where(torch.isnan(scaled), 0.0, scaled)

    def compute_statistics(self, inputs: Tensor) -> Tensor:
        """Return the statistics ``(5, d)`` of some inputs ``(n, d)``; zeros where nothing is present or scaled."""
        values = inputs.double()
        present = ~torch.isnan(values) & torch.tensor(self.scaled)
        count = present.sum(0).double()
        divisor = count.clamp_min(1)
        # Two passes: the difference of the mean square and the squared mean would lose most digits of a date.
        mean = torch.where(present, values, 0.0).sum(0) / divisor
        squares = torch.where(present, values - mean, 0.0).square().sum(0)
        return join_rows(count, [mean, (squares / divisor).sqrt()])

    def pool_statistics(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the statistics ``(5, d)`` of all values together, from those ``(5, d)`` of their parts.

        Chan, Golub and LeVeque 1979, Updating formulae and a pairwise algorithm for computing sample variances,
        equation 1.5 in the form for several parts.
        """
        counts, values = zip(*map(split_rows, parts), strict=True)
        means, deviations = zip(*values, strict=True)
        count, n = torch.stack(counts), torch.stack(counts).sum(0).clamp_min(1)
        mean = (count * torch.stack(means)).sum(0) / n
        squares = (count * (torch.stack(deviations).square() + (torch.stack(means) - mean).square())).sum(0)
        return join_rows(count.sum(0), [mean, (squares / n).sqrt()])

    def is_valid(self, statistics: Tensor, examples: int) -> bool:
        """Return whether statistics ``(5, d)`` can be those of some of ``examples`` examples."""
        count, (_, deviation) = split_rows(statistics)
        is_count = (count == count.round()) & (count >= 0) & (count <= examples)
        # One value, or none, has no deviation.
        is_deviation = (deviation >= 0) & ((count > 1) | (deviation == 0))
        return bool((is_count & is_deviation & ((count > 0) | (statistics[1:] == 0).all(0))).all())


class QuantileEncoder(nn.Module):
    """Encode each standardised number by its position within bins, piecewise linearly; other inputs pass unchanged.

    Gorishniy et al. 2022, "On embeddings for numerical features in tabular deep learning", section 3.2. The bins end at
    quantiles of the normal distribution, so that mean and standard deviation are all that sites have to agree on.

    Args:
        numbers: which of the ``d`` inputs are encoded.
        bins: number of bins; each is an output between 0 and 1.
    """

    def __init__(self, numbers: Sequence[bool], bins: int):
        super().__init__()
        self.positions = [position for position, is_number in enumerate(numbers) if is_number]
        self.others = [position for position, is_number in enumerate(numbers) if not is_number]
        self.edges = [NormalDist().inv_cdf(k / bins) for k in range(1, bins)]
        self.edges = [-OUTER_EDGE, *self.edges, OUTER_EDGE]
        self.outputs = len(self.positions) * bins + len(self.others)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the encoded inputs ``(B, outputs)``."""
        edges = inputs.new_tensor(self.edges)
        low, width = edges[:-1], edges.diff()
        encoded = ((inputs[:, self.positions, None] - low) / width).clamp(0, 1).flatten(1)
        return torch.cat([encoded, inputs[:, self.others]], dim=1)


class TargetScaler(nn.Module):
    """Scale and shift a network's output to the mean and standard deviation of a site's own targets.

    Sites whose targets differ, such as the ages at two scanners, then share a network of the differences within sites.
    ``statistics`` ``(2,)`` has center and spread; it stays at the site, in no message.
    """

    site_tensors = ("statistics",)
    statistics: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("statistics", torch.tensor([0.0, 1.0]))

    def forward(self, outputs: Tensor) -> Tensor:
        """Return ``center + spread * outputs``."""
        center, spread = self.statistics
        scaled: Tensor = center + spread * outputs
        return scaled

    def measure_targets(self, targets: Tensor) -> Tensor:
        """Return center and spread ``(2,)`` of some targets ``(n, 1)``; a spread of 1 where they do not vary."""
        if not len(targets):
            return torch.tensor([0.0, 1.0])
        values = targets.double()
        deviation = values.std(correction=0)
        return torch.stack([values.mean(), deviation if deviation > 0 else torch.ones_like(deviation)]).float()


def find_site_tensors(layout: Layout) -> list[str]:
    """Return the names of the tensors of a network that describe a site's own data."""
    modules = layout.skeleton.named_modules() if layout.skeleton is not None else ()
    return [
        f"{name}.{tensor}".lstrip(".") for name, module in modules for tensor in getattr(module, "site_tensors", ())
    ]


def build_statistics_mask(layout: Layout) -> Mask:
    """Return the entries of a layout that are statistics of inputs; empty for a network without a scaler.

    Raises:
        ConfigError: the job does not exchange the statistics of its network.
    """
    names = set(_find_statistics_layers(layout))
    if missing := names - {spec.name for spec in layout.tensors}:
        raise ConfigError(
            f"the network scales its inputs by statistics of all sites, but this method does not exchange "
            f"{min(missing)}: it belongs to a frozen base model or stays at the sites. Choose another task.scaling, "
            "task.model or method"
        )
    return Mask.from_tensors(layout, lambda spec: spec.name in names)


def select_statistics(vector: Tensor, layout: Layout) -> list[tuple[StatisticsLayer, Tensor]]:
    """Return each layer with statistics, without values, and its statistics in a vector ``(P,)``, as a view."""
    tensors = layout.unflatten(vector)
    return [(layer, tensors[name]) for name, layer in _find_statistics_layers(layout).items()]


def drop_rests(vector: Tensor, layout: Layout) -> Tensor:
    """Return a vector ``(P,)`` whose statistics have no rests: they are off by 2^-24 of themselves, at most."""
    shortened = vector.clone()
    for _, statistics in select_statistics(shortened, layout):
        statistics[2::2] = 0
    return shortened


def _find_statistics_layers(layout: Layout) -> dict[str, StatisticsLayer]:
    """Return the layers with statistics, by the name of the tensor of their statistics."""
    modules = layout.skeleton.named_modules() if layout.skeleton is not None else ()
    return {f"{name}.statistics".lstrip("."): m for name, m in modules if isinstance(m, StatisticsLayer)}


def join_rows(count: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Return rows of float32 from a count and values ``(d,)`` in float64, each as a float32 and its rest."""
    rows = [count.float()]
    for value in values:
        rounded = value.float()
        rows += [rounded, (value - rounded.double()).float()]
    return torch.stack(rows)


def split_rows(statistics: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the count and the values ``(d,)`` in float64 of :func:`join_rows`."""
    count, *rows = statistics.double()
    return count, [value + rest for value, rest in zip(rows[::2], rows[1::2], strict=True)]
