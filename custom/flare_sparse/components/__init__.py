"""Filters, aggregators, executors and controllers of the methods, for any FLARE job (docs/components.md).

A job names a class by its module: ``flare_sparse.components.csr.ToCSR``. In Python the names below are enough.
"""

from importlib import import_module

# Type checkers take it for typing.TYPE_CHECKING; an import of every component would load every method.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .arrays import ComponentError
    from .channel_upload import ChannelUpload
    from .csr import FromCSR, ToCSR
    from .decomposers import MaskDecomposer, PatchDecomposer
    from .flexlora_mean import FlexLoRAMean
    from .keep_mask import KeepMask
    from .magnitude_pruning import MagnitudePruning
    from .masked_training import MaskedTraining
    from .meta_step import MetaStep
    from .metagater_controller import MetaGaterController
    from .neurosfl_controller import NeuroSFLController
    from .ordered_mean import OrderedMean
    from .rank_mean import RankMean
    from .rank_upload import RankUpload
    from .recipes import add_components
    from .score_executor import ScoreExecutor
    from .scored_mask import ScoredMask
    from .selective_sum import SelectiveSum
    from .sparse_exchange import SparseExchange

_MODULES = {
    "arrays": ["ComponentError"],
    "channel_upload": ["ChannelUpload"],
    "csr": ["FromCSR", "ToCSR"],
    "decomposers": ["MaskDecomposer", "PatchDecomposer"],
    "flexlora_mean": ["FlexLoRAMean"],
    "keep_mask": ["KeepMask"],
    "magnitude_pruning": ["MagnitudePruning"],
    "masked_training": ["MaskedTraining"],
    "meta_step": ["MetaStep"],
    "metagater_controller": ["MetaGaterController"],
    "neurosfl_controller": ["NeuroSFLController"],
    "ordered_mean": ["OrderedMean"],
    "rank_mean": ["RankMean"],
    "rank_upload": ["RankUpload"],
    "recipes": ["add_components"],
    "score_executor": ["ScoreExecutor"],
    "scored_mask": ["ScoredMask"],
    "selective_sum": ["SelectiveSum"],
    "sparse_exchange": ["SparseExchange"],
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [
    "ChannelUpload",
    "ComponentError",
    "FlexLoRAMean",
    "FromCSR",
    "KeepMask",
    "MagnitudePruning",
    "MaskDecomposer",
    "MaskedTraining",
    "MetaGaterController",
    "MetaStep",
    "NeuroSFLController",
    "OrderedMean",
    "PatchDecomposer",
    "RankMean",
    "RankUpload",
    "ScoreExecutor",
    "ScoredMask",
    "SelectiveSum",
    "SparseExchange",
    "ToCSR",
    "add_components",
]


def __getattr__(name: str) -> "Any":
    """Import a component on first access."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
