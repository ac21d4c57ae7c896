"""Run a job in FLARE's simulator: one process per site, FLARE's output in a log file, the record in a result folder.

A site's process that dies is noticed here; the simulator itself only logs it.
"""

import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from nvflare.recipe import SimEnv
from nvflare.recipe.spec import Recipe

from ...config.policy.policy import POLICY_FILE
from ...core.environment import set_environment
from ...core.errors import ConfigError
from ...core.observer import SILENT, Observer
from ...core.threads import run_beside
from ...results.runs.model_files import SITE_MODELS, find_site_models, replace_record
from ...results.runs.record import ROUNDS, GrowingRecord
from ...tasks.data.source import SITE_FILE_VARIABLE
from ..checkpoints import CHECKPOINTS_VARIABLE, OFF
from ..controller import RESULTS
from ..recipe import SparseRecipe
from ..session import SITE_MODELS_VARIABLE
from ..site.setup import allow_classes
from ..tracking import FOLDERS
from ..watchdog import COMMAND_VARIABLE, end_processes, identify_command
from ..workspace import KITS_VARIABLE
from .connection import JobFailed

CHECK_S = 1.0
GRACE_S = 10.0
_DEATH = re.compile(rb"(?:Subprocess died for|Communication error with) client ([\w.@-]+?)(?=[,:\s])")
Follow = Callable[[], AbstractContextManager[None]]
_NO_START = b"Failed to create connection to the child process"


@contextmanager
def watch_site_processes(log: Path, workspace: Path, grace_s: float = GRACE_S) -> Iterator[list[str]]:
    """End the simulation of a workspace when a site's process dies; otherwise the others wait for it to the timeout.

    Args:
        log: FLARE's log.
        workspace: FLARE's workspace, which the simulation's processes name in their command lines.
        grace_s: seconds in which the simulation may still end by itself.

    Yields:
        A list that receives what has died.
    """
    dead = list[str]()

    def watch(has_ended: threading.Event) -> None:
        for text in _read_lines(log, has_ended, CHECK_S, once=True):
            if found := _find_death(text):
                dead.append(found)
                if not has_ended.wait(grace_s):
                    end_processes(list_simulation(workspace))
                return

    with run_beside(watch):
        yield dead


def list_simulation(workspace: Path) -> list[psutil.Process]:
    """Return the processes below this one whose command line names a workspace."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            # It has ended in the meantime.
            continue
        if any(word.startswith(str(workspace)) for word in words):
            found.append(process)
    return found


def _find_death(text: bytes) -> str:
    """Return whose process has died, from lines of FLARE's log; empty: none."""
    match = _DEATH.search(text)
    if match:
        return f"the process of {match[1].decode()} died"
    return "the process of a site did not start" if _NO_START in text else ""


@dataclass(frozen=True)
class Workplace:
    """What the simulated server and sites find on their machines.

    Attributes:
        sites: names of the sites.
        site_files: path of their site files, with ``{site}`` in place of the name.
        allowed_classes: further class paths that the sites allow, such as that of a user task.
        checkpoints: folder of the checkpoints of server and sites; None: the run cannot be resumed.
        processes: number of sites that run at a time. The others wait for a free process; a site that starts again in a
            new process has lost the base and receives the full model. None: one process for each site.
        kits: folder with files of startup kits, which a simulation lacks.
        policy: policy file that the server and every site follow; None: the default policy.
    """

    sites: Sequence[str]
    site_files: str
    allowed_classes: Sequence[str] = ()
    checkpoints: Path | None = None
    processes: int | None = None
    kits: Path | None = None
    policy: Path | None = None


STARTS = 3
"""How often a simulation starts that ends before its first round, because a site's process is lost."""


def simulate(recipe: SparseRecipe, workplace: Workplace, out: Path, observer: Observer = SILENT) -> dict[str, Any]:
    """Run a recipe in the simulator, and collect its record in ``out``.

    Args:
        recipe: the job.
        workplace: what server and sites find on their machines.
        out: result folder; FLARE's workspace and log are kept in it.
        observer: sees each line of ``rounds.jsonl`` as it is written, and hears of a simulation that starts again.

    Returns:
        The summary of the run.

    Raises:
        ConfigError: the path contains a space, which FLARE's simulator cannot handle.
        JobFailed: the job ended without a result.
    """
    out = resolve_folder(out)
    growing = GrowingRecord(out)
    server = _find_server_folder(out, recipe.name)
    record = server / "app_server" / RESULTS

    def append_round(line: dict[str, Any]) -> None:
        growing.append([line])
        observer.see_round(line)

    follow = partial(_follow_lines, record / ROUNDS, append_round)
    _execute(recipe, workplace, out, record / "summary.json", observer, follow)
    replace_record(record, out)
    workspace = out / "workspace" / recipe.name
    _copy_site_models(workspace, out)
    for name in ("metrics_summary.json", "round_metrics.jsonl"):
        if (server / "metrics" / name).is_file():
            shutil.copy2(server / "metrics" / name, out / name)
    for name in FOLDERS.values():
        if (server / name).is_dir():
            shutil.copytree(server / name, out / name, dirs_exist_ok=True)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def simulate_statistics(
    recipe: Recipe, workplace: Workplace, out: Path, result: str, observer: Observer = SILENT
) -> Any:
    """Run a recipe of federated statistics in the simulator and return what it wrote.

    Args:
        recipe: the job.
        workplace: as in :func:`simulate`.
        out: folder of FLARE's workspace and log.
        result: path of the statistics in the server's job folder.
        observer: hears of a simulation that starts again.

    Raises:
        ConfigError: as in :func:`simulate`.
        JobFailed: the job ended without statistics.
    """
    out = resolve_folder(out)
    file = _find_server_folder(out, recipe.name) / result
    _execute(recipe, workplace, out, file, observer)
    return json.loads(file.read_text(encoding="utf-8"))


def resolve_folder(out: Path) -> Path:
    """Return the absolute path of a result folder, which must have no space."""
    out = out.resolve()
    if any(character.isspace() for character in str(out)):
        raise ConfigError(f"--out {str(out)!r} contains a space, which FLARE cannot handle; choose another folder")
    return out


def _find_server_folder(out: Path, name: str) -> Path:
    return out / "workspace" / name / "server" / "simulate_job"


def _execute(
    recipe: Recipe, workplace: Workplace, out: Path, result: Path, observer: Observer, follow: Follow = nullcontext
) -> None:
    """Run a recipe in the simulator until the server has written ``result``; ``follow`` lasts as long as a start.

    FLARE's simulator loses about one of 400 site processes while it starts them, each in a thread of its own: the fork
    of one thread inherits the socket by which another has just found a free port, so the other connects to that copy,
    which disappears. The simulation of a job without a committed round therefore starts again.
    """
    workspace, log = out / "workspace" / recipe.name, out / "flare.log"
    # Each site runs in its own process, which inherits only the environment.
    variables = {
        SITE_FILE_VARIABLE: workplace.site_files,
        CHECKPOINTS_VARIABLE: str(workplace.checkpoints or OFF),
        KITS_VARIABLE: str(workplace.kits or ""),
        SITE_MODELS_VARIABLE: str(workspace),
        COMMAND_VARIABLE: identify_command(),
    }
    environment = SimEnv(
        clients=list(workplace.sites), num_threads=workplace.processes, workspace_root=str(workspace.parent)
    )
    for start in range(1, STARTS + 1):
        _create_workspace(workspace, workplace)
        cause = ""
        with set_environment(variables), follow(), redirect_output(log), watch_site_processes(log, workspace) as dead:
            try:
                recipe.execute(environment)
            except RuntimeError as error:
                cause = str(error)
        # The simulator's exit code does not tell whether the job ended well: only the result proves it.
        if result.is_file() and not cause:
            return
        rounds = result.with_name(ROUNDS)
        if not dead or start == STARTS or (rounds.is_file() and rounds.stat().st_size):
            raise _describe_end(log, workspace, dead, cause)
        kept = log.replace(out / f"flare.{start}.log")
        observer.say(f"{dead[0]} before the first round: the simulation starts again (FLARE's log: {kept})")


def _create_workspace(workspace: Path, workplace: Workplace) -> None:
    """Create the empty workspace of a job, with what the simulated server and sites share."""
    shutil.rmtree(workspace, ignore_errors=True)
    (workspace / "local").mkdir(parents=True)
    allow_classes(workspace, workplace.allowed_classes, at_server=True)
    if workplace.policy:
        shutil.copy2(workplace.policy, workspace / "local" / POLICY_FILE)


def _copy_site_models(workspace: Path, out: Path) -> None:
    """Copy the own models of the sites that took part in the final evaluation."""
    last = json.loads((out / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    models = find_site_models(workspace)
    for site in sorted(models.keys() & set(last["sites_contributed"])):
        (out / SITE_MODELS).mkdir(exist_ok=True)
        shutil.copy2(models[site], out / SITE_MODELS / models[site].name)


def _describe_end(log: Path, workspace: Path, dead: Sequence[str], cause: str = "") -> JobFailed:
    """Return the error of a simulation without a result: the first error of the server and the reports of the sites.

    Args:
        log: FLARE's log.
        workspace: FLARE's workspace.
        dead: says which process of a site died; empty: none.
        cause: FLARE's own error.
    """
    if dead:
        return JobFailed(
            f"{dead[0]}: it was killed, most often because memory ran out. The simulation was ended, because its round "
            f"would wait for this site until federation.task_timeout_s.\nFLARE's log: {log}",
            remedy="if memory ran out, simulate fewer sites, or lower method.training.batch_size",
        )
    reports = [f"{p.parts[-3]}: {p.read_text().strip()}" for p in sorted(workspace.glob("*/*/site_error.txt"))]
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    server = [line for line in lines if "FATAL_SYSTEM_ERROR" in line] or [line for line in lines if "ERROR" in line]
    # FLARE reports a killed process by the negative number of the signal.
    is_killed = f"return code -{int(signal.SIGKILL)}" in cause
    unlogged = "FLARE's simulator was killed, most often because memory ran out" if is_killed else "no error was logged"
    errors = "\n  ".join([*server[:1], *reports] or [unlogged])
    return JobFailed(f"the job ended without a result.\n  {errors}\nFLARE's log: {log}")


@contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """Send standard output and error of this process, and of those that it starts, to a file."""
    # Redirect the file descriptors, which FLARE's processes inherit, and not sys.stdout.
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


@contextmanager
def _follow_lines(path: Path, on_line: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Call ``on_line`` with each new JSON line of a file while the block runs."""

    def follow(has_ended: threading.Event) -> None:
        seen = set[bytes]()
        for text in _read_lines(path, has_ended, 0.2):
            # A step back replaces the file by one with fewer lines.
            for line in text.splitlines():
                if line not in seen:
                    seen.add(line)
                    on_line(json.loads(line))

    with run_beside(follow):
        yield


def _read_lines(path: Path, has_ended: threading.Event, pause_s: float, *, once: bool = False) -> Iterator[bytes]:
    """Yield the complete lines of a file that grows, after each pause: all of them, or each line once."""
    position, is_last = 0, False
    while not is_last:
        # One more pass follows the end: what is written last may say why it ended.
        is_last = has_ended.wait(pause_s)
        text = b""
        if path.is_file():
            with path.open("rb") as file:
                file.seek(position)
                text = file.read()
        # A line without its end is still being written.
        text = text[: text.rfind(b"\n") + 1]
        position += len(text) if once else 0
        yield text
