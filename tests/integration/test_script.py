"""A training script in real FLARE jobs in the simulator, and its failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flare_sparse import load_model
from flare_sparse.api.local import run as run_in_process
from flare_sparse.api.start import launch
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

SCRIPT = """
import os
import sys
import nvflare.client as flare
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from flare_sparse import client as sparse
from study.nets import Net

flare.init()
ranks, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
if ranks > 1:
    distributed.init_process_group("gloo")


def tell(value):
    # Rank 0 alone speaks with FLARE; what it hears, it tells the other ranks.
    box = [value]
    if ranks > 1:
        distributed.broadcast_object_list(box)
    return box[0]


site = flare.get_site_name()
assert sparse.site_data().path.is_dir()
x = torch.randn(80, 12, generator=torch.Generator().manual_seed(int(site[-1])))
y = x[:, :3].sum(1, keepdim=True)
net, loss = Net(16), torch.nn.MSELoss()
trained = DistributedDataParallel(net) if ranks > 1 else net
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
while tell(flare.is_running()):
    received = tell(flare.receive())
    net.load_state_dict(received.params)
    if "fail" in sys.argv and site == "site-2":
        raise KeyError("subject " + "-".join(("CANARY", "4711")))
    meta = {"NUM_STEPS_CURRENT_ROUND": 4}
    if sparse.wants_scores(received):
        sparse.send_scores(net, [(x[:20], y[:20])], lambda net, batch: loss(net(batch[0]), batch[1]), meta)
        continue
    net.eval()
    metrics = {"mse": float(loss(net(x[60:]), y[60:])), "test_examples": 20}
    if tell(rank == 0 and flare.is_evaluate()):
        flare.send(flare.FLModel(metrics=metrics))
        continue
    net.train()
    with sparse.masked(trained, optimizer, received):
        for rows in torch.randperm(60, generator=torch.Generator().manual_seed(received.current_round)).split(15):
            optimizer.zero_grad()
            # Each of two ranks has a half of the minibatch; a single process has both.
            for half in (rows[rank::2],) if ranks > 1 else (rows[::2], rows[1::2]):
                (loss(trained(x[half]), y[half]) * ranks / 2).backward()
            optimizer.step()
    flare.send(flare.FLModel(params=trained.state_dict(), metrics=metrics, meta=meta))
if ranks > 1:
    distributed.destroy_process_group()
"""

NET = """
from torch import nn
from .width import DEFAULT

class Net(nn.Sequential):
    def __init__(self, width=DEFAULT):
        super().__init__(nn.Linear(12, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))
"""


def configuration(folder: Path, args: str = "") -> Path:
    """Write a script, a package with its network and a configuration."""
    (folder / "study").mkdir(parents=True)
    (folder / "client.py").write_text(SCRIPT)
    (folder / "study" / "__init__.py").write_text("")
    (folder / "study" / "nets.py").write_text(NET)
    (folder / "study" / "width.py").write_text("DEFAULT = 4")
    task = {
        "script": "client.py",
        "model": "study.nets.Net",
        "model_args": {"width": 16},
        "args": args,
        "metric": {"name": "mse", "mode": "min"},
    }
    content = {
        "name": "script",
        "seed": 3,
        "method": {"name": "neurosfl", "sparsity": 0.7, "rounds": 3},
        "task": task,
        "simulator": {"sites": 2, "data": {"path": str(folder), "partition": {"kind": "shared"}}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def run(file: Path, out: Path, *overrides: str) -> dict[str, Any]:
    return launch("sim", Study.load(file, overrides), RunFolder(out)).summary


@pytest.mark.long
def test_script_in_the_simulator_ends_with_the_bits_of_a_local_run(tmp_path: Path) -> None:
    """The package and the helper travel; the mask holds; the model loads from the record alone.

    The script runs as two processes of torchrun, which share each minibatch by DistributedDataParallel, and in the
    local run within the site.
    """
    file = configuration(tmp_path / "config")
    simulated = run(file, tmp_path / "sim", "task.launch=torchrun --standalone --nproc_per_node=2")
    local = run_in_process(Study.load(file), RunFolder(tmp_path / "local")).summary
    assert simulated["model_sha256"] == local["model_sha256"]
    assert simulated["final"] == local["final"]
    rounds = [json.loads(line) for line in (tmp_path / "sim" / "rounds.jsonl").read_text().splitlines()]
    assert rounds[-1]["metrics"]["mse"] < rounds[1]["metrics"]["mse"]
    (tmp_path / "config").rename(tmp_path / "moved")
    weight = load_model(tmp_path / "sim", trust_code=True)[0].weight
    assert weight.shape == (16, 12)
    assert 0.5 < float((weight == 0).float().mean()) < 0.9


@pytest.mark.long
def test_failing_script_costs_its_own_site_only_and_its_text_stays_there(tmp_path: Path) -> None:
    file = configuration(tmp_path / "config", "fail")
    run(file, tmp_path / "sim", "method={name: topk_ef, fraction: 0.2, rounds: 1}")
    record = (tmp_path / "sim" / "rounds.jsonl").read_text()
    assert json.loads(record.splitlines()[0])["rejected"] == {"site-2": "E_SCRIPT"}
    assert "CANARY-4711" not in record
    report = tmp_path / "sim" / "workspace" / "script" / "site-2" / "simulate_job" / "site_error.txt"
    assert "KeyError: 'subject CANARY-4711'" in report.read_text()
