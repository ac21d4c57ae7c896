"""MetaGater's server (Lin et al. 2021, Algorithm 1): accelerated proximal steps along the sites' mean delta."""

from __future__ import annotations

from typing import Literal

from ..methods.metagater import MetaGater, MetaGaterState
from .aggregator import MethodAggregator


class MetaStep(MethodAggregator[MetaGaterState]):
    """Takes Algorithm 1's lines 10 to 13; gate groups that the Group Lasso makes zero close for good (section 6).

    Args:
        proximity: lambda, also the weight of the sites' proximal term (FedProx's mu).
        step: beta_t.
        acceleration: whether alpha_t < 1.
        momentum_cap: largest momentum of the acceleration.
        restart_every: rounds after which the acceleration restarts; None: never.
        lasso: mu, weight of the Group Lasso on the gates.
        scale_prox: whether the penalty's threshold grows with eta_t, as in the paper.
        closed_channels: ``"permanent"`` or ``"reopenable"``.
        output: ``"pr"``: the result is the model sent last; ``"pr_next"``, ``"ag"``.
        min_sites, persistor_id, resume_from: see :class:`.aggregator.MethodAggregator`.
    """

    _always_serialize_args = ("proximity", "step", "acceleration", "lasso", "closed_channels", "output", "min_sites")
    method_class = MetaGater
    state_class = MetaGaterState

    def __init__(
        self,
        proximity: float = 0.2,
        step: float = 1.0,
        acceleration: bool = True,
        momentum_cap: float = 1.0,
        restart_every: int | None = None,
        lasso: float = 1e-4,
        scale_prox: bool = True,
        closed_channels: Literal["permanent", "reopenable"] = "permanent",
        output: Literal["pr", "pr_next", "ag"] = "pr",
        min_sites: int = 1,
        persistor_id: str = "persistor",
        resume_from: str = "",
    ):
        self.proximity, self.step, self.acceleration, self.momentum_cap = proximity, step, acceleration, momentum_cap
        self.restart_every, self.lasso, self.scale_prox = restart_every, lasso, scale_prox
        self.closed_channels, self.output = closed_channels, output
        super().__init__(
            min_sites, persistor_id, resume_from,
            proximity=proximity, step=step, acceleration=acceleration, momentum_cap=momentum_cap,
            restart_every=restart_every, lasso=lasso, scale_prox=scale_prox, closed_channels=closed_channels,
            output=output,
        )  # fmt: skip
