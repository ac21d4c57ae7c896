"""Masked training with any script: FLARE's own executor, whose result is held to the mask of the task."""

from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor

from ..core.errors import get_failure_code
from .arrays import check_plain
from .filters import MODELS
from .keep_mask import TASK, KeepMask
from .received import check_received


class MaskedTraining(ClientAPIExecutor):
    """``ClientAPIExecutor`` with ``KeepMask`` before all filters, so that a site's own filters see the masked result.

    In FLARE's swarm it holds the aggregating site, too, whose own result passes no filter.

    Args:
        source: of the mask, as of ``KeepMask``.
        args, kwargs: arguments of ``ClientAPIExecutor``.
    """

    def __init__(self, *args: object, source: str = TASK, **kwargs: object):
        super().__init__(*args, **kwargs)
        self.source = source
        self._keep = KeepMask(source)

    @staticmethod
    def _requires_materialized_result(*_: object) -> bool:
        """Return True: a script in a process of its own sends references, which FLARE resolves only for filters."""
        return True

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type != EventType.BEFORE_TASK_EXECUTION:
            self._keep.handle_event(event_type, fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the script's result with the entries outside the mask as they were received."""
        # Not by FLARE's event: in swarm learning there is none.
        received = self._keep.remember(shareable, fl_ctx)
        result = super().execute(task_name, shareable, fl_ctx, abort_signal)
        if result.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return result
        dxo = from_shareable(result)
        if dxo.data_kind not in MODELS:
            return result
        try:
            check_plain(dxo, self)
            return self._keep.hold(dxo, check_received(received, dxo, self), fl_ctx).update_shareable(result)
        except Exception as error:  # noqa: BLE001 - a RuntimeError of an executor ends the job for all sites
            self.log_error(fl_ctx, f"{get_failure_code(error)}: the result is left out of this round: {error}")
            return make_reply(ReturnCode.EXECUTION_RESULT_ERROR)
