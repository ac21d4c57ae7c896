"""The executor of every method: answers the question that the input filter decoded."""

from __future__ import annotations

import torch
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from ..errors import FlareSparseError, MissingBase
from ..exchange import Request
from .payload import HELLO, NOT_HELD_HEADER, REQUEST, UPDATE, hello_to_shareable, make_refusal, update_to_dxo
from .session import get_site_session, write_site_error


class SparseExecutor(Executor):
    """Trains, scores or judges as asked and returns an ordinary DXO, which the site's own filters see first."""

    def __init__(self) -> None:
        super().__init__()
        self._vector = torch.zeros(0)  # what replies are views of; encoded before the next question comes

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Never raises: a failure is a reply with our code and no text, since texts may name paths or subjects."""
        if task_name == HELLO:
            return hello_to_shareable(get_site_session(fl_ctx).hello(fl_ctx))
        request = shareable.get(REQUEST)
        try:
            if not isinstance(request, Request):
                raise request if isinstance(request, Exception) else FlareSparseError("no question was decoded")
            endpoint = get_site_session(fl_ctx).endpoint(fl_ctx)
            update = endpoint.answer(request)
        except FlareSparseError as error:
            return self._refusal(error, error.code, fl_ctx)
        except Exception as error:  # noqa: BLE001 - whatever a task or a model raises must not take the site down
            return self._refusal(error, "E_SITE", fl_ctx)
        if self._vector.numel() != endpoint.site.layout.size:
            self._vector = torch.zeros(endpoint.site.layout.size)
        reply = update_to_dxo(update, endpoint.site.layout, self._vector).to_shareable()
        reply[UPDATE] = (request, update, self._vector)
        return reply

    def _refusal(self, error: Exception, code: str, fl_ctx: FLContext) -> Shareable:
        self.log_error(fl_ctx, f"{code}: {type(error).__name__}; see site_error.txt in the job's folder at this site")
        write_site_error(error, code, fl_ctx)
        reply = make_refusal(code, ReturnCode.EXECUTION_EXCEPTION)
        reply.set_header(NOT_HELD_HEADER, isinstance(error, MissingBase))
        return reply
