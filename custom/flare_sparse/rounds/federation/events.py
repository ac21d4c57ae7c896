"""Events of a run that its record must show: damaged checkpoints, lost bases, steps back, a run that does not learn."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...core.exchange import Contribution
from ..endpoints.events import describe_event
from ..endpoints.server import SERVER

CHECKPOINT_DAMAGED = "checkpoint_damaged"
STARTED_OVER = "started_over"
BASE_LOST = "base_lost"
STEPPED_BACK = "stepped_back"
UPDATE_DISCARDED = "update_discarded"
ENDED_EARLY = "ended_early"
TENSORS_CUT_OFF = "tensors_cut_off"
DATA_WARNING = "data_warning"

STEP_BACK = "the run steps back by one commit: checkpoint {number:08d} is set aside as stepped-back-{number:08d}"


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
        for site, texts in notes.items():
            for text in texts:
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
        events = [
            (CHECKPOINT_DAMAGED, f"checkpoint {number:08d} failed its checksums and is kept as damaged-{number:08d}")
            for number in numbers
        ]
        if events and is_empty:
            detail = "no checkpoint is intact: the run starts again at round 1, from the initial model"
            events.append((STARTED_OVER, detail))
        return [detail for event, detail in events if self.add(SERVER, event, detail)]

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
