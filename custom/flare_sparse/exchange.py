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
    """The server's question to a site.

    Attributes:
        kind: what is asked; a method answers the kinds that it asks, everyone answers ``"evaluate"``.
        round: 1-based (C1); 0 for what comes before the first round of training.
        model: what the site's vector becomes.
        trainable: the entries that may change; all others keep their value bit for bit.
        content: what an answer must be (or ``"metrics"``); known to the server only.
        expected: the very entries that an answer must carry; None: any. Known to the server only.
        fits: says whether the selection of a site's answer may be one, where ``expected`` cannot. Known to the server
            only.
        least: says how many entries an answer of a site carries at least, where ``expected`` does not; None: the site
            decides. Known to the server only.
        smallest: values of an answer below it are refused; None: any may be. Known to the server only.
        otherwise: sent instead of ``model`` to a site that does not hold what ``model`` lies over.
    """

    kind: str
    round: int
    model: Patch
    trainable: Mask
    content: Content = "weights"
    expected: Mask | None = None
    otherwise: Patch | None = None
    fits: Callable[[str, Mask], bool] | None = None
    least: Callable[[str], int] | None = None
    smallest: float | None = None


@dataclass(frozen=True)
class Update:
    """A site's answer.

    Attributes:
        patch: what travels up; empty when the site only reports metrics.
        content: what the values are.
        examples: number of training examples behind them (n_k, C6).
        metrics: the site's own judgement of the model it was sent (or of its personal one). Left empty by a method,
            it is filled in with the former, unless the answer is scores.
        site: filled in by the receiver from what the framework knows, never from the message.
        claimed: the number of examples that the site itself named, where the receiver may count it with fewer; filled
            in by the receiver.
        max_share: largest share of a sum that one site may have; filled in by the receiver.
    """

    patch: Patch
    content: Content
    examples: int
    metrics: dict[str, float] = field(default_factory=dict)
    site: str = ""
    claimed: int | None = None
    max_share: float = 1.0

    @property
    def reported_examples(self) -> int:
        """The examples that the values were made of, as the site says."""
        return self.examples if self.claimed is None else self.claimed
