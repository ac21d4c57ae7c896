"""Write job folders for the admin console's ``submit_job``."""

from pathlib import Path

from ..config.schema import JobConfig
from .recipe import Packaging, SparseRecipe


def export_job(
    config: JobConfig, out: Path, packaging: Packaging = "installed", modules: tuple[Path, ...] = ()
) -> Path:
    """Write the job folder ``out/<name>``, replacing an older one, and return it."""
    SparseRecipe(config, packaging=packaging, modules=modules).export(str(out))
    return out / config.name
