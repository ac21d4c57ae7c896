"""Progress of a run as display text: one line per round."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.observer import Observer
from ...core.steps import STEP_FILE, STEP_FOLDER, describe_step
from .received import read_json

PROGRESS_PLACES = (f"{STEP_FOLDER}/*", "workspace/*/*/simulate_job", "poc/example_project/*/*/*")
"""Folders of the sites' jobs below a result folder with --env local, sim and poc."""
RECENT_ROUNDS = 10
"""Rounds whose mean duration an estimate of the time left extends."""
LEAST_SHOWN_S = 10
"""Shortest estimate that a round's line shows."""


EQUAL = "as much as dense"
"""Text of a comparison with dense FedAvg whose bytes differ by less than 5 %."""


def format_bytes(count: float) -> str:
    """Format a number of bytes with decimal units: 1234567 as ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def compare_with_dense(sent: float, dense: float) -> str:
    """Return how the bytes sent compare with those of dense FedAvg, as display text.

    >>> compare_with_dense(10, 40)
    '4.0x less than dense'
    >>> compare_with_dense(52, 40)
    '1.3x more than dense'
    >>> compare_with_dense(40, 40), compare_with_dense(40, 0), compare_with_dense(0, 40)
    ('as much as dense', 'dense FedAvg has no such messages', 'nothing sent')
    """
    if not sent:
        return "nothing sent"
    if not dense:
        return "dense FedAvg has no such messages"
    ratio = dense / sent
    if abs(ratio - 1) < 0.05:
        return EQUAL
    return f"{ratio:.1f}x less than dense" if ratio > 1 else f"{1 / ratio:.1f}x more than dense"


def format_duration(seconds: float) -> str:
    """Format a duration in its largest two units.

    >>> [format_duration(seconds) for seconds in (4.2, 75, 3700, 200000)]
    ['4 s', '1 min 15 s', '1 h 1 min', '2 d 7 h']
    """
    count = round(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if count >= size:
            return f"{count // size} {unit} {count % size // smaller} {smaller_unit}"
    return f"{count} s"


def estimate_seconds_left(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the time until a run ends: the rounds that remain, at the mean duration of the last ten.

    The first round counts only while it is the only one: it takes longer, because libraries are loaded in it.

    Args:
        lines: lines of ``rounds.jsonl`` so far.

    Returns:
        Seconds; 0 after the last round; None before the first.
    """
    if not lines or lines[-1]["round"] < 1:
        return None
    current, total = lines[-1]["round"], lines[-1]["rounds"]
    # A round may have several requests, such as a count of zeros after the training.
    before = 0 if current == 1 else max(current - RECENT_ROUNDS, 1)
    recent = [line for line in lines if before < line["round"] <= current]
    seconds = float(sum(line["seconds"] for line in recent))
    return max(int(total - current), 0) * seconds / int(current - before)


def find_training(folder: Path, after: int = -1, jobs: Collection[str] | None = None) -> list[str]:
    """Return how far each site is within a round, as text, in the order of their names.

    Args:
        folder: result folder of a run on this machine, or the startup kit of a site.
        after: last committed round; what was written before its end is left out.
        jobs: of a kit, the jobs that run now; None: the folder is that of a run.
    """
    places = PROGRESS_PLACES if jobs is None else sorted(jobs)
    files = [file for place in places for file in folder.glob(f"{place}/{STEP_FILE}")]
    # Without a file, its run has just ended.
    lines = filter(None, map(read_json, files))
    return [describe_step(line) for line in sorted(lines, key=lambda line: str(line["site"])) if line["round"] > after]


CELLS = ("round", "request", "sites", "metric", "bytes", "seconds")
"""Heads of the cells of a round in a table."""


def format_cells(line: Mapping[str, Any]) -> list[str]:
    """Return the cells of a round in a table, as display text; see ``CELLS``."""
    value = line["metrics"].get(line["metric"])
    return [
        "final" if line["round"] > line["rounds"] else f"{line['round']}/{line['rounds']}",
        line["kind"],
        f"{len(line['sites_contributed'])}/{len(line['sites_asked'])}",
        "-" if value is None else f"{value:.3f}",
        format_bytes(line["bytes_up"] + line["bytes_down"]),
        f"{line['seconds']:.1f}",
    ]


def append_round(lines: list[Mapping[str, Any]], line: Mapping[str, Any]) -> None:
    """Append the line of a round; the rounds that the run stepped back from before it are removed."""
    from ...rounds.endpoints.events import STEPPED_BACK

    if any(event["event"] == STEPPED_BACK for event in line.get("events", ())):
        lines[:] = [other for other in lines if other["round"] < line["round"]]
    lines.append(line)


def format_next(lines: list[Mapping[str, Any]], line: Mapping[str, Any]) -> str:
    """Append the line of a round, and return its display text with an estimate of the time left."""
    append_round(lines, line)
    left = estimate_seconds_left(lines)
    return format_progress(line, left if left and left >= LEAST_SHOWN_S else None)


class Printer(Observer):
    """Prints a line for each round, and what else is heard of a run.

    Args:
        show: prints a line about the run.
        show_problem: prints a note or a warning about the data.
    """

    def __init__(
        self,
        show: Callable[[str], Any] = print,
        show_problem: Callable[[str], Any] = lambda text: print(text, file=sys.stderr),  # noqa: T201 - what it is for
    ):
        self._show, self._show_problem = show, show_problem
        self._lines: list[Mapping[str, Any]] = []

    def say(self, text: str) -> None:
        self._show(text)

    def note(self, text: str) -> None:
        self._show_problem(f"note: {text}")

    def warn(self, text: str) -> None:
        self._show_problem(f"warning: {text}")

    def see_round(self, line: dict[str, Any]) -> None:
        # Events precede the commit of their round.
        for text in [*format_events(line), format_next(self._lines, line)]:
            self._show(text)


def format_events(line: Mapping[str, Any]) -> list[str]:
    """Format the events of a round, such as a step back or a damaged checkpoint: one line of text for each.

    Args:
        line: a line of ``rounds.jsonl``.
    """
    return [f"{event['site']}: {event['detail']}" for event in line.get("events", ())]


def format_progress(line: Mapping[str, Any], seconds_left: float | None = None) -> str:
    """Format a round: contributing sites, metric of the model that the round started from, bytes and seconds.

    Args:
        line: a line of ``rounds.jsonl``.
        seconds_left: estimate of the time until the run ends; None: unknown.
    """
    number, kind, sites, value, size, seconds = format_cells(line)
    compared = compare_with_dense(line["bytes_up"] + line["bytes_down"], line["dense_bytes"])
    parts = [
        "final model" if number == "final" else f"round {number}",
        kind if kind not in ("train", "evaluate") else "",
        f"{sites} sites",
        "" if value == "-" else f"{line['metric']} {value} {line['unit']}".strip(),
        f"{size} ({compared})" if line["dense_bytes"] else size,
        f"{seconds} s",
        f"{format_duration(seconds_left)} left" if seconds_left else "",
        f"rejected: {_describe_reasons(line['rejected'])}" if line["rejected"] else "",
        f"excluded: {_describe_reasons(line['excluded'])}" if line.get("excluded") else "",
        f"did not reply: {', '.join(line['timed_out'])}" if line["timed_out"] else "",
        f"in quarantine: {', '.join(line['quarantined'])}" if line.get("quarantined") else "",
    ]
    return "  ".join(part for part in parts if part)


def _describe_reasons(reasons: Mapping[str, str]) -> str:
    """Return each site with the code that its reason begins with."""
    return ", ".join(f"{site} {reason.partition(':')[0]}" for site, reason in sorted(reasons.items()))
