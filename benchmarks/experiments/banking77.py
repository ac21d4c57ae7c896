"""Accuracy and bytes of LoRA-A2 on BANKING77, against its baselines and FLASC, until validation stops a run.

    export FLARE_SPARSE_MODELS=/models        # holds all-MiniLM-L6-v2/
    python benchmarks/experiments/banking77.py --data /data/banking77.csv.gz [--only lora_a2] [--ranks 8 1] [--docs]

Ten sites, a Dirichlet partition, ranks 8 and 1. The encoder is the pre-trained all-MiniLM-L6-v2 with 36 adapted
modules; its weights are frozen, and so is the random head, as in the paper (which has all rows, E = 5, T = 50, 30 sites
and RoBERTa-base). Each site keeps 10 % of its texts for validation and 30 % for testing. A run ends when the accuracy
on the validation texts of all sites has not risen for ``--patience`` rounds; the best model by that accuracy is tested
once.

Every message goes through the wire and is counted. Each run writes one file; finished runs are not repeated, several
processes may share the work, and an interrupted run continues from its last round. ``--docs`` updates the tables of
docs/results/texts.md from the finished runs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from banking77_report import METHOD_LABELS, update_docs
from runs import CONFIGS, claim
from torch.utils.data import TensorDataset

from flare_sparse.config.assemble import Assembly, assemble, open_checkpoints
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.config.study import prepare_site_data
from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.results.runs.local import run_assembly
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.local.run import Course
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, Site, build_site

FLASC = "fraction: 0.25, down: 0.25, decay: 0.9, "
"""A quarter of the adapters' entries both ways (Kuo et al. 2024), with error feedback at both ends and int8 values."""
SLOTS = 16
"""Slots of a module that LoRA-A2 chooses among; the other methods have as many slots as their rank."""


def build_config(name: str, rank: int, seed: int, options: argparse.Namespace) -> RunConfig:
    """Return the configuration of one run, from the published file."""
    ranked = f"rank: {rank}, "
    own = {"lora_a2": ranked, "flexlora": ranked, "flasc": FLASC}.get(name, "")
    method, values = ("topk_ef", "int8") if name == "flasc" else (name, "float32")
    training = f"epochs: {options.epochs}, batch_size: {options.batch_size}, optimizer: adamw, lr: {options.lr}, "
    training += f"weight_decay: 0.01, precision: {options.precision}"
    return load_config(
        CONFIGS / "lora_a2_banking77.yaml",
        [
            f"name=banking77_{name}_{rank}",
            f"seed={seed}",
            f"method={{name: {method}, {own}rounds: {options.rounds}, training: {{{training}}}}}",
            f"wire.values={values}",
            f"task.base={options.base}",
            f"task.adapter.rank={SLOTS if name == 'lora_a2' else rank}",
            f"task.every={options.every}",
            f"task.max_length={options.max_length}",
            "task.split={test: 0.3, validation: 0.1}",
            f"federation.early_stopping={{patience: {options.patience}}}",
            f"simulator.sites={options.sites}",
            f"simulator.data.path={options.data.resolve()}",
            f"simulator.data.partition={{kind: dirichlet, column: label, alpha: {options.alpha}}}",
        ],
    )


def run(name: str, rank: int, seed: int, options: argparse.Namespace, checkpoints: Path) -> dict[str, Any]:
    """Return the figures of one run, which continues from the checkpoints if there are some."""
    config = build_config(name, rank, seed, options)
    assembly = assemble(config)
    data = prepare_site_data(config, assembly.task, Path())
    examples = {site: assembly.task.load(where, seed) for site, where in data.items()}
    label = f"{name} rank {rank} seed {seed}"
    outcome, ledger = run_assembly(
        config,
        assembly,
        {site: open_validated_site(site, own, assembly, seed) for site, own in examples.items()},
        course=Course(
            stores=lambda end: open_checkpoints(config.job, assembly, checkpoints, end),
            resume=True,
            on_round=lambda record: print(
                f"{label} round {record.round}: {record.evaluation.overall}, {record.seconds:.0f} s", flush=True
            ),
        ),
    )
    lines = [line for line in ledger.lines if line.kind == "train"]
    up = [line for line in lines if line.direction == "up"]
    return {
        "method": name,
        "rank": rank,
        "seed": seed,
        "settings": {key: str(getattr(options, key)) for key in SETTINGS},
        "examples": sum(own.n_train for own in examples.values()),
        "validation_examples": sum(own.n_validation for own in examples.values()),
        "curve": [record.evaluation.overall.get("validation_accuracy") for record in outcome.rounds],
        "best_round": outcome.best.round,
        "rounds": outcome.stopped_after or config.method.config.rounds,
        "is_stopped": outcome.stopped_after is not None,
        "hits": find_hits(assembly, outcome, examples),
        "scalars_up": sum(line.scalars_sent for line in up),
        "bytes_up": sum(line.payload_bytes for line in up),
        "bytes_down": sum(line.payload_bytes for line in lines if line.direction == "down"),
        "seconds": sum(record.seconds for record in outcome.rounds),
    }


def open_validated_site(name: str, own: Examples, assembly: Assembly, seed: int) -> Site:
    """Return a site without test examples, which would evaluate the model of every round."""
    validated = Examples(
        own.train, TensorDataset(torch.zeros(0)), validation=own.validation, validation_ids=own.validation_ids
    )
    return build_site(LocalTask.open(name, assembly.task, validated, assembly.layout, seed))


def find_hits(assembly: Assembly, outcome: Outcome, examples: dict[str, Examples]) -> dict[str, str]:
    """Return by site, for each test text, whether the best model by validation finds its class: "1" or "0"."""
    assert outcome.best.model is not None, "every site has validation examples"
    model = assembly.task.model()
    model.load_state_dict(assembly.layout.unflatten(outcome.best.model.to_vector()), strict=False)
    hits = {}
    for name, own in examples.items():
        logits, classes = assembly.task.measure_all(model, own.test)
        hits[name] = "".join(str(int(hit)) for hit in logits.argmax(1) == classes.reshape(-1))
    return hits


SETTINGS = ("base", "sites", "alpha", "every", "max_length", "rounds", "patience")
SETTINGS += ("epochs", "batch_size", "lr", "precision")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/banking77"))
    parser.add_argument("--base", default="all-MiniLM-L6-v2")
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--alpha", type=float, default=0.1, help="concentration of the Dirichlet partition")
    parser.add_argument("--rounds", type=int, default=60, help="most rounds")
    parser.add_argument("--patience", type=int, default=6, help="rounds without a better accuracy that end a run")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="bfloat16: with AMX")
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--only", choices=list(METHOD_LABELS), nargs="+", default=list(METHOD_LABELS))
    parser.add_argument("--docs", action="store_true", help="update docs/results/texts.md from the files in --out")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    # All methods and ranks of one seed come before the next seed, so that an interrupted experiment can be read.
    plan = [(name, rank, seed) for seed in options.seeds for name in options.only for rank in options.ranks]
    for name, rank, seed in plan:
        file = options.out / f"{name}-{rank}-{options.alpha:g}-{seed}.json"
        with claim(file) as is_claimed:
            if not is_claimed:
                continue
            checkpoints = file.with_suffix(".checkpoints")
            write_json(file, run(name, rank, seed, options, checkpoints))
            shutil.rmtree(checkpoints)
    if options.docs:
        update_docs(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
