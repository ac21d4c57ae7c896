"""FLARE's own FedAvg in the simulator, with and without a sparse exchange: final model and bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flare_sparse.rounds.endpoints.egress import find_logs, read_chain

JOB = """
import sys
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from flare_sparse.components import SparseExchange, add_components
from model import Net

recipe = FedAvgRecipe(name="study", min_clients=2, num_rounds=4, model=Net(), train_script="client.py")
recipe.add_server_config({"server": {"task_request_interval": 0.1}})
if sys.argv[1] != "dense":
    add_components(recipe, exchange=SparseExchange(keep=float(sys.argv[1])))
recipe.execute(SimEnv(num_clients=2, workspace_root="workspace", log_config="concise"))
"""

NET = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)  # FLARE builds the network at the server from its class
        super().__init__(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
"""

CLIENT = """
import nvflare.client as flare
import torch
from model import Net

flare.init()
generator = torch.Generator().manual_seed(int(flare.get_site_name()[-1]))
x = torch.randn(160, 12, generator=generator)
y = x[:, :3].sum(1, keepdim=True)
net, loss = Net(), torch.nn.MSELoss()
while flare.is_running():
    received = flare.receive()
    net.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    for rows in torch.randperm(160, generator=torch.Generator().manual_seed(received.current_round)).split(20):
        optimizer.zero_grad()
        loss(net(x[rows]), y[rows]).backward()
        optimizer.step()
    flare.send(flare.FLModel(params=net.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": 8}))
"""


def run(folder: Path, keep: str) -> tuple[dict[str, torch.Tensor], Path]:
    """Run the job in a folder of its own; return its final model and the workspace."""
    folder.mkdir()
    for name, text in (("job.py", JOB), ("model.py", NET), ("client.py", CLIENT)):
        (folder / name).write_text(text)
    done = subprocess.run([sys.executable, "job.py", keep], cwd=folder, capture_output=True, text=True, check=False)
    model = folder / "workspace" / "study" / "server" / "simulate_job" / "app_server" / "FL_global_model.pt"
    assert model.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    return torch.load(model, weights_only=True)["model"], folder / "workspace" / "study"


def read_ledger(workspace: Path) -> list[dict[str, Any]]:
    lines = (workspace / "server" / "simulate_job" / "sparse_exchange.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def compute_error(model: dict[str, torch.Tensor]) -> float:
    """Return the mean squared error on examples that no site has."""
    x = torch.randn(500, 12, generator=torch.Generator().manual_seed(9))
    net = torch.nn.Sequential(
        torch.nn.Linear(12, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    net.load_state_dict({name: torch.as_tensor(value) for name, value in model.items()})
    with torch.no_grad():
        return float(((net.eval()(x)[:, 0] - x[:, :3].sum(1)) ** 2).mean())


@pytest.mark.long
def test_fedavg_recipe_ends_with_the_same_bits_or_sends_a_tenth(tmp_path: Path) -> None:
    dense, _ = run(tmp_path / "dense", "dense")
    exact, workspace = run(tmp_path / "exact", "1.0")
    assert dense.keys() == exact.keys()
    # Two sites: their sum has the same bits in either order of arrival.
    assert all(torch.equal(torch.as_tensor(dense[name]), torch.as_tensor(exact[name])) for name in dense)
    sparse, workspace = run(tmp_path / "sparse", "0.1")
    assert compute_error(sparse) < 1 < compute_error(run_untrained())
    ledger = read_ledger(workspace)
    assert len(ledger) == 2 * 4 * 2
    for site, log in find_logs(tmp_path / "sparse").items():
        # Each update with the names of its parts; the messages themselves are in the ledger.
        sent = sum(line["sent_bytes"] for line in ledger if (line["site"], line["direction"]) == (site, "up"))
        assert sent < sum(line["bytes"] for line in read_chain(log)[0]) < sent + 4 * 1500
    sums = json.loads((workspace / "server" / "simulate_job" / "sparse_exchange.json").read_text())
    assert sums["sent_bytes"] == sum(line["sent_bytes"] for line in ledger)
    assert [sums["sites"][site]["up"]["messages"] for site in ("site-1", "site-2")] == [4, 4]
    # 64 running statistics, and a tenth of the other 513 entries; the first model is whole.
    first = [line["sent_bytes"] for line in ledger if line["round"] == 0 and line["direction"] == "down"]
    assert first == [4 * 577] * 2
    others = [line["sent_bytes"] for line in ledger if line["round"] or line["direction"] == "up"]
    assert max(others) < 4 * (64 + 51) + 300


def run_untrained() -> dict[str, torch.Tensor]:
    """Return the model before the first round."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(12, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    return net.state_dict()
