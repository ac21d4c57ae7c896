"""The three filters of a job: decode the request (site), encode the update (site), decode the update (server).

FLARE's order at a site: the job's input filters, the executor, the site's own result filters, the job's result filters.
So the site's own filters see ordinary named arrays, and ``EncodeUpdate`` encodes their result as one message.
"""

from contextlib import suppress

from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils.memory_utils import try_malloc_trim

from ..core.errors import CheckpointError, RejectedMessage, WireError, get_failure_code
from ..rounds.federation import Reply
from .payload import (
    COUNTED,
    EVENTS,
    REPLY,
    REQUEST,
    UPDATE,
    build_refusal,
    dxo_to_update,
    get_sender,
    read_refusal,
    shareable_to_message,
    update_to_shareable,
)
from .session import get_server_session, get_site_session, read_site_policy
from .workspace import write_site_error


class DecodeRequest(Filter):
    """At the site, on task data: decodes the message into a request."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Put the request, or the error of decoding it, into the shareable. This never raises."""
        # FLARE receives and sends each message in threads of its own, and the C library keeps what each of them frees:
        # without this, a site would take the memory of several messages more with every round.
        try_malloc_trim()
        try:
            message, meta = shareable_to_message(shareable, "server")
            endpoint = get_site_session(fl_ctx).get_endpoint(fl_ctx)
            shareable[REQUEST] = endpoint.receive(message, meta.get(COUNTED))
        # FLARE would log an error raised here with its text, and it streams logs to the server. The executor answers
        # with the error's code instead.
        except Exception as error:  # noqa: BLE001
            shareable[REQUEST] = error
        return shareable


class EncodeUpdate(Filter):
    """At the site, on the task result: encodes the update that the site's filters return as one message."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the message; an update that cannot be encoded becomes a refusal with its error code only.

        Raises:
            RejectedMessage: the reply is not an update, or a filter broke it. FLARE then sends an error, no values.
        """
        # Removed before any return: FLARE's serializer (FOBS) at the server does not know these types.
        pending = shareable.pop(UPDATE, None)
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable
        if pending is None:
            raise RejectedMessage("E_KIND", "reply", "an update of SparseExecutor", "something else")
        endpoint = get_site_session(fl_ctx).get_endpoint(fl_ctx)
        request, update = pending
        update = dxo_to_update(from_shareable(shareable), update, endpoint.site.layout)
        try:
            encoded = endpoint.encode(request, update)
        # Raised, for example, by a value that is not finite or exceeds the bound of a sum.
        except Exception as error:  # noqa: BLE001 - FLARE would send its own code and log the error's text
            code = get_failure_code(error)
            write_site_error(error, code, fl_ctx)
            return build_refusal(code, ReturnCode.TASK_RESULT_FILTER_ERROR)
        if request.round > endpoint.method.config.rounds and endpoint.store is not None:
            # The last request of a run: the next job that starts here deletes the checkpoints of this one. Without the
            # mark they are deleted later, so a full disk must not cost the answer.
            with suppress(CheckpointError):
                endpoint.store.mark_finished(endpoint.store.folder)
            if read_site_policy(fl_ctx).checkpoint_days == 0:
                endpoint.store.delete()
        # The memory of the training goes back before FLARE sends the message.
        try_malloc_trim()
        return update_to_shareable(encoded.data, update, endpoint.events)


class DecodeUpdate(Filter):
    """At the server, on the task result: decodes a site's message and checks it against the request."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Put the reply into the shareable: an update, an error or an error code.

        This never raises: FLARE would replace the shareable by an error without the site's code.
        """
        site = get_sender(shareable)
        if site is None:
            shareable[REPLY] = "E_KIND"
        elif shareable.get_return_code() != ReturnCode.OK:
            shareable[REPLY] = read_refusal(shareable, site)
        else:
            shareable[REPLY] = self._decode(shareable, site, fl_ctx)
        return shareable

    def _decode(self, shareable: Shareable, site: str, fl_ctx: FLContext) -> Reply:
        try:
            message, meta = shareable_to_message(shareable, site)
            endpoint = get_server_session(fl_ctx).endpoint
            return endpoint.decode(site, message, meta.get("examples"), meta.get("metrics"), meta.get(EVENTS))
        except WireError as error:
            self.log_warning(fl_ctx, f"update rejected: {error}")
            return error
