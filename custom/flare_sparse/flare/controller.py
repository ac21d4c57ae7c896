"""The controller of every job: carries the requests of ``Federation`` to the sites and writes the run's record."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
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

from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, FlareSparseError
from ..results.runs.progress import format_events, format_progress
from ..results.runs.record import RecordWriter
from ..rounds.endpoints.server import Attempt
from ..rounds.federation import Connections, Federation, Reply, RoundRecord, SumQuestions
from .analytics import announce_best, announce_round
from .checkpoints import mark_job_finished
from .feed import STATS, TOPIC, RecordFeed
from .job_settings import SERVER_SECTIONS, check_shown_settings
from .payload import (
    COUNTED,
    HELLO,
    REPLY,
    SUM,
    TASK,
    extract_hello,
    extract_sum_reply,
    message_to_shareable,
    sum_to_shareable,
)
from .polling import TaskPolling
from .session import AGGREGATOR_ID, get_server_session
from .workspace import get_workspace

RESULTS = "flare_sparse"
"""Folder below the server's app folder that holds the record of a run."""

READY = "the controller of flare-sparse has started"
"""Line of the server's log from which on a job's statistics can be read."""

UNARCHIVED = (
    "this job has already finished, but FLARE never archived its result (%s): the same model is delivered now. To run "
    "the job from the start, choose another seed or remove %s"
)

POLL_S = 0.01


class Aborted(FlareSparseError):
    """The job was aborted by an admin or by FLARE."""

    code = "E_ABORTED"


class FederatedController(Controller):
    """Runs ``Federation`` over FLARE's tasks, one round after another.

    Args:
        method: name of the job's method.
        task: name of its task.
        settings: what decides what is computed, sent and committed; see :mod:`flare_sparse.flare.job_settings`.
        task_check_period: seconds between FLARE's checks of its tasks; short, because every round waits for it.
    """

    def __init__(self, method: str, task: str, settings: Mapping[str, Any], task_check_period: float = 0.02):
        super().__init__(task_check_period=task_check_period)
        self.method, self.task, self.settings = method, task, dict(settings)
        self._lines: list[str] = []
        self._feed: RecordFeed | None = None
        self._invitations: dict[str, Task] = {}
        self._returned: set[str] = set()

    def start_controller(self, fl_ctx: FLContext) -> None:
        aggregator = fl_ctx.get_engine().get_component(AGGREGATOR_ID)
        # system_panic ends the job; returning alone would let control_flow start.
        if not isinstance(aggregator, Aggregator):
            self.system_panic(f"the server app has no component {AGGREGATOR_ID!r}; export the job again", fl_ctx)
            return
        self._aggregator = aggregator
        self.log_info(fl_ctx, READY)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Required by FLARE; there is nothing to release."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        # FLARE drops a task after its timeout, so late results arrive here.
        self.log_warning(fl_ctx, f"a result of {client.name} came after the timeout and is ignored")

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Add the lines of the committed rounds to the statistics that an admin's ``show_stats`` prints."""
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                lines = [] if self._feed is None else self._feed.dump_rounds()
                collector.set_info(STATS, {"rounds": list(self._lines), "lines": lines})

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        try:
            with ExitStack() as cleanup:
                self._run(cleanup, abort_signal, fl_ctx)
        except Aborted:
            self.log_info(fl_ctx, "the job was aborted; the last committed round is on disk")
        except FlareSparseError as error:
            # FLARE would report an exception raised here as an error of its own, without the error code.
            self.system_panic(f"{error.code}: {error}", fl_ctx)

    def _run(self, cleanup: ExitStack, abort_signal: Signal, fl_ctx: FLContext) -> None:
        session = get_server_session(fl_ctx)
        session.build(fl_ctx)
        job, assembly = session.job, session.assembly
        check_shown_settings(self, job, SERVER_SECTIONS)
        if session.unarchived is not None and session.store is not None:
            self.logger.warning(UNARCHIVED, session.unarchived, session.store.folder)
        app_dir = Path(get_workspace(fl_ctx).get_app_dir(fl_ctx.get_job_id()))
        folder = RecordWriter(app_dir / RESULTS, job, assembly, session.ledger)

        polling = TaskPolling(fl_ctx.get_prop(FLContextKey.RUNNER), job.federation.request_interval_s)
        self._polling = cleanup.enter_context(closing(polling))

        self._feed = feed = RecordFeed()
        fl_ctx.get_engine().register_app_command(TOPIC, feed.answer)

        def commit(record: RoundRecord) -> None:
            line = folder.commit(record)
            feed.commit(line)
            announce_round(self, record, job.name, fl_ctx)
            for event in format_events(line):
                self.logger.warning(event)
            self._lines.append(format_progress(line))
            self.logger.info(self._lines[-1])

        def exchange(attempt: Attempt) -> Mapping[str, Reply]:
            timeout_s = job.federation.task_timeout_s if attempt.seconds is None else attempt.seconds
            return self._exchange(attempt, timeout_s, fl_ctx, abort_signal)

        def exchange_sum(questions: SumQuestions) -> Iterator[tuple[str, Any]]:
            timeout_s = job.federation.task_timeout_s if questions.seconds is None else questions.seconds
            return self._exchange_sum(questions.messages, timeout_s, fl_ctx, abort_signal)

        def handshake(sites: list[str]) -> Mapping[str, Any]:
            timeout_s = job.federation.round_s or job.federation.task_timeout_s
            return self._collect_hellos(sites, timeout_s, fl_ctx, abort_signal)

        connections = Connections(
            partial(_list_connected_sites, fl_ctx, job.federation.min_sites),
            exchange,
            exchange_sum,
            handshake,
            lambda sites: self._list_returned(sites, job.federation.task_timeout_s, fl_ctx),
            lambda warning: self.logger.warning(str(warning)),
        )
        federation = Federation(
            assembly.method,
            session.endpoint,
            assembly.task.metric,
            connections,
            rules=job.federation,
            on_round=commit,
            store=session.store,
        )
        # resume=True always: FLARE gives a job that is submitted again a new id, and only the checkpoints tell whether
        # it was interrupted. Without checkpoints the run starts from round 0.
        outcome = federation.run(assembly.weights, resume=True)
        folder.finish(outcome)
        announce_best(self, outcome.best, assembly.task.metric, fl_ctx)
        # `nvflare job download` reads this file to name the model of the job.
        write_json(
            app_dir / "artifact_manifest.json",
            {
                "schema_version": "1",
                "artifacts": {"global_model": f"{RESULTS}/model.safetensors"},
            },
        )
        # The mark comes last, because it promises that the complete result is on disk.
        if session.store is not None:
            mark_job_finished(session.store, get_workspace(fl_ctx), fl_ctx.get_job_id())

    def _collect_hellos(
        self, sites: list[str], timeout_s: float, fl_ctx: FLContext, abort_signal: Signal
    ) -> Mapping[str, Any]:
        """Return the unchecked hello of each site that sends one before the timeout."""
        hellos: dict[str, Any] = {}

        # FLARE passes keyword arguments, so the parameter names are fixed. The callback must not raise: that would end
        # the task for all sites (see extract_hello). The sender's name comes from FLARE's login, not from the message.
        def receive(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001
            hellos[client_task.client.name] = extract_hello(client_task.result)
            client_task.result = None

        task = Task(name=HELLO, data=Shareable(), timeout=_to_whole_seconds(timeout_s), result_received_cb=receive)
        self._polling.restart()
        self._offer(task, sites, fl_ctx)
        self._wait([task], abort_signal)
        self._polling.restart()
        return dict(hellos)

    def _list_returned(self, sites: list[str], timeout_s: float, fl_ctx: FLContext) -> set[str]:
        """Return the quarantined sites that have sent a hello, and leave an invitation for the others."""

        def receive(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001
            if extract_hello(client_task.result) is not None:
                self._returned.add(client_task.client.name)
            client_task.result = None

        returned = self._returned & set(sites)
        for site in sites:
            task = self._invitations.get(site)
            # Nothing waits for an invitation: a site takes it when it polls again, after a pause of any length.
            if site not in returned and (task is None or task.completion_status is not None):
                task = Task(HELLO, Shareable(), timeout=_to_whole_seconds(timeout_s), result_received_cb=receive)
                self._offer(task, [site], fl_ctx)
                self._invitations[site] = task
        for site in returned:
            self._returned.discard(site)
            self._invitations.pop(site, None)
        return returned

    def _offer(self, task: Task, sites: Sequence[str], fl_ctx: FLContext) -> None:
        """Start a FLARE task for some sites, and let the requests that wait for one find it."""
        # With min_responses=0 FLARE waits for every target until the timeout.
        self.broadcast(task, fl_ctx, targets=list(sites), min_responses=0)
        self._polling.announce()

    def _wait(self, tasks: list[Task], abort_signal: Signal) -> None:
        """Wait until all tasks are complete.

        FLARE's own ``broadcast_and_wait`` handles one task; an attempt may need several, which run at the same time.

        Raises:
            Aborted: the job was aborted meanwhile.
        """
        for _ in self._wait_in_steps(tasks, abort_signal):
            pass

    def _wait_in_steps(self, tasks: list[Task], abort_signal: Signal) -> Iterator[None]:
        """Wait until all tasks are complete; yield again and again, and once when they are.

        Raises:
            Aborted: the job was aborted meanwhile.
        """
        while any(task.completion_status is None for task in tasks):
            self._polling.update()
            if abort_signal.triggered:
                raise Aborted("the job was aborted")
            yield
            time.sleep(POLL_S)
        yield

    def _exchange(
        self, attempt: Attempt, timeout_s: float, fl_ctx: FLContext, abort_signal: Signal
    ) -> Mapping[str, Reply]:
        """Send the messages of an attempt and return the replies that arrive before the timeout."""
        self._aggregator.reset(fl_ctx)
        tasks = []
        self._polling.restart()
        for message, sites in _group_sites(attempt.messages, attempt.counted):
            meta = {"kind": attempt.kind, "round": attempt.round, COUNTED: attempt.counted[sites[0]]}
            data = message_to_shareable(message, meta)
            task = Task(
                name=TASK, data=data, timeout=_to_whole_seconds(timeout_s), result_received_cb=self._receive_result
            )
            self._offer(task, sites, fl_ctx)
            tasks.append(task)
        self._wait(tasks, abort_signal)
        self._polling.restart()
        replies: dict[str, Reply] = self._aggregator.aggregate(fl_ctx)[REPLY]
        return replies

    def _exchange_sum(
        self, questions: Mapping[str, np.ndarray], timeout_s: float, fl_ctx: FLContext, abort_signal: Signal
    ) -> Iterator[tuple[str, Any]]:
        """Send the questions of a step of a sum; yield the replies, or reason codes, as they arrive in time."""
        answers: SimpleQueue[tuple[str, Any]] = SimpleQueue()

        # It must not raise, see _collect_hellos. A site that answers with something else has the code E_KIND.
        def receive(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001
            answers.put((client_task.client.name, extract_sum_reply(client_task.result)))
            client_task.result = None

        self._polling.restart()
        tasks = []
        for message, sites in _group_sites(questions):
            data, seconds = sum_to_shareable(message), _to_whole_seconds(timeout_s)
            task = Task(name=SUM, data=data, timeout=seconds, result_received_cb=receive)
            self._offer(task, sites, fl_ctx)
            tasks.append(task)
        for _ in self._wait_in_steps(tasks, abort_signal):
            while not answers.empty():
                yield answers.get()
        self._polling.restart()

    def _receive_result(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        result = client_task.result
        # Where a filter at the server failed, FLARE passes a new reply without the sender, so the sender is set again.
        result.set_header(ServerCommandKey.FL_CLIENT, client_task.client)
        self._aggregator.accept(result, fl_ctx)
        # FLARE keeps every result until the task is complete; dropping it here frees its memory.
        client_task.result = None


def _list_connected_sites(fl_ctx: FLContext, min_sites: int) -> list[str]:
    """Return the names of the connected sites, sorted.

    Raises:
        ConfigError: no site is connected.
    """
    names = sorted(client.name for client in fl_ctx.get_engine().get_clients())
    if not names:
        raise ConfigError(f"no site is connected; federation.min_sites requires {min_sites}. Start the sites first")
    return names


def _group_sites(
    messages: Mapping[str, np.ndarray], counted: Mapping[str, str | None] | None = None
) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Yield each distinct buffer with the sites that get it in one FLARE task: it is stored and streamed once for them.

    Args:
        messages: by site.
        counted: name of the last answer that counts, by site, which is the same for all sites of a task.
    """
    groups: dict[tuple[int, str | None], list[str]] = {}
    for site, message in messages.items():
        groups.setdefault((id(message), counted[site] if counted else None), []).append(site)
    for sites in groups.values():
        yield messages[sites[0]], sites


def _to_whole_seconds(seconds: float) -> int:
    """Return a timeout as FLARE accepts it: whole seconds, and at least 1, because FLARE reads 0 as no timeout."""
    return max(math.ceil(seconds), 1)
