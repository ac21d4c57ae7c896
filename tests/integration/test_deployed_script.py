"""A training script in POC mode and in a provisioned federation, and the kill of a site's job process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killable_federation import start_killable_federation

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

PATIENCE_S = 600.0
KILLED = "site-2"

SCRIPT = """
import nvflare.client as flare
import numpy as np
import torch
from flare_sparse import client as sparse
from nets import Net

flare.init()
table = torch.tensor(np.loadtxt(sparse.site_data().path, delimiter=",", skiprows=1, dtype="float32"))
x, y = table[:, 2:], table[:, 1].long()
net, loss = Net(), torch.nn.CrossEntropyLoss()
while flare.is_running():
    received = flare.receive()
    net.load_state_dict(received.params)
    net.eval()
    metrics = {"accuracy": float((net(x).argmax(1) == y).float().mean())}
    if flare.is_evaluate():
        flare.send(flare.FLModel(metrics=metrics))
        continue
    net.train()
    # Momentum lives for a round: what a script keeps longer is lost with its process.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    with sparse.masked(net, optimizer, received):
        for rows in torch.randperm(len(x)).split(15):
            optimizer.zero_grad()
            loss(net(x[rows]), y[rows]).backward()
            optimizer.step()
    flare.send(flare.FLModel(params=net.state_dict(), metrics=metrics, meta={"NUM_STEPS_CURRENT_ROUND": 4}))
"""

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A provisioned federation whose processes can be killed."""
    with start_killable_federation(tmp_path_factory.mktemp("federation"), PATIENCE_S) as federation:
        yield federation


@pytest.fixture
def config(federation: Any, tmp_path: Path) -> Path:
    (tmp_path / "client.py").write_text(SCRIPT)
    (tmp_path / "nets.py").write_text(NET)
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: script\nseed: 3\nmethod: {name: topk_ef, fraction: 0.2, rounds: 4}\n"
        "task: {script: client.py, model: nets.Net}\n"
        "federation: {min_sites: 3, task_timeout_s: 3600}\n"
        f"simulator: {{sites: 3, data: {{path: '{federation.folder}/{{site}}.csv'}}}}\n"
    )
    return file


def start(federation: Any, *arguments: str) -> subprocess.Popen[str]:
    """Start ``flare-sparse run``."""
    line = ["flare-sparse", "run", *arguments]
    return subprocess.Popen(
        line, env=federation.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(federation: Any, *arguments: str) -> None:
    process = start(federation, *arguments)
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, text


def read_digest(out: Path) -> str:
    return str(json.loads((out / "summary.json").read_text())["model_sha256"])


@pytest.mark.long
@pytest.mark.usefixtures("poc_ports")
def test_script_in_poc_and_provisioned_ends_with_the_model_of_the_simulator(
    config: Path, federation: Any, tmp_path: Path
) -> None:
    kit = str(federation.kits / "lead@coordination.org")
    for environment in (["sim"], ["poc"], ["prod", "--kit", kit]):
        run(federation, str(config), "--env", *environment, "--out", str(tmp_path / environment[0]))
    traffic = [json.loads((tmp_path / env / "summary.json").read_text())["traffic"] for env in ("sim", "poc", "prod")]
    assert len({read_digest(tmp_path / env) for env in ("sim", "poc", "prod")}) == 1
    assert traffic[0] == traffic[1] == traffic[2]
    assert list((tmp_path / "prod" / "job").rglob("custom/client.py"))


@pytest.mark.long
def test_killed_site_resumes_its_script_to_the_model_of_an_undisturbed_run(
    config: Path, federation: Any, tmp_path: Path
) -> None:
    """The random numbers of a resumed script repeat, and the residuals of round 2 are on the site's disk."""
    from kills.federation import JOBS, wait_for

    armed, reached = federation.faults / "armed.json", federation.faults / "reached.json"
    armed.write_text(json.dumps({"phase": "training", "participant": KILLED, "round": 3}))
    arguments = [str(config), "--env", "prod", "--kit", str(federation.kits / "lead@coordination.org")]
    arguments += ["--out", str(tmp_path / "out")]
    process = start(federation, *arguments)
    wait_for(lambda: reached.is_file() or process.poll() is not None, PATIENCE_S, f"{KILLED} trains in round 3")
    assert reached.is_file(), process.communicate()[0]
    federation.kill(federation.list_processes(KILLED, JOBS[KILLED]))
    armed.unlink()
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "a process of the job died" in " ".join(text.split())) == (1, True), text
    wait_for(lambda: not federation.list_job_processes(), PATIENCE_S, "the processes of the dead job ended", every=1)

    run(federation, *arguments, "--resume")
    rounds = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in rounds[:4]] == [1, 2, 3, 4]
    local = run_in_process(Study.load(config), RunFolder(tmp_path / "local")).summary
    assert read_digest(tmp_path / "out") == local["model_sha256"]
