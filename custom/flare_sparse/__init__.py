"""Federated learning on NVIDIA FLARE in which only what matters travels."""

from .errors import FlareSparseError
from .exchange import Patch, Request, Update
from .mask import Mask
from .params import Layout
from .task import Examples, Metric, SiteData, Task, TaskConfig

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
]
