"""Names that torchmetrics imports where it finds torchvision; none of the examples uses them."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return None for any network."""
    if name.startswith("__"):
        raise AttributeError(name)
    return None
