"""A device that is not the CPU, for tests without a GPU: torch refuses to mix its tensors with those of the CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from skips import require
from torch.utils.cpp_extension import load


def require_compiler() -> None:
    require(bool(which("ninja") and which("c++")), "a C++ compiler and ninja are needed (g++, ninja-build)")


@cache
def open_other_device() -> torch.device:
    """Compile and register the device of ``other_device.cpp``, which takes half a minute the first time."""
    torch.utils.rename_privateuse1_backend("other")
    module = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=0: torch.empty(0, dtype=torch.uint8),
        set_rng_state=lambda state, device=0: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
    )
    torch._register_device_module("other", module)
    # In a folder of its own: torch's cache is locked for good by a process that was killed while it compiled.
    with TemporaryDirectory() as folder:
        load("other_device", [str(Path(__file__).with_suffix(".cpp"))], build_directory=folder)
    return torch.device("other", 0)
