"""Updates: each message carries the largest entries of a delta, and the sender adds the others to its next one.

Error feedback as in Stich et al. 2018 (arXiv 1809.07599), Algorithm 1, and docs/algorithms.md, section 7.4, for the
updates of any algorithm. An update that does not count takes nothing with it: the next one starts from the residual
before it.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...compute.structure.norms import clip_variances
from ...core.errors import RejectedMessage
from ...core.exchange import Patch
from ...core.mask import Mask
from ...core.params import Layout
from ...core.seeds import make_generator
from ...wire.codec import decode, encode
from ...wire.messages import Decoded, Encoded
from ...wire.plan import Plan
from ..link import name_request
from .arrays import build_layout
from .models import HeldModel
from .settings import StreamSettings, find_buffers, find_candidates, select_entries


@dataclass(frozen=True)
class SentUpdate:
    """An update after encoding.

    Attributes:
        encoded: the message.
        plan: plan of the message.
        residual: float32 ``(P,)``, what the sender keeps if the update counts; None: nothing.
    """

    encoded: Encoded
    plan: Plan
    residual: Tensor | None = None


def encode_update(
    update: Tensor,
    request: HeldModel,
    residual: Tensor | None,
    settings: StreamSettings,
    *,
    run: str,
    kind: str,
    is_delta: bool,
    missing: Collection[str] = (),
) -> SentUpdate:
    """Return the message of an update and what is left to send.

    Args:
        update: float32 ``(P,)`` weights or delta, in the layout of the request.
        request: the model that was trained.
        residual: float32 ``(P,)``, what earlier updates left; None: nothing.
        settings: what to send.
        run: 16 hex digits that identify the run.
        kind: kind of the message.
        is_delta: whether ``update`` is a delta.
        missing: arrays that the update does not have; ``update`` is 0 there.

    Raises:
        RejectedMessage: a value is infinite.
        UndefinedScores: a value is NaN.
    """
    layout = build_layout(request.specs)
    plan = _build_plan(request, layout, run, kind)
    candidates = find_candidates(layout, settings, missing)
    generator = make_generator(int(request.request, 16) >> 1, "stream", kind)
    if settings.is_exact and not is_delta:
        # By bits: entries that the site has not changed, or a filter has put back, need not travel.
        changed = candidates & Mask(update.view(torch.int32) != request.vector.view(torch.int32))
        candidates = changed if changed.count else candidates
        whole = encode(Patch.from_vector(update, candidates), plan, values=settings.values, generator=generator)
        return SentUpdate(whole, plan)
    total = _compute_delta(update, None if is_delta else request.vector, layout, missing)
    feeds_back = settings.error_feedback and not settings.is_exact
    if feeds_back and residual is not None and residual.shape == total.shape:
        total += residual
    mask = select_entries(total, candidates, layout, settings.keep)
    patch = Patch.from_vector(total, mask, "previous")
    encoded = encode(patch, plan, content="delta", values=settings.values, generator=generator)
    if not feeds_back:
        return SentUpdate(encoded, plan)
    return SentUpdate(encoded, plan, _keep(total, mask, encoded.residual, layout, settings))


def _compute_delta(update: Tensor, received: Tensor | None, layout: Layout, missing: Collection[str]) -> Tensor:
    """Return a delta, or weights minus those ``received``, ``(P,)``."""
    delta = update.clone() if received is None else update - received
    if missing:
        # The site did not train these arrays to 0. Without this, minus their weights would enter the residual.
        delta[Mask.from_tensors(layout, lambda spec: spec.name in missing).bits] = 0
    return delta


def _keep(total: Tensor, mask: Mask, rounded_off: Tensor | None, layout: Layout, settings: StreamSettings) -> Tensor:
    """Return what an update of the entries ``mask`` leaves of ``total`` ``(P,)``."""
    # Entries that never travel would only add up. The deltas of running statistics have no sum that means anything:
    # each leads from the received value to the site's own, and two of them would lead past it.
    kept = find_candidates(layout, settings) - find_buffers(layout)
    residual = torch.where(kept.bits, total, 0.0)
    sent = mask & kept
    return sent.put(torch.zeros(sent.count) if rounded_off is None else sent.take(rounded_off), residual)


def name_update(request: HeldModel, kind: str) -> str:
    """Return the name of the answer to a request in one stream."""
    return name_request("", kind, request.round, request.target)


def decode_update(
    message: np.ndarray, request: HeldModel, *, run: str, kind: str, is_delta: bool, site: str = "?"
) -> tuple[Decoded, Plan, Tensor]:
    """Return the message, its plan, and the weights or the delta ``(P,)`` that it carries.

    Args:
        message: uint8 ``(n,)``.
        request: the model that the receiver sent: weights are this model plus the delta of the message.
        run: 16 hex digits that identify the run.
        kind: kind of the message.
        is_delta: whether the update is a delta.
        site: name of the sender, for errors.

    Raises:
        RejectedMessage: the message is malformed, damaged, or answers another request.
        MissingBase: it refers to another model.
    """
    layout = build_layout(request.specs)
    plan = _build_plan(request, layout, run, kind)
    decoded = decode(message, plan, site)
    patch = decoded.patch
    expected_base = {"weights": "zeros", "delta": "previous"}.get(decoded.content)
    if patch.base != expected_base or (is_delta and decoded.content == "weights"):
        raise RejectedMessage("E_KIND", "content", "a delta" if is_delta else "weights or a delta", decoded.content)
    if decoded.content == "weights":
        reached = patch.write_into(request.vector.clone())
    else:
        reached = patch.mask.put(patch.mask.take(request.vector) + patch.values, request.vector.clone())
    # A running variance is 0 where it would be below, as in the rounds of a method.
    clipped = clip_variances(reached, Mask.full(layout.size), layout)
    if not is_delta:
        return decoded, plan, clipped
    return decoded, plan, torch.where(clipped == reached, patch.to_vector(), -request.vector)


def _build_plan(request: HeldModel, layout: Layout, run: str, kind: str) -> Plan:
    return Plan(
        layout,
        run,
        base=request.target,
        target=request.target,
        request=name_update(request, kind),
        sequence=0,
        round=request.round,
        kind=kind,
    )
