"""The executors of hubs and of their sites.

FLARE 2.9 sends every message between two clients through the server, also where a project sets ``parent`` or relays. A
hub of that kind would double the traffic at the server. A hub therefore listens for its sites itself. For a site, one
task of the server, :data:`~flare_sparse.flare.payload.JOIN`, lasts as long as the job: in it the site connects to its
hub and answers its questions, each as the FLARE task that it would be without the hub, with the site's own filters.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReservedKey, ReservedTopic, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from ...core.errors import ConfigError, RejectedMessage, get_failure_code
from ...rounds.federation import Hub
from ..payload import build_refusal, collection_to_shareable, extract_collection
from ..session import read_job
from ..workspace import get_workspace, write_site_error
from .addresses import HUBS_FILE, find_address
from .connection import HubConnection, serve_hub
from .listener import HubListener
from .mailboxes import Mailboxes
from .messages import build_site_links, pack_answer, pack_failure, read_question
from .tls import build_server_credentials, build_site_credentials

SHARES = (0.9, 0.05)
"""Share of a collection's time in which answers of sites must begin to arrive, and the next one, in which they end.

The rest is for the hub's own answer, which must reach the server in time without the sites that are late.
"""
FREE_S, PAUSE_S = 20.0, 0.5
"""Seconds that a hub waits for its port to become free, and between two tries."""


class HubExecutor(Executor):
    """Answers the collections of the server, at a client that ``federation.hubs`` names; elsewhere it does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._hub: Hub | None = None
        self._listener: HubListener | None = None
        self._signal = Signal()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Listen for the sites from the start of a job to its end."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            try:
                self._signal = fl_ctx.get_prop(ReservedKey.RUN_ABORT_SIGNAL) or self._signal
                self._open(fl_ctx)
            # Not raised: FLARE would log its text, which it may stream to the server. The first collection is refused.
            except Exception as error:  # noqa: BLE001
                _report(self, error, fl_ctx)
        if event_type == EventType.END_RUN and self._listener is not None:
            self._listener.close()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return a collection with the replies of the hub's sites, or a refusal with an error code. It never raises."""
        try:
            self._signal = abort_signal
            hub = self._hub or self._open(fl_ctx)
            if hub is None:
                raise ConfigError(f"federation.hubs: {fl_ctx.get_identity_name()} is no hub of this participant's job")
            return collection_to_shareable(hub.answer(extract_collection(shareable)))
        except Exception as error:  # noqa: BLE001 - one collection must not stop the hub's process
            return build_refusal(_report(self, error, fl_ctx), ReturnCode.EXECUTION_EXCEPTION)

    def _open(self, fl_ctx: FLContext) -> Hub | None:
        """Listen for the sites of this hub; return None at a client that is no hub."""
        name, job = fl_ctx.get_identity_name(), read_job(fl_ctx)
        rules = job.hubs.get(name)
        if rules is None:
            return None
        workspace = get_workspace(fl_ctx)
        mailboxes = Mailboxes(rules.sites, rules.fetch_s)
        address = find_address(Path(workspace.get_site_config_dir()), name)
        credentials = build_server_credentials(Path(workspace.get_startup_kit_dir()))

        def is_aborted() -> bool:
            return bool(self._signal.triggered)

        def ask(contents: Mapping[str, bytes], seconds: float | None, max_answer_bytes: int) -> dict[str, bytes]:
            total_s = seconds or job.federation.round_s or job.federation.task_timeout_s
            begin_s, transfer_s = (share * total_s for share in SHARES)
            return mailboxes.ask(contents, begin_s, max_answer_bytes, transfer_s, is_aborted)

        open_listener = partial(HubListener, address, mailboxes, credentials, fl_ctx.get_job_id())
        self._listener = _listen(name, address, open_listener, is_aborted)
        self._hub = Hub(rules, build_site_links(ask))
        self.log_info(fl_ctx, f"hub of {len(rules.sites)} sites, listening on {address[0]}:{address[1]}")
        return self._hub


class HubSiteExecutor(Executor):
    """Answers the questions of the site's hub from the start of a job to its end."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return at the end of the job, or a refusal with an error code before it. It never raises."""
        try:
            connection = self._build_connection(fl_ctx)
            self.log_info(fl_ctx, f"this site answers {connection.hub} from now on")
            serve_hub(
                connection,
                lambda question: self._answer(question, connection.hub, fl_ctx),
                lambda: abort_signal.triggered,
            )
        except Exception as error:  # noqa: BLE001 - as in SparseExecutor
            return build_refusal(_report(self, error, fl_ctx), ReturnCode.EXECUTION_EXCEPTION)
        return make_reply(ReturnCode.OK)

    def _build_connection(self, fl_ctx: FLContext) -> HubConnection:
        name, workspace = fl_ctx.get_identity_name(), get_workspace(fl_ctx)
        hubs = [hub for hub, rules in read_job(fl_ctx).hubs.items() if name in rules.sites]
        if not hubs:
            raise ConfigError(f"federation.hubs: no hub lists {name}; the server and this site have different jobs")
        # The site's own file decides whether it has dealings with this hub, and where it is: the job names no address.
        address = find_address(Path(workspace.get_site_config_dir()), hubs[0])
        credentials = build_site_credentials(Path(workspace.get_startup_kit_dir()))
        return HubConnection(hubs[0], address, credentials, fl_ctx.get_job_id())

    def _answer(self, content: bytes, hub: str, fl_ctx: FLContext) -> bytes:
        """Run the FLARE task of a question, as if the server had sent it, and return the answer."""
        name, engine = fl_ctx.get_identity_name(), fl_ctx.get_engine()
        try:
            topic, task, data = read_question(content, hub)
        except RejectedMessage as error:
            return pack_failure(name, _report(self, error, fl_ctx))
        data.set_header(ReservedKey.TASK_NAME, task)
        data.set_header(ReservedKey.TASK_ID, f"{fl_ctx.get_prop(ReservedKey.TASK_ID)}-{hub}")
        # FLARE's handler of tasks that come as messages: all filters of job and site run, as for a task of the server.
        data.set_peer_props(fl_ctx.get_peer_context().get_all_public_props())
        with engine.new_context() as context:
            result = engine.dispatch(topic=ReservedTopic.DO_TASK, request=data, fl_ctx=context)
        return pack_answer(topic, name, result)


def _listen(
    name: str, address: tuple[str, int], open_listener: Callable[[], HubListener], is_aborted: Callable[[], bool]
) -> HubListener:
    """Return a listener, as soon as its port is free.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            return open_listener()
        except OSError as error:
            # The process of a job that was aborted a moment ago may still hold the port.
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline or is_aborted():
                place, reason = f"{address[0]}:{address[1]}", error.strerror or error
                raise ConfigError(f"{HUBS_FILE}: {name}: {place}: {reason}; set an address of this host") from error
        time.sleep(PAUSE_S)


def _report(executor: Executor, error: Exception, fl_ctx: FLContext) -> str:
    """Write an error to the file of this participant, log its code, and return the code."""
    code = get_failure_code(error)
    executor.log_error(fl_ctx, f"{code}: {type(error).__name__}; see site_error.txt in the job's folder at this site")
    # A full disk must not cost the answer.
    with suppress(OSError):
        write_site_error(error, code, fl_ctx)
    return code
