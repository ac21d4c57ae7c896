"""Holds a site's result to a mask, whatever its script trained (NeuroSFL, FedSparsify)."""

from pathlib import Path

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import Tensor

from ..core.errors import list_first
from .arrays import ComponentError, hold, is_float, unpack_mask
from .received import Received, ReceivingFilter

TASK, ZEROS = "task", "zeros"


class KeepMask(ReceivingFilter):
    """Entries outside a mask keep the value that the site received, bit for bit; of a difference they are zero.

    Args:
        source: ``"task"``: the mask that came with the model, from an aggregator or a controller of this package; all
            entries are live until one has come. ``"zeros"``: the entries of weights that are zero in the received model
            are off; after decryption none is exactly zero. Else the name of a file of the job's ``config`` folder,
            written by ``numpy.savez``: a bool array by tensor name; a tensor that it does not name is live.
    """

    _always_serialize_args = ("source",)

    def __init__(self, source: str = TASK):
        super().__init__()
        self.source = source
        self._has_kept = False
        self._has_masked = False

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
        return keep_mask(dxo, received, live)

    def _find_live(self, received: Received, fl_ctx: FLContext) -> dict[str, Tensor]:
        """Return the bool tensors of the mask by name; tensors without one are live."""
        if self.source == TASK:
            return read_live(received, self)
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


def read_live(received: Received, component: object) -> dict[str, Tensor]:
    """Return the bool tensors of the mask that came with a model by name; tensors without one are live.

    Raises:
        ComponentError: it is of another network.
    """
    shapes = {name: tuple(np.shape(array)) for name, array in received.arrays.items()}
    return {} if received.mask is None else unpack_mask(received.mask, shapes, component)


def keep_mask(dxo: DXO, received: Received, live: dict[str, Tensor]) -> DXO:
    """Return a site's result with the entries outside ``live`` as they were received."""
    start = received.arrays if dxo.data_kind == DataKind.WEIGHTS else None
    data = {**dxo.data, **hold({name: a for name, a in dxo.data.items() if name in live}, live, start)}
    return DXO(dxo.data_kind, data=data, meta=dxo.meta)
