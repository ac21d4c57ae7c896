"""The three filters: decode the question (site), encode the answer (site, last of the job's), decode it (server)."""

from __future__ import annotations

from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from ..errors import FlareSparseError, MissingBase, RejectedMessage, WireError
from ..federation import Reply
from .payload import (
    NOT_HELD_HEADER,
    REPLY,
    REQUEST,
    UPDATE,
    answer_to_shareable,
    dxo_to_update,
    get_refusal_code,
    get_sender,
    make_refusal,
    shareable_to_message,
)
from .session import get_server_session, get_site_session, write_site_error


class DecodeRequest(Filter):
    """Site, task data: bytes in, question out. A question that cannot be read is refused by the executor."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        try:
            message, _ = shareable_to_message(shareable, "server")
            shareable[REQUEST] = get_site_session(fl_ctx).endpoint(fl_ctx).receive(message)
        except Exception as error:  # noqa: BLE001 - the executor says the code; the text may name subjects and stays here
            shareable[REQUEST] = error
        return shareable


class EncodeUpdate(Filter):
    """Site, task result: what the site's own filters left over becomes one message. Withholds what it cannot encode."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """What cannot be sent (a value that is not finite, or cannot be encrypted) becomes a reply with its code only.

        Raises:
            RejectedMessage: the reply is not an update, or a filter broke it; FLARE then sends an error, no values.
        """
        waiting = shareable.pop(UPDATE, None)  # first: its types are none that the server's FLARE could read
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable
        if waiting is None:
            raise RejectedMessage("E_KIND", "reply", "an update of SparseExecutor", "something else")
        endpoint = get_site_session(fl_ctx).endpoint(fl_ctx)
        request, update, vector = waiting
        update = dxo_to_update(from_shareable(shareable), update, vector, endpoint.site.layout)
        try:
            encoded = endpoint.encode(request, update)
        except FlareSparseError as error:
            write_site_error(error, error.code, fl_ctx)
            return make_refusal(error.code, ReturnCode.TASK_RESULT_FILTER_ERROR)
        return answer_to_shareable(encoded.data, update)


class DecodeUpdate(Filter):
    """Server, task result: checks a site's message against the question it answers; touches nobody else's."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        site = get_sender(shareable)
        if site is None:
            shareable[REPLY] = "E_KIND"
        elif shareable.get_return_code() != ReturnCode.OK:
            shareable[REPLY] = _refusal(shareable, site)
        else:
            shareable[REPLY] = self._decoded(shareable, site, fl_ctx)
        return shareable

    def _decoded(self, shareable: Shareable, site: str, fl_ctx: FLContext) -> Reply:
        try:
            message, meta = shareable_to_message(shareable, site)
            return get_server_session(fl_ctx).endpoint.decode(site, message, meta.get("examples"), meta.get("metrics"))
        except WireError as error:
            self.log_warning(fl_ctx, f"left out of this round: {error}")
            return error


def _refusal(shareable: Shareable, site: str) -> Reply:
    """Why a site did not answer, from codes only: its text is not ours to repeat."""
    if shareable.get_header(NOT_HELD_HEADER) is True:
        return MissingBase("E_NOT_HELD", "known", "what the message leans on", "nothing", site)
    return get_refusal_code(shareable)
