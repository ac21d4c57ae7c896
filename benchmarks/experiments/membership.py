"""FedSparsify's table of attacks between sites: dense and pruned models, every site attacks every other one.

    python benchmarks/experiments/membership.py CONFIG [--seeds 1 2 3] [--references 4] [--out runs/membership]

CONFIG describes task, training and sites, such as 8 of them for 56 attacks; its method is replaced by fedavg and by
fedsparsify at 85, 90, 95 and 99 %. Runs and audits that exist are used again. Prints the table as Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from flare_sparse.audit.attacks import AuditOptions
from flare_sparse.audit.record import audit_run
from flare_sparse.cli.local import run_config_locally
from flare_sparse.cli.sites import prepare_site_data
from flare_sparse.config import RunConfig, load_config
from flare_sparse.config.yaml_files import parse_yaml, read_settings
from flare_sparse.runs.load import load_assembly
from flare_sparse.runs.results import RunResult

SPARSITIES = (0.0, 0.85, 0.9, 0.95, 0.99)
CONSOLE = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--references", type=int, default=4, help="reference models of RMIA; 0: none")
    parser.add_argument("--out", type=Path, default=Path("runs/membership"))
    arguments = parser.parse_args()
    records = {sparsity: [audit(arguments, sparsity, seed) for seed in arguments.seeds] for sparsity in SPARSITIES}
    print(format_table(records))
    return 0


def audit(arguments: argparse.Namespace, sparsity: float, seed: int) -> dict[str, Any]:
    """Return the record of the audit of one run, after training and attacking it unless that was done before."""
    out = arguments.out.resolve() / f"{100 * sparsity:.0f}-{seed}"
    if not (out / "summary.json").is_file():
        run_config_locally(build_config(arguments.config, sparsity, seed), arguments.config, out)
    run = RunResult.read(out)
    if run.audit:
        return run.audit
    assembly, config = load_assembly(out)
    data = prepare_site_data(config, assembly.task, out)
    options = AuditOptions(references=arguments.references, canaries=0)
    return audit_run(run, data, ["outsider", "member"], options, lambda line: CONSOLE.print(f"{out.name}: {line}"))


def build_config(file: Path, sparsity: float, seed: int) -> RunConfig:
    """Return the configuration with another method of the same rounds and training."""
    method = parse_yaml(read_settings(file))["method"]
    shared = {name: method[name] for name in ("rounds", "training") if name in method}
    pruned = {"name": "fedsparsify", "sparsity": sparsity} if sparsity else {"name": "fedavg"}
    return load_config(file, [f"method={ {**pruned, **shared} }", f"seed={seed}"])


def format_table(records: dict[float, list[dict[str, Any]]]) -> str:
    """Return the table; ranges are those of the seeds."""
    lines = [
        "| sparsity | mean accuracy | AUC | above 0.5 | successful | RMIA: AUC | RMIA: TPR at 1 % FPR |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for sparsity, runs in records.items():
        attacks = [{attack["attack"]: attack for attack in record["attacks"]} for record in runs]
        pairs, rmia = [a["gradient classifier"] for a in attacks], [a["rmia"] for a in attacks if "rmia" in a]
        cells = [
            f"{100 * sparsity:.0f} %" if sparsity else "dense",
            format_range([pair["balanced_accuracy"] for pair in pairs]),
            format_range([pair["auc"] for pair in pairs]),
            *(format_counts(pairs, name) for name in ("above_half", "successful")),
            *(format_range([a[name] for a in rmia]) for name in ("auc", "tpr_at_1_percent_fpr")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_range(values: list[float]) -> str:
    """Return mean, least and largest value."""
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "-"


def format_counts(pairs: list[dict[str, Any]], name: str) -> str:
    """Return a count of each seed, of all attacks."""
    return f"{', '.join(str(pair[name]) for pair in pairs)} of {pairs[0]['pairs']}"


if __name__ == "__main__":
    sys.exit(main())
