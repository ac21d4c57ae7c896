"""What both ends of a sum of padded values compute alike: the ring of an update and the sites' weights."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from ...core.exchange import Content, Contribution, Patch
from ...core.mask import Mask
from ...core.params import Layout
from ...methods.aggregation.weighted import Weights
from ...privacy.secure_aggregation.limits import SumRules
from ...privacy.secure_aggregation.rings import Ring, RingFormat
from ...wire.quantized import find_exact_values


def build_ring(content: Content, mask: Mask, layout: Layout, rules: SumRules) -> RingFormat:
    """Return the format of the values of a mask.

    Scores and buffers take 64 bits: saliencies differ by orders of magnitude, and a running variance has no bound.
    """
    is_wide = np.ones(mask.count, dtype=bool) if content == "scores" else find_exact_values(mask, layout).numpy()
    return RingFormat(is_wide, Ring(32, rules.bound))


def compute_reference(content: Content, mask: Mask, model: Tensor) -> np.ndarray:
    """Return what is subtracted from the values of an update, float64 ``(mask.count,)``: for weights, the model.

    The change of a round is far smaller than the weights, so the same ring holds it more exactly.
    """
    return mask.take(model).double().numpy() if content == "weights" else np.zeros(mask.count)


def compute_shares(examples: Mapping[str, int], sites: Sequence[str], weigh: Weights) -> dict[str, float]:
    """Return each site's share of a sum: its weight over the sum of the weights of ``sites``.

    Args:
        examples: numbers of examples by site.
        sites: names of the sites of the sum.
        weigh: weights of the method's aggregation.
    """
    weights = compute_weights(examples, sites, weigh)
    total = sum(weights.values())
    return {site: weight / total for site, weight in weights.items()}


def compute_weights(examples: Mapping[str, int], sites: Sequence[str], weigh: Weights) -> dict[str, float]:
    """Return the weight of each site in the method's aggregation over ``sites``."""
    without_values = Patch.empty(1)
    counted = [Contribution(site, without_values, "weights", examples[site]) for site in sorted(sites)]
    return dict(zip(sorted(sites), weigh(counted), strict=True))
