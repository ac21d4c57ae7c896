"""Requests and updates: what the server and the sites exchange."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from .mask import Mask

Base = Literal["zeros", "previous"]
Content = Literal["weights", "delta", "scores", "metrics", "statistics"]

_PIECE_BYTES = 2**22

EVALUATE = "evaluate"
"""Kind of the request that every site answers for every method: metrics of the model on its test examples."""
EXACT_CONTENTS: Final[tuple[Content, ...]] = ("scores", "statistics")
"""Contents whose values are float32 in every number format of the job: rounded scores would have ties, and statistics
are sums that one pooled table would give."""


@dataclass(frozen=True)
class Patch:
    """Values of the entries of a mask, over a base: all other entries are those of the base.

    Attributes:
        source: float32, either the values ``(mask.count,)`` in the order of the layout, or the vector ``(P,)`` that
            they are entries of. The vector must not change while the patch is in use: messages gather from it directly.
        mask: entries in the patch.
        base: ``"zeros"``, or ``"previous"``: the vector that the receiver holds since the last message.

    Examples:
        >>> patch = Patch.from_vector(torch.tensor([1.0, 2.0, 3.0]), Mask(torch.tensor([True, False, True])))
        >>> patch.values, patch.to_vector()
        (tensor([1., 3.]), tensor([1., 0., 3.]))
    """

    source: Tensor
    mask: Mask
    base: Base = "zeros"

    @classmethod
    def from_vector(cls, vector: Tensor, mask: Mask, base: Base = "zeros") -> Patch:
        """Return the patch of the entries ``mask`` of a vector ``(P,)``, which is not copied."""
        return cls(vector, mask, base)

    @cached_property
    def values(self) -> Tensor:
        """float32 ``(mask.count,)``, in the order of the layout."""
        return self.source if self.source.numel() == self.mask.count else self.mask.take(self.source)

    def copy_to_host(self) -> Patch:
        """Return the patch with its values on the CPU: they alone are copied; itself if they are there."""
        return self if self.source.device.type == "cpu" else replace(self, source=self.values.cpu())

    @cached_property
    def digest(self) -> str:
        """Digest of the selected entries and their values; 64 hex digits.

        SHA-256 of the mask's fingerprint and of the SHA-256 of every 4 MiB of the values.
        """
        data = self.values.detach().contiguous().numpy().astype("<f4", copy=False).data.cast("B")
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        # Hash the pieces side by side: a single pass takes longer than to write the values into a message.
        with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1) or 1) as threads:
            digests = threads.map(lambda piece: hashlib.sha256(piece).digest(), pieces)
            return hashlib.sha256(bytes.fromhex(self.mask.fingerprint) + b"".join(digests)).hexdigest()

    @classmethod
    def empty(cls, size: int) -> Patch:
        """Return the patch without values of a layout of ``size`` entries."""
        return cls(Tensor(), Mask.empty(size))

    def to_vector(self) -> Tensor:
        """Return the patch over zeros, ``(P,)``."""
        return self.write_into(torch.zeros(self.mask.size))

    def write_into(self, base: Tensor) -> Tensor:
        """Write this patch into ``base`` ``(P,)``, in place, and return it."""
        return self.mask.put(self.values, base)


@dataclass(frozen=True)
class Request:
    """What the server sends to a site.

    Attributes:
        kind: one of the method's kinds, or ``"evaluate"``, which every site answers.
        round: 1-based; 0 before training.
        model: patch that turns the site's vector into the model of the request.
        trainable: entries that training may change; all others keep their value bit for bit.

    Examples:
        >>> request = Request("train", 1, Patch.empty(3), Mask.full(3))
        >>> request.kind, request.trainable.count
        ('train', 3)
    """

    kind: str
    round: int
    model: Patch
    trainable: Mask


class RequestId(NamedTuple):
    """Kind and round of a request. Every attempt at one request has the same id."""

    kind: str
    round: int


@dataclass(frozen=True)
class UpdateSpec:
    """Requirements that an update must meet to be accepted. They stay at the server.

    Attributes:
        content: required content; an update of metrics alone is always accepted.
        mask: the exact entries that an update carries; None: see ``accepts``.
        accepts: whether a site may send a selection, by site name and mask; None: any selection.
        min_entries: fewest entries of an update by site name, where ``mask`` is None; None: the site decides.
        min_value: smallest value that is accepted; None: no bound.
        is_valid: whether values can be those of a site with so many training examples; None: any can.
        counts_empty: whether an update with an empty selection contributes a delta of zero; if not, its site abstains.
    """

    content: Content = "weights"
    mask: Mask | None = None
    accepts: Callable[[str, Mask], bool] | None = None
    min_entries: Callable[[str], int] | None = None
    min_value: float | None = None
    is_valid: Callable[[Patch, int], bool] | None = None
    counts_empty: bool = False


@dataclass(frozen=True)
class Assignment:
    """A request and what the server requires of the update that answers it.

    Attributes:
        request: message to the site.
        expected: requirements on the update.
        full_model: sent instead of ``request.model`` to a site that does not hold the base of ``request.model``. A
            method that gives it may build its next request on this one.
    """

    request: Request
    expected: UpdateSpec = UpdateSpec()
    full_model: Patch | None = None


@dataclass(frozen=True)
class Update:
    """What a site returns.

    Attributes:
        patch: values for the server; empty when the site only reports metrics.
        content: kind of the values.
        num_examples: number of training examples of the site (n_k).
        metrics: the site's evaluation of the model that it received, or of its personal model. If a method leaves
            it empty, the site endpoint adds the former, unless the update carries scores.
        is_complete: whether every entry outside the patch is zero at the site and at the server, so that no rounding
            residual of it is left to send.

    Examples:
        >>> patch = Patch.from_vector(torch.tensor([1.0, 2.0, 3.0]), Mask(torch.tensor([True, False, True])))
        >>> update = Update(patch, "weights", num_examples=40, metrics={"mae": 5.8})
        >>> update.patch.mask.count, update.num_examples
        (2, 40)
    """

    patch: Patch
    content: Content
    num_examples: int
    metrics: dict[str, float] = field(default_factory=dict)
    is_complete: bool = False


@dataclass(frozen=True)
class SiteEvent:
    """An event at a site that the run's record must show, such as a damaged checkpoint.

    Attributes:
        event: one of the codes in :mod:`flare_sparse.rounds.endpoints.events`.
        sequence: number of the message or checkpoint that the event concerns; it tells a new event from a repeated
            report.
    """

    event: str
    sequence: int


@dataclass(frozen=True)
class Contribution:
    """A site's update as the server counts it.

    Attributes:
        site: the sender's name as FLARE authenticated it, never one from the message.
        patch, content, metrics: as in the update.
        num_examples: weight of the site in sums; at most the reported number.
        max_share: largest share of a sum that one site may have.
        events: events that the site reported beside the update.
    """

    site: str
    patch: Patch
    content: Content
    num_examples: int
    metrics: dict[str, float] = field(default_factory=dict)
    max_share: float = 1.0
    events: tuple[SiteEvent, ...] = ()
