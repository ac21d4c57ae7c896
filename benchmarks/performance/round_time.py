"""Seconds of a round of NeuroSFL at 90 % sparsity against FLARE's FedAvgRecipe, without training.

Four sites, a model of 30 M (and 3 M) float32 parameters. A site trains a single scalar by one step on one example, so a
round consists of encoding, sending, loading, flattening, sending back and summing. FLARE's recipe runs with its
defaults and, for comparison, with the polling interval of our jobs.

    python benchmarks/performance/round_time.py [--json FILE] [--millions 30 3] [--rounds 6]

Exits with 1 if NeuroSFL takes more than 1/4 of FLARE's time at 30 M, or more than FLARE's time at 3 M.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse.config import RunConfig, import_task_class
from flare_sparse.flare.launch.simulator import redirect_output, simulate
from flare_sparse.flare.recipe import SparseRecipe
from flare_sparse.task import Examples, Metric, SiteData, Task, TaskConfig

SITES = [f"site-{i}" for i in range(1, 5)]
BOUND = {30: 0.25, 3: 1.0}
HERE = Path(__file__).resolve()


class IdleNet(nn.Module):
    """``millions`` M weights that are sent but not trained, and one scalar that the loss depends on."""

    def __init__(self, millions: int = 30):
        super().__init__()
        self.body = nn.Linear(1000, 1000 * millions, bias=False)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class IdleConfig(TaskConfig):
    millions: int = 30


class IdleTask(Task):
    """One training and one test example, and next to no arithmetic."""

    Config = IdleConfig
    metric = Metric("error", "", "min")

    def model(self) -> nn.Module:
        return IdleNet(self.config.millions)

    def load(self, data: SiteData, seed: int) -> Examples:
        one = TensorDataset(torch.ones(1, 1), torch.zeros(1, 1))
        return Examples(one, one)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).square().mean()

    def predict(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"error": float((predictions - targets).abs().mean())}


CLIENT = """
import nvflare.client as flare

flare.init()
while flare.is_running():
    flare.send(flare.receive())
"""


def time_neurosfl(millions: int, rounds: int, folder: Path) -> list[float]:
    """Return the seconds between the commits of successive rounds."""
    settings = {
        "name": "neurosfl",
        "method": {
            "name": "neurosfl",
            "rounds": rounds,
            "sparsity": 0.9,
            "scores": "random",
            "training": {"optimizer": "sgd", "lr": 1e-6},
        },
        "task": {"class": "round_time.IdleTask", "millions": millions},
        "federation": {"min_sites": 4},
    }
    task = import_task_class("round_time.IdleTask", HERE.parent)
    config = RunConfig.model_validate(settings, context={"task": {"round_time.IdleTask": task.Config}})
    sites = folder / "sites"
    sites.mkdir(parents=True)
    for site in SITES:
        (sites / f"{site}.yaml").write_text(f"data: {folder}\n")
    recipe = SparseRecipe(config, packaging="byoc", modules=(HERE,))
    simulate(recipe, SITES, str(sites / "{site}.yaml"), folder / "ours")
    lines = [json.loads(line) for line in (folder / "ours" / "rounds.jsonl").read_text().splitlines()]
    times = [line["committed_at"] for line in lines if line["kind"] == "train"]
    return [b - a for a, b in pairwise(times)]


def time_flare(millions: int, rounds: int, folder: Path, interval_s: float | None) -> list[float]:
    """Return the seconds between the starts of successive rounds of FLARE's FedAvgRecipe."""
    folder.mkdir(parents=True)
    script = folder / "client.py"
    script.write_text(CLIENT)
    recipe = FedAvgRecipe(
        name="fedavg", model=IdleNet(millions), min_clients=4, num_rounds=rounds, train_script=str(script)
    )
    if interval_s is not None:
        recipe.add_server_config({"server": {"task_request_interval": interval_s}})
    with redirect_output(folder / "flare.log"):
        recipe.execute(SimEnv(clients=SITES, workspace_root=str(folder / "workspace")))
    text = (folder / "flare.log").read_text(errors="replace")
    starts = dict(parse_round_starts(text))
    times = [starts[n] for n in sorted(starts)]
    if len(times) < rounds:
        raise RuntimeError(f"FLARE's FedAvg ran {len(times)} of {rounds} rounds; see {folder / 'flare.log'}")
    return [b - a for a, b in pairwise(times)]


def parse_round_starts(text: str) -> list[tuple[int, float]]:
    """Return (round, time) of each "Round n started", a banner below the log line that carries the time."""
    stamps, moment = [], 0.0
    for line in text.splitlines():
        if match := re.search(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ", line):
            moment = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        if match := re.search(r"Round (\d+) started", line):
            stamps.append((int(match[1]), moment))
    return stamps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--millions", type=int, nargs="+", default=[30, 3])
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    rows, failed = [], False
    for millions in arguments.millions:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            row = {"parameters": millions * 1_000_000}
            row["flare_s"] = statistics.median(time_flare(millions, arguments.rounds, folder / "default", None))
            row["flare_fast_polling_s"] = statistics.median(
                time_flare(millions, arguments.rounds, folder / "fast", 0.05)
            )
            row["neurosfl_s"] = statistics.median(time_neurosfl(millions, arguments.rounds, folder))
        row["ratio"] = row["neurosfl_s"] / row["flare_s"]
        row["bound"] = BOUND.get(millions, 1.0)
        failed |= row["ratio"] > row["bound"]
        rows.append(row)
        print(
            f"{millions:>3} M parameters: FLARE FedAvg {row['flare_s']:.2f} s a round (fast polling "
            f"{row['flare_fast_polling_s']:.2f} s), NeuroSFL 90 % {row['neurosfl_s']:.2f} s; "
            f"ratio {row['ratio']:.3f}, bound {row['bound']}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
