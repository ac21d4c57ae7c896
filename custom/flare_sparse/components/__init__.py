"""Filters, aggregators, executors and controllers of the methods, for any FLARE job (docs/components.md).

A job names a class by its module: ``flare_sparse.components.csr.ToCSR``. In Python the names below are enough.
"""

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
