"""A small job of NeuroSFL on three CSV files, for tests of sums in FLARE's environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def write_mortality_job(folder: Path, name: str, rounds: int, **sections: Any) -> Path:
    """Write the data of three sites and a configuration; return the configuration's file.

    Args:
        folder: receives the files.
        name: name of the job.
        rounds: its rounds.
        sections: more sections of the configuration.
    """
    rows = [f"{i},{i * 5 % 7 % 2},{i % 2},{i % 3 % 2},{i % 5 % 2}" for i in range(60)]
    for site in ("site-1", "site-2", "site-3"):
        (folder / f"{site}.csv").write_text("stay,died,med_a,med_b,med_c\n" + "\n".join(rows) + "\n")
    content = {
        "name": name,
        "seed": 3,
        "method": {
            "name": "neurosfl",
            "sparsity": 0.5,
            "rounds": rounds,
            "training": {"optimizer": "sgd", "lr": 0.1},
        },
        "task": {
            "name": "table",
            "kind": "binary",
            "target": "died",
            "id": "stay",
            "features": ["med_a", "med_b", "med_c"],
            "scaling": "none",
            "model": {"name": "mlp", "hidden": [8]},
        },
        "federation": {"min_sites": 3, "task_timeout_s": 300},
        "simulator": {"sites": 3, "data": {"path": str(folder / "{site}.csv")}},
        **sections,
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(content))
    return file
