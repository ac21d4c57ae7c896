"""The executor of every job: answers the request that the input filter decoded."""

from collections.abc import Mapping
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from ..core.errors import FlareSparseError, MissingBase, get_failure_code
from ..core.exchange import Request
from ..wire.capabilities import local_capabilities
from .job_settings import SITE_SECTIONS, check_shown_settings
from .payload import (
    HELLO,
    MISSING_BASE_HEADER,
    REQUEST,
    SUM,
    UPDATE,
    build_refusal,
    extract_sum,
    hello_to_shareable,
    sum_to_shareable,
    update_to_dxo,
)
from .session import get_site_session, read_job
from .workspace import write_site_error


class SparseExecutor(Executor):
    """Trains, scores or evaluates as requested and returns an ordinary DXO, so that the site's filters see values.

    Args:
        method: name of the job's method.
        task: name of its task.
        settings: what decides what this site computes and sends; see :mod:`flare_sparse.flare.job_settings`.
    """

    def __init__(self, method: str, task: str, settings: Mapping[str, Any]):
        super().__init__()
        self.method, self.task, self.settings = method, task, dict(settings)
        self._error: Exception | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Check at the start of the job that the arguments show what runs; a difference refuses every task."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            try:
                check_shown_settings(self, read_job(fl_ctx), SITE_SECTIONS)
            except Exception as error:  # noqa: BLE001 - settings of another version may raise any exception
                self._error = error

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the update, or a refusal with an error code and without text, which could name paths or subjects.

        Never raises: FLARE would log the error's text, and it streams logs to the server.
        """
        if task_name == HELLO:
            is_valid = self._error is None
            hello = get_site_session(fl_ctx).build_hello(fl_ctx) if is_valid else local_capabilities().to_message()
            return hello_to_shareable(hello)
        if self._error is not None:
            return self._refuse(self._error, get_failure_code(self._error), fl_ctx)
        if task_name == SUM:
            return self._answer_sum(shareable, fl_ctx)
        request = shareable.get(REQUEST)
        try:
            if not isinstance(request, Request):
                raise request if isinstance(request, Exception) else FlareSparseError("the task holds no request")
            session = get_site_session(fl_ctx)
            endpoint = session.get_endpoint(fl_ctx)
            session.attach(fl_ctx, abort_signal)
            update = endpoint.answer(request)
            # Not at the end of the job alone: a process that dies before it would take the site's own model with it.
            if request.round > endpoint.method.config.rounds:
                session.save_own_model(fl_ctx)
        except Exception as error:  # noqa: BLE001 - an error in a task or a model must not stop the site's process
            return self._refuse(error, get_failure_code(error), fl_ctx)
        reply = update_to_dxo(update, endpoint.site.layout).to_shareable()
        # The objects that EncodeUpdate needs; it removes them before anything is sent.
        reply[UPDATE] = (request, update)
        return reply

    def _answer_sum(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        try:
            endpoint = get_site_session(fl_ctx).get_endpoint(fl_ctx)
            return sum_to_shareable(endpoint.protection.answer(extract_sum(shareable)))
        except Exception as error:  # noqa: BLE001 - as in execute
            return self._refuse(error, get_failure_code(error), fl_ctx)

    def requires_materialized_task_result(self, task_name: str) -> bool:
        """Tell FLARE that results of a script in a process of its own are read here, not passed on to the server."""
        return True

    def _refuse(self, error: Exception, code: str, fl_ctx: FLContext) -> Shareable:
        self.log_error(fl_ctx, f"{code}: {type(error).__name__}; see site_error.txt in the job's folder at this site")
        write_site_error(error, code, fl_ctx)
        reply = build_refusal(code, ReturnCode.EXECUTION_EXCEPTION)
        reply.set_header(MISSING_BASE_HEADER, isinstance(error, MissingBase))
        return reply
