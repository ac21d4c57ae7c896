"""Filters and executor of a site that hold what a script trained to the mask of the server or of its task.

The filters need the model that the site has received; FLARE hands them the result alone.
"""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.utils.task_utils import contains_lazy_download_ref, materialize_lazy_download_refs
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.ccwf.common import Constant
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from torch import Tensor

from ..core.errors import get_failure_code, list_first
from .arrays import MASK, MODELS, ComponentError, check_plain, hold, is_float, unpack_mask
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
                fl_ctx.set_prop(_TASK, self.receive(data, fl_ctx), private=True, sticky=True)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        is_arriving = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN
        is_site = fl_ctx.get_process_type() != ProcessType.SERVER_JOB
        names_aggregator = shareable.get_header(Constant.AGGREGATOR) is not None
        if self._is_message and is_site and (is_arriving or names_aggregator):
            fl_ctx.set_prop(_MESSAGE, self.receive(shareable, fl_ctx), private=True, sticky=True)
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
        return require_received(fl_ctx.get_prop(_MESSAGE if self._is_message else _TASK), dxo, self)

    def receive(self, shareable: Shareable, fl_ctx: FLContext) -> Received | None:
        """Prepare the model of a task, in place, and return copies of it; None: the task brings none."""
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


def require_received(received: object, dxo: DXO, component: object) -> Received:
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


TASK, ZEROS = "task", "zeros"


@dataclass(eq=False)
class KeepMask(ReceivingFilter):
    """Entries outside a mask keep the value that the site received, bit for bit; of a difference they are zero.

    Args:
        source: ``"task"``: the mask that came with the model, from an aggregator or a controller of this package; all
            entries are live until one has come. ``"zeros"``: the entries of weights that are zero in the received model
            are off; after decryption none is exactly zero. Else the name of a file of the job's ``config`` folder,
            written by ``numpy.savez``: a bool array by tensor name; a tensor that it does not name is live.
    """

    _always_serialize_args = ("source",)

    source: str = TASK

    _has_kept: bool = field(default=False, init=False)
    _has_masked: bool = field(default=False, init=False)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.END_RUN and self._has_kept and not self._has_masked:
            self.log_warning(fl_ctx, f"KeepMask: source {self.source!r} has never brought a mask; all entries trained")

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        return self.hold(dxo, self.get_received(dxo, fl_ctx), fl_ctx)

    def hold(self, dxo: DXO, received: Received, fl_ctx: FLContext) -> DXO:
        """Return a result with the entries outside the mask as they were received."""
        live = self._find_live(received, fl_ctx)
        self._has_kept, self._has_masked = True, self._has_masked or bool(live)
        start = received.arrays if dxo.data_kind == DataKind.WEIGHTS else None
        data = {**dxo.data, **hold({name: a for name, a in dxo.data.items() if name in live}, live, start)}
        return DXO(dxo.data_kind, data=data, meta=dxo.meta)

    def _find_live(self, received: Received, fl_ctx: FLContext) -> dict[str, Tensor]:
        """Return the bool tensors of the mask by name; tensors without one are live."""
        if self.source == TASK:
            shapes = {name: tuple(np.shape(array)) for name, array in received.arrays.items()}
            return {} if received.mask is None else unpack_mask(received.mask, shapes, self)
        if self.source == ZEROS:
            if received.is_decrypted:
                raise ComponentError(self, "a decrypted model has no exact zeros", "name a mask file as its source")
            weights = {name: torch.as_tensor(a) for name, a in received.arrays.items() if is_float(a) and a.ndim > 1}
            return {name: value != 0 for name, value in weights.items()}
        workspace = fl_ctx.get_engine().get_workspace()
        # The name alone: a job may name a file that came with it, and no other of this machine.
        return self._read_file(
            Path(workspace.get_app_config_dir(fl_ctx.get_job_id())) / Path(self.source).name, received
        )

    def _read_file(self, file: Path, received: Received) -> dict[str, Tensor]:
        remedy = f"write {file.name} by numpy.savez with a bool array by tensor name, into the job's config folder"
        try:
            with np.load(file, allow_pickle=False) as archive:
                arrays = dict(archive)
        except (OSError, ValueError) as error:
            raise ComponentError(self, f"{file.name} cannot be read ({type(error).__name__})", remedy) from error
        for name, bits in arrays.items():
            if name not in received.arrays or bits.dtype != bool or bits.shape != np.shape(received.arrays[name]):
                found = f"{name} is {bits.dtype} {bits.shape}; the model has {list_first(received.arrays, 3)}"
                raise ComponentError(self, f"the mask is of another network: {found}", remedy)
        return {name: torch.from_numpy(bits) for name, bits in arrays.items()}


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
        # Do not wait for FLARE's event: in swarm learning there is none.
        received = self._keep.receive(shareable, fl_ctx)
        result = super().execute(task_name, shareable, fl_ctx, abort_signal)
        if result.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            return result
        dxo = from_shareable(result)
        if dxo.data_kind not in MODELS:
            return result
        try:
            check_plain(dxo, self)
            return self._keep.hold(dxo, require_received(received, dxo, self), fl_ctx).update_shareable(result)
        except Exception as error:  # noqa: BLE001 - a RuntimeError of an executor ends the job for all sites
            self.log_error(fl_ctx, f"{get_failure_code(error)}: the result is left out of this round: {error}")
            return make_reply(ReturnCode.EXECUTION_RESULT_ERROR)
