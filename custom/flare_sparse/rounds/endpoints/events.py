"""What a site reports beside its updates: events, number of examples and metrics; their form and their validation."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...core.errors import RejectedMessage, abbreviate
from ...core.exchange import SiteEvent
from ...tasks.task import COUNTS, METRIC_NAMES, is_metric_name
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


_MAX_NAMES = 1024
"""Most metrics: 20 subgroups with 20 metrics, each with its standard error."""

# Integers below 2**53 are exact in float64, which weights are computed in.
_EXAMPLES_LIMIT = 2**53

# A float32 times 2**53, summed over any number of sites, is still a finite float64.
_LARGEST_METRIC = torch.finfo(torch.float32).max


def validate_num_examples(value: Any, site: str) -> int:
    """Return the reported number of training examples.

    Raises:
        RejectedMessage: it is not an integer from 0 to 2**53 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _EXAMPLES_LIMIT:
        raise RejectedMessage("E_WEIGHT", "examples", "an integer from 0", abbreviate(value), site)
    return value


def validate_metrics(value: Any, site: str) -> dict[str, float]:
    """Return the reported metrics as floats.

    Raises:
        RejectedMessage: it is not a dict of at most 1,024 short names with finite numbers.
    """
    if not isinstance(value, dict) or len(value) > _MAX_NAMES:
        raise RejectedMessage(
            "E_METRICS", "metrics", f"at most {_MAX_NAMES} names with numbers", type(value).__name__, site
        )
    for name, number in value.items():
        if not is_metric_name(name) or isinstance(number, bool):
            raise RejectedMessage("E_METRICS", "metrics", f"names of {METRIC_NAMES}", abbreviate(name), site)
        # "not abs(x) <= limit" and not "abs(x) > limit", which NaN would pass.
        if not isinstance(number, (int, float)) or not abs(number) <= _LARGEST_METRIC:
            raise RejectedMessage("E_METRICS", f"metrics.{name}", "a finite float32", abbreviate(number), site)
    # The means over all sites are weighted by these metrics: a zero or a huge number would make them useless.
    for count in COUNTS:
        if not 1 <= value.get(count, 1) < _EXAMPLES_LIMIT:
            raise RejectedMessage("E_METRICS", count, "at least 1", abbreviate(value[count]), site)
    return {name: float(number) for name, number in value.items()}
