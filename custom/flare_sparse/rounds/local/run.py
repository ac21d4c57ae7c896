"""Run of a method in one process: every message is encoded, decoded and counted as in FLARE, with the same result."""

import errno
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...core.checkpoint.store import Store
from ...core.errors import FlareSparseError, MissingBase, WireError, format_site_error, get_failure_code
from ...core.exchange import Update
from ...core.seeds import limit_threads
from ...methods.method import Method
from ...tasks.task import Metric
from ...training import Site
from ...wire.capabilities import local_capabilities
from ...wire.formats import ValueType
from ...wire.ledger import Ledger
from ...wire.stage import PLAIN_STAGE, Questions, Reply, ServerStage, SiteStage, Stage, StageRun, StepReply
from ..endpoints.egress import EgressLog, Outgoing, build_beside, describe_message
from ..endpoints.events import SERVER, pack_events
from ..endpoints.plans import InitialModel
from ..endpoints.request_log import RequestLog
from ..endpoints.server import Attempt, ServerEndpoint
from ..endpoints.site import SiteEndpoint
from ..federation.loop import Federation
from ..federation.records import Outcome, RoundRecord
from ..federation.roster import Connections
from ..federation.rules import RoundRules

_LOG = logging.getLogger(__name__)


def log_site_error(site: str, error: Exception) -> None:
    """Log the failure of a site."""
    _LOG.error("site %s: %s", site, format_site_error(error).strip())


@dataclass(frozen=True)
class Transport:
    """How the messages of a run travel.

    Attributes:
        values: number format of the values.
        stage: what the values of updates pass on their way to the server.
        builds_initial: each site builds the initial model itself, and no message carries it.
    """

    values: ValueType = "float32"
    stage: Stage = PLAIN_STAGE
    builds_initial: bool = False


@dataclass(frozen=True)
class Course:
    """How a run goes, where it starts, and what is called meanwhile.

    Attributes:
        run: run id, 16 hex digits.
        rules: rules that decide when a round is committed; None: the defaults.
        threads: number of torch threads, which fixes the order of float sums.
        stores: returns the checkpoint store of an end (``"server"`` or a site's name); None: no checkpoints.
        resume: continue from the checkpoints in ``stores``.
        egress: returns a site's egress log; None: the site has none.
        notes: what the record says of the sites' data, by site.
        on_round: called with the record of each committed round.
        on_site_error: called with the name and the error of a site that fails. As in FLARE, the server learns the code
            of the error alone, and the run continues with the other sites.
    """

    run: str = "0" * 16
    rules: RoundRules | None = None
    threads: int = 1
    stores: Callable[[str], Store | None] = lambda end: None
    resume: bool = False
    egress: Callable[[str], EgressLog | None] = lambda site: None
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    on_round: Callable[[RoundRecord], None] = lambda record: None
    on_site_error: Callable[[str, Exception], None] = log_site_error


PLAIN, FROM_START = Transport(), Course()


def run_locally(
    method: Method[Any, Any],
    weights: Tensor,
    sites: Mapping[str, Site | Exception],
    metric: Metric,
    *,
    transport: Transport = PLAIN,
    course: Course = FROM_START,
    ledger: Ledger | None = None,
) -> tuple[Outcome, Ledger]:
    """Run a method over sites in this process, through the real wire.

    Args:
        method: the method.
        weights: initial weights ``(P,)``.
        sites: sites by name, or the error that kept a site from loading its data.
        metric: metric that selects the best model.
        transport: how messages travel.
        course: how the run goes, where it starts, and what is called meanwhile.
        ledger: receives a line per message; None: a new ledger.

    Returns:
        The outcome and the ledger.
    """
    ledger = Ledger() if ledger is None else ledger
    values, run = transport.values, course.run
    server_stage, stages = build_stages(method, run, transport.stage, sorted(sites), ledger)
    server = ServerEndpoint(method.layout, run, values, ledger, server_stage, method.seed)
    initial = InitialModel(weights, method.layout) if transport.builds_initial else None
    endpoints = {
        name: site
        if isinstance(site, Exception)
        else SiteEndpoint(site, method, run, values, course.stores(name), stages[name], initial=initial)
        for name, site in sorted(sites.items())
    }
    logs = {name: course.egress(name) for name, endpoint in endpoints.items() if isinstance(endpoint, SiteEndpoint)}
    local = LocalSites(server, endpoints, logs, course.on_site_error)
    federation = Federation(
        method,
        server,
        metric,
        Connections(lambda: sorted(endpoints), local.exchange, local.exchange_steps, local.shake_hands),
        rules=course.rules,
        on_round=course.on_round,
        store=course.stores(SERVER),
    )
    with limit_threads(course.threads):
        outcome = federation.run(weights, resume=course.resume, notes=course.notes)
    return outcome, ledger


def build_stages(
    method: Method[Any, Any], run: str, stage: Stage, sites: Sequence[str], ledger: Ledger
) -> tuple[ServerStage, dict[str, SiteStage]]:
    """Return both ends of the stage of a run in this process, the sites' by name, with generated startup kits."""
    kits, stage_run = stage.generate_kits(sites), StageRun(method.layout, run, method.get_sum_weights)
    return stage.build_server(stage_run, ledger, kits[""].__getitem__), {
        name: stage.build_site(
            name, stage_run, kits[name].__getitem__, RequestLog(run, method.count_requests, attempts=1).admit_sum
        )
        for name in sites
    }


@dataclass(frozen=True)
class LocalSites:
    """The sites of this process, and how messages reach them.

    Attributes:
        server: validates the replies.
        endpoints: endpoint of each site, or the error that kept it from loading its data.
        logs: egress log of each site; it receives a line before each message leaves.
        on_site_error: called with the name and the error of a site that fails.
    """

    server: ServerEndpoint
    endpoints: Mapping[str, SiteEndpoint | Exception]
    logs: Mapping[str, EgressLog | None]
    on_site_error: Callable[[str, Exception], None]

    def exchange(self, attempt: Attempt) -> Mapping[str, Reply]:
        """Deliver an attempt's requests; return the validated reply of each site that answers in time."""
        return dict(self._collect_replies(attempt))

    def _collect_replies(self, attempt: Attempt) -> Iterator[tuple[str, Reply]]:
        for name, message in attempt.messages.items():
            start, endpoint = time.monotonic(), self.endpoints[name]
            if isinstance(endpoint, Exception):
                # Not raised again: each raise would extend its traceback, so that equal errors get different reports.
                yield name, self._refuse(name, endpoint)
                continue
            try:
                update, data, events = self._answer(name, endpoint, message, attempt.counted.get(name))
            except MissingBase as error:
                # This is no failure: the server sends the full model.
                yield name, error
                continue
            # Catch any exception of a task, a model or its data, as at a site of FLARE.
            except Exception as error:
                # The sites of this process share the server's disk: the run cannot go on without this one.
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                yield name, self._refuse(name, error)
                continue
            # The sites of this process take turns, and each has the whole time, as if they worked at the same time.
            if attempt.seconds is not None and time.monotonic() - start > attempt.seconds:
                continue
            try:
                yield name, self.server.decode(name, data, update.num_examples, update.metrics, events)
            except WireError as error:
                yield name, error

    def exchange_steps(self, questions: Questions) -> Iterator[tuple[str, StepReply]]:
        """Deliver the questions of a step of the stage; yield each reply, or the code of the site's failure."""
        for name, question in questions.messages.items():
            endpoint = self.endpoints[name]
            assert not isinstance(endpoint, Exception), "a site that failed has sent no update"
            try:
                reply = endpoint.stage.answer(question)
            except FlareSparseError as error:
                yield name, self._refuse(name, error)
                continue
            self._record(name, describe_message(reply))
            yield name, reply

    def shake_hands(self, names: list[str]) -> Mapping[str, Any]:
        """Return the hello of each site."""
        hellos = {}
        for name in names:
            endpoint = self.endpoints[name]
            # A site that cannot load its data sends its versions only.
            hellos[name] = (
                local_capabilities().to_message() if isinstance(endpoint, Exception) else endpoint.build_hello()
            )
            self._record(name, Outgoing("hello", ["versions and limits"], beside=hellos[name]))
        return hellos

    def _answer(self, name: str, endpoint: SiteEndpoint, message: Any, counted: str | None) -> tuple[Update, Any, Any]:
        """Return a site's update, its encoded message and its events."""
        request = endpoint.receive(message, counted)
        update = endpoint.answer(request)
        data, events = endpoint.encode(request, update).data, pack_events(endpoint.events)
        self._record(name, describe_message(data, build_beside(update, events)))
        return update, data, events

    def _refuse(self, name: str, error: Exception) -> str:
        """Return the code of a site's failure, all that the server learns of it."""
        self.on_site_error(name, error)
        self._record(name, Outgoing("refusal", [code := get_failure_code(error)]))
        return code

    def _record(self, name: str, outgoing: Outgoing) -> None:
        if (log := self.logs.get(name)) is not None:
            log.record(outgoing)
