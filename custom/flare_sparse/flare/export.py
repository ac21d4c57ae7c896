"""Write job folders for the admin console's ``submit_job``, and compare them with their configurations."""

from __future__ import annotations

import filecmp
import tempfile
from pathlib import Path

from ..config.schema import JobConfig
from .recipe import Packaging, SparseRecipe

SIGNATURES = [".__nvfl_sig.json", ".__nvfl_submitter.crt"]
"""Files that FLARE writes into every folder of a submitted job."""


def export_job(
    config: JobConfig, out: Path, packaging: Packaging = "installed", modules: tuple[Path, ...] = ()
) -> Path:
    """Write the job folder ``out/<name>``, replacing an older one, and return it."""
    SparseRecipe(config, packaging=packaging, modules=modules).export(str(out))
    return out / config.name


def find_outdated_files(config: JobConfig, jobs: Path, modules: tuple[Path, ...] = ()) -> list[str]:
    """Return the files in which ``jobs/<name>`` differs from a fresh export; empty when the folder is up to date."""
    with tempfile.TemporaryDirectory() as fresh:
        return sorted(
            _list_differences(export_job(config, Path(fresh), modules=modules), jobs / config.name, config.name)
        )


def _list_differences(fresh: Path, stored: Path, label: str) -> list[str]:
    if not stored.is_dir():
        return [f"{label}: missing"]
    # A submitted folder holds FLARE's signatures, which no export writes.
    compared = filecmp.dircmp(fresh, stored, ignore=[*filecmp.DEFAULT_IGNORES, *SIGNATURES])
    differences = [f"{label}/{name}: missing" for name in compared.left_only]
    differences += [f"{label}/{name}: no longer exported" for name in compared.right_only]
    _, mismatched, errors = filecmp.cmpfiles(fresh, stored, compared.common_files, shallow=False)
    differences += [f"{label}/{name}: differs" for name in [*mismatched, *errors]]
    for name in compared.common_dirs:
        differences += _list_differences(fresh / name, stored / name, f"{label}/{name}")
    return differences
