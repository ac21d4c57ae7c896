"""Sparse federated learning on NVIDIA FLARE: sites and server exchange only the selected entries of a model."""

# Type checkers take it for typing.TYPE_CHECKING; to import typing would delay the command's handlers (__main__.py).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .api.run import Run
    from .api.start import run
    from .api.sweep import sweep
    from .config.study import Study
    from .core.errors import FlareSparseError
    from .core.exchange import Patch, Request, Update
    from .core.mask import Mask
    from .core.observer import Observer
    from .core.params import Layout
    from .results.runs.folder import RunFolder
    from .results.runs.load import load_model
    from .tasks.task import Examples, Metric, SiteData, Task, TaskConfig

__all__ = [
    "Examples",
    "FlareSparseError",
    "Layout",
    "Mask",
    "Metric",
    "Observer",
    "Patch",
    "Request",
    "Run",
    "RunFolder",
    "SiteData",
    "Study",
    "Task",
    "TaskConfig",
    "Update",
    "load_model",
    "run",
    "sweep",
]

_MODULES = {
    "api.run": ["Run"],
    "api.start": ["run"],
    "api.sweep": ["sweep"],
    "config.study": ["Study"],
    "core.errors": ["FlareSparseError"],
    "core.exchange": ["Patch", "Request", "Update"],
    "core.mask": ["Mask"],
    "core.observer": ["Observer"],
    "core.params": ["Layout"],
    "results.runs.folder": ["RunFolder"],
    "results.runs.load": ["load_model"],
    "tasks.task": ["Examples", "Metric", "SiteData", "Task", "TaskConfig"],
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> "Any":
    """Import a name on first access: torch takes a second, ``load_model`` imports every task and network."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    # Stored, so that the next access does not come here.
    value = globals()[name] = getattr(import_module(f".{_PLACES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    """List the names that are imported on first access, too."""
    return sorted({*globals(), *__all__})
