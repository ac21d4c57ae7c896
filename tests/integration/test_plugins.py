"""A distribution outside this repository with a method, a task and a component: installed from a wheel, and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "new-method.md"
TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse import Examples, Metric, Task


class Line(Task):
    """The sum of three of six numbers."""

    metric = Metric("mse", "", "min")

    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def load(self, data, seed):
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(int(data.site[-1])))
        y = x[:, :3].sum(1, keepdim=True)
        return Examples(TensorDataset(x[8:], y[8:]), TensorDataset(x[:8], y[:8]))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def predict(self, model, batch):
        return model(batch[0]), batch[1]

    def metrics(self, predictions, targets):
        return {"mse": float((predictions - targets).square().mean())}
'''
COMPONENT = '''
from flare_sparse.components.filters import ModelFilter


class Halve(ModelFilter):
    """Sends half of each update."""

    def process_dxo(self, dxo, shareable, fl_ctx):
        dxo.data = {name: value / 2 for name, value in dxo.data.items()}
        return dxo
'''
CONFIG = """
name: masks
seed: 1
method: {name: random_masks, density: 0.25, rounds: 2}
task: {name: line}
simulator: {sites: 2, data: {path: "data/{site}"}}
"""
JOB = """
import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import FilterContextKey
from nvflare.apis.fl_context import FLContext
from sparse_draws.components import Halve

sent = Halve().process(DXO(DataKind.WEIGHT_DIFF, data={"w": np.ones(3)}).to_shareable(), FLContext())
print(from_shareable(sent).data["w"].tolist())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The distribution of docs/new-method.md, built as a wheel and installed into a folder of its own."""
    source, installed = tmp_path / "source", tmp_path / "site-packages"
    text = PAGE.read_text(encoding="utf-8")
    method = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    project = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)[0]
    (source / "sparse_draws").mkdir(parents=True)
    (source / "pyproject.toml").write_text(project)
    modules = {"__init__": "", "random_masks": method, "line": TASK, "components": COMPONENT}
    for name, content in modules.items():
        (source / "sparse_draws" / f"{name}.py").write_text(content)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path / "dist"),
        str(source),
    ]
    run(build, tmp_path, dict(os.environ))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(installed), str(wheel)], tmp_path, dict(os.environ)
    )
    return {**os.environ, "PYTHONPATH": str(installed)}


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_method_task_and_component_of_a_wheel_run(environment: dict[str, str], tmp_path: Path) -> None:
    """In one process and in the simulator, with the same bits; the job names the classes and carries no code."""
    (tmp_path / "masks.yaml").write_text(CONFIG)
    for site in ("site-1", "site-2"):
        (tmp_path / "data" / site).mkdir(parents=True)
    cli = [sys.executable, "-m", "flare_sparse"]
    listed = " ".join(run([*cli, "settings"], tmp_path, {**environment, "COLUMNS": "200"}).split())
    assert "sparse_draws.random_masks.RandomMasks sparse-draws 0.1" in listed
    assert "sparse_draws.line.Line sparse-draws 0.1" in listed
    digests = {}
    for env in ("local", "sim"):
        run([*cli, "run", "masks.yaml", "--env", env, "--out", env], tmp_path, environment)
        summary = json.loads((tmp_path / env / "summary.json").read_text())
        digests[env] = summary["model_sha256"]
        assert summary["method"] == "sparse_draws.random_masks.RandomMasks"
    assert digests["local"] == digests["sim"]
    run([*cli, "export", "masks.yaml", "--out", "jobs"], tmp_path, environment)
    app = tmp_path / "jobs" / "masks" / "app"
    components = json.loads((app / "config" / "config_fed_client.json").read_text())["components"]
    built = {part["id"]: next(iter(part["args"].values()), {}) for part in components}
    assert built["method"]["path"] == "sparse_draws.random_masks.RandomMasks"
    assert built["task"]["path"] == "sparse_draws.line.Line"
    assert not (app / "custom").exists()
    (tmp_path / "job.py").write_text(JOB)
    assert run([sys.executable, "job.py"], tmp_path, environment).strip().endswith("[0.5, 0.5, 0.5]")
