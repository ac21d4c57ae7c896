"""What a training step takes of a process, against what ``estimate --memory`` counts, by network.

    python benchmarks/performance/step_memory.py [--networks basic_unet vit3d]

Each network trains in a process of its own, on phantoms; a first step loads libraries. On Linux alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flare_sparse.api import memory
from flare_sparse.config.study import Study

CONFIGS = Path(__file__).resolve().parents[2] / "app_configs"
AGE, SEGMENTATION = "neurosfl_brain_age", "neurosfl_segmentation"
NETWORKS = {
    "brain_age_cnn_3mm": (AGE, ()),
    "resnet3d": (AGE, ("task.downsample=1", "task.model={name: resnet3d}")),
    "vit3d": (AGE, ("task.downsample=1", "task.model={name: vit3d, width: 384, hidden: 1536, heads: 6}")),
    "basic_unet": (SEGMENTATION, ()),
    "dyn_unet": (SEGMENTATION, ("task.model={name: dyn_unet}",)),
}
# Freed memory goes back at once, so that the largest number of pages is that of one moment.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


class Resident(memory.PeakMemory):
    """Measures the pages of the process in place of counting storages."""

    def __enter__(self) -> Resident:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _read_status("VmRSS")
        return self

    def __exit__(self, *error: Any) -> None:
        self.peak = _read_status("VmHWM") - self._before


def _read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def compare(network: str) -> dict[str, Any]:
    """Return the megabytes of a step, counted and of the process."""
    config, overrides = NETWORKS[network]
    study = Study.load(CONFIGS / f"{config}.yaml", [*overrides, "simulator.data.phantom.subjects=8"])
    memory.measure_step(study)
    counted = memory.measure_step(study)["step"]
    memory.PeakMemory = Resident  # type: ignore[misc]
    taken = memory.measure_step(study)["step"]
    return {"network": network, "counted_mb": counted / 1e6, "process_mb": taken / 1e6, "ratio": taken / counted}


def main() -> None:
    """Print a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    names = parser.parse_args().networks
    if len(names) == 1 and ENVIRONMENT.items() <= os.environ.items():
        print(json.dumps(compare(names[0])))
        return
    for name in names:
        line = [sys.executable, __file__, "--networks", name]
        subprocess.run(line, check=True, env={**os.environ, **ENVIRONMENT})


if __name__ == "__main__":
    main()
