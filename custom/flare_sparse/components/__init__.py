"""Filters, aggregators, executors and controllers of the methods, for any FLARE job (docs/components.md).

A job names a class by its module: ``flare_sparse.components.csr.ToCSR``. In Python the names below are enough.
"""

from .aggregators import FlexLoRAMean, MagnitudePruning, MetaStep, OrderedMean, RankMean, ScoredMask, SelectiveSum
from .arrays import ComponentError
from .controllers import MetaGaterController, NeuroSFLController
from .csr import FromCSR, ToCSR
from .decomposers import MaskDecomposer, PatchDecomposer
from .masking import KeepMask, MaskedTraining
from .recipes import add_components
from .score_executor import ScoreExecutor
from .sparse_exchange import SparseExchange
from .uploads import ChannelUpload, RankUpload

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
