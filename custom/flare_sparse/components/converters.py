"""Patches as FLARE's DXOs of named arrays, and back: weights, deltas, scores, and the adapters or gates of a mask."""

from collections.abc import Mapping
from typing import Any

from nvflare.apis.dxo import DXO, DataKind

from ..core.exchange import Patch
from ..core.mask import Mask
from ..core.params import Layout
from .arrays import MASK, ComponentError, check_plain, pack_mask, read_mask, to_vector
from .filters import MODELS


def patch_to_dxo(patch: Patch, layout: Layout, *, is_delta: bool = False, meta: Mapping[str, Any] | None = None) -> DXO:
    """Return a patch as named float32 arrays, zero outside it, with its mask in the meta.

    Examples:
        >>> import torch
        >>> layout = Layout.from_module(torch.nn.Linear(2, 1))
        >>> dxo = patch_to_dxo(Patch(torch.tensor([1.0, 3.0]), Mask(torch.tensor([True, False, True]))), layout)
        >>> dxo.data["weight"], dxo.data["bias"]
        (array([[1., 0.]], dtype=float32), array([3.], dtype=float32))
        >>> dxo_to_patch(dxo, layout).values
        tensor([1., 3.])
    """
    arrays = {name: view.numpy() for name, view in layout.unflatten(patch.to_vector()).items()}
    kind = DataKind.WEIGHT_DIFF if is_delta else DataKind.WEIGHTS
    return DXO(kind, data=arrays, meta={**(meta or {}), MASK: pack_mask(patch.mask, layout)})


def dxo_to_patch(dxo: DXO, layout: Layout) -> Patch:
    """Return the patch of a DXO's arrays and of the mask in its meta; without a mask, of all entries.

    Raises:
        ComponentError: it holds other values, or those of another network.
    """
    if dxo.data_kind not in MODELS:
        raise ComponentError("dxo_to_patch", f"the kind is {dxo.data_kind}", "give WEIGHTS or WEIGHT_DIFF")
    check_plain(dxo, "dxo_to_patch")
    packed = dxo.get_meta_prop(MASK)
    mask = Mask.full(layout.size) if packed is None else read_mask(packed, layout, "dxo_to_patch")
    return Patch.from_vector(to_vector(dxo.data, layout, "dxo_to_patch"), mask)
