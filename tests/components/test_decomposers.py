"""Masks and patches in FLARE's serializer and DXOs: they come back, and what is none is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.fuel.utils import fobs
from torch import nn

from flare_sparse.components.arrays import MASK, ComponentError, dxo_to_patch, patch_to_dxo
from flare_sparse.components.decomposers import MaskDecomposer, PatchDecomposer
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout

LAYOUT = Layout.from_module(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


def build_patch(seed: int) -> Patch:
    generator = torch.Generator().manual_seed(seed)
    mask = Mask(torch.rand(LAYOUT.size, generator=generator) > 0.5)
    return Patch(torch.randn(mask.count, generator=generator), mask)


@given(st.integers(0, 10**6), st.booleans())
def test_patch_comes_back_from_a_dxo_and_from_a_shareable(seed: int, is_delta: bool) -> None:
    patch = build_patch(seed)
    dxo = from_shareable(patch_to_dxo(patch, LAYOUT, is_delta=is_delta, meta={"steps": 3}).to_shareable())
    assert dxo.data_kind == (DataKind.WEIGHT_DIFF if is_delta else DataKind.WEIGHTS)
    assert dxo.meta["steps"] == 3
    back = dxo_to_patch(dxo, LAYOUT)
    assert back.mask == patch.mask
    assert torch.equal(back.values, patch.values)
    fobs.register(MaskDecomposer)
    fobs.register(PatchDecomposer)
    sent = fobs.loads(fobs.dumps({"mask": patch.mask, "patch": patch}))
    assert sent["mask"] == patch.mask
    assert (sent["patch"].mask, sent["patch"].base) == (patch.mask, "zeros")
    assert torch.equal(sent["patch"].values, patch.values)


@pytest.mark.parametrize(
    ("decomposer", "data"),
    [
        (MaskDecomposer(), [9, b"\x00"]),
        (MaskDecomposer(), [True, b"\x00"]),
        (MaskDecomposer(), ["9", b"\x00\x00"]),
        (MaskDecomposer(), [9]),
        (MaskDecomposer(), None),
        (PatchDecomposer(), [8, b"\xff", b"\x00" * 31, "zeros"]),
        (PatchDecomposer(), [8, b"\xff", b"\x00" * 32, "other"]),
        (PatchDecomposer(), [8, b"\xff", b"\x00" * 32]),
    ],
)
def test_what_is_no_mask_or_patch_is_refused(decomposer: Any, data: Any) -> None:
    with pytest.raises(ComponentError, match="Decomposer: the data are no"):
        decomposer.recompose(data)


@pytest.mark.parametrize(
    ("dxo", "reason"),
    [
        (DXO(DataKind.METRICS, data={"a": 1}), "the kind is .*METRICS"),
        (DXO(DataKind.WEIGHTS, data={"0.weight": b"x"}), "of type bytes"),
        (DXO(DataKind.WEIGHTS, data={"0.weight": np.ones((4, 3))}), "lacks 0.bias"),
        (patch_to_dxo(Patch.empty(LAYOUT.size), LAYOUT, meta={}), None),
    ],
)
def test_dxo_of_another_kind_is_refused(dxo: DXO, reason: str | None) -> None:
    if reason is None:
        assert dxo_to_patch(dxo, LAYOUT).mask.count == 0
        dxo.meta[MASK] = {"other": bytes(1)}
        reason = "the mask has other, which the model has not"
    with pytest.raises(ComponentError, match=f"dxo_to_patch: .*{reason}"):
        dxo_to_patch(dxo, LAYOUT)
