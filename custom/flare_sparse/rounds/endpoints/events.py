"""Events that a site reports beside its updates: their codes, their form in a message, and their validation."""

from collections.abc import Iterable, Mapping
from typing import Any

from ...core.exchange import SiteEvent
from ...training.script_trainer import SCORES_BY_TRAINING

CHECKPOINT_DAMAGED = "checkpoint_damaged"
MEMORY_DROPPED = "memory_dropped"
MODEL_UNCHANGED = "model_unchanged"

DETAILS: Mapping[str, str] = {
    CHECKPOINT_DAMAGED: "checkpoint {sequence:08d} failed its checksums and is not used",
    MEMORY_DROPPED: "the site has lost what followed its last update that counts (attempt {sequence}); what it adds "
    "to its next one (a rounding residual, the method's memory) starts from zero",
    MODEL_UNCHANGED: "the site's training changed no parameter (attempt {sequence}); is the learning rate 0, or does "
    "its script send what it received?",
    SCORES_BY_TRAINING: "the site's training script sends no gradients: its scores are |w * (w_before - w_after)| of "
    "one local training in place of |w * dL/dw| (attempt {sequence})",
}
"""Text of each event in the run's record. A site sends codes and numbers only, so no text of a site enters a record."""

MAX_EVENTS = 16
"""Most events in one message; the newest are kept."""


def describe_event(event: SiteEvent) -> str:
    """Return an event as a line of text."""
    return DETAILS[event.event].format(sequence=event.sequence)


def pack_events(events: Iterable[SiteEvent]) -> list[list[str | int]]:
    """Return events as plain lists, which FLARE's serializer can write."""
    packed: list[list[str | int]] = [[event.event, event.sequence] for event in events]
    return packed[-MAX_EVENTS:]


def parse_events(value: Any, sequence: int) -> tuple[SiteEvent, ...]:
    """Return the well-formed events of a message and ignore everything else. This never raises.

    Args:
        value: the object received; untrusted.
        sequence: number of the last attempt; an event cannot concern a later one.
    """
    # A malformed report must not cost the site its update, and a later version may report other events.
    if not isinstance(value, (list, tuple)):
        return ()
    events = []
    for item in value[-MAX_EVENTS:]:
        if not isinstance(item, (list, tuple)) or len(item) != 2 or not isinstance(item[0], str):
            continue
        # bool is a subclass of int.
        if item[0] in DETAILS and type(item[1]) is int and 0 <= item[1] <= sequence:
            events.append(SiteEvent(item[0], item[1]))
    return tuple(events)
