"""Federated learning on NVIDIA FLARE in which only what matters travels."""

from typing import TYPE_CHECKING, Any

from .errors import FlareSparseError
from .exchange import Patch, Request, Update
from .mask import Mask
from .params import Layout
from .task import Examples, Metric, SiteData, Task, TaskConfig

if TYPE_CHECKING:
    from .runs.load import load_model

__all__ = [
    "Examples",
    "FlareSparseError",
    "Layout",
    "Mask",
    "Metric",
    "Patch",
    "Request",
    "SiteData",
    "Task",
    "TaskConfig",
    "Update",
    "load_model",
]


def __getattr__(name: str) -> Any:
    """``load_model`` brings every task and network along: only when it is asked for."""
    if name == "load_model":
        from .runs.load import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
