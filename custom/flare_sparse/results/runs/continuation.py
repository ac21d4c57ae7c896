"""Continuation of a finished run with more rounds: its last checkpoints become those of a longer run.

The checkpoint of the last committed round holds the state before the final evaluation. A longer run that resumes from
it is therefore the run that had more rounds from the start, bit for bit, if the method's rounds do not depend on their
number (``Need.NUMBER_OF_ROUNDS``).
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...config.choice import Choice
from ...config.loading import load_config, serialize_job
from ...config.needs import CONTINUATION, find_conflicts
from ...config.schema import JobConfig, RunConfig
from ...config.study import Study
from ...config.withdrawals import Withdrawals
from ...core.checkpoint.store import Store, iterate_differences
from ...core.errors import ConfigError
from ...rounds.endpoints.events import SERVER
from .record import CONFIG, SUMMARY

UNFINISHED = "checkpoints"
"""Folder in the result folder with the checkpoints of an unfinished run."""
FINAL = "final_checkpoints"
"""Folder in the result folder that holds the last checkpoint of each end of a finished run."""

EXPIRED = "{folder}: its checkpoints are older than federation.checkpoint_days and were deleted"


def keep_final_checkpoints(checkpoints: Path, *, has_history: bool = False) -> None:
    """Keep the last checkpoints of every end up to the last commit beside ``checkpoints``, and delete all others.

    Args:
        checkpoints: folder of the checkpoints of a finished run, in its result folder.
        has_history: keep those of earlier rounds, too.
    """
    for server in checkpoints.glob(f"*/{SERVER}"):
        committed = Store(server, {}).find_newest()
        for folder in server.parent.iterdir():
            store = Store(folder, {})
            # A site's checkpoints after the last commit belong to the final evaluation, which a longer run discards.
            kept = [] if committed is None else _list_last(folder, committed + 1)
            for number in store.list_numbers():
                if not kept or number > kept[-1] or (number not in kept and not has_history):
                    shutil.rmtree(folder / f"{number:08d}", ignore_errors=True)
    final = checkpoints.with_name(FINAL)
    shutil.rmtree(final, ignore_errors=True)
    # Renamed: --start last must not find the checkpoints of a finished run.
    if any(checkpoints.glob(f"*/{SERVER}/[0-9]*")):
        checkpoints.replace(final)
    else:
        shutil.rmtree(checkpoints, ignore_errors=True)


def expire_checkpoints(run: Path, days: int | None) -> bool:
    """Delete the checkpoints in a result folder whose time is over, and return whether there were any.

    Args:
        run: result folder.
        days: days since the newest checkpoint was written; None: no limit. An interrupted run has one day at least.
    """
    is_expired = False
    for name, least in () if days is None else ((FINAL, 0), (UNFINISHED, 1)):
        root = run / name
        written = [path.stat().st_mtime for path in root.glob("*/*/[0-9]*")]
        if written and time.time() - max(written) >= max(days or 0, least) * 86_400:
            shutil.rmtree(root)
            is_expired = True
    return is_expired


def copy_checkpoints(folder: Path, open_store: Callable[[str], Store], below: int | None = None) -> None:
    """Copy the last checkpoint of the server and the last two of every site.

    Args:
        folder: folder of the checkpoints of one run.
        open_store: returns the store of an end (``"server"`` or a site's name) of the other run.
        below: consider only checkpoints with a smaller number.

    Raises:
        CheckpointError: a copy could not be written.
    """
    for end in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        for number in _list_last(folder / end, below):
            Store(folder / end, {}).copy_newest(open_store(end), number + 1)


def _list_last(folder: Path, below: int | None = None) -> list[int]:
    """Return the numbers of the checkpoints from which an end continues, ascending.

    For a site these are two: the last update may be one that did not count, after which the site starts from the
    memory before it.
    """
    store = Store(folder, {})
    newest = store.find_newest(below)
    if newest is None:
        return []
    before = None if folder.name == SERVER else store.find_newest(newest)
    return [newest] if before is None else [before, newest]


def prepare_continuation(run: Path, study: Study, out: Path, folder: str) -> None:
    """Give a run the last checkpoints of a shorter one, so that it can resume from them. ``run`` is not changed.

    Args:
        run: result folder of the finished run.
        study: the longer run.
        out: its result folder.
        folder: name of the folder of checkpoints in ``out``.

    Raises:
        ConfigError: the run cannot be continued with these settings.
        CheckpointError: a checkpoint could not be written.
    """
    if not (run / SUMMARY).is_file():
        raise ConfigError(
            f"--start {run}: no record of a finished run; expected last, new, or the result folder of a finished run. "
            f"An interrupted one needs --out {run} --start last"
        )
    # Read them with the longer run's code: the folder's own may be somebody else's, and is not executed.
    choices: dict[str, Choice[Any]] = {"method": study.config.method, "task": study.config.task}
    classes = {section: choice.entry for section, choice in choices.items() if choice.key != "name"}
    finished = Study(load_config(run / CONFIG, classes=classes), study.file)
    # Check them before anything is built from these settings, which may name other modules.
    _check_settings(run, finished.config, study.config)
    if expire_checkpoints(run, finished.config.federation.checkpoint_days):
        raise ConfigError(f"--start {EXPIRED.format(folder=run)}")
    if conflicts := find_conflicts(finished.config, features=[CONTINUATION]):
        rounds = study.config.method.config.rounds
        raise ConfigError(f"{run} cannot continue with {rounds} rounds: {'; '.join(conflicts)}")
    source = run / FINAL / f"{finished.config.name}-{finished.run_id}"
    if Store(source / SERVER, {}).find_newest() is None:
        raise ConfigError(
            f"--start {run}: {source / SERVER} holds no checkpoint, so the run cannot be continued. Runs with "
            "--env sim, local and poc keep one; it may have been deleted"
        )
    if out.resolve() == run.resolve() or (out / SUMMARY).is_file():
        raise ConfigError(f"--out {out}: holds a finished run; choose another folder for the longer run")
    # Copied beside and renamed: an interrupted command must not leave a part of the checkpoints to --start last.
    unfinished = out / f"{folder}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(out / folder, ignore_errors=True)
    Withdrawals.read(run).inherit(out)
    copy_checkpoints(source, lambda end: study.open_checkpoints(unfinished, end))
    unfinished.replace(out / folder)


def _check_settings(run: Path, finished: RunConfig, config: RunConfig) -> None:
    """Refuse settings with which a finished run cannot be continued.

    Raises:
        ConfigError: settings other than the number of rounds differ, or there are no more rounds than the run has.
    """
    if differences := list(iterate_differences(_drop_rounds(finished), _drop_rounds(config))):
        raise ConfigError(
            f"--start {run}: only method.rounds may differ from the finished run, but also do "
            f"{'; '.join(differences[:6])}. Use its config.yaml, {run / 'config.yaml'}"
        )
    rounds, finished_rounds = config.method.config.rounds, finished.method.config.rounds
    if rounds <= finished_rounds:
        raise ConfigError(
            f"--start {run}: method.rounds is {rounds}, and the run has {finished_rounds} already; set a "
            f"larger total, such as method.rounds={2 * finished_rounds}"
        )


def _drop_rounds(config: JobConfig) -> dict[str, Any]:
    """Return the settings on which the first rounds depend."""
    settings = serialize_job(config)
    settings["method"] = {name: value for name, value in settings["method"].items() if name != "rounds"}
    return {name: value for name, value in settings.items() if name != "name"}
