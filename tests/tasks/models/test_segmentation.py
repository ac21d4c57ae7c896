"""Networks of segmentation: sizes, one logit for every class and voxel, and errors for patches that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flare_sparse.core.errors import ConfigError
from flare_sparse.tasks.models import build_model

SMALL: dict[str, dict[str, Any]] = {
    "basic_unet": {"channels": (2, 2, 4, 4, 4, 2)},
    "dyn_unet": {"channels": (2, 4, 4), "residual": True, "dropout": 0.1},
    "seg_resnet": {"blocks": (1, 1, 1), "dropout": 0.1},
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("basic_unet", 360_435), ("dyn_unet", 350_771), ("seg_resnet", 1_176_195)],
)
def test_defaults_have_the_documented_number_of_parameters(name: str, parameters: int) -> None:
    network = build_model(name, outputs=3)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_network_returns_one_logit_for_every_class_and_voxel(name: str) -> None:
    patch = (32, 16, 16)
    network = build_model(name, patch=patch, inputs=2, outputs=3, **SMALL[name])
    with torch.inference_mode():
        assert network(torch.zeros(1, 2, *patch)).shape == (1, 3, *patch)


@pytest.mark.parametrize(
    ("name", "patch", "message"),
    [
        (
            "basic_unet",
            (16, 16, 16),
            r"16x16x16 does not fit, its sides must be at least 16, one .* 32; .* is 16x16x32",
        ),
        (
            "dyn_unet",
            (40, 56, 42),
            r"input 40x56x42 .* must be multiples of 8, .* works is 40x56x48\. Use .* task\.patch",
        ),
        ("seg_resnet", (8, 8, 8), r"the smallest that works is 8x8x16"),
        ("basic_unet", (4096, 4096, 16), r"more than 134217728 voxels"),
    ],
)
def test_patch_that_does_not_fit_is_refused_with_one_that_does(
    name: str, patch: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(name, patch=patch)
