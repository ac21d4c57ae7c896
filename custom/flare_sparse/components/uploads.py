"""What filters share that let a part of a site's delta leave."""

from abc import abstractmethod

import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import Tensor

from ..core.errors import UndefinedScores
from ..core.mask import Mask
from ..core.params import Layout
from .arrays import MASK, Arrays, guess_layout, hold, pack_mask, to_vector
from .received import ReceivingFilter


class UploadFilter(ReceivingFilter):
    """Lets selected entries of what a site trained leave; all others keep the received value, or are a zero difference.

    The mask of the selection travels in the meta, so that the server can tell an entry of delta zero from one that was
    not sent. Arrays that the layout does not have never leave: integer buffers, a frozen base model.
    """

    def get_layout(self, arrays: Arrays) -> Layout:
        """Return the layout of the tensors of which entries may leave."""
        return guess_layout(arrays)

    @abstractmethod
    def select(self, delta: Tensor, start: Tensor, layout: Layout, site: str, t: int) -> Mask:
        """Return the entries of a site's delta ``(P,)``, measured from ``start``, that leave in round ``t``."""

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        received = self.get_received(dxo, fl_ctx)
        layout = self.get_layout(received.arrays)
        start, sent = (to_vector(arrays, layout, self) for arrays in (received.arrays, dxo.data))
        is_difference = dxo.data_kind == DataKind.WEIGHT_DIFF
        delta = sent if is_difference else sent - start
        if not bool(torch.isfinite(delta).all()):
            raise UndefinedScores("the update has entries that are not finite; nothing is selected")
        mask = self.select(delta, start, layout, fl_ctx.get_identity_name(), received.round)
        data = hold(dxo.data, layout.unflatten(mask.bits), None if is_difference else received.arrays)
        return DXO(dxo.data_kind, data=data, meta={**dxo.meta, MASK: pack_mask(mask, layout)})
