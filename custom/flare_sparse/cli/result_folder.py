"""The result folder of ``flare-sparse run``: which one is used, and what is refused before anything starts."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.checkpoint.locking import lock_folder
from ..core.errors import ConfigError, DiskFull, FlareSparseError
from ..results.runs.continuation import FINAL
from ..results.runs.folder import APPENDED_FILES, LAYER_COMPUTE
from ..results.runs.model_files import delete_models
from ..results.runs.results import AUDIT_FILE, AUDIT_FOLDER, EVALUATIONS
from ..results.runs.updates import UPDATES
from .local import ERRORS
from .outcome import LEAST_FREE, RunCommand, describe_disk, measure_free
from .resume import has_checkpoint

RECORD = (
    "summary.json",
    *APPENDED_FILES,
    "model_card.md",
    "metrics_summary.json",
    "round_metrics.jsonl",
    "job_id.txt",
    "evidence.zip",
    AUDIT_FILE,
    LAYER_COMPUTE,
)
"""Files of a finished run that a new run must not inherit; models are deleted with :func:`delete_models`."""
FOLDERS = (EVALUATIONS, ERRORS, FINAL, AUDIT_FOLDER, UPDATES)
"""Folders that describe the models and the sites of a finished run, or continue it."""

PATIENCE_S = 10.0
"""Seconds to wait for the processes of a killed command: those of FLARE's simulator end within two."""


def is_finished(out: Path) -> bool:
    """Return whether a result folder holds a finished run."""
    return (out / "summary.json").is_file()


def choose_default_folder(name: str, *, resume: bool, overwrite: bool) -> Path:
    """Return the result folder of a run without ``--out``: ``runs/NAME``, or ``runs/NAME-2`` if that run has finished.

    Args:
        name: name of the run.
        resume: the run is continued: the newest folder of this name is used.
        overwrite: the first folder is used whatever it holds.
    """
    base = Path("runs") / name
    if overwrite:
        return base
    number, folder = 1, base
    while is_finished(folder):
        following = base.with_name(f"{name}-{number + 1}")
        if resume and not following.exists():
            return folder
        number, folder = number + 1, following
    return folder


@contextmanager
def claim_result_folder(out: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Let no other command write to a result folder while the block runs; the folder is created if it does not exist.

    Args:
        out: result folder.
        patience_s: seconds to wait for another command that writes to it.

    Raises:
        ConfigError: another command writes to it, or it cannot be written.
        DiskFull: its disk has no space.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: this is a file; choose a folder, or a name that does not exist")
    try:
        lock = lock_folder(out, patience_s)
    except BlockingIOError as error:
        raise ConfigError(
            f"--out {out}: another flare-sparse command is writing to this folder. Wait for it, follow it with "
            f"flare-sparse watch {out}, or choose another --out"
        ) from error
    except OSError as error:
        raise _explain_unwritable(out, error) from error
    try:
        yield
    finally:
        os.close(lock)


def prepare_result_folder(command: RunCommand, *, resume: bool, overwrite: bool, is_deployed: bool) -> Path:
    """Prepare a result folder that :func:`claim_result_folder` has claimed, and return its absolute path.

    Args:
        command: the user's command, with the result folder.
        resume: the run that the folder holds is continued.
        overwrite: the run that the folder holds is deleted.
        is_deployed: the run's state is kept at a server, which resumes the job by itself.

    Raises:
        ConfigError: the folder cannot be written, or it holds a run that would be lost.
        DiskFull: its disk has too little space.
    """
    out = command.out
    if not resume and not overwrite:
        _check_for_a_run(command, is_deployed=is_deployed)
    try:
        with tempfile.TemporaryFile(dir=out) as file:
            file.write(bytes(100_000))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _explain_unwritable(out, error) from error
    _check_space(out)
    if overwrite and not resume:
        delete_record(out)
    return out.resolve()


def delete_record(out: Path) -> None:
    """Delete the record and the models of an earlier run, so that nothing of it is taken for the new one's."""
    delete_models(out)
    for name in RECORD:
        (out / name).unlink(missing_ok=True)
    for name in FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)


def _check_for_a_run(command: RunCommand, *, is_deployed: bool) -> None:
    out = command.out
    if is_finished(out):
        raise ConfigError(
            f"--out {out}: holds a finished run, which would be lost. Choose another folder, or replace it: "
            f"{command.format('--overwrite')}"
        )
    if not is_deployed and has_checkpoint(out):
        raise ConfigError(
            f"--out {out}: holds an interrupted run. Continue it from its last committed round: "
            f"{command.format('--resume')}\nor start again from the beginning: {command.format('--overwrite')}"
        )


def _explain_unwritable(out: Path, error: OSError) -> FlareSparseError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(describe_disk(out, measure_free(out)))
    return ConfigError(f"--out {out}: cannot be written ({error.strerror}); choose another folder")


def _check_space(out: Path) -> None:
    free = measure_free(out)
    if free is not None and free < LEAST_FREE:
        raise DiskFull(describe_disk(out, free))
