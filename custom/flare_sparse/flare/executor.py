"""The executor of every job, which answers requests, and the filter that encodes its updates.

FLARE's order at a site: the executor, the site's own result filters, the job's result filters. So the site's own
filters see ordinary named arrays, and ``EncodeUpdate`` encodes their result as one message.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.task_utils import contains_lazy_download_ref, materialize_lazy_download_refs
from nvflare.fuel.utils.memory_utils import try_malloc_trim

from ..core.errors import CheckpointError, MissingBase, RejectedMessage, get_failure_code
from ..wire.capabilities import local_capabilities
from . import payload
from .job_settings import SITE_SECTIONS, check_shown_settings
from .session import get_site_session, read_job, read_site_policy
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
        if task_name == payload.HELLO:
            is_valid = self._error is None
            hello = get_site_session(fl_ctx).build_hello(fl_ctx) if is_valid else local_capabilities().to_message()
            return payload.wrap(payload.HELLO, hello)
        # FLARE receives and sends each message in threads of its own, and the C library keeps what each of them frees:
        # without this, a site would take the memory of several messages more with every round.
        try_malloc_trim()
        try:
            if self._error is not None:
                raise self._error
            session = get_site_session(fl_ctx)
            endpoint = session.get_endpoint(fl_ctx)
            if task_name == payload.SUM:
                return payload.wrap(payload.SUM, endpoint.stage.answer(payload.extract(payload.SUM, shareable)))
            # In a job with a script FLARE downloads what a task holds only for a filter, and for whoever asks.
            if contains_lazy_download_ref(shareable):
                cell = fl_ctx.get_engine().get_cell()
                shareable = materialize_lazy_download_refs(shareable, cell, abort_signal)
            message, meta = payload.shareable_to_message(shareable, "server")
            request = endpoint.receive(message, meta.get(payload.COUNTED))
            session.attach(fl_ctx, abort_signal)
            update = endpoint.answer(request)
            # Not at the end of the job alone: a process that dies before it would take the site's own model with it.
            if request.round > endpoint.method.config.rounds:
                session.save_own_model(fl_ctx)
        except Exception as error:  # noqa: BLE001 - an error in a task or a model must not stop the site's process
            return self._refuse(error, fl_ctx)
        reply = payload.update_to_dxo(update, endpoint.site.layout).to_shareable()
        # The objects that EncodeUpdate needs; it removes them before anything is sent.
        reply[payload.UPDATE] = (request, update)
        return reply

    def requires_materialized_task_result(self, task_name: str) -> bool:
        """Tell FLARE that results of a script in a process of its own are read here, not passed on to the server."""
        return True

    def _refuse(self, error: Exception, fl_ctx: FLContext) -> Shareable:
        code = get_failure_code(error)
        self.log_error(fl_ctx, f"{code}: {type(error).__name__}; see site_error.txt in the job's folder at this site")
        write_site_error(error, code, fl_ctx)
        reply = payload.build_refusal(code, ReturnCode.EXECUTION_EXCEPTION)
        reply.set_header(payload.MISSING_BASE_HEADER, isinstance(error, MissingBase))
        return reply


class EncodeUpdate(Filter):
    """At the site, on the task result: encodes the update that the site's filters return as one message."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the message; an update that cannot be encoded becomes a refusal with its error code only.

        Raises:
            RejectedMessage: the reply is not an update, or a filter broke it. FLARE then sends an error, no values.
        """
        # Removed before any return: FLARE's serializer (FOBS) at the server does not know these types.
        pending = shareable.pop(payload.UPDATE, None)
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable
        if pending is None:
            raise RejectedMessage("E_KIND", "reply", "an update of SparseExecutor", "something else")
        endpoint = get_site_session(fl_ctx).get_endpoint(fl_ctx)
        request, update = pending
        update = payload.dxo_to_update(from_shareable(shareable), update, endpoint.site.layout)
        try:
            encoded = endpoint.encode(request, update)
        # Raised, for example, by a value that is not finite or exceeds the bound of a sum.
        except Exception as error:  # noqa: BLE001 - FLARE would send its own code and log the error's text
            code = get_failure_code(error)
            write_site_error(error, code, fl_ctx)
            return payload.build_refusal(code, ReturnCode.TASK_RESULT_FILTER_ERROR)
        if request.round > endpoint.method.config.rounds and endpoint.store is not None:
            # The last request of a run: the next job that starts here deletes the checkpoints of this one. Without the
            # mark they are deleted later, so a full disk must not cost the answer.
            with suppress(CheckpointError):
                endpoint.store.mark_finished(endpoint.store.folder)
            if read_site_policy(fl_ctx).checkpoint_days == 0:
                endpoint.store.delete()
        # The memory of the training goes back before FLARE sends the message.
        try_malloc_trim()
        return payload.update_to_shareable(encoded.data, update, endpoint.events)
