"""A result folder: which one a run uses, what it may replace, and how a run starts, continues and completes in it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ...config.loading import dump_config
from ...config.schema import MIN_COMMITS, FederationConfig
from ...config.study import Study
from ...config.user_code import CODE_FOLDER
from ...core.checkpoint.store import Store
from ...core.checkpoint.writing import lock_folder
from ...core.errors import CheckpointError, ConfigError, DiskFull
from ...rounds.endpoints.events import SERVER
from .continuation import EXPIRED, FINAL, UNFINISHED, expire_checkpoints, keep_final_checkpoints, prepare_continuation
from .model_files import delete_models
from .received import check_links
from .record import APPENDED_FILES, CONFIG, SUMMARY
from .results import AUDIT_FILE, AUDIT_FOLDER, EVALUATIONS

CHECKPOINTS, ERRORS = UNFINISHED, "site_errors"
"""Folders of an unfinished run's checkpoints, and of reports of sites that failed."""
LEAST_FREE = 10_000_000
"""Bytes that must be free in the result folder before a run starts."""
RECORD = (
    SUMMARY,
    *APPENDED_FILES,
    "model_card.md",
    "metrics_summary.json",
    "round_metrics.jsonl",
    "job_id.txt",
    "dpia.md",
    AUDIT_FILE,
)
"""Files of a finished run that a new run must not inherit; models are deleted with :func:`delete_models`."""
FOLDERS = (CHECKPOINTS, EVALUATIONS, ERRORS, FINAL, AUDIT_FOLDER)
"""Folders that describe the models and the sites of a finished run, or continue it."""


@dataclass(frozen=True)
class RunFolder:
    """A result folder, and how a run starts in it.

    Attributes:
        path: the folder.
        resume: the run that it holds is continued from its last committed round.
        replaces: the run that it holds is deleted by :meth:`clear`.

    Examples:
        >>> RunFolder(Path("runs/study")).choose().path
        PosixPath('runs/study')
    """

    path: Path
    resume: bool = False
    replaces: bool = False

    @classmethod
    def open(cls, name: str, study: Study, start: str | Path | None = None, out: Path | None = None) -> RunFolder:
        """Return the folder of a run; a finished run that it continues gives it its checkpoints.

        Args:
            name: name of the run, for a run that names no folder.
            study: the run.
            start: ``last`` continues the run that the folder holds, ``new`` replaces it, and the result folder of a
                finished run is continued; None: a new run.
            out: its folder; None: see :meth:`choose` and :meth:`continue_run`.

        Raises:
            ConfigError, CheckpointError: as :meth:`continue_run`.
        """
        if start not in (None, "last", "new"):
            return cls.continue_run(Path(start), study, out)
        folder = cls(out or Path("runs") / name, resume=start == "last", replaces=start == "new")
        return folder if out else folder.choose()

    def choose(self) -> RunFolder:
        """Return this folder, or with ``-2`` after its name the next one if its run has finished, and so on.

        The newest folder of this name is that of a run that is continued; the first one is replaced whatever it holds.
        """
        folder, number = self, 1
        while folder.is_finished and not folder.replaces:
            following = replace(folder, path=self.path.with_name(f"{self.path.name}-{number + 1}"))
            if folder.resume and not following.path.exists():
                break
            folder, number = following, number + 1
        return folder

    @classmethod
    def continue_run(cls, run: Path, study: Study, out: Path | None = None) -> RunFolder:
        """Return the folder of a longer run, with the last checkpoints of a finished one, which is not changed.

        Args:
            run: result folder of the finished run.
            study: the longer run.
            out: its result folder; None: beside ``run``, named after the number of rounds.

        Raises:
            ConfigError: the run cannot be continued with these settings, or the folder holds another run.
            CheckpointError: a checkpoint could not be written.
        """
        check_links(run)
        run, rounds = run.resolve(), study.config.method.config.rounds
        folder = cls((out or run.with_name(f"{run.name}-{rounds}")).resolve(), resume=True)
        if folder.path != run and folder.has_checkpoint:
            raise ConfigError(
                f"--out {folder.path}: holds an interrupted run. If it is this continuation, go on with it: the same "
                f"command with --out {folder.path} --start last. Else choose another --out"
            )
        prepare_continuation(run, study, folder.path, CHECKPOINTS)
        return folder

    @property
    def is_finished(self) -> bool:
        """Whether the folder holds a finished run."""
        return (self.path / SUMMARY).is_file()

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder holds a checkpoint of an unfinished run."""
        return any(path.name.isdigit() for path in self.path.glob(f"{CHECKPOINTS}/*/{SERVER}/*"))

    @contextmanager
    def claim(self, patience_s: float = 0.0) -> Iterator[None]:
        """Let no other command write to the folder while the block runs; it is created if it does not exist.

        Args:
            patience_s: seconds to wait for another command that writes to it.

        Raises:
            ConfigError: another command writes to it, it cannot be written, or a link in it leads elsewhere.
            DiskFull: its disk has no space.
        """
        out = self.path
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out {out}: this is a file; choose a folder, or a name that does not exist")
        check_links(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            # The lock may be there already, and a quota shows in no number of free bytes.
            with tempfile.TemporaryFile(dir=out) as file:
                file.write(bytes(100_000))
                file.flush()
                os.fsync(file.fileno())
            lock = lock_folder(out, patience_s)
        except BlockingIOError as error:
            raise ConfigError(
                f"--out {out}: another flare-sparse command is writing to this folder. Wait for it, follow it with "
                f"flare-sparse watch {out}, or choose another --out"
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(describe_disk(out, measure_free(out))) from error
            raise ConfigError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from error
        try:
            yield
        finally:
            os.close(lock)

    def prepare(self, *, keeps_state: bool = True, advise: Callable[[str], str] = str) -> RunFolder:
        """Prepare the folder, which :meth:`claim` has claimed, and return it with its absolute path.

        Args:
            keeps_state: the checkpoints of a run lie in the folder, and not at a server.
            advise: returns what the user has to type for another start, such as ``new``.

        Raises:
            ConfigError: the folder holds a run that would be lost.
            DiskFull: its disk has too little space.
        """
        is_new = not self.resume and not self.replaces
        if is_new and self.is_finished:
            raise ConfigError(
                f"--out {self.path}: holds a finished run, which would be lost. Choose another folder, or replace it: "
                f"{advise('new')}"
            )
        if is_new and keeps_state and self.has_checkpoint:
            raise ConfigError(
                f"--out {self.path}: holds an interrupted run. Continue it from its last committed round: "
                f"{advise('last')}\nor start again from the beginning: {advise('new')}"
            )
        free = measure_free(self.path)
        if free is not None and free < LEAST_FREE:
            raise DiskFull(describe_disk(self.path, free))
        return replace(self, path=self.path.resolve())

    def clear(self) -> None:
        """Delete the checkpoints of an earlier run, and with ``replaces`` its record and models, too.

        A run calls it when nothing can be refused any more; it does nothing for one that is resumed.
        """
        if self.resume:
            return
        for name in FOLDERS if self.replaces else (CHECKPOINTS, FINAL):
            shutil.rmtree(self.path / name, ignore_errors=True)
        if self.replaces:
            delete_models(self.path)
            for name in RECORD:
                (self.path / name).unlink(missing_ok=True)

    def open_checkpoints(self, study: Study) -> Path:
        """Return the folder of the checkpoints, which a run that is resumed must have.

        Those that are older than ``federation.checkpoint_days`` are deleted.

        Raises:
            CheckpointError: there is no checkpoint, or it belongs to another job; the text names the settings that
                differ.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        root = self.path / CHECKPOINTS
        if not self.resume:
            return root
        if expire_checkpoints(self.path, study.config.federation.checkpoint_days):
            raise CheckpointError(f"--start last: {EXPIRED.format(folder=self.path)}. Leave --start out to start again")
        store = study.open_checkpoints(root, SERVER)
        if store.list_numbers():
            return root
        # A changed setting changes the job's folder below root: compare with the others there and name the difference.
        for folder in sorted(root.glob(f"*/{SERVER}")):
            Store(folder, store.identity).check()
        if self.is_finished:
            raise CheckpointError(
                f"--start last: {root} holds no checkpoint, because the run in {self.path} has finished. For more "
                f"rounds: flare-sparse run {self.path / CONFIG} --set method.rounds=N --start {self.path}"
            )
        raise CheckpointError(
            f"--start last: {root} holds no checkpoint: the run committed no round. Leave --start out to start again"
        )

    def keep_study(self, study: Study) -> None:
        """Write the configuration and the user's code, from which the finished run can be loaded and run again."""
        (self.path / CONFIG).write_text(dump_config(study.config), encoding="utf-8")
        copy_user_code(study.user_code, self.path)

    def complete(self, federation: FederationConfig) -> None:
        """Keep the last checkpoints for a continuation: from now on the run cannot be resumed."""
        keep_final_checkpoints(self.path / CHECKPOINTS, has_history=federation.kept_commits > MIN_COMMITS)
        expire_checkpoints(self.path, federation.checkpoint_days)


def describe_disk(path: Path, free: int | None) -> str:
    """Return which disk is full, for which path, and how many bytes are free."""
    mount = path.resolve()
    while not mount.is_mount():
        mount = mount.parent
    return (
        f"the disk {mount} is full: {'?' if free is None else f'{free:,}'} bytes free for {path}. Free some space, or "
        "choose another --out"
    )


def measure_free(path: Path) -> int | None:
    """Return the free bytes of the disk of a path that may not exist yet; None: it cannot be told."""
    folder = path.resolve()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def copy_user_code(code: Sequence[Path], folder: Path) -> None:
    """Copy the user's files and packages into the folder ``code`` below a folder; do nothing if there are none."""
    for source in code:
        target = folder / CODE_FOLDER / source.name
        if source.resolve() == target.resolve():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy2(source, target)
