"""The controller of every job: carries the requests of ``Federation`` to the sites and writes the run's record."""

import base64
import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, FlareSparseError, WireError, get_failure_code
from ..results.runs.progress import format_events, format_progress
from ..results.runs.record import RecordWriter
from ..rounds.endpoints.server import Attempt, ServerEndpoint
from ..rounds.federation.loop import Federation
from ..rounds.federation.records import BestModel, RoundRecord
from ..rounds.federation.roster import Connections
from ..tasks.task import TEST_EXAMPLES, Metric
from ..wire.stage import Questions, Reply
from . import payload
from .checkpoints import mark_job_finished
from .job_settings import SERVER_SECTIONS, check_shown_settings
from .polling import TaskPolling
from .session import ServerSession
from .tracking import TRACKER_ID, Tracker, collect_figures
from .watchdog import watch_command
from .workspace import get_workspace

RESULTS = "flare_sparse"
"""Folder below the server's app folder that holds the record of a run."""

READY = "the controller of flare-sparse has started"
"""Line of the server's log from which on a job's statistics can be read."""
STATS = "flare_sparse"
"""Group of a running job's statistics (``show_stats``) that holds the rounds so far."""

UNARCHIVED = (
    "this job has already finished, but FLARE never archived its result (%s): the same model is delivered now. To run "
    "the job from the start, choose another seed or remove %s"
)

POLL_S = 0.01

Receive = Callable[[ClientTask, FLContext], None]


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
        self._lines: list[dict[str, Any]] = []
        self._invitations: dict[str, Task] = {}
        self._returned: set[str] = set()

    def start_controller(self, fl_ctx: FLContext) -> None:
        watch_command()
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
                lines = list(self._lines)
                record = base64.b64encode(zlib.compress(json.dumps(lines).encode())).decode()
                collector.set_info(STATS, {"rounds": [format_progress(line) for line in lines], "record": record})

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
        session = ServerSession(fl_ctx)
        job, assembly = session.job, session.assembly
        check_shown_settings(self, job, SERVER_SECTIONS)
        if session.unarchived is not None and session.store is not None:
            self.logger.warning(UNARCHIVED, session.unarchived, session.store.folder)
        tracker = fl_ctx.get_engine().get_component(TRACKER_ID)
        run_dir = Path(get_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id()))
        app_dir = Path(get_workspace(fl_ctx).get_app_dir(fl_ctx.get_job_id()))
        folder = RecordWriter(app_dir / RESULTS, job, assembly, session.ledger)

        polling = TaskPolling(fl_ctx.get_prop(FLContextKey.RUNNER), job.federation.request_interval_s)
        self._polling = cleanup.enter_context(closing(polling))

        limit_s = job.federation.task_timeout_s
        ask = partial(self._ask, fl_ctx, abort_signal)

        def commit(record: RoundRecord) -> None:
            line = folder.commit(record)
            self._announce_round(record, fl_ctx)
            if isinstance(tracker, Tracker):
                tracker.log(collect_figures(record), record.evaluated_round, run_dir)
            for event in format_events(line):
                self.logger.warning(event)
            self._lines.append(line)
            self.logger.info(format_progress(line))

        def exchange(attempt: Attempt) -> Mapping[str, Reply]:
            meta = {"kind": attempt.kind, "round": attempt.round}
            tasks = [
                (payload.message_to_shareable(message, {**meta, payload.COUNTED: attempt.counted[sites[0]]}), sites)
                for message, sites in _group_sites(attempt.messages, attempt.counted)
            ]
            replies = {
                site: decode_reply(session.endpoint, site, result, self.logger)
                for site, result in ask(payload.TASK, tasks, limit_s if attempt.seconds is None else attempt.seconds)
            }
            # Replies arrive in any order, but float sums depend on it: the order of names gives the same bits.
            return dict(sorted(replies.items()))

        def exchange_steps(questions: Questions) -> Iterator[tuple[str, Any]]:
            tasks = [(payload.wrap(payload.SUM, message), sites) for message, sites in _group_sites(questions.messages)]
            for site, result in ask(payload.SUM, tasks, limit_s if questions.seconds is None else questions.seconds):
                yield site, payload.extract_sum_reply(result)

        def handshake(sites: list[str]) -> Mapping[str, Any]:
            tasks = [(Shareable(), sites)]
            return {
                site: payload.extract(payload.HELLO, hello)
                for site, hello in ask(payload.HELLO, tasks, job.federation.round_s or limit_s)
            }

        connections = Connections(
            partial(_list_connected_sites, fl_ctx, job.federation.min_sites),
            exchange,
            exchange_steps,
            handshake,
            lambda sites: self._list_returned(sites, limit_s, fl_ctx),
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
        self._announce_best(outcome.best, assembly.task.metric, fl_ctx)
        # `nvflare job download` reads this file to name the model of the job.
        artifacts = {"global_model": f"{RESULTS}/model.safetensors"}
        write_json(app_dir / "artifact_manifest.json", {"schema_version": "1", "artifacts": artifacts})
        # The mark comes last, because it promises that the complete result is on disk.
        if session.store is not None:
            mark_job_finished(session.store, get_workspace(fl_ctx), fl_ctx.get_job_id())

    def _announce_round(self, record: RoundRecord, fl_ctx: FLContext) -> None:
        """Publish the metrics of the model after ``record.evaluated_round`` to FLARE's MetricsArtifactWriter."""
        if not record.evaluation.sites:
            return
        sites = [
            {"name": name, "metrics": metrics, "weight": metrics.get(TEST_EXAMPLES, 1.0)}
            for name, metrics in sorted(record.evaluation.sites.items())
        ]
        model = FLModel(
            metrics=dict(record.evaluation.overall),
            current_round=record.evaluated_round,
            meta={AppConstants.METRICS_AGGREGATION_INFO: {"metric_source": "site_test_examples", "sites": sites}},
        )
        self.fire_event_with_data(AppEventType.AFTER_AGGREGATION, fl_ctx, AppConstants.AGGREGATION_RESULT, model)

    def _announce_best(self, best: BestModel, metric: Metric, fl_ctx: FLContext) -> None:
        """Name the best round in FLARE's metrics summary; none if no model was evaluated."""
        if best.round < 0:
            return
        info = {
            "best_round": best.round,
            "best_metrics": best.metrics,
            "best_aggregated_metrics": best.metrics,
            "key_metric": {"name": metric.name, "mode": metric.mode},
            "source": "flare_sparse",
        }
        event, key = AppEventType.GLOBAL_BEST_MODEL_AVAILABLE, AppConstants.METRICS_SELECTION_INFO
        self.fire_event_with_data(event, fl_ctx, key, info)

    def _list_returned(self, sites: list[str], timeout_s: float, fl_ctx: FLContext) -> set[str]:
        """Return the quarantined sites that have sent a hello, and leave an invitation for the others."""

        def receive(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001
            if payload.extract(payload.HELLO, client_task.result) is not None:
                self._returned.add(client_task.client.name)
            client_task.result = None

        returned = self._returned & set(sites)
        for site in sites:
            task = self._invitations.get(site)
            # Nothing waits for an invitation: a site takes it when it polls again, after a pause of any length.
            if site not in returned and (task is None or task.completion_status is not None):
                self._invitations[site] = self._offer(payload.HELLO, Shareable(), [site], timeout_s, receive, fl_ctx)
        for site in returned:
            self._returned.discard(site)
            self._invitations.pop(site, None)
        return returned

    def _offer(
        self, name: str, data: Shareable, sites: list[str], timeout_s: float, receive: Receive, fl_ctx: FLContext
    ) -> Task:
        """Start a FLARE task for some sites, and let the requests that wait for one find it."""
        # FLARE takes whole seconds, and reads 0 as no timeout.
        task = Task(name, data, timeout=max(math.ceil(timeout_s), 1), result_received_cb=receive)
        # With min_responses=0 FLARE waits for every target until the timeout.
        self.broadcast(task, fl_ctx, targets=sites, min_responses=0)
        self._polling.announce()
        return task

    def _ask(
        self,
        fl_ctx: FLContext,
        abort_signal: Signal,
        name: str,
        groups: Iterable[tuple[Shareable, list[str]]],
        timeout_s: float,
    ) -> Iterator[tuple[str, Shareable]]:
        """Send tasks of one name, each to its sites; yield the unchecked results as they arrive before the timeout.

        FLARE's own ``broadcast_and_wait`` handles one task; an attempt may need several, which run at the same time.
        The sender's name comes from FLARE's login, not from the message.

        Raises:
            Aborted: the job was aborted meanwhile.
        """
        arrived: SimpleQueue[tuple[str, Shareable]] = SimpleQueue()

        # FLARE passes keyword arguments, so the parameter names are fixed, and keeps every result until the task is
        # complete. It must not raise, which would end the task for all sites, and holds up the others meanwhile.
        def receive(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001
            arrived.put((client_task.client.name, client_task.result))
            client_task.result = None

        self._polling.restart()
        tasks = [self._offer(name, data, sites, timeout_s, receive, fl_ctx) for data, sites in groups]
        while True:
            # Read before the queue, so that no result is lost.
            is_complete = all(task.completion_status is not None for task in tasks)
            while not arrived.empty():
                yield arrived.get()
            if is_complete:
                break
            self._polling.update()
            if abort_signal.triggered:
                raise Aborted("the job was aborted")
            time.sleep(POLL_S)
        self._polling.restart()


def decode_reply(endpoint: ServerEndpoint, site: str, result: Shareable, log: logging.Logger) -> Reply:
    """Return a site's update, or why there is none: an error or an error code.

    It never raises, whatever the site sent: one site must not end the job of all.
    """
    try:
        if result.get_return_code() != ReturnCode.OK:
            return payload.read_refusal(result, site)
        message, meta = payload.shareable_to_message(result, site)
        return endpoint.decode(site, message, meta.get("examples"), meta.get("metrics"), meta.get(payload.EVENTS))
    except WireError as error:
        log.warning("update rejected: %s", error)
        return error
    except Exception as error:
        log.exception("update of %s rejected", site)
        return get_failure_code(error)


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
