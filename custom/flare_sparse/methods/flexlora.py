"""FlexLoRA (Bai et al. 2024): the server averages the products ``B_k A_k`` and decomposes them by SVD.

"Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources", arXiv 2402.11505;
docs/algorithms.md, section 4.9. Each site receives the best approximation of the rank that it can afford. The server
sees all factors of every site.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ..core.exchange import Assignment, Contribution, Request, Update
from ..training import Site
from .aggregation.weighted import weigh_by_examples, weighted_sum
from .method import ModelState, train_locally
from .support.lora import RankedConfig, RankedMethod


@final
class FlexLoRA(RankedMethod[RankedConfig, ModelState]):
    """A site of rank r_k receives, trains and returns the first r_k slots of every module.

    After the first round, slot ``i`` of a module in ``state.weights`` is the ``i``-th singular direction of the mean
    product. Slots beyond the rank of that product keep their values if no contributing site has them.
    """

    name = "flexlora"
    Config = RankedConfig

    def build_assignments(self, kind: str, state: ModelState, sites: Sequence[str]) -> dict[str, Assignment]:
        """Return the first slots for each site, one object for each rank."""
        return self.assign_ranks(kind, state, {site: self.config.get_rank(site) for site in sites})

    def answer(self, request: Request, site: Site) -> Update:
        mask = self.require_affordable(request, site)
        return train_locally(request, site, self.config.get_training(request.round), trainable=mask)

    def learn(self, state: ModelState, contributions: Sequence[Contribution]) -> ModelState:
        # The average is the result for entries outside the adapters; the factors are overwritten below.
        weights = weighted_sum(contributions, weigh_by_examples)
        shares = weigh_by_examples(contributions)
        vectors = [contribution.patch.to_vector() for contribution in contributions]
        for adapter in self.slots.adapters:
            weighted_b = torch.cat(
                [w * adapter.view_matrix(v, "B").double() for w, v in zip(shares, vectors, strict=True)], dim=1
            )
            stacked_a = torch.cat([adapter.view_matrix(v, "A").double() for v in vectors])
            b, a = factorise(weighted_b, stacked_a, adapter.rank)
            # A slot whose A and B are both zero has no gradient and would never train again. Where the product has no
            # direction, A stays; so does B, unless a site has reported that it is zero.
            is_empty = ~b.any(0)
            is_owned = torch.stack([adapter.view_slots(c.patch.mask.bits, "B").any(1) for c in contributions]).any(0)
            previous_b, previous_a = (adapter.view_matrix(state.weights, factor) for factor in ("B", "A"))
            adapter.view_matrix(weights, "B").copy_(torch.where(is_empty & ~is_owned, previous_b.double(), b))
            adapter.view_matrix(weights, "A").copy_(torch.where(is_empty[:, None], previous_a.double(), a))
        return ModelState(state.round + 1, weights)


def factorise(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the best approximation of ``left @ right`` of a rank, without forming the product.

    The square roots of the singular values are in both of them.

    With ``left = Q R`` and ``right.T = P T`` the singular values are those of the small ``R T.T``.

    Args:
        left: ``(d1, n)``.
        right: ``(n, d2)``.
        rank: rank of the result; directions beyond the rank of the product are zero.

    Returns:
        ``(d1, rank)`` and ``(rank, d2)``, strongest direction first.
    """
    q, r = torch.linalg.qr(left)
    p, t = torch.linalg.qr(right.T)
    u, s, v = torch.linalg.svd(r @ t.T, full_matrices=False)
    # Singular values of a product of lower rank are rounding, not exact zeros.
    is_positive = s > s.max() * max(s.numel(), 1) * torch.finfo(s.dtype).eps
    kept = min(rank, int(is_positive.sum()))
    b, a = left.new_zeros(left.shape[0], rank), right.new_zeros(rank, right.shape[1])
    b[:, :kept] = (q @ u * s.sqrt())[:, :kept]
    a[:kept] = ((p @ v.T) * s.sqrt()).T[:kept]
    return b, a
