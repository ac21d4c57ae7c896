"""What the server and the sites say to each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from .mask import Mask

Base = Literal["zeros", "previous"]
Content = Literal["weights", "delta", "scores", "metrics"]

EVALUATE = "evaluate"
"""The question that every site answers for every method: how good is this model on your test examples?"""


@dataclass(frozen=True)
class EncryptedValues:
    """Values that only who holds the key can read, as they travel (docs/wire-format.md).

    Attributes:
        data: uint8 ``(n,)``.
    """

    data: Tensor


@dataclass(frozen=True)
class Patch:
    """The entries ``on`` take these values; all others are as in ``over``.

    Attributes:
        source: float32, the values ``(on.count,)`` in the order of the layout, or the vector ``(P,)`` that they are
            entries of, which must not change while the patch is in use: a message gathers from it directly.
        on: the entries that travel, out of P.
        over: ``"zeros"``, or ``"previous"``: the vector that the receiver holds since the last message.
        sealed: the values, encrypted. For a receiver that cannot read them ``source`` is NaN: whatever is computed with
            it is NaN, too, and is never sent.
    """

    source: Tensor
    mask: Mask
    base: Base = "zeros"
    encrypted: EncryptedValues | None = None

    @classmethod
    def from_vector(cls, vector: Tensor, on: Mask, over: Base = "zeros") -> Patch:
        """The entries ``on`` of a vector ``(P,)``."""
        return cls(vector, on, over)

    @classmethod
    def from_encrypted(cls, sealed: EncryptedValues, on: Mask, over: Base = "zeros") -> Patch:
        """A patch whose values the holder cannot read."""
        return cls(torch.full((on.count,), math.nan), on, over, sealed)

    @cached_property
    def values(self) -> Tensor:
        """float32 ``(on.count,)``, in the order of the layout."""
        return self.source if self.source.numel() == self.mask.count else self.mask.take(self.source)

    @classmethod
    def empty(cls, size: int) -> Patch:
        return cls(Tensor(), Mask.empty(size))

    def to_vector(self) -> Tensor:
        """The patch over zeros, ``(on.size,)``."""
        return self.write_into(torch.zeros(self.mask.size))

    def write_into(self, base: Tensor) -> Tensor:
        """``base`` ``(P,)`` with this patch written into it, in place."""
        return self.mask.put(self.values, base)


@dataclass(frozen=True)
class Request:
    """What the server sends to a site.

    Attributes:
        kind: what is asked for; a method answers the kinds that it asks, every site answers ``"evaluate"``.
        round: 1-based; 0 for what comes before the first round of training.
        model: what the site's vector becomes.
        trainable: the entries that may change; all others keep their value bit for bit.
    """

    kind: str
    round: int
    model: Patch
    trainable: Mask


@dataclass(frozen=True)
class UpdateSpec:
    """What an update must be for the server to accept it. It never travels.

    Attributes:
        content: what the values are; an update may always carry metrics only.
        mask: the exact entries that an update carries; None: see ``accepts``.
        accepts: whether a site may send a selection, by site name and mask; None: any selection.
        min_entries: fewest entries of an update by site name, where ``mask`` is None; None: the site decides.
        min_value: smallest value that is accepted; None: no bound.
    """

    content: Content = "weights"
    mask: Mask | None = None
    accepts: Callable[[str, Mask], bool] | None = None
    min_entries: Callable[[str], int] | None = None
    min_value: float | None = None


@dataclass(frozen=True)
class Assignment:
    """A request and what the server requires of the update that answers it.

    Attributes:
        request: what travels.
        expected: what the update must be.
        full_model: sent instead of ``request.model`` to a site that does not hold the base of ``request.model``.
    """

    request: Request
    expected: UpdateSpec = UpdateSpec()
    full_model: Patch | None = None


@dataclass(frozen=True)
class Update:
    """What a site returns.

    Attributes:
        patch: the values that travel to the server; empty when the site only reports metrics.
        content: what the values are.
        num_examples: number of training examples behind them (n_k).
        metrics: the site's evaluation of the model that it received, or of its personal model. Where a method leaves
            it empty, the site endpoint adds the former, unless the update carries scores.
    """

    patch: Patch
    content: Content
    num_examples: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Contribution:
    """A site's update as the server counts it.

    Attributes:
        site: the sender's name as the framework knows it, never one from the message.
        patch, content, metrics: as in the update.
        num_examples: the weight of the site in sums; at most what the site reported.
        capped_from: what the site reported, where it counts with fewer examples; None: it counts with what it reported.
        max_share: largest share of a sum that one site may have.
    """

    site: str
    patch: Patch
    content: Content
    num_examples: int
    metrics: dict[str, float] = field(default_factory=dict)
    capped_from: int | None = None
    max_share: float = 1.0

    @classmethod
    def from_update(cls, site: str, update: Update) -> Contribution:
        """The update of ``site``, counted with the number of examples that it reports."""
        return cls(site, update.patch, update.content, update.num_examples, update.metrics)

    @property
    def reported_examples(self) -> int:
        """The number of examples that the values were computed from, as the site reported it."""
        return self.num_examples if self.capped_from is None else self.capped_from
