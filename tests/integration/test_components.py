"""The stock jobs in FLARE's simulator: FLARE's controllers end with the model of the package's own run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flare_sparse import load_model
from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
STOCK = ROOT / "jobs" / "stock"
CUSTOM = STOCK / "custom"
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
FULL_BATCH = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "batch_size": 10_000}
METHODS: dict[str, dict[str, Any]] = {
    "fedsparsify": {"name": "fedsparsify", "sparsity": 0.8},
    "scbf": {"name": "scbf", "rate": 0.3, "aggregation": "mean"},
    "neurosfl": {"name": "neurosfl", "sparsity": 0.8},
    "lora_a2": {"name": "lora_a2", "rank": 2, "training": {**FULL_BATCH, "epochs": 3, "lr": 0.05}},
    "metagater": {
        "name": "metagater", "lasso": 0.02, "local_steps": 3, "training": {**FULL_BATCH, "lr": 0.1}, "adapt_lr": 0.1
    },
}  # fmt: skip
EXACT = ("fedsparsify", "scbf", "neurosfl")
"""Jobs of which the package's own run trains by the same script: both sum in the order of site names."""


def run_stock(job: Path, folder: Path) -> Path:
    """Run a job in FLARE's simulator and return its workspace."""
    workspace = folder / "workspace"
    command = [Path(sys.executable).parent / "nvflare", "simulator", job, "-w", workspace, "-n", "3", "-t", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    return workspace


def read_stock(workspace: Path) -> dict[str, torch.Tensor]:
    """Return the model that FLARE's persistor saved last."""
    file = workspace / "server" / "simulate_job" / "app_server" / "FL_global_model.pt"
    assert file.is_file(), (workspace.parent / "log.txt").read_text()[-4000:]
    return {n: torch.as_tensor(v) for n, v in torch.load(file, weights_only=False)["model"].items()}


def run_own(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Run the method of the same settings as the package does, and return its final model."""
    for file in CUSTOM.glob("*.py"):
        shutil.copy(file, folder)
    if name in EXACT:
        task: dict[str, Any] = {"script": "client.py", "model": "study.Net"}
    else:
        net = {"lora_a2": "AdaptedNet", "metagater": "GatedNet"}[name]
        (folder / f"stock_{name}.py").write_text(TASK.format(net=net))
        task = {"class": f"stock_{name}.StockTask"}
    simulator = {"sites": 3, "data": {"path": str(folder), "partition": {"kind": "shared"}}}
    content = {"name": name, "seed": 0, "method": {**METHODS[name], "rounds": 5}, "task": task, "simulator": simulator}
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    run_in_process(Study.load(folder / "study.yaml"), RunFolder(folder / "run"))
    return load_model(folder / "run").state_dict()


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_stock_job_ends_with_the_model_of_the_package(name: str, tmp_path: Path) -> None:
    stock = read_stock(run_stock(STOCK / name, tmp_path))
    own = run_own(name, tmp_path)
    assert own.keys() <= stock.keys()
    worst = max(float((stock[n] - v).abs().max()) for n, v in own.items())
    if name in EXACT:
        assert all(torch.equal(stock[n], v) for n, v in own.items())
    else:
        # The package trains on one minibatch of all examples in another order: sums of float32 in another order.
        assert worst < 1e-5


@pytest.mark.long
def test_scatter_and_gather_ends_with_the_model_of_the_package(tmp_path: Path) -> None:
    job = tmp_path / "job"
    shutil.copytree(STOCK / "fedsparsify", job)
    file = job / "app" / "config" / "config_fed_server.json"
    server = json.loads(file.read_text())
    aggregator = {"id": "aggregator", **server["workflows"][0]["args"]["aggregator"]}
    args = {
        "min_clients": 3, "num_rounds": 5, "wait_time_after_min_received": 0, "aggregator_id": "aggregator",
        "persistor_id": "persistor", "shareable_generator_id": "generator", "train_task_name": "train",
    }  # fmt: skip
    flare = "nvflare.app_common"
    server["workflows"] = [
        {"id": "sag", "path": f"{flare}.workflows.scatter_and_gather.ScatterAndGather", "args": args}
    ]
    generator = f"{flare}.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator"
    server["components"] += [aggregator, {"id": "generator", "path": generator, "args": {}}]
    file.write_text(json.dumps(server))
    gathered, own = read_stock(run_stock(job, tmp_path)), run_own("fedsparsify", tmp_path)
    assert all(torch.equal(gathered[name], value) for name, value in own.items())
