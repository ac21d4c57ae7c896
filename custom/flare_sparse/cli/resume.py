"""Checkpoints of ``flare-sparse run`` in the result folder, ``--resume`` and ``--continue-from``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ..config.assemble import Assembly, assemble, open_checkpoints
from ..config.schema import RunConfig
from ..config.user_tasks import load_task
from ..core.checkpoint.store import Store
from ..core.errors import CheckpointError, ConfigError
from ..results.runs.continuation import FINAL, copy_key_contexts, prepare_continuation
from ..results.runs.folder import SUMMARY
from ..rounds.endpoints.server import SERVER
from ..rounds.federation.events import STEP_BACK
from .console import out as stdout
from .keys import FOLDER as KEYS

FOLDER = "checkpoints"
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue an interrupted run in the same --out from its last committed round")
]

StepBack = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Only with --resume: discard the last N commits first and repeat their rounds. For a poisoned commit: "
        "most sites diverge from its model (E_DIVERGED, E_FINITE), or an update in it turns out to be wrong. Remove "
        "the cause first. The last two commits are kept, so one step is possible. Not for --env prod",
    ),
]

ContinueFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Continue a finished run, given by its result folder, up to the larger total of --rounds; the result is "
        "that of a run with all rounds at once. RUN is not changed. Default of --out then: RUN-ROUNDS. Not for --env "
        "prod, and not for methods whose schedule depends on the number of rounds",
    ),
]


def continue_run(run: Path, config: RunConfig, file: Path, out: Path | None, env: str, *, resume: bool) -> Path:
    """Prepare the result folder of a longer run with the last checkpoints of a finished one; return the folder.

    Args:
        run: result folder of the finished run.
        config: configuration of the longer run.
        file: where it was read from.
        out: result folder of the longer run; None: beside ``run``, named after the number of rounds.
        env: environment of the longer run.
        resume: whether --resume was given.

    Raises:
        ConfigError: the run cannot be continued with these settings, or in this environment.
        CheckpointError: a checkpoint could not be written.
    """
    if resume:
        raise ConfigError(
            "--resume and --continue-from exclude each other: --continue-from starts a longer run from a finished one, "
            "--resume goes on with that longer run after an interruption"
        )
    if env == "prod" or (env == "poc" and config.encrypted):
        reason = "the server deletes its checkpoints" if env == "prod" else "every federation has new keys"
        raise ConfigError(
            f"--continue-from does not apply to --env {env}, where {reason} after a run. Start a run of "
            f"{config.method.config.rounds} rounds without --continue-from"
        )
    run = run.resolve()
    folder = (out or run.with_name(f"{run.name}-{config.method.config.rounds}")).resolve()
    if folder != run and has_checkpoint(folder):
        raise ConfigError(
            f"--out {folder}: holds an interrupted run. If it is this continuation, go on with it: the same command "
            f"with --out {folder} --resume in place of --continue-from. Else choose another --out"
        )
    prepare_continuation(run, config, assemble(config, load_task(config, file.parent)), folder, FOLDER)
    if config.encrypted:
        copy_key_contexts(run / KEYS, folder / KEYS)
    return folder


def check_step_back(step_back: int | None, env: str, *, resume: bool, continue_from: Path | None) -> None:
    """Raises:
    ConfigError: --step-back does not apply to the environment or to the other options.
    """
    if step_back is None:
        return
    if env == "prod":
        raise ConfigError(
            "--step-back does not apply to --env prod, where the checkpoints lie at the server: abort the job, rename "
            'the server\'s newest checkpoint (docs/reliability.md, "Malicious sites") and submit it again'
        )
    if continue_from is not None or not resume:
        reason = " and not for --continue-from" if continue_from is not None else "; add --resume"
        raise ConfigError(f"--step-back discards commits of an interrupted run: it is for --resume{reason}")


def has_checkpoint(out: Path) -> bool:
    """Return whether a result folder holds a checkpoint of an unfinished run."""
    return any(path.name.isdigit() for path in out.glob(f"{FOLDER}/*/{SERVER}/*"))


def prepare_checkpoints(config: RunConfig, assembly: Assembly, out: Path, *, resume: bool, step_back: int = 0) -> Path:
    """Return the checkpoint folder; it is emptied unless a run is resumed.

    Args:
        config: configuration of the run.
        assembly: its parts.
        out: result folder.
        resume: keep the checkpoints.
        step_back: number of the server's newest checkpoints to set aside.

    Raises:
        CheckpointError: there is no checkpoint, or it belongs to another job; the text names the settings that differ;
            or there are too few to step back.
    """
    root = out / FOLDER
    if not resume:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(out / FINAL, ignore_errors=True)
        return root
    store = open_checkpoints(config.job, assembly, root, SERVER)
    if store.list_numbers():
        _step_back(store, step_back)
        return root
    # A changed setting changes the job's folder below root: compare with the others there and name the difference.
    for folder in sorted(root.glob(f"*/{SERVER}")):
        Store(folder, store.identity).check()
    if (out / SUMMARY).is_file():
        raise CheckpointError(
            f"--resume: {root} holds no checkpoint, because the run in {out} has finished. For more rounds: "
            f"flare-sparse run {out / 'config.yaml'} --rounds N --continue-from {out}"
        )
    raise CheckpointError(
        f"--resume: {root} holds no checkpoint: the run committed no round. Leave --resume out to start again"
    )


def _step_back(store: Store, count: int) -> None:
    """Set the newest undamaged checkpoints aside.

    Raises:
        CheckpointError: no checkpoint would be left; nothing is set aside.
    """
    if not count:
        return
    # The identity is checked first: a commit of another job must stay.
    store.check()
    intact = store.list_intact()
    # Without a checkpoint the run would silently start from round 1, which --overwrite says openly.
    if count >= len(intact):
        raise CheckpointError(
            f"--step-back {count}: {store.folder} holds {len(intact)} intact checkpoint{'s' * (len(intact) != 1)}, so "
            f"the run can step back by at most {max(len(intact) - 1, 0)}. To repeat all rounds, run again with "
            "--overwrite instead of --resume and --step-back"
        )
    for _ in range(count):
        stdout.print(STEP_BACK.format(number=store.step_back()), markup=False)
