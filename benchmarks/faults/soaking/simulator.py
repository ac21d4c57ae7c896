"""The soak in FLARE's simulator: one process per site, memory of all of them after every round."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from flare_sparse.config.loading import parse_job
from flare_sparse.config.schema import RunConfig
from flare_sparse.core.observer import Observer
from flare_sparse.flare.launch.simulator import Workplace, simulate
from flare_sparse.flare.recipe import SparseRecipe
from flare_sparse.tasks.data.source import write_site_files
from flare_sparse.tasks.task import SiteData

from .faulty import FaultyTask
from .figures import measure_memory, summarize

FAULTS_FOLDER = Path(__file__).resolve().parents[1]


def soak(settings: dict[str, Any], sites: int, folder: Path, processes: int | None = None) -> dict[str, Any]:
    """Run the job, ``processes`` sites at a time, and return its figures; record and log stay in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    samples: list[dict[str, float]] = []

    class Recorder(Observer):
        def see_round(self, line: dict[str, Any]) -> None:
            lines.append(line)
            samples.append(measure_memory())

    names = sorted(f"site-{i}" for i in range(1, sites + 1))
    site_files = write_site_files(folder / "sites", [SiteData(name, folder / "data") for name in names])
    job = parse_job(settings, FaultyTask)
    # Every site's process imports ``soaking.faulty``.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FAULTS_FOLDER), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    workplace = Workplace(names, site_files, allowed_classes=(FaultyTask.__module__,), processes=processes)
    simulate(SparseRecipe(RunConfig(**dict(job))), workplace, folder, Recorder())
    return summarize(lines, samples, time.monotonic() - began)
