"""How a site trains: one loop, settings declared once, seeds that depend on run, site and round only."""

from .config import TrainingConfig
from .sample_usage import SampleUsage
from .site import Site

__all__ = ["SampleUsage", "Site", "TrainingConfig"]
