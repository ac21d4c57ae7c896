"""Run a job in FLARE's simulator: one process per site, the sites' data described at the sites, quiet on the screen."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvflare.recipe import SimEnv

from ...data.source import SITE_FILE_VARIABLE
from ...errors import ConfigError, FlareSparseError
from ...runs.model_files import delete_models
from ..checkpoints import CHECKPOINTS_VARIABLE, OFF
from ..controller import RESULTS
from ..he_keys import KEYS_VARIABLE
from ..recipe import SparseRecipe
from ..site.allow_list import allow


class JobFailed(FlareSparseError):
    """The job ended without a result; the logs say why."""

    code = "E_JOB"


def simulate(
    recipe: SparseRecipe,
    sites: Sequence[str],
    site_files: str,
    out: Path,
    *,
    allowed: Sequence[str] = (),
    checkpoints: Path | None = None,
    processes: int | None = None,
    keys: Path | None = None,
    on_round: Callable[[dict[str, Any]], None] = lambda line: None,
) -> dict[str, Any]:
    """Run a recipe in the simulator and collect its record in ``out``.

    Args:
        recipe: the job.
        sites: names of the sites.
        site_files: where each site's site file lies, with ``{site}`` in it.
        out: result folder; FLARE's workspace and log are kept in it.
        allowed: class paths beside ours that the simulated sites allow (the user's own task).
        checkpoints: where server and sites keep them, and find those of a run that was cut short; None: nowhere.
        processes: how many sites run at a time; the others wait their turn, and a site that comes back to a process has
            lost what it held and is sent everything. None: a process for each site.
        keys: folder with the keys of an encrypted run.
        on_round: called with each line of ``rounds.jsonl`` as it is written.

    Returns:
        The summary.

    Raises:
        ConfigError: the folder cannot be used (the simulator breaks on a path with a space).
        JobFailed: there is no result.
    """
    out = out.resolve()
    if any(character.isspace() for character in str(out)):
        raise ConfigError(f"--out {str(out)!r} contains a space, which FLARE's simulator cannot handle; choose another")
    workspace = out / "workspace" / recipe.name
    shutil.rmtree(workspace, ignore_errors=True)
    (workspace / "local").mkdir(parents=True)
    allow(workspace, allowed)
    record = workspace / "server" / "simulate_job" / "app_server" / RESULTS
    log = out / "flare.log"
    variables = {
        SITE_FILE_VARIABLE: site_files,
        CHECKPOINTS_VARIABLE: str(checkpoints or OFF),
        KEYS_VARIABLE: str(keys or ""),
    }
    with _environment(variables), _following(record / "rounds.jsonl", on_round):
        with _output_to(log):
            try:
                recipe.execute(
                    SimEnv(clients=list(sites), num_threads=processes, workspace_root=str(out / "workspace"))
                )
            except RuntimeError as error:
                raise JobFailed(_why(log, workspace)) from error
    if not (record / "summary.json").is_file():
        raise JobFailed(_why(log, workspace))
    delete_models(out)
    for file in sorted(record.iterdir()):
        shutil.copy2(file, out / file.name)
    metrics = workspace / "server" / "simulate_job" / "metrics"
    for name in ("metrics_summary.json", "round_metrics.jsonl"):
        if (metrics / name).is_file():
            shutil.copy2(metrics / name, out / name)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def _why(log: Path, workspace: Path) -> str:
    """What the server and the sites said first, and where to read on."""
    reports = [f"{p.parts[-3]}: {p.read_text().strip()}" for p in sorted(workspace.glob("*/*/site_error.txt"))]
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    server = [line for line in lines if "FATAL_SYSTEM_ERROR" in line] or [line for line in lines if "ERROR" in line]
    said = [*server[:1], *reports] or ["no error was logged"]
    return "the job ended without a result.\n  " + "\n  ".join(said) + f"\nFLARE's log: {log}"


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Standard output and error of this process and of those it starts go to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for descriptor, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)


@contextmanager
def _following(path: Path, on_line: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Call ``on_line`` with each JSON line that is appended to a file while the block runs."""
    done = threading.Event()

    def follow() -> None:
        position = 0
        while True:
            last = done.is_set()
            if path.is_file():
                with path.open() as file:
                    file.seek(position)
                    while (line := file.readline()).endswith("\n"):
                        position = file.tell()
                        on_line(json.loads(line))
            if last:
                return
            done.wait(0.2)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        done.set()
        follower.join()
