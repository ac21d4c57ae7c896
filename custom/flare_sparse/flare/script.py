"""A site's training script, run by FLARE's own ``ClientAPIExecutor`` inside the executor of this package.

The script sees FLARE's Client API as in any other job: ``flare.receive()`` returns the dense model of the request, and
what it sends comes back here before anything is selected, encoded or checked against the site's policy.

A script's calls of FLARE's in-process Client API: seeded, awaited, and one result for each received model.
"""

import os
import random
import shlex
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor, ExecutionMode
from nvflare.client import api as client_api
from nvflare.client.api_spec import CLIENT_API_KEY
from nvflare.client.config import ExchangeFormat
from nvflare.client.in_process.api import TOPIC_ABORT
from nvflare.fuel.data_event.data_bus import DataBus

from ..core.errors import ConfigError, FlareSparseError, describe_exception
from ..privacy.dp.account import BudgetSpent
from ..tasks.data.source import DATA_VARIABLE, SITE_FILE_VARIABLE, write_site_files
from ..tasks.task import SiteData
from ..training.script_exchange import REQUEST_KIND, TRAINABLE, ScriptFailed, ScriptReply, ScriptRequest

MOST_RECEIVES = 100
"""Calls of ``receive`` that return one model, in a script whose loop does not call ``is_running``."""


class ScriptCalls:
    """Wraps ``receive``, ``send`` and ``is_running`` of the API of one script.

    - ``receive`` seeds the script's random numbers when it returns a new model. The first numbers after a request then
      depend on the run's seed, site and round alone, in any environment.
    - ``send`` hands over the result first and drops the received model last. A request that follows the result at once
      would put its model in between, and FLARE would drop that one: the script would wait for it without end.
      :meth:`prepare_request` prevents it.
    - Until ``send``, FLARE returns the same model again. A script may ask for it several times in one turn of its loop,
      as Lightning's callback does, and before the loop, for the number of rounds; one that begins the next turn would
      train on it without end.

    Args:
        api: FLARE's API; its three methods are replaced.
    """

    def __init__(self, api: Any):
        self._api_receive, self._api_send, self._api_is_running = api.receive, api.send, api.is_running
        api.receive, api.send, api.is_running = self._receive, self._send, self._is_running
        self._lock = threading.Lock()
        self._seed: int | None = None
        # The received model for which nothing has been sent yet.
        self._unsent: Any = None
        self._receives = 0
        # Calls of ``is_running``, which begins each turn of a loop, up to now and at the last ``receive``.
        self._turn = self._received_turn = 0

    def prepare_request(self, seed: int) -> None:
        """Wait until no ``send`` is being executed; seed the script when it receives the next model."""
        with self._lock:
            self._seed = seed

    def _receive(self, timeout: float | None = None) -> Any:
        model = self._api_receive(timeout)
        if model is None:
            return None
        is_new = model is not self._unsent
        if is_new:
            self._unsent, self._receives = model, 0
        self._receives += 1
        before, self._received_turn = self._received_turn, self._turn
        # Before the first turn a script builds its network, which draws numbers; its first round must not depend on it.
        is_first_turn = before == 0 and self._turn > 0
        if not is_new and not is_first_turn and (before != self._turn or self._receives > MOST_RECEIVES):
            raise RuntimeError(
                "the script called flare.receive() again without flare.send(); it must send one result for each model"
            )
        if (is_new or is_first_turn) and self._seed is not None:
            # Seed in the script's own thread: while it starts, it may draw numbers at any time.
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)  # noqa: NPY002 - the generator that scripts and libraries draw from
            torch.manual_seed(self._seed)
        return model

    def _send(self, *args: Any, **kwargs: Any) -> None:
        with self._lock:
            self._api_send(*args, **kwargs)
            self._unsent = None

    def _is_running(self) -> bool:
        self._turn += 1
        return bool(self._api_is_running())


_THREAD = "client_api_in_process_trainer"
"""Name that FLARE gives to the thread of a script."""
_TASKS = {"train": AppConstants.TASK_TRAIN, "score": AppConstants.TASK_TRAIN, "evaluate": AppConstants.TASK_VALIDATION}


class FlareScript:
    """Runs one script in this process, in a thread of its own; a process can run one.

    FLARE's in-process Client API lives on a bus that is shared by the whole process, and ``sys.argv`` is shared, too.

    Args:
        script: file of the script.
        args: its command line.
        data: location of the site's data, which the script finds in ``FLARE_SPARSE_DATA``; None: the site has set none.
        folder: receives a copy of the site file, from which ``flare_sparse.client.site_data`` reads.
        launch: command that starts the script as a process of its own, such as ``torchrun``; empty: no process.
        log: where the script's output is, for messages.
    """

    def __init__(
        self,
        script: Path,
        args: str,
        data: SiteData | None,
        folder: Path,
        launch: str = "",
        log: str = "the site's log",
    ):
        self._script, self._args, self._data, self._folder = script, args, data, folder
        self._launch, self._log = launch, log
        self._executor: ClientAPIExecutor | None = None
        self._context: FLContext | None = None
        self._abort_signal = Signal()
        self._failure = ""
        # Keep the exception with which the script ended, and the hook of ``threading`` that the own one replaces.
        self._error: BaseException | None = None
        self._next_hook = threading.excepthook
        # None: no script, or one in a process of its own.
        self._calls: ScriptCalls | None = None

    def attach(self, fl_ctx: FLContext, abort_signal: Signal) -> None:
        """Set FLARE's context and signal of the task that is executed now."""
        self._context, self._abort_signal = fl_ctx, abort_signal

    def run(self, request: ScriptRequest) -> ScriptReply:
        """Return the script's reply to a request; the first request starts the script, and so does one after a failure.

        Raises:
            ConfigError: there is no such script.
            ScriptFailed: the script raised an exception, ended, or was aborted.
        """
        assert self._context is not None, "attach() comes before every request"
        if self._executor is None:
            if any(thread.name == _THREAD and thread.is_alive() for thread in threading.enumerate()):
                # What it sends would be taken for the reply of a new one.
                raise ScriptFailed("the script is still running an aborted task; it starts again once that has ended")
            self._executor = self._start(self._context)
        if self._calls is not None:
            self._calls.prepare_request(request.seed)
        reply = self._executor.execute(_TASKS[request.kind], _build_task(request), self._context, self._abort_signal)
        if reply.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            # FLARE never runs a script again that was aborted or has ended, such as after a round that timed out. Here
            # it is stopped for good, and the next request starts a new one.
            executor, self._executor = self._executor, None
            executor.handle_event(EventType.END_RUN, self._context)
            # Explained last: FLARE returns before the script's thread has ended with its exception.
            raise self._explain_failure()
        return _read_reply(reply)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Pass the abort of a task and the end of the run to the script."""
        if self._executor is not None and event_type in (EventType.ABORT_TASK, EventType.END_RUN):
            self._executor.handle_event(event_type, fl_ctx)

    def _start(self, fl_ctx: FLContext) -> ClientAPIExecutor:
        if not self._script.is_file():
            raise ConfigError(
                f"task.script: {self._script.name} did not come with the job; export it again (flare-sparse export)"
            )
        if self._data is not None:
            os.environ[SITE_FILE_VARIABLE] = write_site_files(self._folder, [self._data])
            os.environ[DATA_VARIABLE] = str(self._data.path.absolute())
        self._failure = ""
        DataBus().unsubscribe(TOPIC_ABORT, self._remember_failure)
        DataBus().subscribe([TOPIC_ABORT], self._remember_failure)
        # flare.init() would return the closed API of the script before.
        client_api.context_dict.clear()
        client_api.default_context = None
        executor = ClientAPIExecutor(
            **self._describe_execution(),
            # Tensors on both sides: nothing is converted, and values keep their bits.
            params_exchange_format=ExchangeFormat.PYTORCH,
            server_expected_format=ExchangeFormat.PYTORCH,
        )
        self._error = None
        if threading.excepthook != self._keep_error:
            self._next_hook, threading.excepthook = threading.excepthook, self._keep_error
        with self._wrap_calls():
            executor.handle_event(EventType.START_RUN, fl_ctx)
        return executor

    @contextmanager
    def _wrap_calls(self) -> Iterator[None]:
        """Wrap the calls of the API that FLARE hands over within this context, before it starts the script's thread.

        A script that is faster than the code after the start would call FLARE's own functions first: unseeded, and
        with a turn that nobody counted.
        """
        bus = DataBus()
        put_data = bus.put_data

        def put_wrapped(key: Any, datum: Any) -> None:
            if key == CLIENT_API_KEY and datum is not None:
                self._calls = ScriptCalls(datum)
            put_data(key, datum)

        self._calls = None
        bus.put_data = put_wrapped
        try:
            yield
        finally:
            # The bus is one for the process: its class has the function that this one hid.
            del bus.put_data

    def _describe_execution(self) -> dict[str, Any]:
        """Return the arguments of FLARE's executor that say where the script runs."""
        if not self._launch:
            return {
                "execution_mode": ExecutionMode.IN_PROCESS,
                "task_script_path": str(self._script),
                "task_script_args": self._args,
            }
        # The number of threads decides the order of float sums. torch would take all cores in a process of its own.
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        command = [*shlex.split(self._launch), str(self._script), *shlex.split(self._args)]
        return {"execution_mode": ExecutionMode.EXTERNAL_PROCESS, "command": command}

    def _remember_failure(self, topic: str, data: Any, bus: DataBus) -> None:
        # The first cause: FLARE repeats its own messages about it.
        self._failure = self._failure or str(data)

    def _keep_error(self, args: threading.ExceptHookArgs) -> None:
        # FLARE reports neither an ImportError nor ``sys.exit``, by which argparse refuses a command line.
        if args.thread is not None and args.thread.name == _THREAD:
            self._error = args.exc_value
        self._next_hook(args)

    def _explain_failure(self) -> FlareSparseError:
        """Return the error of a script that failed; the traceback of its exception is a note.

        A spent budget is no failure of the script: the site abstains.
        """
        if self._abort_signal.triggered:
            return ScriptFailed("the task was aborted while the script was running it")
        # Not kept: its frames hold the script's data.
        error, self._error = self._error, None
        if isinstance(error, BudgetSpent):
            return BudgetSpent(str(error))
        failed = ScriptFailed(f"script {self._script.name}: {self._describe_end(error)}", self._log)
        if error is not None and not isinstance(error, SystemExit):
            failed.add_note("".join(traceback.format_exception(error)))
        return failed

    def _describe_end(self, error: BaseException | None) -> str:
        """Return why a script ended, from the exception that ended it."""
        command = f"its command line {self._args!r} (task.args) must be one that it accepts"
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            return f"it ended by sys.exit({error.code!r}): {command}"
        if isinstance(error, FileNotFoundError) and error.filename and not Path(str(error.filename)).is_absolute():
            # The folder in which a script runs differs by environment, as in FLARE.
            return f"{describe_exception(error)}\na script runs in a folder of its own: read {_DATA}"
        if error is not None and not isinstance(error, SystemExit):
            return describe_exception(error)
        reason = "it ended before it sent a result: its loop must go on while flare.is_running()"
        return self._failure or (f"{reason}, and {command}" if self._launch else reason)


_DATA = "flare_sparse.client.site_data().path, which simulator.data.path or the site file sets"


def _build_task(request: ScriptRequest) -> Shareable:
    """Return a request as a task of FLARE's Client API."""
    meta: dict[str, Any] = {REQUEST_KIND: request.kind}
    if request.trainable:
        meta[TRAINABLE] = dict(request.trainable)
    shareable = DXO(DataKind.WEIGHTS, data=dict(request.params), meta=meta).to_shareable()
    shareable.set_header(AppConstants.CURRENT_ROUND, request.round)
    shareable.set_header(AppConstants.NUM_ROUNDS, request.total_rounds)
    return shareable


def _read_reply(shareable: Shareable) -> ScriptReply:
    """Return what the script sent.

    Raises:
        ScriptFailed: it is neither a model nor metrics.
    """
    dxo = from_shareable(shareable)
    if dxo.data_kind == DataKind.METRICS:
        return ScriptReply(metrics=dxo.data, meta=dxo.meta)
    if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
        raise ScriptFailed(f"the script sent {dxo.data_kind}; expected an FLModel with params or metrics")
    metrics = dxo.meta.get(MetaKey.INITIAL_METRICS) or {}
    return ScriptReply(dxo.data, dxo.data_kind == DataKind.WEIGHT_DIFF, metrics, dxo.meta)
