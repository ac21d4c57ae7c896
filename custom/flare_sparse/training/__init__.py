"""Local training at a site: one loop for all methods, seeded by run, site and round only."""

from .config import TrainingConfig
from .sample_usage import SampleUsage
from .site import Site

__all__ = ["SampleUsage", "Site", "TrainingConfig"]
