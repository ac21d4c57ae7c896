"""A training script in a process of its own, for a run without FLARE's simulator (``--env local``).

FLARE's in-process Client API is one for a whole process, so every site needs its own. The process hosts the same
:class:`~flare_sparse.flare.script.FlareScript` as a site of FLARE, so that a script behaves alike in every environment.
"""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.signal import Signal

from ..core.errors import FlareSparseError
from ..privacy.dp.scripts import PRIVACY_VARIABLE, ScriptBudget
from ..tasks.task import SiteData
from ..training.script_exchange import ScriptFailed, ScriptReply, ScriptRequest
from .script import FlareScript

OUTPUT = "output.log"
"""File with the output of a script, in its folder."""
STOP_S = 10.0
"""Seconds after which a script that does not end is killed."""


class ScriptTooSlow(FlareSparseError):
    """A script did not answer in time, which says nothing about whether it works."""

    code = "E_SCRIPT"


class ScriptProcess:
    """Runs a site's script in a child process.

    Args:
        script: file of the script.
        args: its command line.
        data: location of the site's data.
        folder: working folder of the script; its output is in ``output.log``.
        code: folders of the modules that the script imports, besides its own.
        threads: number of torch threads.
        budget: what the script's engine charges; None: the job has no privacy section.
        limit_s: seconds after which the process is stopped if it has not answered a request; None: never.
    """

    def __init__(
        self,
        script: Path,
        args: str,
        data: SiteData,
        folder: Path,
        code: Sequence[Path] = (),
        threads: int = 1,
        budget: ScriptBudget | None = None,
        limit_s: float | None = None,
    ):
        self._settings = (script.resolve(), args, data, folder.resolve(), threads)
        self._code, self._folder = [str(path.resolve()) for path in (script.parent, *code)], folder
        self._budget, self._limit_s = budget, limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, request: ScriptRequest) -> ScriptReply:
        """Return the script's reply to a request; the first request starts the process.

        Raises:
            ScriptFailed: the script raised an exception or ended, or its process died.
            ScriptTooSlow: it did not answer in time.
        """
        if self._process is None:
            self._start()
        assert self._process is not None, "the process has been started"
        try:
            _send(self._pipe, request)
            if not self._pipe.poll(self._limit_s):
                self._process.kill()
                raise ScriptTooSlow(
                    f"the script still ran after {self._limit_s:.0f} s and was stopped: nothing else is known about it"
                )
            reply = _receive(self._pipe)
        except (EOFError, OSError) as error:
            raise ScriptFailed("the script's process died", str(self._folder / OUTPUT)) from error
        if isinstance(reply, Exception):
            raise reply
        assert isinstance(reply, ScriptReply), "the process sends replies and errors"
        return reply

    def close(self) -> None:
        """Stop the script and its process."""
        if self._process is None:
            return
        self._pipe.close()
        # The process ends when its requests end; a script that is stuck is killed.
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pipe, its_end = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*self._code, *filter(None, sys.path)])}
        if self._budget is not None:
            environment[PRIVACY_VARIABLE] = self._budget.write(self._folder / "budget.json")
        with (self._folder / OUTPUT).open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter and a module of this package
                [sys.executable, "-m", __name__, str(its_end.fileno())],
                pass_fds=[its_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=environment,
            )
        # Closed here, so that the death of the process ends the pipe.
        its_end.close()
        _send(self._pipe, self._settings)


def serve(pipe: Connection) -> None:
    """Run the script and answer requests until there are no more."""
    script_file, args, data, folder, threads = _receive(pipe)
    torch.set_num_threads(threads)
    script = FlareScript(script_file, args, data, folder, log=str(folder / OUTPUT))
    context = FLContextManager(_Engine(), identity_name=data.site, job_id="local").new_context()
    # The part of FLARE's workspace that it reads to run a script.
    workspace = SimpleNamespace(get_app_custom_dir=lambda job_id: str(script_file.parent))
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
    context.set_prop(FLContextKey.CURRENT_JOB_ID, "local", private=False, sticky=True)
    script.attach(context, Signal())
    while True:
        try:
            request = _receive(pipe)
        except EOFError:
            return
        try:
            reply: Any = script.run(request)
        # Whatever fails, the site in the other process reports it.
        except Exception as error:  # noqa: BLE001
            reply = error
        _send(pipe, reply)


class _Engine:
    """Engine without events: metrics that a script logs stay in its process."""

    def new_context(self) -> Any:
        return FLContextManager(self).new_context()

    def fire_event(self, event_type: str, fl_ctx: Any) -> None:
        """Do nothing."""


# Not the pipe's own pickling: torch extends it, and would share the memory of tensors in place of copying it.
def _send(connection: Connection, value: object) -> None:
    connection.send_bytes(pickle.dumps(value))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())  # noqa: S301 - from this package's own process, over a pipe


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with suppress(ConnectionError):
        serve(Connection(int(sys.argv[1])))
    # A script that is stuck holds a thread; leaving at once ends it with this process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
