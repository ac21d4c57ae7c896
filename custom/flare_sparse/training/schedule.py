"""Learning rate over the rounds of a run."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..core.mask import floor_fraction


class LearningRateSchedule(BaseModel):
    """Factor of the learning rate, by round; a function of the share of the run that is over.

    A schedule over the rounds, and not over the steps of one round, gives every site the same learning rate, however
    many examples it has (docs/algorithms.md, section 1.8).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["constant", "cosine", "poly", "step"] = Field(
        "constant",
        description="cosine: falls to final along half a cosine; poly: falls to 0 as (1 - share) ** 0.9, as nnU-Net's; "
        "step: falls at milestones",
    )
    warmup: float = Field(
        0.0, ge=0, lt=1, description="share of the rounds over which the learning rate first rises linearly"
    )
    final: float = Field(0.0, ge=0, le=1, description="cosine: share of the learning rate that it falls to")
    milestones: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (0.5, 0.75), description="step: shares of the rounds after which the learning rate falls"
    )
    factor: float = Field(0.1, gt=0, le=1, description="step: factor of the learning rate at each milestone")

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate does not depend on the number of rounds."""
        return self.kind == "constant" and self.warmup == 0

    def compute_factor(self, t: int, rounds: int) -> float:
        """Return the factor of round ``t``, 1-based, of ``rounds``.

        >>> [round(LearningRateSchedule(kind="cosine").compute_factor(t, 4), 3) for t in (1, 2, 3, 4)]
        [1.0, 0.854, 0.5, 0.146]
        """
        # Training before the first or after the last round, such as fine-tuning, has the rate of that round.
        t = min(max(t, 1), rounds)
        warmup = floor_fraction(self.warmup, rounds)
        if t <= warmup:
            return t / (warmup + 1)
        if self.kind == "step":
            return float(self.factor ** sum(t > floor_fraction(share, rounds) for share in self.milestones))
        if self.kind == "constant":
            return 1.0
        # Below 1 in the last round: a rate of 0 would make it useless.
        progress = (t - 1 - warmup) / (rounds - warmup)
        if self.kind == "poly":
            return float((1 - progress) ** 0.9)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
