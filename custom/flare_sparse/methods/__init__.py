"""The methods, one module each, close to its paper; ``registry`` lists them.

The names that a method needs are here, for one in any repository (docs/new-method.md).
"""

from ..core.exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..core.mask import Mask, floor_fraction, top_k
from ..core.params import Layout
from ..core.seeds import make_generator
from ..training import Site, TrainingConfig
from .aggregation.weighted import average_over_owners, weigh_by_examples
from .method import Method, MethodConfig, ModelState, SiteSettings, train_locally

__all__ = [
    "Assignment",
    "Contribution",
    "Layout",
    "Mask",
    "Method",
    "MethodConfig",
    "ModelState",
    "Patch",
    "Request",
    "Site",
    "SiteSettings",
    "TrainingConfig",
    "Update",
    "UpdateSpec",
    "average_over_owners",
    "floor_fraction",
    "make_generator",
    "top_k",
    "train_locally",
    "weigh_by_examples",
]
