"""The base that a site holds, the plans of a request and its update, and what a receiver makes of a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from ...compute.structure.norms import clip_variances
from ...compute.structure.scaling import build_statistics_mask
from ...core.exchange import EXACT_CONTENTS, STATISTICS, Content, Patch, Request
from ...core.mask import Mask
from ...core.params import Layout
from ...wire.formats import ValueType, is_quantized
from ...wire.plan import CiphertextFormat, Plan


@dataclass(frozen=True)
class SiteBase:
    """Identity of the vector that a site holds, known at both ends. A patch over ``"previous"`` applies to this vector.

    Attributes:
        mask: live entries of the vector.
        sequence: sequence number of the message that carried the vector.
        vector: ``(P,)`` the vector as the site reads it, at the server, if the job's values are quantized; else None.
    """

    mask: Mask
    sequence: int
    vector: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class InitialModel:
    """The model of a job's seed, which both ends build; in the place of a message it has the number 0.

    Attributes:
        weights: ``(P,)``.
        layout: layout of the network.
    """

    weights: Tensor
    layout: Layout

    @cached_property
    def statistics(self) -> Mask:
        """Its entries that are statistics of inputs, which no seed gives."""
        return build_statistics_mask(self.layout)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its values, 64 hex digits."""
        return Patch.from_vector(self.weights, Mask.full(self.layout.size)).digest

    @cached_property
    def base(self) -> SiteBase:
        """The base of a site that holds it."""
        return SiteBase(Mask.full(self.layout.size), 0, self.weights)

    def shorten(self, patch: Patch) -> Patch | None:
        """Return the statistics alone of a patch that is this model with others; None: the patch is another model."""
        if patch.base != "zeros" or not patch.mask.is_full or patch.encrypted is not None:
            return None
        is_same = patch.values == self.weights
        is_same |= self.statistics.bits
        return Patch.from_vector(patch.values, self.statistics, "previous") if bool(is_same.all()) else None

    def complete(self, patch: Patch) -> Patch:
        """Return the whole model of a patch over this one."""
        return Patch.from_vector(patch.write_into(self.weights.clone()), Mask.full(self.layout.size))


def choose_values(content: Content, values: ValueType, initial: InitialModel | None) -> ValueType:
    """Return the number format of an update in a job with the format ``values``.

    Statistics travel without their rests and compressed, if each site builds the initial model and values are rounded.
    """
    if content not in EXACT_CONTENTS:
        return values
    return "float32_zstd" if content == STATISTICS and initial is not None and is_quantized(values) else "float32"


def compute_site_vector(received: Patch, base: SiteBase | None) -> Tensor:
    """Return the vector ``(P,)`` of a site after a message.

    Args:
        received: the patch as the site reads it.
        base: base of the site before, as the server knows it; None: none.
    """
    if received.base == "zeros":
        return received.to_vector()
    assert base is not None, "a patch over the previous model is for a site with a base"
    assert base.vector is not None, "the server keeps the vectors of a job with quantized values"
    return received.write_into(base.vector.clone())


def correct_variances(patch: Patch, layout: Layout) -> Patch:
    """Return a patch of a model with 0 in place of each running variance below 0.

    Error feedback adds the rounding residual of a large variance to a small one, and a sender may send anything. From a
    variance below 0, every result of the network would be NaN.
    """
    values = clip_variances(patch.values, patch.mask, layout)
    return patch if values is patch.values else replace(patch, source=values)


def plan_request(
    layout: Layout,
    run: str,
    base: SiteBase | None,
    *,
    request: Request | None = None,
    sequence: int | None = None,
    ciphertext_format: CiphertextFormat | None = None,
) -> Plan:
    """Return the plan of a message from the server to a site.

    Args:
        layout: layout of the model.
        run: id of the run, 16 hex digits.
        base: base that the site holds; None: none.
        request: the request that the server sends; None at the site, which learns kind and round from the message.
        sequence: number of the attempt; None at the site.
        ciphertext_format: format of encrypted values that this end accepts; None: it accepts none.
    """
    return Plan(
        layout,
        run,
        base_mask=base.mask if base else None,
        base_sequence=base.sequence if base else None,
        base_vector=base.vector if base else None,
        sequence=sequence,
        round=request.round if request else None,
        kind=request.kind if request else None,
        ciphertext_format=ciphertext_format,
    )


def plan_update(
    layout: Layout,
    run: str,
    request: Request,
    sequence: int,
    ciphertext_format: CiphertextFormat | None = None,
    vector: Tensor | None = None,
) -> Plan:
    """Return the plan of the update that answers ``request``, the same at both ends.

    The base of an update is always the trainable mask: the request carries it, so both ends hold it.

    Args:
        layout: layout of the model.
        run: id of the run, 16 hex digits.
        request: the request that the update answers.
        sequence: number of the attempt that the site received.
        ciphertext_format: format of encrypted values that this end accepts; None: it accepts none.
        vector: ``(P,)`` the vector that the site received, if the job's values are quantized; else None.
    """
    return Plan(
        layout,
        run,
        base_mask=request.trainable,
        base_sequence=None if vector is None else sequence,
        base_vector=vector,
        sequence=sequence,
        round=request.round,
        kind=request.kind,
        ciphertext_format=ciphertext_format,
    )
