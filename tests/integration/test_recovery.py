"""What the lead reads and types when a provisioned federation fails, and a training script in a federation like it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killable_federation import start_killable_federation

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

ROUNDS = 6
PATIENCE_S = 900.0
"""Longest wait for a condition; a machine under load takes minutes for what an idle one does in seconds."""
HELD = "site-1"
"""Site whose training is held in a round until the test has read the terminal."""
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
    with start_killable_federation(tmp_path_factory.mktemp("recovery"), PATIENCE_S) as federation:
        yield federation


class Terminal:
    """A ``flare-sparse`` command that runs beside the test, and the lines that it has printed."""

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str]):
        self._file = folder / "terminal.txt"
        program = "from flare_sparse.cli import app; app()"
        with self._file.open("w") as screen:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, *words], stdout=screen, stderr=screen, env=environment, cwd=folder
            )

    def wait_for(self, text: str, seconds: float = PATIENCE_S) -> None:
        """Wait until the terminal shows a text."""
        end = time.monotonic() + seconds
        while text not in self._file.read_text():
            assert self._process.poll() is None, self._file.read_text()
            if time.monotonic() > end:
                self._process.kill()
                self._process.wait()
                pytest.fail(f"{text!r} is not shown after {seconds:.0f} s:\n{self._file.read_text()}")
            time.sleep(0.1)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def finish(self, seconds: float = 2 * PATIENCE_S) -> tuple[int, str]:
        """Return exit code and text of the ended command."""
        try:
            return self._process.wait(seconds), self._file.read_text()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            pytest.fail(f"the command has not ended after {seconds:.0f} s:\n{self._file.read_text()}")


def read_command(text: str) -> list[str]:
    """Return the words after ``flare-sparse`` of the one command that the last line of the terminal shows."""
    line = text.splitlines()[-1]
    return shlex.split(line[line.index("flare-sparse run") :])[1:]


def hold(federation: Any, number: int) -> None:
    """Hold the next process of a site in the training of a round; no process of a job may be running."""
    part = federation.faults / "armed.part"
    part.write_text(json.dumps({"phase": "training", "participant": HELD, "round": number}))
    part.replace(federation.faults / "armed.json")


def release(federation: Any) -> None:
    """Let the held process go on, and wait until no process of the dead job is left that another hold could stop."""
    from kills.federation import wait_for

    (federation.faults / "armed.json").unlink()
    wait_for(lambda: not federation.list_job_processes(), PATIENCE_S, "the processes of the dead job ended", every=1)


@pytest.mark.long
def test_one_command_goes_on_after_ctrl_c_a_dead_job_and_a_dead_server(federation: Any, tmp_path: Path) -> None:
    from kills.federation import ADMIN, JOBS, PARENTS, SERVER

    file = tmp_path / "job.yaml"
    file.write_text(
        f"name: recovery\nseed: 3\nmethod: {{name: topk_ef, rounds: {ROUNDS}, training: {{lr: 0.01}}}}\n"
        "task: {name: table, kind: binary, target: died, id: stay, "
        "features: [med_a, med_b, med_c], scaling: none, model: {name: mlp, hidden: [128]}}\n"
        "federation: {min_sites: 3, task_timeout_s: 3600}\n"
        f"simulator: {{sites: 3, data: {{path: '{federation.folder}/{{site}}.csv'}}}}\n"
    )
    kit = federation.kits / ADMIN

    def type_command(words: list[str]) -> Terminal:
        return Terminal(words, tmp_path, federation.environment)

    # Ctrl-C: the job continues at the server, and the command follows it again.
    hold(federation, 3)
    terminal = type_command(["run", str(file), "--env", "prod", "--kit", str(kit), "--out", "out"])
    terminal.wait_for(f"round 2/{ROUNDS}")
    terminal.interrupt()
    code, text = terminal.finish()
    assert code == 130, text
    assert "stopped by Ctrl-C; the job itself continues at the server" in text
    assert "is committed at the server" in text
    words = read_command(text)
    assert words[-2:] == ["--start", "last"]

    # The server's job process dies: the cause is named, and the same command submits the job again.
    terminal = type_command(words)
    terminal.wait_for("still at the server; following it")
    terminal.wait_for(f"round 2/{ROUNDS}")
    federation.kill(federation.list_processes(SERVER, JOBS[SERVER]))
    release(federation)
    code, text = terminal.finish()
    assert (code, "Traceback" in text) == (1, False), text
    assert "a process of the job died, at the server or at a site: killed, or out of memory" in text
    assert "refused" not in text
    assert read_command(text) == words

    # The server dies with its job: its supervisor restarts it, and the command notices that the job is lost.
    hold(federation, 5)
    terminal = type_command(words)
    terminal.wait_for(f"round 4/{ROUNDS}")
    federation.kill(
        [*federation.list_processes(SERVER, PARENTS[SERVER]), *federation.list_processes(SERVER, JOBS[SERVER])]
    )
    terminal.wait_for("does not reply; trying again for 300 s")
    (federation.faults / "armed.json").unlink()
    code, text = terminal.finish()
    assert (code, "Traceback" in text) == (1, False), text
    assert "the server was restarted, and job" in text
    assert read_command(text) == words

    terminal = type_command(words)
    code, text = terminal.finish()
    assert code == 0, text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (
        summary["model_sha256"]
        == run_in_process(Study.load(file), RunFolder(tmp_path / "local")).summary["model_sha256"]
    )


@pytest.fixture
def script_job(federation: Any, tmp_path: Path) -> Path:
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
def test_killed_site_resumes_its_script_to_the_model_of_an_undisturbed_run(
    script_job: Path, federation: Any, tmp_path: Path
) -> None:
    """The random numbers of a resumed script repeat, and the residuals of round 2 are on the site's disk."""
    from kills.federation import JOBS, wait_for

    armed, reached = federation.faults / "armed.json", federation.faults / "reached.json"
    reached.unlink(missing_ok=True)
    armed.write_text(json.dumps({"phase": "training", "participant": KILLED, "round": 3}))
    arguments = [str(script_job), "--env", "prod", "--kit", str(federation.kits / "lead@coordination.org")]
    arguments += ["--out", str(tmp_path / "out")]
    process = start(federation, *arguments)
    wait_for(lambda: reached.is_file() or process.poll() is not None, PATIENCE_S, f"{KILLED} trains in round 3")
    assert reached.is_file(), process.communicate()[0]
    federation.kill(federation.list_processes(KILLED, JOBS[KILLED]))
    armed.unlink()
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "a process of the job died" in " ".join(text.split())) == (1, True), text
    wait_for(lambda: not federation.list_job_processes(), PATIENCE_S, "the processes of the dead job ended", every=1)

    run(federation, *arguments, "--start", "last")
    rounds = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in rounds[:4]] == [1, 2, 3, 4]
    local = run_in_process(Study.load(script_job), RunFolder(tmp_path / "local")).summary
    assert read_digest(tmp_path / "out") == local["model_sha256"]
    assert list((tmp_path / "out" / "job").rglob("custom/client.py"))
