"""A plugin of pytest: every initial model is perturbed by 1e-6 of each value, relative.

    PYTHONPATH=tests/support FLARE_SPARSE_PERTURB=1 pytest -p perturbed tests/methods

A test that asserts on trained values and fails with some seed is brittle: another processor or another version of torch
rounds otherwise, too. Tests fail by right that compare with a model which this process did not build: a subprocess, or
constants such as ones and zeros.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from flare_sparse.config import assemble

_build = assemble.build_initial_model


def _build_perturbed(*arguments: Any, **settings: Any) -> Any:
    layout, weights = _build(*arguments, **settings)
    generator = torch.Generator().manual_seed(int(os.environ.get("FLARE_SPARSE_PERTURB", "1")))
    return layout, weights * (1 + 1e-6 * torch.randn(weights.shape, generator=generator))


assemble.build_initial_model = _build_perturbed
