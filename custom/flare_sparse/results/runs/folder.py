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
from ...core.errors import CheckpointError, ConfigError, DiskFull, FlareSparseError
from ...core.observer import SILENT, Observer
from ...privacy.encryption import KeyContexts
from ...rounds.endpoints.server import SERVER
from ...rounds.federation.events import STEP_BACK
from .continuation import EXPIRED, FINAL, UNFINISHED, expire_checkpoints, keep_final_checkpoints, prepare_continuation
from .disk import LEAST_FREE, describe_disk, measure_free
from .model_files import delete_models
from .record import APPENDED_FILES, CONFIG, SUMMARY
from .results import AUDIT_FILE, AUDIT_FOLDER, EVALUATIONS

CHECKPOINTS, KEYS, ERRORS = UNFINISHED, "he", "site_errors"
"""Folders of an unfinished run's checkpoints, of the keys of an encrypted run, and of reports of sites that failed."""
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
FOLDERS = (EVALUATIONS, ERRORS, FINAL, AUDIT_FOLDER)
"""Folders that describe the models and the sites of a finished run, or continue it."""


@dataclass(frozen=True)
class RunFolder:
    """A result folder, and how a run starts in it.

    Attributes:
        path: the folder.
        resume: the run that it holds is continued from its last committed round.
        step_back: number of commits that are discarded before; only with ``resume``.

    Examples:
        >>> RunFolder.choose("study").path
        PosixPath('runs/study')
    """

    path: Path
    resume: bool = False
    step_back: int = 0

    @classmethod
    def choose(cls, name: str, *, resume: bool = False, overwrite: bool = False) -> RunFolder:
        """Return the folder of a run that names none: ``runs/NAME``, or ``runs/NAME-2`` if that run has finished.

        Args:
            name: name of the run.
            resume: the run is continued: the newest folder of this name is used.
            overwrite: the first folder is used whatever it holds.
        """
        folder, number = cls(Path("runs") / name, resume), 1
        while folder.is_finished and not overwrite:
            following = replace(folder, path=Path("runs") / f"{name}-{number + 1}")
            if resume and not following.path.exists():
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
        run, rounds = run.resolve(), study.config.method.config.rounds
        folder = cls((out or run.with_name(f"{run.name}-{rounds}")).resolve(), resume=True)
        if folder.path != run and folder.has_checkpoint:
            raise ConfigError(
                f"--out {folder.path}: holds an interrupted run. If it is this continuation, go on with it: the same "
                f"command with --out {folder.path} --resume in place of --continue-from. Else choose another --out"
            )
        prepare_continuation(run, study, folder.path, CHECKPOINTS)
        if study.config.encrypted:
            # Only these decrypt the checkpoints.
            KeyContexts.read(run / KEYS).write(folder.path / KEYS)
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
            ConfigError: another command writes to it, or it cannot be written.
            DiskFull: its disk has no space.
        """
        out = self.path
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

    def prepare(
        self, *, overwrite: bool = False, keeps_state: bool = True, advise: Callable[[str], str] = str
    ) -> RunFolder:
        """Prepare the folder, which :meth:`claim` has claimed, and return it with its absolute path.

        Args:
            overwrite: the run that the folder holds is deleted.
            keeps_state: the checkpoints of a run lie in the folder, and not at a server.
            advise: returns what the user has to type with a further flag, such as ``--overwrite``.

        Raises:
            ConfigError: the folder cannot be written, or it holds a run that would be lost.
            DiskFull: its disk has too little space.
        """
        out = self.path
        if not self.resume and not overwrite:
            self._check_for_a_run(keeps_state=keeps_state, advise=advise)
        try:
            with tempfile.TemporaryFile(dir=out) as file:
                file.write(bytes(100_000))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _explain_unwritable(out, error) from error
        free = measure_free(out)
        if free is not None and free < LEAST_FREE:
            raise DiskFull(describe_disk(out, free))
        if overwrite and not self.resume:
            self.delete_record()
        return replace(self, path=out.resolve())

    def _check_for_a_run(self, *, keeps_state: bool, advise: Callable[[str], str]) -> None:
        if self.is_finished:
            raise ConfigError(
                f"--out {self.path}: holds a finished run, which would be lost. Choose another folder, or replace it: "
                f"{advise('--overwrite')}"
            )
        if keeps_state and self.has_checkpoint:
            raise ConfigError(
                f"--out {self.path}: holds an interrupted run. Continue it from its last committed round: "
                f"{advise('--resume')}\nor start again from the beginning: {advise('--overwrite')}"
            )

    def delete_record(self) -> None:
        """Delete the record and the models of an earlier run, so that nothing of it is taken for the new one's."""
        delete_models(self.path)
        for name in RECORD:
            (self.path / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def open_checkpoints(self, study: Study, observer: Observer = SILENT) -> Path:
        """Return the folder of the checkpoints; it is emptied unless a run is resumed.

        Args:
            study: the run.
            observer: hears of each step back.

        Raises:
            CheckpointError: there is no checkpoint, or it belongs to another job; the text names the settings that
                differ; or there are too few to step back.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        root = self.path / CHECKPOINTS
        if not self.resume:
            shutil.rmtree(root, ignore_errors=True)
            shutil.rmtree(self.path / FINAL, ignore_errors=True)
            return root
        if expire_checkpoints(self.path, study.config.federation.checkpoint_days):
            raise CheckpointError(f"--resume: {EXPIRED.format(folder=self.path)}. Leave --resume out to start again")
        store = study.open_checkpoints(root, SERVER)
        if store.list_numbers():
            self._discard_commits(store, observer)
            return root
        # A changed setting changes the job's folder below root: compare with the others there and name the difference.
        for folder in sorted(root.glob(f"*/{SERVER}")):
            Store(folder, store.identity).check()
        if self.is_finished:
            raise CheckpointError(
                f"--resume: {root} holds no checkpoint, because the run in {self.path} has finished. For more rounds: "
                f"flare-sparse run {self.path / CONFIG} --set method.rounds=N --continue-from {self.path}"
            )
        raise CheckpointError(
            f"--resume: {root} holds no checkpoint: the run committed no round. Leave --resume out to start again"
        )

    def _discard_commits(self, store: Store, observer: Observer) -> None:
        """Set the newest ``step_back`` undamaged checkpoints aside.

        Raises:
            CheckpointError: no checkpoint would be left; nothing is set aside.
        """
        if not self.step_back:
            return
        # The identity is checked first: a commit of another job must stay.
        store.check()
        intact = store.list_intact()
        # Without a checkpoint the run would silently start from round 1, which --overwrite says openly.
        if self.step_back >= len(intact):
            raise CheckpointError(
                f"--step-back {self.step_back}: {store.folder} holds {len(intact)} intact "
                f"checkpoint{'s' * (len(intact) != 1)}, so the run can step back by at most {max(len(intact) - 1, 0)}. "
                "To repeat all rounds, run again with --overwrite instead of --resume and --step-back"
            )
        for _ in range(self.step_back):
            observer.say(STEP_BACK.format(number=store.step_back()))

    def open_keys(self, study: Study) -> KeyContexts | None:
        """Return new key contexts, or those of the resumed run; None when the run is not encrypted.

        Raises:
            ConfigError: TenSEAL is not installed, or the key contexts of a resumed run are missing.
        """
        folder = self.path / KEYS
        if not self.resume:
            shutil.rmtree(folder, ignore_errors=True)
        if not study.config.encrypted:
            return None
        # The checkpoints of an encrypted run hold ciphertexts: only the keys that wrote them can read them.
        if self.resume:
            return KeyContexts.read(folder)
        contexts = KeyContexts.generate()
        contexts.write(folder)
        return contexts

    def keep_study(self, study: Study) -> None:
        """Write the configuration and the user's code, from which the finished run can be loaded and run again."""
        (self.path / CONFIG).write_text(dump_config(study.config), encoding="utf-8")
        copy_user_code(study.user_code, self.path)

    def complete(self, federation: FederationConfig) -> None:
        """Keep the last checkpoints for a continuation: from now on the run cannot be resumed."""
        keep_final_checkpoints(self.path / CHECKPOINTS, has_history=federation.kept_commits > MIN_COMMITS)
        expire_checkpoints(self.path, federation.checkpoint_days)


def _explain_unwritable(out: Path, error: OSError) -> FlareSparseError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(describe_disk(out, measure_free(out)))
    return ConfigError(f"--out {out}: cannot be written ({error.strerror}); choose another folder")


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
