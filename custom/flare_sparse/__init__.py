"""Sparse federated learning on NVIDIA FLARE: sites and server exchange only the selected entries of a model."""

from typing import TYPE_CHECKING, Any

from .core.errors import FlareSparseError
from .core.exchange import Patch, Request, Update
from .core.mask import Mask
from .core.params import Layout
from .tasks.task import Examples, Metric, SiteData, Task, TaskConfig

if TYPE_CHECKING:
    from .results.runs.load import load_model

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
    """Import ``load_model`` on first access: it imports every task and network, which takes seconds."""
    if name == "load_model":
        from .results.runs.load import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
