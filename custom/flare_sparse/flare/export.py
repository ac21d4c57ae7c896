"""Exported job folders: what the admin console's ``submit_job`` takes."""

from __future__ import annotations

import filecmp
import tempfile
from pathlib import Path

from ..config import JobConfig
from .recipe import Packaging, SparseRecipe

SIGNATURES = [".__nvfl_sig.json", ".__nvfl_submitter.crt"]
"""What FLARE leaves in every folder of a job that was submitted."""


def export_job(
    config: JobConfig, out: Path, packaging: Packaging = "installed", modules: tuple[Path, ...] = ()
) -> Path:
    """Write the job folder ``out/<name>`` (replacing an older one); returns it."""
    SparseRecipe(config, packaging=packaging, modules=modules).export(str(out))
    return out / config.name


def find_differences(config: JobConfig, jobs: Path) -> list[str]:
    """Files in which ``jobs/<name>`` differs from what the configuration exports now; empty when it is up to date."""
    with tempfile.TemporaryDirectory() as fresh:
        return sorted(_compare(export_job(config, Path(fresh)), jobs / config.name, config.name))


def _compare(fresh: Path, stored: Path, label: str) -> list[str]:
    if not stored.is_dir():
        return [f"{label}: missing"]
    compared = filecmp.dircmp(fresh, stored, ignore=[*filecmp.DEFAULT_IGNORES, *SIGNATURES])
    found = [f"{label}/{name}: missing" for name in compared.left_only]
    found += [f"{label}/{name}: not exported any more" for name in compared.right_only]
    _, mismatched, errors = filecmp.cmpfiles(fresh, stored, compared.common_files, shallow=False)
    found += [f"{label}/{name}: differs" for name in [*mismatched, *errors]]
    for name in compared.common_dirs:
        found += _compare(fresh / name, stored / name, f"{label}/{name}")
    return found
