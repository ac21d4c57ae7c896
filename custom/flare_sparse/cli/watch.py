"""``flare-sparse watch``: a live table of a run that proceeds elsewhere."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..core.errors import ConfigError
from ..core.threads import run_beside
from ..results.runs.progress import (
    CELLS,
    append_round,
    compare_with_dense,
    estimate_seconds_left,
    find_training,
    format_bytes,
    format_cells,
    format_duration,
    format_next,
)
from .console import JSON, err
from .console import build_table as build_plain_table
from .console import out as stdout
from .options import AdminKit

if TYPE_CHECKING:
    from nvflare.fuel.flare_api.flare_api import Session

Lines = list[Mapping[str, Any]]
"""Lines of ``rounds.jsonl``; of a site: each with a text, ``now``."""
SHOWN_ROUNDS = 12
"""Lines of the live table; older ones scroll away."""
EVERY_S, REFRESH_S = 2.0, 5
"""Seconds between two looks, and after which a page loads itself again."""
_PORT = re.compile(r"-?\d+")
WIDTH = 64
"""Characters of a line of a page; so many fit a phone."""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">REFRESH
<link rel="icon" href="data:,"><title>flare-sparse watch</title><style>{stylesheet}
pre {{ font: min(1rem, calc((100vw - 1rem) / 39))/1.15 monospace; }} body {{ margin: .5rem; }}</style>
</head><body style="color: {foreground}; background: {background}"><pre>{code}</pre></body></html>
"""


def watch(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|KIT|JOB",
            help="Result folder of a run, startup kit of a site, or with --kit the id of a job",
        ),
    ],
    kit: AdminKit = None,
    page: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|PORT",
            help="Also write an HTML page, which loads itself again in a browser while the run goes on; or serve it at "
            "http://127.0.0.1:PORT",
        ),
    ] = None,
) -> None:
    """Show the rounds of a run as they are committed, with the bytes so far and an estimate of the time left.

    On this machine it also shows how far each site is within the round. At a site, give its startup kit: a line says
    what this site was asked, and how far its training is; nothing of other sites is there.

    It only reads, ends with the run, and may start before or during the run; Ctrl-C leaves the run alone. If the output
    is no terminal, it prints a line for each round instead of a table.

    Examples:

        flare-sparse watch runs/neurosfl_brain_age

        flare-sparse watch runs/neurosfl_brain_age --page live.html

        flare-sparse watch /opt/flare/site-1 --page 8080

        flare-sparse watch 4f2d9d61-7c58-4a0f-9d6e-0c4b4f0e7a55 --kit kits/lead@coordination.org
    """
    from ..results.runs.received import name_damage

    folder = Path(run)
    build: Callable[[Lines], RenderableType] = partial(build_tables, folder=folder if kit is None else None)
    if kit is not None:
        updates = follow_job(run, kit.resolve())
    elif (folder / "startup").is_dir() and (folder / "local").is_dir():
        updates, build = follow_site(folder), partial(build_site_table, kit=folder)
    else:
        updates = follow_folder(folder)
    with ExitStack() as stack:
        file = None if page is None else Path(page)
        if page is not None and _PORT.fullmatch(page):
            file = Path(stack.enter_context(TemporaryDirectory())) / "page.html"
            address = stack.enter_context(serve_page(file, int(page)))
            err.print(f"page: {address}")
        elif file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ConfigError(f"--page {page}: expected a file in a folder that exists, or a port")
        stack.enter_context(name_damage(folder, OSError))
        try:
            show_updates(stdout, updates, build, as_json=JSON.get(), page=file)
        except KeyboardInterrupt:
            stdout.print("no longer watching; the run continues")


@contextmanager
def serve_page(file: Path, port: int) -> Iterator[str]:
    """Serve a page to browsers on this machine alone while the block runs; yield its address.

    Raises:
        ConfigError: there is no such port, or it is not free.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A site of the internet whose name resolves to this machine must not read it through a browser here.
            is_own = self.headers.get("Host", "").partition(":")[0] in ("127.0.0.1", "localhost")
            self.send_response(200 if is_own and file.exists() else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(file.read_bytes() if is_own and file.exists() else b"")

        def log_message(self, *_: Any) -> None:
            """Print no line for a request: the terminal has the table."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        text = getattr(error, "strerror", error)
        raise ConfigError(f"--page {port}: {text}; choose another port; a file of this name is ./{port}") from error
    with server, run_beside(lambda _: server.serve_forever()):
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def write_page(file: Path, shown: RenderableType, *, has_ended: bool = False) -> None:
    """Write what the terminal shows as a page, which loads itself again until the run has ended."""
    from ..core.checkpoint.writing import replace_atomically

    screen = Console(record=True, file=io.StringIO(), width=WIDTH)
    screen.print(shown)
    refresh = "" if has_ended else f'<meta http-equiv="refresh" content="{REFRESH_S}">'
    text = screen.export_html(code_format=_PAGE.replace("REFRESH", refresh))
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        with replace_atomically(file) as part:
            part.write_text(text, encoding="utf-8")


def follow_site(kit: Path) -> Iterator[Lines]:
    """Yield a line for each run that asked a site for models, and for each of its trainings; it never ends.

    Nothing of other sites is in a kit.

    Raises:
        ConfigError: the folder is no kit.
        RequestRefused: a record cannot be read.
    """
    from ..flare.running import RUNNING_FOLDER, list_uses
    from ..flare.session import REQUESTS_FOLDER
    from ..flare.site.people import summarize_requests

    read: dict[Path, int] | None = None
    while True:
        # A site may have thousands of records: they are read again after a new request only.
        files = (kit / REQUESTS_FOLDER).glob("*/*.json")
        if (written := {file: file.stat().st_mtime_ns for file in files}) != read:
            read, runs = written, summarize_requests(kit)
        asked = [f"{run.label}: {len(run.record.requests)} models, to round {run.last_round}" for run in runs]
        running = {
            use.job for site in (kit / RUNNING_FOLDER).glob("*") for use in list_uses(kit, site.name, running=True)
        }
        yield [{"now": text} for text in [*asked, *find_training(kit, jobs=running)]]
        time.sleep(EVERY_S)


def follow_folder(folder: Path) -> Iterator[Lines]:
    """Yield all rounds of a run in a result folder, which need not have started, at every look until it has ended.

    Raises:
        ConfigError: there is no such folder, or it holds something else.
    """
    from ..core.checkpoint.writing import LOCK
    from ..results.runs.received import check_links, parse_record
    from ..results.runs.record import ROUNDS, SUMMARY

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no result folder; give the folder of --out, or a job's id with --kit")
    check_links(folder)
    # A run locks its folder before it writes anything. In an empty one, a run may be about to start.
    names = {path.name for path in folder.iterdir()}
    if names and not names & {LOCK, ROUNDS, SUMMARY}:
        raise ConfigError(f"{folder} holds no run; give the folder of --out")
    if not names:
        stdout.print(f"waiting for a run to start in {folder}; Ctrl-C ends this command")
    file = folder / ROUNDS
    while True:
        # Looked for before the rounds are read: the summary is written last, so that no round is missed.
        has_ended = (folder / SUMMARY).is_file()
        # Read from its beginning: a run that is resumed, or that steps back, writes the file again. The last line may
        # be written in part.
        text = file.read_bytes() if file.is_file() else b""
        # A line that is no JSON object raises an error here.
        yield [{**parse_record(line)} for line in text[: text.rfind(b"\n") + 1].decode().splitlines()]
        if has_ended:
            return
        time.sleep(EVERY_S)


def follow_job(job: str, kit: Path) -> Iterator[Lines]:
    """Yield all rounds of a job in a running federation, at every look, until the job has ended.

    Args:
        job: id of the job.
        kit: startup kit of an admin with the right to see the job.

    Raises:
        ConfigError: the kit is not that of an admin, the login failed, or the server knows no such job.
    """
    from ..flare.launch.connection import LOST, ServerConnection
    from ..flare.launch.submission import fetch_rounds

    with closing(ServerConnection(kit)) as connection:
        num_rounds, rounds = 0, list[Mapping[str, Any]]()

        def read(session: Session) -> tuple[str, list[dict[str, Any]]]:
            try:
                status = str(session.get_job_status(job))
            except LOST:
                raise
            # FLARE raises several kinds of exceptions for an unknown id, some without a common base class.
            except Exception as error:
                raise ConfigError(f"the server has no job {job!r}: {error}") from error
            try:
                return status, fetch_rounds(session, job, num_rounds)
            except LOST:
                raise
            # FLARE raises several kinds of exceptions while a job starts or ends; the next look succeeds or fails for a
            # lasting reason.
            except Exception:  # noqa: BLE001
                return status, []

        while True:
            status, lines = connection.ask(read)
            num_rounds += len(lines)
            for line in lines:
                append_round(rounds, line)
            yield list(rounds)
            if status.startswith("FINISHED"):
                return
            time.sleep(EVERY_S)


def show_updates(
    console: Console,
    updates: Iterator[Lines],
    build: Callable[[Lines], RenderableType] | None = None,
    *,
    as_json: bool = False,
    page: Path | None = None,
) -> None:
    """Show lines as they come: a live table on a terminal, else one line of text each.

    Args:
        console: receives them.
        updates: all lines so far, at every look.
        build: returns the table; None: that of a run, without what goes on within a round.
        as_json: print each line as JSON, on a terminal, too.
        page: written when the table changes, and once more at its end; None: no page.
    """
    build, shown, lines = build or build_tables, Lines(), Lines()
    is_table = console.is_terminal and not as_json
    with Live(build(lines), console=console, auto_refresh=False) if is_table else nullcontext() as live:
        for lines in updates:
            if page is not None:
                write_page(page, build(lines))
            if live is not None:
                live.update(build(lines), refresh=True)
                continue
            seen: Lines = []
            texts = [
                json.dumps(line, allow_nan=False) if as_json else line.get("now") or format_next(seen, line)
                for line in lines
            ]
            new = [text for line, text in zip(lines, texts, strict=True) if line not in shown]
            for text in new:
                console.print(text)
            # A resumed run first writes the rounds that it has: they are not shown a second time.
            shown = lines if new else shown
    if page is not None:
        write_page(page, build(lines), has_ended=True)


def build_site_table(lines: Lines, kit: Path) -> RenderableType:
    """Return what was asked of a site, and how far its trainings are."""
    return build_plain_table(f"site {kit.resolve().name}", ["now"], [[line["now"]] for line in lines])


def build_tables(lines: Lines, folder: Path | None = None) -> RenderableType:
    """Return the table of the rounds, and below it that of the sites.

    Args:
        lines: the rounds.
        folder: result folder, which shows how far each site is in the next one; None: not on this machine.
    """
    now = [] if folder is None else find_training(folder, lines[-1]["round"] if lines else 0)
    return Group(build_table(lines, now), build_sites_table(lines)) if lines else build_table(lines, now)


def build_sites_table(lines: Lines) -> Table:
    """Return a row for each site: what it contributed, its last metric, its spent budget, and why it is missing now."""
    metric, spent, rows = lines[-1]["metric"], lines[-1].get("spent_epsilon", {}), []
    for site in sorted({site for line in lines for site in line["sites_asked"]}):
        asked = [line for line in lines if site in line["sites_asked"]]
        values = [line.get("site_metrics", {}).get(site, {}).get(metric) for line in lines]
        value = next((f"{value:.3f}" for value in reversed(values) if value is not None), "-")
        contributed = f"{sum(site in line['sites_contributed'] for line in asked)} of {len(asked)}"
        epsilon = [f"{spent[site]:.2f}" if site in spent else "-"] if spent else []
        rows.append([site, contributed, value, *epsilon, _explain_absence(site, asked[-1])])
    columns = ["site", "contributed", str(metric), *(["epsilon"] if spent else []), "last request"]
    return build_plain_table("", columns, rows, left=("site", "last request"))


def _explain_absence(site: str, line: Mapping[str, Any]) -> str:
    """Return what became of the last request to a site, as one word or the code of the reason."""
    if site in line["sites_contributed"]:
        return "answered"
    if site in line["timed_out"]:
        return "did not reply in time"
    reason = line["rejected"].get(site) or line.get("excluded", {}).get(site)
    return str(reason).partition(":")[0] if reason else "did not contribute"


def build_table(lines: Lines, now: Sequence[str] = ()) -> Table:
    """Return the table of the last rounds, with what goes on now, the bytes so far and the time left below it."""
    title = "waiting for the first round ..."
    if lines:
        line = lines[-1]
        title = f"run {line['run']}: {line['metric']} ({line['unit']})" if line["unit"] else f"run {line['run']}"
    table = build_plain_table("", CELLS, map(format_cells, lines[-SHOWN_ROUNDS:]), left=("request",))
    # As Text: names that come from sites are shown as they are, and never read as markup.
    table.title, table.caption = Text(title), Text("\n").join(map(Text, [*now, _describe_total(lines)]))
    return table


def _describe_total(lines: Lines) -> str:
    sent = sum(line["bytes_up"] + line["bytes_down"] for line in lines)
    dense = sum(line["dense_bytes"] for line in lines)
    parts = [f"{format_bytes(sent)} in total"]
    if dense:
        parts.append(compare_with_dense(sent, dense))
    left = estimate_seconds_left(lines)
    if left is not None:
        parts.append(f"about {format_duration(left)} left" if left else "all rounds done")
    return ", ".join(parts)
