"""A script in a process of its own receives requests and sends replies through FLARE's Client API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flare_sparse.flare.script_process import ScriptProcess
from flare_sparse.task import SiteData
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
log = SummaryWriter()
while flare.is_running():
    received = flare.receive()
    if "fail" in sys.argv or ("once" in sys.argv and not Path("failed").exists()):
        Path("failed").touch()
        raise KeyError("subject 4711")
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


def test_request_right_after_a_result_reaches_a_script_that_is_still_sending(
    start: Callable[..., ScriptProcess],
) -> None:
    process = start("slow")
    kinds: list[str] = []

    def ask_twice() -> None:
        kinds.extend(process.run(request(kind)).meta["kind"] for kind in ("train", "score"))

    # A request that gets lost is waited for without end; a thread leaves that to the end of the test.
    asking = threading.Thread(target=ask_twice, daemon=True)
    asking.start()
    asking.join(60)
    assert kinds == ["train", "score"]


def test_exception_and_early_end_of_a_script_are_explained(start: Callable[..., ScriptProcess]) -> None:
    process = start("fail")
    with pytest.raises(ScriptFailed, match=r"(?s)script client.py: .*client.py.*KeyError: 'subject 4711'"):
        process.run(request())
    with pytest.raises(ScriptFailed, match=r"it ended before it sent a result: its loop must go on"):
        start("end").run(request())


def test_next_request_starts_a_script_again_that_has_failed(start: Callable[..., ScriptProcess]) -> None:
    process = start("once")
    with pytest.raises(ScriptFailed, match="KeyError: 'subject 4711'"):
        process.run(request())
    assert process.run(request()).metrics["accuracy"] == 0.5
    assert process.run(request("evaluate")).metrics["accuracy"] == 0.5
