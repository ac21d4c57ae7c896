"""Settings of MetaGater's rounds (Lin et al. 2021, Algorithm 1)."""

from typing import Literal

from pydantic import Field

from ...core.needs import Need, Needs
from .adaptation import AdaptationConfig
from .schedules import StepSizes, compute_step_sizes


class MetaLearningConfig(AdaptationConfig):
    """Settings of the sites' proximal problem, of the server's accelerated steps and of the gates' penalty."""

    proximity: float = Field(0.2, gt=0, description="lambda: weight of the distance to the meta-model")
    local_proximity: float | None = Field(None, ge=0, description="lambda in the sites' problem; null: as proximity")
    local_accuracy: float | None = Field(
        None,
        gt=0,
        description="xi_t: squared norm of the gradient of a site's proximal problem at which it stops, local_steps or "
        "training.epochs at the latest; null: no other end",
    )
    step: float = Field(1.0, gt=0, description="beta_t, the server's step; eta_t = beta_t / alpha_t")
    acceleration: bool = Field(True, description="false: alpha_t = 1; FedProx with step 1 / lambda, Reptile with less")
    momentum_cap: float = Field(1.0, ge=0, le=1, description="largest momentum of the acceleration; 1: as in the paper")
    restart_every: int | None = Field(None, ge=1, description="rounds after which the acceleration restarts")
    lasso: float = Field(1e-4, ge=0, description="mu: weight of the penalty H on the gates' output channels")
    penalty: Literal["group_lasso", "l1"] = Field(
        "group_lasso", description="H: group_lasso closes whole channels, l1 zeroes single weights of their gates"
    )
    scale_prox: bool = Field(
        True, description="true: the penalty's threshold grows with eta_t, as in the paper; false: with beta_t"
    )
    closed_channels: Literal["permanent", "reopenable"] = Field(
        "reopenable",
        description="reopenable: a zero group is sent and may grow again, as in the paper; permanent: neither it nor "
        "its filter is sent or trained again",
    )
    output: Literal["pr", "pr_next", "ag"] = Field(
        "pr", description="the result: the model last sent (the paper), the one that would be sent next, or w_T^ag"
    )

    def needs(self) -> Needs:
        needs = {Need.READABLE_MODEL.because("the server takes steps of its own along the sites' mean")}
        if self.local_accuracy is not None:
            needs.add(Need.PLAIN_STEPS.because("local_accuracy: a gradient ends the training", "leave it out"))
        return super().needs() | needs

    def compute_steps(self, t: int) -> StepSizes:
        """Return alpha_t, beta_t and eta_t."""
        return compute_step_sizes(
            t,
            beta=self.step,
            acceleration=self.acceleration,
            momentum_cap=self.momentum_cap,
            restart_every=self.restart_every,
        )

    def is_restart(self, t: int) -> bool:
        """Return whether the acceleration restarts after round ``t``."""
        return self.acceleration and self.restart_every is not None and t % self.restart_every == 0
