"""Local training at a site: one loop for all methods, seeded by run, site and round only."""

from .compose import SitePrivacy, build_site
from .config import TrainingConfig
from .local_task import LocalTask
from .sample_usage import SampleUsage
from .site import Site
from .trainer import Trainer, Training

__all__ = ["LocalTask", "SampleUsage", "Site", "SitePrivacy", "Trainer", "Training", "TrainingConfig", "build_site"]
