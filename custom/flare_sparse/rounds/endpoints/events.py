"""Events that the record of a run must show, and what a site reports beside its updates, with its validation.

Events are damaged checkpoints, lost bases, steps back, a run that does not learn, at the server and at the sites.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.errors import RejectedMessage, abbreviate
from ...core.exchange import Contribution, SiteEvent
from ...tasks.task import COUNTS, METRIC_NAMES, is_metric_name
from ...training.script_trainer import SCORES_BY_TRAINING

SERVER = "server"
"""The server's name where sites are identified by theirs, for example in the checkpoint folder."""

CHECKPOINT_DAMAGED = "checkpoint_damaged"
MEMORY_DROPPED = "memory_dropped"
MODEL_UNCHANGED = "model_unchanged"

STARTED_OVER = "started_over"
BASE_LOST = "base_lost"
STEPPED_BACK = "stepped_back"
UPDATE_DISCARDED = "update_discarded"
ENDED_EARLY = "ended_early"
TENSORS_CUT_OFF = "tensors_cut_off"
DATA_WARNING = "data_warning"

STEP_BACK = "the run steps back by one commit: checkpoint {number:08d} is set aside as stepped-back-{number:08d}"

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


@dataclass(frozen=True)
class Event:
    """An event at the server or at a site.

    Attributes:
        round: round in whose record the event stands.
        site: where it happened: a site's name, or ``"server"``.
        event: code of the event.
        detail: the event in words, written by the server.
    """

    round: int
    site: str
    event: str
    detail: str


class EventLog:
    """The events of a run: those of the committed rounds, and those that the next record will show."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str, str]] = set()
        self._pending: list[tuple[str, str, str]] = []

    def restore(self, events: Iterable[Event]) -> None:
        """Take over the events of committed rounds."""
        self._reported.update((event.site, event.event, event.detail) for event in events)

    def add_notes(self, notes: Mapping[str, Sequence[str]]) -> None:
        """Add what the record says of the sites' data, by site."""
        for site, text in ((site, text) for site, texts in notes.items() for text in texts):
            self.add(site, DATA_WARNING, text)

    def add(self, site: str, event: str, detail: str) -> bool:
        """Add an event to the next record, unless it was reported earlier; return whether it is new."""
        # Sites report an event with every update, because an update may be lost; a restarted server sees the same
        # damaged folders again.
        key = (site, event, detail)
        if key in self._reported:
            return False
        self._reported.add(key)
        self._pending.append(key)
        return True

    def add_reports(self, contributions: Iterable[Contribution]) -> None:
        """Add the events that sites reported beside their updates."""
        for contribution in contributions:
            for event in contribution.events:
                self.add(contribution.site, event.event, describe_event(event))

    def add_damaged_checkpoints(self, numbers: Iterable[int], *, is_empty: bool) -> list[str]:
        """Add the damaged checkpoints of the server and return the details of the new ones.

        Args:
            numbers: numbers of the damaged checkpoints.
            is_empty: whether no intact checkpoint is left.
        """
        text = "checkpoint {0:08d} failed its checksums and is kept as damaged-{0:08d}"
        events = {text.format(number): CHECKPOINT_DAMAGED for number in numbers}
        if events and is_empty:
            events["no checkpoint is intact: the run starts again at round 1, from the initial model"] = STARTED_OVER
        return [detail for detail, event in events.items() if self.add(SERVER, event, detail)]

    def add_steps_back(self, numbers: Iterable[int]) -> None:
        """Add the checkpoints of the server that were set aside intact."""
        for number in numbers:
            self.add(SERVER, STEPPED_BACK, STEP_BACK.format(number=number))

    def take(self, number: int) -> list[Event]:
        """Return the events for the record of round ``number``, which are then reported."""
        # Not at the time of the event: a round that is never committed has no record to show it in.
        events = [Event(number, *event) for event in self._pending]
        self._pending = []
        return events
