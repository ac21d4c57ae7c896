"""A script in a process of its own receives requests and sends replies through FLARE's Client API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flare_sparse.core.errors import format_site_error
from flare_sparse.flare.script_process import ScriptProcess
from flare_sparse.privacy.dp.account import Budget, BudgetSpent, PrivacyAccount
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.scripts import ScriptBudget
from flare_sparse.tasks.task import SiteData
from flare_sparse.training.script_exchange import ScriptFailed, ScriptRequest

SCRIPT = """
import random, sys, time
from pathlib import Path
import numpy as np
import torch
import nvflare.client as flare
from nvflare.client.in_process.api import TOPIC_LOCAL_RESULT
from nvflare.client.tracking import SummaryWriter
from nvflare.fuel.data_event.event_manager import EventManager
from flare_sparse import client as sparse
from beside import SHIFT

if "slow" in sys.argv:
    # FLARE's send, delayed after it has handed over the result.
    fire = EventManager.fire_event

    def fire_slowly(self, topic, data):
        fire(self, topic, data)
        time.sleep(1 if topic == TOPIC_LOCAL_RESULT else 0)

    EventManager.fire_event = fire_slowly
flare.init()
print("reads", sparse.site_data().path, sparse.site_data().subset)
if "end" in sys.argv:
    sys.exit(0)
if "status" in sys.argv:
    sys.exit(2)
if "file" in sys.argv:
    Path("table.csv").read_text()
if "import" in sys.argv:
    import helper_missing
log = SummaryWriter()
while flare.is_running():
    received = flare.receive()
    if "fail" in sys.argv or ("once" in sys.argv and not Path("failed").exists()):
        Path("failed").touch()
        raise KeyError("subject 4711")
    if "twice" in sys.argv:
        assert flare.receive() is received
    if "forget" in sys.argv:
        print("forgets send", flush=True)
        continue
    log.add_scalar("loss", 0.5, received.current_round)
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    metrics = {"accuracy": 0.5, "round": received.current_round, "rounds": received.total_rounds}
    if flare.is_evaluate():
        flare.send(flare.FLModel(metrics=metrics))
        continue
    meta = {"NUM_STEPS_CURRENT_ROUND": 3, "drawn": drawn, "kind": received.meta["flare_sparse_request"],
            "trainable": sorted(received.meta.get("flare_sparse_trainable", {}))}
    params = {name: value + SHIFT for name, value in received.params.items()}
    flare.send(flare.FLModel(params=params, metrics=metrics, meta=meta))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ScriptProcess]]:
    processes: list[ScriptProcess] = []

    def start(args: str = "") -> ScriptProcess:
        script = tmp_path / "client.py"
        script.write_text(SCRIPT)
        script.with_name("beside.py").write_text("SHIFT = 2.0")
        data = SiteData("site-1", tmp_path, ("a", "b"))
        processes.append(ScriptProcess(script, args, data, tmp_path / "work" / str(len(processes))))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def request(kind: str = "train", seed: int = 7) -> ScriptRequest:
    params = {"w": torch.arange(3.0), "count": torch.tensor(5)}
    return ScriptRequest(kind, params, 1, 4, {"w": torch.tensor([True, False, True])}, seed)  # type: ignore[arg-type]


@pytest.mark.slow
def test_script_answers_requests_and_draws_the_same_numbers_for_a_seed(
    start: Callable[..., ScriptProcess], tmp_path: Path
) -> None:
    process = start()
    reply = process.run(request())
    assert reply.params is not None
    assert {name: value.tolist() for name, value in reply.params.items()} == {"w": [2.0, 3.0, 4.0], "count": 7}
    assert (reply.is_delta, dict(reply.metrics)) == (False, {"accuracy": 0.5, "round": 1, "rounds": 4})
    assert {key: reply.meta[key] for key in ("NUM_STEPS_CURRENT_ROUND", "kind", "trainable")} == {
        "NUM_STEPS_CURRENT_ROUND": 3,
        "kind": "train",
        "trainable": ["w"],
    }
    again, other = process.run(request("score")), process.run(request(seed=8))
    assert again.meta["kind"] == "score"
    assert again.meta["drawn"] == reply.meta["drawn"] != other.meta["drawn"]
    evaluated = process.run(request("evaluate"))
    assert (evaluated.params, evaluated.metrics["accuracy"]) == (None, 0.5)
    process.close()
    output = (tmp_path / "work" / "0" / "output.log").read_text()
    assert f"reads {tmp_path} ('a', 'b')" in output
    # Figures that the script logs need no server, and go nowhere.
    assert "Traceback" not in output


@pytest.mark.long
def test_request_right_after_a_result_reaches_a_script_that_is_still_sending(
    start: Callable[..., ScriptProcess],
) -> None:
    """The script may receive a model twice before it sends."""
    process = start("slow twice")
    kinds: list[str] = []

    def ask_twice() -> None:
        kinds.extend(process.run(request(kind)).meta["kind"] for kind in ("train", "score"))

    # A request that gets lost is waited for without end; a thread leaves that to the end of the test.
    asking = threading.Thread(target=ask_twice, daemon=True)
    asking.start()
    asking.join(60)
    assert kinds == ["train", "score"]


def fail(process: ScriptProcess) -> ScriptFailed:
    with pytest.raises(ScriptFailed) as raised:
        process.run(request())
    return raised.value


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "first", "last"),
    [
        ("file", "FileNotFoundError: [Errno 2] No such file or directory: 'table.csv'", "directory: 'table.csv'"),
        # FLARE reports no ImportError.
        ("import", "ModuleNotFoundError: No module named 'helper_missing'", "No module named 'helper_missing'"),
    ],
)
def test_exception_of_a_script_is_reported_with_its_line_and_its_traceback(
    args: str, first: str, last: str, start: Callable[..., ScriptProcess], tmp_path: Path
) -> None:
    lines = format_site_error(fail(start(args))).splitlines()
    assert lines[0] == f"E_SCRIPT: script client.py: {first}"
    assert lines[1].startswith(f"  at {tmp_path / 'client.py'}:")
    if args == "file":
        assert "flare_sparse.client.site_data().path" in lines.pop(2)
    assert lines[2] == f"its output is in {tmp_path / 'work' / '0' / 'output.log'}"
    assert lines[3] == "Traceback (most recent call last):"
    assert lines[-1].endswith(last)


@pytest.mark.long
def test_early_end_of_a_script_is_explained(start: Callable[..., ScriptProcess]) -> None:
    ended, refused = str(fail(start("end"))), str(fail(start("status")))
    assert "it ended before it sent a result: its loop must go on while flare.is_running()" in ended
    assert "it ended by sys.exit(2): its command line 'status' (task.args) must be one that it accepts" in refused


@pytest.mark.long
def test_script_that_begins_its_next_turn_without_a_result_fails(
    start: Callable[..., ScriptProcess], tmp_path: Path
) -> None:
    error = fail(start("forget"))
    assert "the script called flare.receive() again without flare.send()" in str(error)
    assert (tmp_path / "work" / "0" / "output.log").read_text().count("forgets send") == 1


@pytest.mark.long
def test_next_request_starts_a_script_again_that_has_failed(start: Callable[..., ScriptProcess]) -> None:
    process = start("once")
    with pytest.raises(ScriptFailed, match="KeyError: 'subject 4711'"):
        process.run(request())
    assert process.run(request()).metrics["accuracy"] == 0.5
    assert process.run(request("evaluate")).metrics["accuracy"] == 0.5


PRIVATE = """
import nvflare.client as flare
import torch
from torch.utils.data import DataLoader, TensorDataset
from flare_sparse import client as sparse

flare.init()
net = torch.nn.Linear(3, 1)
loader = DataLoader(TensorDataset(torch.ones(20, 3), torch.ones(20, 1)), batch_size=10)
net, optimizer, loader = sparse.make_private(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
while flare.is_running():
    received = flare.receive()
    net.load_state_dict(received.params)
    for rows, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(rows), targets).backward()
        optimizer.step()
    flare.send(flare.FLModel(params=net.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": 2}))
"""


@pytest.mark.long
def test_script_with_a_spent_budget_abstains_and_its_process_charges_the_ledger_of_the_site(tmp_path: Path) -> None:
    account = PrivacyAccount(tmp_path / "kit", Budget(6.0, 1e-5))
    budget = ScriptBudget(PrivacyConfig(noise_multiplier=1.5, unit="record"), account, 9, "run", "job")
    (tmp_path / "client.py").write_text(PRIVATE)
    site, folder = SiteData("site-1", tmp_path), tmp_path / "work"
    process = ScriptProcess(tmp_path / "client.py", "", site, folder, budget=budget)
    params = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}
    rounds = 0
    try:
        with pytest.raises(BudgetSpent, match="epsilon of this site's policy"):  # noqa: PT012
            for rounds in range(20):
                process.run(ScriptRequest("train", params, rounds, 20, {}, 1))
    finally:
        process.close()
    assert rounds == budget.count_charges() > 0
    assert budget.compute_spent() <= 6.0
