r"""FedSparsify's table of attacks between sites: dense and pruned models, every site attacks every other one.

    python benchmarks/experiments/membership.py benchmarks/experiments/membership.yaml \
        --set simulator.data.path=../shared/data/brain_t1 [--seeds 1 2 3] [--references 2] [--out runs/membership]

The configuration describes task, training and sites, such as 8 of them for 56 attacks; its method is replaced by fedavg
and by fedsparsify at 85, 90, 95 and 99 %. All attacks between sites come first, then RMIA, whose reference models
are dense ones of the same seed. Runs, audits and reference models that exist are used again, and an interrupted run
continues. ``--report`` prints the tables of what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from scipy.stats import t as student

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.config.study import Study, prepare_site_data
from flare_sparse.config.yaml_files import apply_overrides, read_yaml
from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.core.seeds import limit_threads
from flare_sparse.results.audit.attacks import RunAttacks, audit_run
from flare_sparse.results.audit.training import Retraining
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.results.runs.load import load_study, load_trained_model
from flare_sparse.results.runs.results import RunResult

SPARSITIES = (0.0, 0.85, 0.9, 0.95, 0.99)
LOSSES = "losses.json"
"""File in a result folder with the attacks by losses."""
CONSOLE = Console(highlight=False)
Audits = dict[tuple[float, int], dict[str, Any]]
"""Attacks by name and ``mae`` of each run, by sparsity and seed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sparsities", type=float, nargs="+", default=list(SPARSITIES), help="0: dense")
    parser.add_argument("--references", type=int, default=2, help="reference models of RMIA; 0: none")
    parser.add_argument("--out", type=Path, default=Path("runs/membership"))
    parser.add_argument("--report", action="store_true", help="train and attack nothing")
    arguments = parser.parse_args()
    runs = [(sparsity, seed) for seed in arguments.seeds for sparsity in arguments.sparsities]
    if not arguments.report:
        # Seed by seed, so that an interrupted experiment has whole rows of the table.
        for sparsity, seed in runs:
            attack_between_sites(arguments, sparsity, seed)
        for sparsity, seed in runs if arguments.references else ():
            attack_by_loss(arguments, sparsity, seed)
    print(format_tables({key: audit for key in runs if (audit := read_audit(arguments.out, *key))}))
    return 0


def name_folder(out: Path, sparsity: float, seed: int) -> Path:
    return out.resolve() / f"{100 * sparsity:g}-{seed}"


def attack_by_loss(arguments: argparse.Namespace, sparsity: float, seed: int) -> None:
    """Attack by the losses alone, unless that was done before; the reference models are dense, for all sparsities.

    Zarifzadeh et al. 2024 (arXiv:2312.03262) allow reference models of another kind than the attacked one.
    """
    out, dense = (name_folder(arguments.out, s, seed) for s in (sparsity, 0.0))
    file = out / LOSSES
    if file.is_file() and json.loads(file.read_text())["rmia"]["references"] == arguments.references:
        return
    study = load_study(out)
    model, assembly = load_trained_model(study), study.assembly
    config = load_study(dense).config
    data = prepare_site_data(config, assembly.task, dense)
    examples = {name: assembly.task.load(where, config.seed) for name, where in sorted(data.items())}
    attacks = RunAttacks(
        assembly.task,
        model,
        Retraining(dense, config, data, examples),
        RunResult.read(dense).identity,
        arguments.out / f"references-{seed}",
        arguments.references,
        lambda line: CONSOLE.print(f"{out.name}: {line}"),
    )
    with limit_threads(config.torch_threads):
        results = attacks.attack_by_loss(), attacks.attack_by_rmia()
    write_json(file, {result["attack"]: result for result in results})


def attack_between_sites(arguments: argparse.Namespace, sparsity: float, seed: int) -> None:
    """Train and let the sites attack each other, unless that was done before."""
    out = name_folder(arguments.out, sparsity, seed)
    if not (out / "summary.json").is_file():
        config = build_config(arguments.config, arguments.overrides, sparsity, seed)
        run_in_process(Study(config, arguments.config), RunFolder(out, resume=RunFolder(out).has_checkpoint))
    run = RunResult.read(out)
    if is_attacked(run.audit):
        return
    data = load_study(out).prepare_sites(out)
    audit_run(run, data, 0, lambda line: CONSOLE.print(f"{out.name}: {line}"))


def build_config(file: Path, overrides: list[str], sparsity: float, seed: int) -> RunConfig:
    """Return the configuration with another method of the same rounds and training."""
    method = apply_overrides(read_yaml(file), overrides)["method"]
    shared = {name: method[name] for name in ("rounds", "training") if name in method}
    pruned = {"name": "fedsparsify", "sparsity": sparsity} if sparsity else {"name": "fedavg"}
    return load_config(file, [*overrides, f"method={ {**pruned, **shared} }", f"seed={seed}"])


def read_audit(out: Path, sparsity: float, seed: int) -> dict[str, Any]:
    """Return the attacks of a run by name, and its test error; empty if it was not audited."""
    folder = name_folder(out, sparsity, seed)
    if not (folder / "summary.json").is_file() or not is_attacked(record := RunResult.read(folder).audit):
        return {}
    final = RunResult.read(folder).summary["final"]["metrics"]
    losses = json.loads((folder / LOSSES).read_text()) if (folder / LOSSES).is_file() else {}
    return {attack["attack"]: attack for attack in record["attacks"]} | losses | {"mae": final["mae"]}


def is_attacked(record: Mapping[str, Any]) -> bool:
    """Return whether a record of an audit has the attacks between sites."""
    return any(attack["attack"] == "gradient classifier" for attack in record.get("attacks", []))


def format_tables(audits: Audits) -> str:
    """Return the tables of attacks between sites, of every seed, and of the attacks on losses."""
    sparsities = sorted({sparsity for sparsity, _ in audits})
    lines = [
        "| sparsity | seeds | MAE | mean accuracy | minus dense | AUC | above 0.5 | successful |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for sparsity in sparsities:
        by_seed = {seed: audit for (s, seed), audit in audits.items() if s == sparsity}
        pairs = {seed: audit["gradient classifier"] for seed, audit in by_seed.items()}
        dense = {seed: audits[0.0, seed]["gradient classifier"] for seed in pairs if (0.0, seed) in audits}
        accuracy = {seed: pair["balanced_accuracy"] for seed, pair in pairs.items()}
        gaps = [accuracy[seed] - dense[seed]["balanced_accuracy"] for seed in dense]
        cells = [
            f"{100 * sparsity:g} %" if sparsity else "dense",
            f"{len(pairs)}",
            format_mean([audit["mae"] for audit in by_seed.values()], 1),
            format_mean(list(accuracy.values()), 3),
            format_mean(gaps, 3, sign="+") if sparsity else "",
            format_mean([pair["auc"] for pair in pairs.values()], 3),
            *(format_counts(pairs, name) for name in ("above_half", "successful")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *format_seeds(audits), "", *format_losses(audits, sparsities)]
    return "\n".join(lines)


def format_seeds(audits: Audits) -> list[str]:
    """Return the attacks between sites on each run, with their bootstrap intervals over the subjects."""
    lines = ["| sparsity, seed | accuracy | AUC | TPR at 1 % FPR |", "| --- | --- | --- | --- |"]
    for (sparsity, seed), audit in sorted(audits.items()):
        names = ("balanced_accuracy", "auc", "tpr_at_1_percent_fpr")
        cells = [format_interval(audit["gradient classifier"], name) for name in names]
        lines.append(f"| {100 * sparsity:g} %, {seed} | " + " | ".join(cells) + " |")
    return lines


def format_losses(audits: Audits, sparsities: list[float]) -> list[str]:
    """Return the attacks on losses, means over the seeds that have them."""
    lines = [
        "| sparsity | seeds | loss threshold: AUC | RMIA: AUC | RMIA: TPR at 1 % FPR, of each seed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for sparsity in sparsities:
        chosen = [audit for (s, _), audit in sorted(audits.items()) if s == sparsity and "rmia" in audit]
        if not chosen:
            continue
        cells = [
            f"{100 * sparsity:g} %" if sparsity else "dense",
            f"{len(chosen)}",
            format_mean([audit["loss threshold"]["auc"] for audit in chosen], 3),
            format_mean([audit["rmia"]["auc"] for audit in chosen], 3),
            "; ".join(format_interval(audit["rmia"], "tpr_at_1_percent_fpr") for audit in chosen),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def format_mean(values: list[float], digits: int, sign: str = "") -> str:
    """Return a mean and its 95 % interval over the seeds by Student's t."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):{sign}.{digits}f}"
    if len(values) < 2:
        return mean
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {half:.{digits}f}"


def format_interval(attack: Mapping[str, Any], name: str) -> str:
    """Return a figure and its bootstrap interval."""
    low, high = attack["intervals"][name]
    return f"{attack[name]:.3f} ({low:.3f} to {high:.3f})"


def format_counts(pairs: Mapping[int, Mapping[str, Any]], name: str) -> str:
    """Return a count of each seed, of all attacks."""
    return f"{', '.join(str(pair[name]) for pair in pairs.values())} of {next(iter(pairs.values()))['pairs']}"


if __name__ == "__main__":
    sys.exit(main())
