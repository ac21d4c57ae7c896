"""What a site keeps of its answers, in memory and in its checkpoints."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...core.mask import Mask
from ..link import Vector


@dataclass(frozen=True)
class SiteMemory:
    """What a site carries from one update to the next.

    Attributes:
        residual: rounding residual that is added to the next update (error feedback); None: zero.
        method: tensors that the method keeps at the site.
    """

    residual: Tensor | None = None
    method: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteSnapshot:
    """A site's checkpoint, written before each update is sent.

    Attributes:
        name: name of the answer.
        after: name of the last answer before it that counted; None: none.
        held: name of the vector that the site holds.
        mask: live entries of that vector.
        values: ``(mask.count,)`` their values; all others are zero.
        memory: memory after the answer.
    """

    name: str
    after: str | None
    held: str
    mask: Mask
    values: Tensor
    memory: SiteMemory

    @property
    def vector(self) -> Vector:
        """The vector that the site held, without values."""
        return Vector(self.held, self.mask)

    def to_vector(self) -> Tensor:
        """Return the values ``(P,)`` of the vector that the site held."""
        return self.mask.put(self.values, torch.zeros(self.mask.size))
