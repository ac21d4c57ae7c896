"""The model that a site has received: filters of results need it, but FLARE hands them the result alone."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ProcessType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.task_utils import contains_lazy_download_ref, materialize_lazy_download_refs
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.ccwf.common import Constant
from torch import Tensor

from .arrays import MASK, ComponentError
from .filters import ModelFilter

_TASK, _MESSAGE = "flare_sparse.received_task", "flare_sparse.received_message"


@dataclass(frozen=True)
class Received:
    """What a site has received.

    Attributes:
        arrays: copies of the model's arrays: a script may change those that it gets in place.
        mask: packed mask of the entries that train; None: all of them.
        round: 1-based round of the task.
        is_decrypted: whether FLARE has decrypted the model, whose zeros are then not exact.
    """

    arrays: dict[str, Any]
    mask: object
    round: int
    is_decrypted: bool = False


class ReceivingFilter(ModelFilter):
    """A filter of what leaves a site that knows the model which the site has received.

    One filter among those of results suffices: it hears FLARE's event before the executor runs. Where sites exchange
    models between them (swarm) there is no such event; there the filter remembers the models that arrive, and that
    which a site sends to all, because it trains this model, too, without a message to itself. FLARE asks the receiver
    of the model before it sends an update, so that the model is always remembered by then.
    """

    is_strict = True

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            data = fl_ctx.get_prop(FLContextKey.TASK_DATA)
            if isinstance(data, Shareable):
                fl_ctx.set_prop(_TASK, self.remember(data, fl_ctx), private=True, sticky=True)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        is_arriving = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN
        is_site = fl_ctx.get_process_type() != ProcessType.SERVER_JOB
        names_aggregator = shareable.get_header(Constant.AGGREGATOR) is not None
        if self._is_message and is_site and (is_arriving or names_aggregator):
            fl_ctx.set_prop(_MESSAGE, self.remember(shareable, fl_ctx), private=True, sticky=True)
            return shareable
        if not is_site or is_arriving:
            raise ComponentError(
                self,
                "it is in a chain of messages that do not leave a site",
                "put it among the task_result_filters of config_fed_client.json",
            )
        return super().process(shareable, fl_ctx)

    @property
    def _is_message(self) -> bool:
        return bool(self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN)

    def prepare(self, dxo: DXO, t: int) -> None:
        """Change the received model, in place, before the site trains it in round ``t``; by default nothing."""

    def get_received(self, dxo: DXO, fl_ctx: FLContext) -> Received:
        """Return the received model, whose arrays the result has, too.

        Raises:
            ComponentError: the task brought no model, or one of other tensors.
        """
        return check_received(fl_ctx.get_prop(_MESSAGE if self._is_message else _TASK), dxo, self)

    def remember(self, shareable: Shareable, fl_ctx: FLContext) -> Received | None:
        """Prepare the model of a task, in place, and return it; None: the task brings none."""
        try:
            dxo = from_shareable(_fetch(shareable, fl_ctx))
        except ValueError:
            return None
        if dxo.data_kind != DataKind.WEIGHTS or not dxo.data:
            return None
        t = int(shareable.get_header(AppConstants.CURRENT_ROUND) or 0) + 1
        self.prepare(dxo, t)
        dxo.update_shareable(shareable)
        return Received({name: _copy(a) for name, a in dxo.data.items()}, dxo.meta.get(MASK), t)


def check_received(received: object, dxo: DXO, component: object) -> Received:
    """Return what a task brought.

    Raises:
        ComponentError: it brought no model, or one of other tensors than the result.
    """
    if not isinstance(received, Received):
        raise ComponentError(
            component, "the task brought no model (WEIGHTS)", "name only tasks that carry one, such as train"
        )
    if unknown := sorted(set(map(str, dxo.data)) - set(received.arrays)):
        raise ComponentError(
            component, f"the result has {unknown[0]!r}, which the received model has not", "send tensors of that model"
        )
    arrays = {name: _shape(array, dxo.data.get(name)) for name, array in received.arrays.items()}
    is_decrypted = any(isinstance(array, list) for array in received.arrays.values())
    for name, array in dxo.data.items():
        if np.shape(array) != np.shape(arrays[name]):
            raise ComponentError(
                component,
                f"{name} has the shape {tuple(np.shape(array))}, received was {np.shape(arrays[name])}",
                "send tensors of the received model",
            )
    return replace(received, arrays=arrays, is_decrypted=is_decrypted)


def _fetch(shareable: Shareable, fl_ctx: FLContext) -> Shareable:
    """Return a task with its arrays: a script in a process of its own gets references, and fetches them itself."""
    if not contains_lazy_download_ref(shareable):
        return shareable
    return materialize_lazy_download_refs(shareable, fl_ctx.get_engine().get_cell())


def _copy(array: Any) -> Any:
    return array.detach().clone() if isinstance(array, Tensor) else copy.copy(array)


def _shape(received: Any, sent: Any) -> Any:
    """Return a received array; FLARE's decryptor gives a plain list, which has the shape of what the site sends."""
    if not isinstance(received, list):
        return received
    flat = np.asarray(received, np.float32)
    return flat.reshape(np.shape(sent)) if flat.size == np.size(sent) else flat
