"""Sparse federated learning on NVIDIA FLARE: sites and server exchange only the selected entries of a model."""

# Type checkers take it for typing.TYPE_CHECKING; to import typing would delay the command's handlers (__main__.py).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    # "as": what is imported here under its own name may be imported from here.
    from .api.run import Run as Run
    from .api.start import run as run
    from .api.sweep import sweep as sweep
    from .config.study import Study as Study
    from .core.errors import FlareSparseError as FlareSparseError
    from .core.exchange import Patch as Patch
    from .core.exchange import Request as Request
    from .core.exchange import Update as Update
    from .core.mask import Mask as Mask
    from .core.observer import Observer as Observer
    from .core.params import Layout as Layout
    from .results.runs.folder import RunFolder as RunFolder
    from .results.runs.load import load_model as load_model
    from .tasks.task import Examples as Examples
    from .tasks.task import Metric as Metric
    from .tasks.task import SiteData as SiteData
    from .tasks.task import Task as Task
    from .tasks.task import TaskConfig as TaskConfig

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
_PLACES = dict(sorted((name, module) for module, names in _MODULES.items() for name in names))
__all__ = list(_PLACES)


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
