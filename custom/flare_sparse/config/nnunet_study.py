"""A study of nnU-Net: its plan, made of the data at hand, and the settings that fit the plan."""

import json
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..tasks.data.phantom import write_phantoms
from ..tasks.nnunet.fingerprint import compute_fingerprint, count_samples, merge_fingerprints
from ..tasks.nnunet.plan import build_plan, list_configurations
from ..tasks.nnunet.raw import DATASET, find_raw_cases
from .yaml_files import format_yaml

PHANTOM = {
    "channel_names": {"0": "T1w"},
    "labels": {"background": 0, "grey_matter": 1, "white_matter": 2, "ventricles": 3},
    "file_ending": ".nii.gz",
}
"""The part of ``dataset.json`` that all sites of the phantoms share."""
SUBJECTS = 5


def write_nnunet_study(out: Path, data: Path | None) -> list[str]:
    """Write ``study.yaml`` and ``plan.json``, and without data also two sites of phantoms.

    Args:
        out: folder to write to.
        data: a raw data set of nnU-Net (``imagesTr``, ``labelsTr``, ``dataset.json``), dealt out to two sites, or a
            folder of such data sets, ``site-1``, ``site-2``, ...; None: phantoms.

    Returns:
        What was inferred, in sentences.

    Raises:
        ConfigError: the folder is none of the two.
        DataError: a data set cannot be read.
    """
    folders = [_write_phantoms(out / "data" / f"site-{n}", n) for n in (1, 2)] if data is None else find_data_sets(data)
    samples = count_samples(sum(len(find_raw_cases(folder)) for folder in folders))
    merged = merge_fingerprints([compute_fingerprint(folder, samples) for folder in folders])
    plan = build_plan(merged, "Dataset001_Federation")
    configuration = next(name for name in ("3d_fullres", "2d") if name in list_configurations(plan))
    entry = plan["plans"]["configurations"][configuration]
    located: dict[str, Any] = {"path": "data/{site}" if data is None else str(data.absolute() / "{site}")}
    if data is not None and folders == [data]:
        located = {"path": str(data.absolute()), "partition": {"kind": "iid"}}
    training = {"epochs": 1, "batch_size": entry["batch_size"], "optimizer": "sgd", "lr": 0.01, "momentum": 0.99}
    training |= {"nesterov": True, "weight_decay": 3.0e-5, "clip_norm": 12, "schedule": {"kind": "poly"}}
    study = {
        "name": "study",
        "seed": 1,
        "method": {"name": "fedavg", "rounds": 10, "training": training},
        "task": {"name": "nnunet", "plan": "plan.json", "configuration": configuration},
        "simulator": {"sites": max(len(folders), 2), "data": located},
    }
    (out / "plan.json").write_text(json.dumps(plan, indent=1), encoding="utf-8")
    head = "# nnU-Net over several sites, with its own plan (plan.json). See docs/nnunet.md.\n"
    (out / "study.yaml").write_text(head + format_yaml(study), encoding="utf-8")
    return [
        f"plan of {merged.cases} cases: {configuration}, patch {entry['patch_size']}, batch size {entry['batch_size']}",
        "rounds and epochs are small, for a first run: nnU-Net trains 1,000 epochs of 250 minibatches",
    ]


def find_data_sets(data: Path) -> list[Path]:
    """Return the data sets in a folder: itself, or one for each site.

    Raises:
        ConfigError: there is none.
    """
    if (data / DATASET).is_file():
        return [data]
    found = sorted(file.parent for file in data.glob(f"*/{DATASET}"))
    if not found:
        raise ConfigError(f"--data {data}: expected nnU-Net's {DATASET} in it, or in a folder for each site")
    if wrong := [folder.name for folder in found if not folder.name.startswith("site-")]:
        raise ConfigError(f"--data {data}: expected folders site-1, site-2, ...; found {', '.join(wrong)}")
    return found


def _write_phantoms(folder: Path, seed: int) -> Path:
    """Write one site of phantoms in BIDS, with the ``dataset.json`` that names channels and labels."""
    write_phantoms(folder, 1, SUBJECTS, seed, labels=True)
    (folder / DATASET).write_text(json.dumps(PHANTOM), encoding="utf-8")
    return folder
