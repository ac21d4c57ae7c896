"""The executor of every job: answers the request that the input filter decoded."""

from __future__ import annotations

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from ..core.errors import FlareSparseError, MissingBase, RequestRefused, get_failure_code
from ..core.exchange import Request
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
from .session import get_site_session
from .workspace import write_site_error


class SparseExecutor(Executor):
    """Trains, scores or evaluates as requested and returns an ordinary DXO, so that the site's filters see values."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the update, or a refusal with an error code and without text, which could name paths or subjects.

        Never raises: FLARE would log the error's text, and it streams logs to the server.
        """
        if task_name == HELLO:
            return hello_to_shareable(get_site_session(fl_ctx).build_hello(fl_ctx))
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
            session.record_layer_compute(fl_ctx)
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
            sums = get_site_session(fl_ctx).get_endpoint(fl_ctx).sums
            if sums is None:
                raise RequestRefused("a step of a sum, but wire.aggregation of this site's copy of the job is plain")
            return sum_to_shareable(sums.answer(extract_sum(shareable)))
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
