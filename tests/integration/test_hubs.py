"""A provisioned federation with two hubs of two sites: mTLS, separate processes, the bits of the run without hubs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT
from ports import lock_ports

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0
"""Longest wait for a condition; a machine under load takes minutes for what an idle one does in seconds."""
MASKED = ROOT / "app_configs" / "masked_brain_age.yaml"
# On a machine with fewer cores than processes, a site may start a minute after its hub.
HUBS = (
    "federation.hubs={hub-1: {sites: [site-1, site-2], fetch_s: 300}, "
    "hub-2: {sites: [site-3, site-4], min_sites: 2, fetch_s: 300}}"
)
SMALL = ("method.rounds=2", "method.training.epochs=1", "task.downsample=4", "federation.task_timeout_s=600")


def run_command(*line: str, timeout_s: float = 900) -> str:
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a running federation with hubs."""
    folder = tmp_path_factory.mktemp("tree") / "workspace"
    with lock_ports("provisioned"):
        try:
            run_command(str(ROOT / "poc" / "up"), "--tree", str(folder))
            yield folder
        finally:
            run_command(str(ROOT / "poc" / "down"), str(folder))


@pytest.mark.long
def test_provisioned_tree_ends_in_the_bits_of_the_flat_local_run(workspace: Path, tmp_path: Path) -> None:
    """Without masks; the test below shows the same of masked sums, after a kill."""
    data = f"simulator.data={{path: '{workspace / 'data' / '{site}'}'}}"
    flat = [*SMALL, data, "wire.aggregation=fixed_point"]
    run_in_process(Study.load(MASKED, flat), RunFolder(tmp_path / "flat"))
    kit, out = workspace / "sparse" / "prod_00" / "lead@coordination.org", tmp_path / "tree"
    settings = [word for setting in [*flat, HUBS] for word in ("--set", setting)]
    run_command("flare-sparse", "run", str(MASKED), "--env", "prod", "--kit", str(kit), "--out", str(out), *settings)
    of_tree = check_tree(out, tmp_path / "flat")
    for line in (out / "rounds.jsonl").read_text().splitlines():
        assert json.loads(line)["sites_contributed"] == ["site-1", "site-2", "site-3", "site-4"]
    # Values reach the server as one sum of each hub: as many messages with values as hubs, in every step.
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    sums = [
        line
        for line in lines
        if line["direction"] == "up" and line["scalars_sent"] and line["site"] in of_tree["links"]
    ]
    assert [line["site"] for line in sums].count("hub-1") == [line["site"] for line in sums].count("hub-2") == 3


def check_tree(out: Path, flat: Path) -> dict[str, Any]:
    """Check that a run with hubs has the bits of the one without; return its summary."""
    of_tree, of_flat = (json.loads((folder / "summary.json").read_text()) for folder in (out, flat))
    assert of_tree["model_sha256"] == of_flat["model_sha256"]
    assert set(of_tree["links"]) == {"server", "hub-1", "hub-2"}
    return dict(of_tree)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {PATIENCE_S:.0f} s"
        time.sleep(0.1)


def list_server_records(kits: Path) -> set[Path]:
    """Return the records of the jobs at the server, which has them earlier than a command that follows a job."""
    return set((kits / "localhost").glob("*/app_server/**/rounds.jsonl"))


def read_rounds(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


def kill_processes(kit: Path) -> None:
    """Kill the participant of a startup kit with its job, and not the shell that starts it again."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if str(kit) in words and "python" in words[0]:
                os.kill(int(folder.name), signal.SIGKILL)


@pytest.mark.long
def test_job_of_a_killed_hub_ends_and_its_resumption_ends_in_the_undisturbed_bits(
    workspace: Path, tmp_path: Path
) -> None:
    # The kill comes within a second after the first commit, well before the last round.
    rounds = 6
    data = f"simulator.data={{path: '{workspace / 'data' / '{site}'}'}}"
    flat = [*SMALL, data, "wire.aggregation=masked", f"method.rounds={rounds}"]
    flat += ["federation.task_timeout_s=120", "federation.retries=0"]
    kits, out = workspace / "sparse" / "prod_00", tmp_path / "tree"
    settings = [word for setting in [*flat, HUBS] for word in ("--set", setting)]
    line = ["flare-sparse", "run", str(MASKED), "--env", "prod", "--kit", str(kits / "lead@coordination.org")]
    line += ["--out", str(out), *settings]
    log = kits / "hub-1" / "process.log"
    connected, earlier = log.read_text().count("Successfully registered client"), list_server_records(kits)

    def has_committed() -> bool:
        """Return whether round 1 follows the scores; every line but the last is whole."""
        return any(file.read_text().count("\n") >= 2 for file in list_server_records(kits) - earlier)

    with (tmp_path / "terminal.txt").open("w") as screen:
        running = subprocess.Popen(line, env=ENVIRONMENT, stdout=screen, stderr=screen)
    try:
        wait_for(lambda: has_committed() or running.poll() is not None, "round 1 is committed")
        kill_processes(kits / "hub-1")
        # The hub's supervisor starts its client again, but not the job: the next exchange with it times out.
        code = running.wait(PATIENCE_S)
    finally:
        running.kill()
        running.wait()
    shown = (tmp_path / "terminal.txt").read_text()
    assert code != 0, shown
    assert "E_QUORUM" in shown
    assert "is committed at the server" in shown
    assert "--resume" in shown
    before = read_rounds(out)
    assert 2 <= len(before) < rounds
    assert not (out / "model.safetensors").exists()
    wait_for(lambda: log.read_text().count("Successfully registered client") > connected, "the hub is connected again")
    run_command(*line, "--resume")
    run_in_process(Study.load(MASKED, flat), RunFolder(tmp_path / "flat"))
    check_tree(out, tmp_path / "flat")
    # The rounds before the kill were not repeated.
    after = read_rounds(out)
    assert [record["committed_at"] for record in after[: len(before)]] == [record["committed_at"] for record in before]
    assert [record["round"] for record in after] == [record["round"] for record in read_rounds(tmp_path / "flat")]
