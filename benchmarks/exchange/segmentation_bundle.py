"""A small MONAI bundle of the hippocampus for FLARE's example ``monai-spleen``, whose own data are CT volumes.

The example's script trains any bundle through ``MonaiAlgo``. Its configuration asks FLARE's Client API for the name of
the site, and each site has a list of its own volumes.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

SITES = {"site-1": "A", "site-2": "B"}
"""FLARE's names, and the column ``site`` of the data set."""
TRAIN, TEST = 24, 10
"""Volumes of a site."""
SHAPE = [32, 48, 32]
CASES = "$json.loads(pathlib.Path(@bundle_root, flare.get_site_name() + '.json').read_text())['{part}']"


def write_bundle(source: Path, folder: Path) -> None:
    """Write the configuration and the sites' lists of volumes; the volumes stay where they are."""
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / "train.json").write_text(json.dumps(build_configuration(), indent=2))
    (folder / "configs" / "evaluate.json").write_text("{}")
    data = (source / "hippocampus").resolve()
    with (data / "participants.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    for site, origin in SITES.items():
        names = [row["participant_id"] for row in rows if row["site"] == origin][: TRAIN + TEST]
        cases = [
            {
                "image": str(data / name / "anat" / f"{name}_T1w.nii.gz"),
                "label": str(data / "derivatives" / "manual" / name / "anat" / f"{name}_dseg.nii.gz"),
            }
            for name in names
        ]
        (folder / f"{site}.json").write_text(json.dumps({"train": cases[:TRAIN], "test": cases[TRAIN:]}))


def build_transforms() -> list[dict[str, Any]]:
    """Return the transforms of a volume: both parts of the hippocampus are one class, as the spleen is."""
    keys = ["image", "label"]
    return [
        {"_target_": "LoadImaged", "keys": keys, "ensure_channel_first": True, "image_only": True},
        {"_target_": "NormalizeIntensityd", "keys": "image"},
        {"_target_": "AsDiscreted", "keys": "label", "threshold": 0.5},
        {"_target_": "ResizeWithPadOrCropd", "keys": keys, "spatial_size": SHAPE},
    ]


def build_configuration() -> dict[str, Any]:
    """Return ``train.json``, with the parts of MONAI's ``spleen_ct_segmentation`` that the script needs."""
    network = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": [16, 32, 64, 128, 256]}
    steps = [
        {"_target_": "Activationsd", "keys": "pred", "softmax": True},
        {"_target_": "AsDiscreted", "keys": ["pred", "label"], "argmax": [True, False], "to_onehot": 2},
    ]
    metric = {"_target_": "MeanDice", "include_background": False}
    metric["output_transform"] = "$monai.handlers.from_engine(['pred', 'label'])"
    return {
        "imports": ["$import json", "$import pathlib", "$import monai", "$import nvflare.client as flare"],
        "bundle_root": ".",
        "device": "cpu",
        "max_epochs": 1,
        "network": {"_target_": "UNet", **network, "strides": [2] * 4, "num_res_units": 2, "norm": "batch"},
        "optimizer": {"_target_": "torch.optim.AdamW", "params": "$@network.parameters()", "lr": 0.002},
        "train": {
            "dataset": build_dataset("train"),
            "dataloader": {"_target_": "DataLoader", "dataset": "@train#dataset", "batch_size": 4, "shuffle": True},
            "trainer": {
                "_target_": "SupervisedTrainer",
                "max_epochs": "@max_epochs",
                "device": "@device",
                "train_data_loader": "@train#dataloader",
                "network": "@network",
                "loss_function": {"_target_": "DiceCELoss", "to_onehot_y": True, "softmax": True},
                "optimizer": "@optimizer",
            },
        },
        "validate": {
            "dataset": build_dataset("test"),
            "dataloader": {"_target_": "DataLoader", "dataset": "@validate#dataset", "batch_size": 5},
            "evaluator": {
                "_target_": "SupervisedEvaluator",
                "device": "@device",
                "val_data_loader": "@validate#dataloader",
                "network": "@network",
                "postprocessing": {"_target_": "Compose", "transforms": steps},
                # The script reports the metric of this name as that of the model it received.
                "key_val_metric": {"val_accuracy": metric},
            },
        },
        "initialize": [],
    }


def build_dataset(part: str) -> dict[str, Any]:
    """Return the data set of a part, ``train`` or ``test``."""
    return {
        "_target_": "CacheDataset",
        "data": CASES.format(part=part),
        "transform": {"_target_": "Compose", "transforms": build_transforms()},
        "progress": False,
    }
