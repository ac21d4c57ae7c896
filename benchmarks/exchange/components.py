"""The stock jobs, and others of the same components, in FLARE's simulator, beside the package's own runs.

    python benchmarks/exchange/components.py [--cells scbf swarm ...] [--docs]
    python benchmarks/exchange/components.py --cells scbf fedsparsify --kit KITS/lead@coordination.org

Accuracy is the mean over the sites of the final model's share of right answers on their test examples; *sent* is what
left the sites, as their egress logs or ``sparse_exchange.jsonl`` count it, *dense* the same messages as float32. The
last column is the largest difference of an entry from the final model of the package's own run with the same settings.
``--docs`` writes the table of docs/components.md. ``--kit``, the startup kit of an admin, submits the jobs to a running
federation of three sites instead, in POC mode or provisioned; what left the sites is then in their own logs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
STOCK, PAGE = ROOT / "jobs" / "stock", ROOT / "docs" / "components.md"
CODE = STOCK / "custom"
FLARE, OWN = "nvflare.app_common", "flare_sparse.components"
FULL_BATCH = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "batch_size": 10_000}
METHODS: dict[str, dict[str, Any]] = {
    "fedsparsify": {"name": "fedsparsify", "sparsity": 0.8},
    "scbf": {"name": "scbf", "budget": 0.3, "aggregation": "mean"},
    "neurosfl": {"name": "neurosfl", "sparsity": 0.8},
    "lora_a2": {"name": "lora_a2", "rank": 2, "training": {**FULL_BATCH, "epochs": 3, "lr": 0.05}},
    "metagater": {
        "name": "metagater", "lasso": 0.02, "local_steps": 3, "training": {**FULL_BATCH, "lr": 0.1}, "adapt_lr": 0.1
    },
}  # fmt: skip
NETWORKS = {"lora_a2": "AdaptedNet", "metagater": "GatedNet"}
"""Networks of the methods that the package trains by a task of its own; the others train ``Net`` by ``client.py``."""
TASK = """
import torch
from study import {net} as Net, load, loss, measure
from torch.utils.data import TensorDataset
from flare_sparse import Examples, Metric, Task


class StockTask(Task):
    metric = Metric("accuracy", "", "max")

    def model(self):
        return Net()

    def load(self, data, seed):
        x, y, x_test, y_test = load(data.site)
        return Examples(TensorDataset(x, y), TensorDataset(x_test, y_test))

    def loss(self, model, batch):
        return loss(model, batch)

    def predict(self, model, batch):
        return model(batch[0]), batch[1]

    def metrics(self, predictions, targets):
        return {{"accuracy": float(((predictions > 0) == (targets > 0.5)).float().mean())}}
"""
Config = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One job.

    Attributes:
        job: the stock job that it is, or is made of.
        own: the package's run that it is compared with; empty: none.
        components: what it is made of, as display text.
        change: changes the configurations of server and clients.
    """

    job: str
    own: str
    components: str
    change: Callable[[Config, Config], None] = lambda server, client: None


def describe(path: str, **args: Any) -> Config:
    """Return an entry of a configuration."""
    return {"path": path, "args": args}


def scatter_and_gather(server: Config, _: Config) -> None:
    """Use FLARE's controller of Shareables."""
    aggregator = {"id": "aggregator", **server["workflows"][0]["args"]["aggregator"]}
    args = {
        "min_clients": 3, "num_rounds": 5, "wait_time_after_min_received": 0, "aggregator_id": "aggregator",
        "persistor_id": "persistor", "shareable_generator_id": "generator", "train_task_name": "train",
    }  # fmt: skip
    path = f"{FLARE}.workflows.scatter_and_gather.ScatterAndGather"
    server["workflows"] = [{"id": "controller", **describe(path, **args)}]
    generator = f"{FLARE}.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator"
    server["components"] += [aggregator, {"id": "generator", **describe(generator)}]


def swarm(_: Config, client: Config) -> None:
    """Put the filters on the messages between the sites of FLARE's swarm."""
    path = f"{OWN}.sparse_exchange.SparseExchange"
    keep, select = describe(f"{OWN}.keep_mask.KeepMask", source="zeros"), client["selection"]
    chains = [
        ("swarm_learn", "out", [keep, select, describe(path, content="model")]),
        ("swarm_learn", "in", [describe(path, content="model"), keep, select]),
        ("swarm_report_learn_result", "out", [keep, select, describe(path, content="update")]),
        ("swarm_report_learn_result", "in", [describe(path, content="update")]),
    ]
    client.pop("selection")
    client["task_data_filters"] = [{"tasks": [t], "direction": d, "filters": f} for t, d, f in chains]


CELLS = {
    "fedsparsify": Cell("fedsparsify", "fedsparsify", "MagnitudePruning, KeepMask, ToCSR, FromCSR"),
    "scbf": Cell("scbf", "scbf", "SelectiveSum, ChannelUpload, SparseExchange"),
    "neurosfl": Cell("neurosfl", "neurosfl", "NeuroSFLController, ScoredMask, ScoreExecutor, KeepMask, CSR"),
    "lora_a2": Cell("lora_a2", "lora_a2", "RankMean, RankUpload, SparseExchange"),
    "metagater": Cell("metagater", "metagater", "MetaGaterController, MetaStep, KeepMask, CSR"),
    "ScatterAndGather": Cell("fedsparsify", "fedsparsify", "MagnitudePruning, KeepMask, CSR", scatter_and_gather),
    "swarm": Cell("scbf", "", "FLARE's swarm, KeepMask, ChannelUpload, SparseExchange", swarm),
}


def write_swarm(folder: Path) -> None:
    """Export FLARE's swarm with the stock jobs' network and script, and the selection of the SCBF job beside it."""
    code = f"""
from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe
from study import Net
script = {str(CODE / "client.py")!r}
recipe = SwarmLearningRecipe(name="scbf", model=Net(), min_clients=3, num_rounds=5, train_script=script)
recipe._job.set_app_packages(["flare_sparse"])
recipe.export({str(folder)!r})
"""
    environment = {**os.environ, "PYTHONPATH": str(CODE)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    own = json.loads((STOCK / "scbf" / "app" / "config" / "config_fed_client.json").read_text())
    file = folder / "scbf" / "app" / "config" / "config_fed_client.json"
    selection = own["task_result_filters"][0]["filters"][0]
    file.write_text(json.dumps({**json.loads(file.read_text()), "selection": selection}))


def write_job(name: str, folder: Path) -> Path:
    """Write the job of a cell below ``folder``, and return its own folder."""
    cell = CELLS[name]
    if name == "swarm":
        write_swarm(folder)
    else:
        subprocess.run([STOCK / "build", folder], check=True)
    files = [folder / cell.job / "app" / "config" / f"config_fed_{end}.json" for end in ("server", "client")]
    server, client = (json.loads(file.read_text()) for file in files)
    cell.change(server, client)
    for file, config in zip(files, (server, client), strict=True):
        file.write_text(json.dumps(config, indent=2))
    return folder / cell.job


def run_stock(job: Path, folder: Path) -> Path:
    """Run a job in FLARE's simulator and return its workspace; its output lies beside it, in ``log.txt``."""
    workspace = folder / "workspace"
    command = [Path(sys.executable).parent / "nvflare", "simulator", job, "-w", workspace, "-n", "3", "-t", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    return workspace


def run_deployed(job: Path, folder: Path, kit: Path) -> Path:
    """Submit a job, wait until it ends, and return the folder of its downloaded result."""

    def call(*words: str) -> Any:
        line = [Path(sys.executable).parent / "nvflare", "--format", "json", "job", *words, "--startup-kit", kit]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])["data"]

    number = call("submit", "-j", str(job))["job_id"]
    while not (states := [row["status"] for row in call("list") if row["job_id"] == number])[0].startswith("FINISHED"):
        time.sleep(5)
    (folder / "log.txt").write_text(f"{job.name}: {states[0]}")
    call("download", number, "-o", str(folder))
    return folder / number


def read_stock(workspace: Path) -> dict[str, torch.Tensor]:
    """Return the model that FLARE's persistor saved last.

    Raises:
        SystemExit: there is none; the text is the end of the job's output.
    """
    files = sorted(workspace.rglob("FL_global_model.pt"))
    if not files:
        raise SystemExit((workspace.parent / "log.txt").read_text()[-4000:])
    return {n: torch.as_tensor(v) for n, v in torch.load(files[0], weights_only=False)["model"].items()}


def run_own(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Run the method of the same settings as the package does, and return its final model."""
    from flare_sparse import load_model
    from flare_sparse.api.local import run
    from flare_sparse.config.study import Study
    from flare_sparse.results.runs.folder import RunFolder

    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
    task: dict[str, Any] = {"script": "client.py", "model": "study.Net"}
    if name in NETWORKS:
        (folder / f"stock_{name}.py").write_text(TASK.format(net=NETWORKS[name]))
        task = {"class": f"stock_{name}.StockTask"}
    simulator = {"sites": 3, "data": {"path": str(folder), "partition": {"kind": "shared"}}}
    content = {"name": name, "seed": 0, "method": {**METHODS[name], "rounds": 5}, "task": task, "simulator": simulator}
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    run(Study.load(folder / "study.yaml"), RunFolder(folder / "run"))
    return load_model(folder / "run", trust_code=True).state_dict()


def find_difference(stock: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of an entry of two models; 0.0 exactly if they have the same bits."""
    return max(0.0 if torch.equal(stock[n], v) else float((stock[n] - v).abs().max()) for n, v in own.items())


def count_bytes(workspace: Path, model: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return the bytes that left the sites, and those of the same messages as float32."""
    from flare_sparse.results.runs.exchanges import has_exchanges, read_exchanges

    if has_exchanges(workspace):
        up = [site["up"] for job in read_exchanges(workspace) for site in job.sites.values() if "up" in site]
        return sum(part.sent for part in up), sum(part.dense for part in up)
    logs = workspace.rglob("flare_sparse_egress/*/egress.jsonl")
    lines = [json.loads(text) for log in logs for text in log.read_text().splitlines()]
    dense = 4 * sum(tensor.numel() for tensor in model.values() if tensor.is_floating_point())
    models = [line for line in lines if line["bytes"] > 1000]
    return sum(line["bytes"] for line in lines), dense * len(models)


def compute_accuracy(name: str, model: dict[str, torch.Tensor]) -> float:
    """Return the mean accuracy of a stock job's model over the sites."""
    # By its file: another module of this process may have the name of the job's.
    study = runpy.run_path(str(CODE / "study.py"))
    network = study[NETWORKS.get(name, "Net")]()
    network.load_state_dict(model)
    figures = [study["measure"](network, *study["load"](f"site-{n}")[2:])["accuracy"] for n in (1, 2, 3)]
    return sum(figures) / len(figures)


def measure_cell(name: str, kit: Path | None = None) -> str:
    """Run a cell, in the simulator or by an admin's kit, and return its row of the table."""
    cell = CELLS[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        job = write_job(name, folder / "jobs")
        workspace = run_stock(job, folder) if kit is None else run_deployed(job, folder, kit)
        model = read_stock(workspace)
        sent, dense = count_bytes(workspace, model)
        worst = find_difference(model, run_own(cell.own, folder)) if cell.own else None
    equality = "no such run" if worst is None else "bit-equal" if worst == 0 else f"{worst:.1e}"
    figures = f"{compute_accuracy(cell.job, model):.3f} | {sent:,} | {dense:,} | {equality}"
    return f"| {name} | {cell.components} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--docs", action="store_true", help="write the rows into docs/components.md")
    parser.add_argument("--kit", type=Path, help="startup kit of an admin of a running federation")
    options = parser.parse_args()
    for name in options.cells:
        row = measure_cell(name, options.kit)
        print(row, flush=True)
        if options.docs:
            page = PAGE.read_text()
            PAGE.write_text(re.sub(rf"^\| {re.escape(name)} \|.*$", lambda _, row=row: row, page, flags=re.MULTILINE))


if __name__ == "__main__":
    main()
