"""What both ends of a message agree on: number formats, plans, and what a receiver makes of a model."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ...compute.structure.nodes import clip_variances
from ...core.exchange import EXACT_CONTENTS, Content, Patch, Request
from ...core.mask import Mask
from ...core.params import Layout
from ...wire.formats import FORMATS, ValueType
from ...wire.plan import Plan
from ..link import Vector


@dataclass(frozen=True)
class InitialModel:
    """The model of a job's seed, which both ends build.

    Attributes:
        weights: ``(P,)``.
        layout: layout of the network.
    """

    weights: Tensor
    layout: Layout

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its values, 64 hex digits."""
        return Patch.from_vector(self.weights, Mask.full(self.layout.size)).digest

    @cached_property
    def vector(self) -> Vector:
        """The vector of a site that holds it."""
        return Vector(self.digest[:16], Mask.full(self.layout.size), self.weights)

    def shorten(self, patch: Patch) -> Patch | None:
        """Return the buffers of a patch that differ, as statistics of inputs do; None: the patch is another model."""
        if patch.base != "zeros" or not patch.mask.is_full:
            return None
        differs = self.layout.unflatten(patch.values != self.weights)
        changed = {spec.name: spec.role for spec in self.layout.tensors if differs[spec.name].any()}
        if set(changed.values()) - {"buffer"}:
            return None
        return Patch.from_vector(patch.values, Mask.from_tensors(self.layout, lambda s: s.name in changed), "previous")


def choose_values(content: Content, values: ValueType, initial: InitialModel | None) -> ValueType:
    """Return the number format of an update in a job with the format ``values``.

    Exact contents are compressed where messages are to be short: each site builds the initial model, and values have
    few bits. Scores are not, which are close to random numbers.
    """
    if content not in EXACT_CONTENTS:
        return values
    is_short = content != "scores" and initial is not None and FORMATS[values].sends_differences
    return "float32_zstd" if is_short else "float32"


def correct_variances(patch: Patch, layout: Layout) -> Patch:
    """Return a patch of a model with 0 in place of each running variance below 0.

    Error feedback adds the rounding residual of a large variance to a small one, and a sender may send anything. From a
    variance below 0, every result of the network would be NaN.
    """
    values = clip_variances(patch.values, patch.mask, layout)
    return patch if values is patch.values else replace(patch, source=values)


def find_target(read: Patch, base: Vector | None, layout: Layout, *, keeps_values: bool) -> Vector:
    """Return the vector that a site holds after a message.

    Args:
        read: the patch as the site reads it.
        base: the vector on which a patch over "previous" builds; with its values, if the patch has any.
        layout: layout of the model.
        keeps_values: whether the vector is to have its values.
    """
    patch = correct_variances(read, layout)
    if patch.base == "zeros":
        return Vector.of(patch, keeps_values=keeps_values)
    assert base is not None, "a patch over the previous model is for a site with a base"
    if not patch.mask.count:
        return base if keeps_values else replace(base, values=None)
    assert base.values is not None, "the server keeps the vectors that patches with rounded values build on"
    values = patch.write_into(base.values.clone())
    vector = Vector.of(Patch.from_vector(values, base.mask))
    return replace(vector, values=values) if keeps_values else vector


def plan_request(layout: Layout, run: str, base: Vector | None, **names: Any) -> Plan:
    """Return the plan of a message from the server to a site.

    Args:
        layout: layout of the model.
        run: id of the run, 16 hex digits.
        base: vector that the site holds; None: none.
        names: what only the sender knows: ``sequence``, ``round`` and ``kind``.
    """
    if base is not None:
        names |= {"base": base.name, "base_mask": base.mask, "base_vector": base.values}
    return Plan(layout, run, is_request=True, **names)


def plan_update(layout: Layout, run: str, asked: Request, target: Vector, **names: Any) -> Plan:
    """Return the plan of the update that answers a request, the same at both ends.

    The base mask of an update is always the trainable mask: the request carries it, so both ends hold it.

    Args:
        layout: layout of the model.
        run: id of the run, 16 hex digits.
        asked: the request that the update answers.
        target: the vector of the request, with its values if messages carry differences.
        names: ``sequence``, and ``request``, the name of the answer; without it at the server, which compares two.
    """
    names |= {"target": target.name, "round": asked.round, "kind": asked.kind}
    return Plan(layout, run, target.name, asked.trainable, target.values, is_request=False, **names)
