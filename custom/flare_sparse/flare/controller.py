"""The controller of every method: carries the questions of ``Federation`` to the sites and writes the record."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import FLContextKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.aggregator import Aggregator
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from ..assemble import build_rules
from ..checkpoint.writing import write_json
from ..endpoints.server import Attempt
from ..errors import ConfigError, FlareSparseError
from ..federation import Federation, Reply, RoundRecord
from ..runs.folder import RunFolder, build_run_facts
from ..runs.model_files import ENCRYPTED
from ..runs.progress import progress_line
from .analytics import announce_best, announce_round
from .checkpoints import mark_job_finished
from .payload import HELLO, REPLY, TASK, extract_hello, message_to_shareable
from .polling import TaskPolling
from .session import AGGREGATOR_ID, get_server_session, get_workspace

RESULTS = "flare_sparse"
"""Folder under the server's app folder that holds the record of a run."""

STATS = "flare_sparse"
"""Group of a running job's statistics (``show_stats``) that holds its rounds so far."""

DELIVERED = (
    "this job ended before, and its result was never archived (%s): the same model is delivered now. For a run from the "
    "start take another seed, or remove %s"
)

POLL_S = 0.01


class Aborted(FlareSparseError):
    """The job was aborted from outside."""

    code = "E_ABORTED"


class FederatedController(Controller):
    """Asks, stages, validates, commits: one round after the other, each with a timeout.

    Args:
        task_check_period: seconds between FLARE's looks at its tasks; short, since every round waits for it.
    """

    def __init__(self, task_check_period: float = 0.02):
        super().__init__(task_check_period=task_check_period)
        self._lines: list[str] = []

    def start_controller(self, fl_ctx: FLContext) -> None:
        aggregator = fl_ctx.get_engine().get_component(AGGREGATOR_ID)
        if not isinstance(aggregator, Aggregator):
            self.system_panic(f"no component {AGGREGATOR_ID!r}; export the job again", fl_ctx)
            return
        self._aggregator = aggregator

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is held open between rounds."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_warning(fl_ctx, f"an answer of {client.name} came too late and was not used")

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """The rounds so far are what an admin's ``show_stats`` shows of a running job."""
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                collector.set_info(STATS, {"rounds": list(self._lines)})

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        try:
            self._run(abort_signal, fl_ctx)
        except Aborted:
            self.log_info(fl_ctx, "aborted; the last commit is on disk")
        except FlareSparseError as error:
            self.system_panic(f"{error.code}: {error}", fl_ctx)

    def _run(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        session = get_server_session(fl_ctx)
        session.open(fl_ctx)
        job, assembly = session.job, session.assembly
        if session.unarchived is not None and session.store is not None:
            self.logger.warning(DELIVERED, session.unarchived, session.store.folder)
        facts = build_run_facts(job, assembly)
        app_dir = Path(get_workspace(fl_ctx).get_app_dir(fl_ctx.get_job_id()))
        folder = RunFolder(app_dir / RESULTS, facts, assembly.layout, session.ledger)

        self._pace = TaskPolling(fl_ctx.get_prop(FLContextKey.RUNNER), job.federation.request_interval_s)

        def committed(record: RoundRecord) -> None:
            line = folder.commit(record)
            announce_round(self, record, fl_ctx)
            self._lines.append(progress_line(line))
            self.logger.info(self._lines[-1])

        def carry(question: Attempt) -> Mapping[str, Reply]:
            return self._carry(question, job.federation.task_timeout_s, fl_ctx, abort_signal)

        def greet(sites: list[str]) -> Mapping[str, Any]:
            return self._greet(sites, job.federation.task_timeout_s, fl_ctx, abort_signal)

        federation = Federation(
            assembly.method,
            session.endpoint,
            assembly.task.metric,
            build_rules(job),
            committed,
            session.store,
            lambda why: self.logger.warning(str(why)),
        )
        sites = partial(self._sites, fl_ctx, job.federation.min_sites)
        outcome = federation.run(assembly.weights, sites, carry, handshake=greet, resume=True)
        folder.finish(outcome)
        announce_best(self, outcome.best, assembly.task.metric, fl_ctx)
        write_json(
            app_dir / "artifact_manifest.json",
            {
                "schema_version": "1",
                "artifacts": {"global_model": f"{RESULTS}/{ENCRYPTED if outcome.encrypted else ''}model.safetensors"},
            },
        )
        if session.store is not None:
            mark_job_finished(session.store, get_workspace(fl_ctx), fl_ctx.get_job_id())

    def _sites(self, fl_ctx: FLContext, wanted: int) -> list[str]:
        names = sorted(client.name for client in fl_ctx.get_engine().get_clients())
        if not names:
            raise ConfigError(f"no site is connected; federation.min_sites asks for {wanted}")
        return names

    def _greet(self, sites: list[str], timeout_s: float, fl_ctx: FLContext, abort_signal: Signal) -> Mapping[str, Any]:
        """What each site says of itself, unchecked, until all answered or the time is up."""
        said: dict[str, Any] = {}

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001 - FLARE calls it by name
            said[client_task.client.name] = extract_hello(client_task.result)  # who it is, the server knows
            client_task.result = None

        task = Task(name=HELLO, data=Shareable(), timeout=math.ceil(timeout_s), result_received_cb=received)
        self._pace.begin()
        self.broadcast(task, fl_ctx, targets=list(sites), min_responses=0)
        self._wait([task], abort_signal)
        return dict(said)

    def _wait(self, tasks: list[Task], abort_signal: Signal) -> None:
        """Until all tasks are done.

        Raises:
            Aborted: the job was aborted meanwhile.
        """
        while any(task.completion_status is None for task in tasks):
            self._pace.go_on()
            if abort_signal.triggered:
                raise Aborted("the job was aborted")
            time.sleep(POLL_S)
        self._pace.begin()

    def _carry(
        self, question: Attempt, timeout_s: float, fl_ctx: FLContext, abort_signal: Signal
    ) -> Mapping[str, Reply]:
        """One FLARE task per distinct message; back comes what was staged until all answered or the time is up."""
        self._aggregator.reset(fl_ctx)
        shared: dict[int, tuple[np.ndarray, list[str]]] = {}
        for site, message in question.messages.items():
            shared.setdefault(id(message), (message, []))[1].append(site)
        tasks = []
        self._pace.begin()
        for message, sites in shared.values():
            data = message_to_shareable(message, {"kind": question.kind, "round": question.round})
            task = Task(name=TASK, data=data, timeout=math.ceil(timeout_s), result_received_cb=self._received)
            self.broadcast(task, fl_ctx, targets=list(sites), min_responses=0)
            tasks.append(task)
        self._wait(tasks, abort_signal)
        replies: dict[str, Reply] = self._aggregator.aggregate(fl_ctx)[REPLY]
        return replies

    def _received(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        result = client_task.result  # where a filter failed, an empty one in its stead
        result.set_header(ServerCommandKey.FL_CLIENT, client_task.client)
        self._aggregator.accept(result, fl_ctx)
        client_task.result = None
