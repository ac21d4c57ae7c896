"""Dice and bytes of adapting a pre-trained SegResNet to another cohort: full training, (dual) LoRA, LoRA-A2, FLASC.

The network first learns to restore masked blocks of whole brains (`brain_t1`, 3 mm, IXI-HH), without labels. Then the
four sites of hippocampus.py adapt it to the Decathlon's hippocampus, as one class, with a new last layer; beside them
the same network from new weights. Voxels of 2 mm take a fifth of the time of 1 mm, and cost Dice.

    python benchmarks/experiments/encoder_adaptation.py ../shared/data --runs runs/encoder [--seeds 3] [--rounds 8]
        [--steps 600] [--rows fl_lora flasc] [--finished]

Sites, splits and seeds are those of hippocampus.py. A killed call goes on from the last committed round when it is
repeated; several calls may share the work.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hippocampus import CONFIG, LINE, run_row
from hippocampus_report import print_report
from runs import claim
from safetensors.torch import save_file
from torch.nn import functional

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.config.study import prepare_site_data
from flare_sparse.core.seeds import limit_threads
from flare_sparse.tasks.data.cases import find_cases
from flare_sparse.tasks.data.segmentation import Preparation, sample_patch
from flare_sparse.tasks.models.base import MODELS_VARIABLE
from flare_sparse.tasks.models.registry import build_model
from flare_sparse.tasks.segmentation import name_metrics

PATCH, SPACING = (24, 32, 24), (2, 2, 2)
RANK = 4
BLOCK, MASKED = 8, 0.6
"""Voxels per side of a masked block, and the share of the blocks that is masked."""
HEAD = "conv_final.2"
ADAPTER = {"alpha": 16, "head": "trained"}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "scratch": ({"name": "fedavg"}, None, "float32"),
    "full": ({"name": "fedavg"}, None, "float32"),
    "fl_lora": ({"name": "fedavg"}, {"rank": RANK}, "float32"),
    "dual_lora": ({"name": "fedavg", "personal": "site"}, {"rank": RANK // 2, "site_rank": RANK // 2}, "float32"),
    "lora_a2": ({"name": "lora_a2", "rank": RANK, "budget": "scalars"}, {"rank": 4 * RANK}, "float32"),
    "flasc": ({"name": "topk_ef", "fraction": 0.25, "down": 0.25, "decay": 0.9}, {"rank": RANK}, "int8"),
}
"""Method, adapter and values of each row; ``scratch`` starts from new weights, the others from the base."""


def pretrain(data: Path, file: Path, steps: int) -> None:
    """Train a SegResNet to restore masked blocks of whole brains, and write its weights.

    The loss is the mean squared error of the masked voxels of a brain, z-scored over the volume.
    """
    generator, network = torch.Generator().manual_seed(0), build_network()
    preparation = Preparation(classes={"brain": 1})
    volumes = [preparation.read_image(case.images)[0] for case in find_cases(data).values()]
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(1, steps + 1):
        numbers = torch.randint(len(volumes), (2,), generator=generator).tolist()
        crops = [sample_patch(volumes[n], torch.zeros_like(volumes[n][0]), PATCH, 0.0, generator)[0] for n in numbers]
        images = torch.stack(crops)
        blocks = (torch.rand(2, 1, *(side // BLOCK for side in PATCH), generator=generator) < MASKED).float()
        hidden = functional.interpolate(blocks, size=PATCH) > 0
        restored = network(images.masked_fill(hidden, 0.0))
        loss = (restored - images)[hidden].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 50 == 0:
            print(f"{time.strftime('%H:%M:%S')} step {step}: loss {np.mean(losses[-50:]):.3f}", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(network.state_dict(), file)


def build_network() -> torch.nn.Module:
    """Return the network of the adaptation with one output, newly initialised."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_model("seg_resnet", patch=PATCH, inputs=1, outputs=1)


def build_config(options: argparse.Namespace, row: str, seed: int) -> RunConfig:
    """Return the configuration of a row: that of hippocampus.py with another network and start."""
    method, adapter, values = ROWS[row]
    training = {
        "epochs": 1, "batch_size": 2, "optimizer": "adamw", "lr": options.lr,
        "schedule": {"kind": "cosine", "warmup": 0.1},
    }  # fmt: skip
    task: dict[str, Any] = {"model": {"name": "seg_resnet"}, "patch": PATCH, "spacing": SPACING, "hd95": False}
    task["classes"] = {"hippocampus": [1, 2]}
    if row != "scratch":
        task["base"] = {"folder": "brains", "new": [f"{HEAD}.*"]}
    if adapter:
        task["adapter"] = ADAPTER | adapter
    settings = [f"task.{key}={json.dumps(value)}" for key, value in task.items()]
    settings += [f"task.split.validation={options.validation}"] if options.validation else []
    return load_config(
        CONFIG,
        [
            f"method={json.dumps(method | {'rounds': options.rounds, 'training': training})}",
            f"seed={seed}",
            f"wire.values={values}",
            f"simulator.data.path={(options.data / 'hippocampus').resolve()}",
            *settings,
        ],
    )


def run(options: argparse.Namespace, row: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run one row of one seed, or the rest of it, and return its line."""
    config = build_config(options, row, seed)
    assembly = assemble(config)
    data = prepare_site_data(config, assembly.task, options.data / "hippocampus")
    sites = {name: open_site(assembly, site) for name, site in data.items()}
    metrics = name_metrics(config.task.config.classes, hd95=False)  # type: ignore[attr-defined]
    about = {"row": row, "sparsity": 0.0, "seed": seed, "metrics": metrics}
    return about | run_row(row, config, assembly, sites, folder, validation=bool(options.validation))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with brain_t1/ and hippocampus/")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=600, help="steps of the pre-training")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--validation", type=float, default=0.0, help="measure this share of the training cases instead"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--finished", action="store_true", help="print the finished runs and start none")
    options = parser.parse_args()
    lines = []
    os.environ[MODELS_VARIABLE] = str((options.runs / "models").resolve())
    with limit_threads(1):
        base = options.runs / "models" / "brains" / "model.safetensors"
        if not base.is_file():
            pretrain(options.data / "brain_t1" / "IXI-HH", base, options.steps)
        # Seed by seed, so that a series that is cut short has all rows.
        for seed, row in product(range(1, options.seeds + 1), options.rows):
            folder = options.runs / f"{row}-seed{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            with claim(folder / LINE) as is_claimed:
                if is_claimed and not options.finished:
                    (folder / LINE).write_text(json.dumps(run(options, row, seed, folder)))
            if (folder / LINE).is_file():
                lines.append(json.loads((folder / LINE).read_text()))
    print_report(lines)
    print("\n| row | seconds | parameters |\n| --- | --- | --- |")
    for row in options.rows:
        own = [line for line in lines if line["row"] == row]
        if own:
            print(f"| {row} | {np.mean([line['seconds'] for line in own]):.0f} | {own[0]['parameters']:,} |")


if __name__ == "__main__":
    main()
