"""How a site trains: one loop, settings declared once, seeds that depend on run, site and round only."""

from .drawn import Used
from .local import TrainingConfig
from .site import Site

__all__ = ["Site", "TrainingConfig", "Used"]
