"""Accuracy and bytes of FLARE's own recipes: dense, with a tenth of the entries, and with bfloat16 values.

    python benchmarks/exchange/recipes.py [--recipes fedavg scaffold ...] [--rounds 5] [--json cells.jsonl]

Two sites of scikit-learn's digits, in FLARE's simulator; one epoch a round. *Measured* bytes are those of the loopback
interface in a network namespace of the job's own (``unshare``, Linux), so that frames, heartbeats and polling count.
*Ledger* bytes are the lengths of the messages; dense jobs have none. With ``--json`` every cell is a line of a file,
and a second call goes on with the cells that are missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from digits_net import Net, load_images

FOLDER = Path(__file__).parent
RECIPES = ("fedavg", "fedprox", "fedopt", "scaffold", "cyclic", "swarm", "ditto")
MODES: dict[str, dict[str, Any]] = {"dense": {}, "keep 10 %": {"keep": 0.1}, "bfloat16": {"values": "bfloat16"}}
MODELS = ("server/simulate_job/app_server/FL_global_model.pt", "site-1/simulate_job/app_site-1/FL_global_model.pt")
"""Where a recipe writes its final model: at the server, in the swarm at the sites."""


def build_recipe(name: str, rounds: int) -> Any:
    """Return FLARE's recipe for the digits."""
    from nvflare.app_opt.pt.recipes.cyclic import CyclicRecipe
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe
    from nvflare.app_opt.pt.recipes.fedprox import FedProxRecipe
    from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe
    from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe

    common = {
        "name": "digits",
        "model": Net(),
        "min_clients": 2,
        "num_rounds": rounds,
        "train_script": str(FOLDER / "digits_client.py"),
    }
    if name == "swarm":
        return SwarmLearningRecipe(**common)
    common["train_args"] = name
    if name == "fedopt":
        return FedOptRecipe(**common, optimizer_args={"path": "torch.optim.SGD", "args": {"lr": 1.0, "momentum": 0.3}})
    classes = {"fedprox": FedProxRecipe, "scaffold": ScaffoldRecipe, "cyclic": CyclicRecipe}
    return classes.get(name, FedAvgRecipe)(**common)


def run_job(name: str, mode: str, rounds: int) -> None:
    """Run one job in the working folder; the network namespace is the caller's."""
    from nvflare.recipe import SimEnv

    from flare_sparse.components import SparseExchange, add_components

    recipe = build_recipe(name, rounds)
    recipe.add_server_config({"server": {"task_request_interval": 0.1}})
    if MODES[mode]:
        add_components(recipe, exchange=SparseExchange(**MODES[mode]))
    recipe.execute(SimEnv(num_clients=2, workspace_root="workspace", log_config="concise"))


def measure_cell(name: str, mode: str, rounds: int) -> dict[str, Any]:
    """Return accuracy and bytes of one job."""
    with tempfile.TemporaryDirectory() as folder:
        job = 'ip link set lo up; "$@"; grep "lo:" /proc/net/dev > bytes'
        command = [sys.executable, str(FOLDER / "recipes.py"), "--job", name, "--mode", mode, "--rounds", str(rounds)]
        done = subprocess.run(
            ["unshare", "-rn", "sh", "-c", job, "sh", *command], cwd=folder, capture_output=True, text=True, check=False
        )
        workspace = Path(folder) / "workspace" / "digits"
        models = [workspace / file for file in MODELS if (workspace / file).is_file()]
        if not models:
            raise SystemExit(f"{name}, {mode}: no model\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        measured = int((Path(folder) / "bytes").read_text().split()[1])
        return {
            "recipe": name,
            "mode": mode,
            # SCAFFOLD's controls are NumPy arrays beside the model; the job of this script has just written the file.
            "accuracy": compute_accuracy(torch.load(models[0], weights_only=False)["model"]),
            "measured": measured,
            "ledger": read_ledger(workspace, name) if MODES[mode] else None,
        }


def compute_accuracy(weights: dict[str, Any]) -> float:
    """Return the share of test images whose digit is right."""
    net = Net()
    net.load_state_dict({name: torch.as_tensor(value) for name, value in weights.items()})
    x, y = load_images("test")
    with torch.no_grad():
        return float((net.eval()(x).argmax(1) == y).float().mean())


def read_ledger(workspace: Path, name: str) -> int:
    """Return the bytes of all messages: at the server; in the swarm, those that sites received and sent."""
    ends = ["site-1", "site-2"] if name == "swarm" else ["server"]
    files = [workspace / end / "simulate_job" / "sparse_exchange.jsonl" for end in ends]
    lines = [json.loads(line) for file in files if file.is_file() for line in file.read_text().splitlines()]
    return int(sum(line["sent_bytes"] for line in lines))


def format_table(cells: list[dict[str, Any]]) -> str:
    """Return the cells as a Markdown table."""
    rows = [
        "| recipe | exchange | accuracy | measured | of dense | ledger | lines added |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    dense = {cell["recipe"]: cell["measured"] for cell in cells if cell["mode"] == "dense"}
    for cell in cells:
        share = f"{cell['measured'] / dense[cell['recipe']]:.2f}" if cell["recipe"] in dense else ""
        ledger = "" if cell["ledger"] is None else f"{cell['ledger']:,}"
        rows.append(
            f"| {cell['recipe']} | {cell['mode']} | {cell['accuracy']:.3f} | {cell['measured']:,} | {share} | {ledger} "
            f"| {0 if cell['mode'] == 'dense' else 2} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file of the finished cells, which are not run again")
    parser.add_argument("--job", choices=RECIPES, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=list(MODES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_job(options.job, options.mode, options.rounds)
        return
    cells = []
    if options.json and options.json.is_file():
        cells = [json.loads(line) for line in options.json.read_text(encoding="utf-8").splitlines()]
    finished = {(cell["recipe"], cell["mode"]) for cell in cells}
    for name in options.recipes:
        for mode in options.modes:
            if (name, mode) not in finished:
                cells.append(measure_cell(name, mode, options.rounds))
                if options.json:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(cells[-1]) + "\n")
    cells.sort(key=lambda cell: (RECIPES.index(cell["recipe"]), list(MODES).index(cell["mode"])))
    print(format_table(cells))


if __name__ == "__main__":
    main()
