"""Executors of components: scores without gradients, and results that are held to the mask whatever the script does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flare_ends import End, build_task, to_numpy
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from torch import nn

from flare_sparse.client import compute_scores
from flare_sparse.components.arrays import MASK, ComponentError, pack_mask
from flare_sparse.components.masking import MaskedTraining
from flare_sparse.components.score_executor import ScoreExecutor
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout

CANARY = "-".join(("CANARY", "4711"))


class Data:
    """A user's data: sites differ; some cannot be read."""

    def batches(self, site: str) -> list[Any]:
        if site == "site-9":
            raise RuntimeError(f"subject {CANARY}")
        x = torch.randn(20, 6, generator=torch.Generator().manual_seed(int(site[-1])))
        return [(x, x[:, :1])]

    def loss(self, network: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(network(batch[0]), batch[1])


def build_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))


LAYOUT = Layout.from_module(build_network())


def execute(executor: Any, task: Shareable, site: End) -> Shareable:
    return executor.execute("score", task, site.manager.new_context(), Signal())  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_torch", [False, True])
def test_scores_are_those_of_the_received_model(is_torch: bool, tmp_path: Path) -> None:
    received = {name: value + 1 for name, value in build_network().state_dict().items()}
    arrays = received if is_torch else {name: value.numpy() for name, value in received.items()}
    reply = execute(ScoreExecutor(build_network(), Data()), build_task(arrays), End("site-2", tmp_path))
    dxo = from_shareable(reply)
    network = build_network()
    network.load_state_dict(received)
    expected = compute_scores(network, Data().batches("site-2"), Data().loss)
    assert dxo.data_kind == DataKind.WEIGHT_DIFF
    assert dxo.data.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(dxo.data[name]), value) for name, value in expected.items())
    assert isinstance(dxo.data["0.weight"], torch.Tensor if is_torch else np.ndarray)
    assert min(float(value.min()) for value in expected.values()) >= 0


@pytest.mark.parametrize(
    ("site", "task", "reason"),
    [
        (
            "site-9",
            build_task(to_numpy(torch.ones(LAYOUT.size), LAYOUT)),
            "E_SITE: no scores of this site: RuntimeError",
        ),
        ("site-1", build_task({"0.weight": np.ones((5, 6), np.float32)}), "ScoreExecutor: the message lacks 0.bias"),
        ("site-1", build_task({"0.weight": b"cipher"}), "'0.weight' is of type bytes"),
        ("site-1", DXO(DataKind.METRICS, data={"a": 1}).to_shareable(), "expected WEIGHTS"),
    ],
)
def test_failure_costs_the_site_its_scores_and_tells_the_server_nothing(
    site: str, task: Shareable, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reply = execute(ScoreExecutor(build_network(), Data()), task, End(site, tmp_path))
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert reason in caplog.text
    assert CANARY not in caplog.text + str(reply)


def test_object_without_batches_or_loss_is_refused_before_the_job_runs() -> None:
    with pytest.raises(ComponentError, match=r"ScoreExecutor: data of type Linear has no batches\(\)"):
        ScoreExecutor(build_network(), nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ComponentError, match="ScoreExecutor: model is of type str"):
        ScoreExecutor("study.Net", Data())  # type: ignore[arg-type]


@pytest.mark.parametrize("is_delta", [False, True])
def test_any_script_is_held_to_the_mask_of_the_task(
    is_delta: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = to_numpy(torch.randn(LAYOUT.size), LAYOUT)
    mask = Mask(torch.arange(LAYOUT.size) % 3 == 0)
    kind = DataKind.WEIGHT_DIFF if is_delta else DataKind.WEIGHTS
    trained = {name: array + 2 for name, array in start.items()}
    replies = iter([DXO(kind, data=dict(trained)).to_shareable(), make_reply(ReturnCode.TASK_ABORTED)])
    # FLARE's part starts a thread with a script; here it is the script's result alone.
    monkeypatch.setattr(ClientAPIExecutor, "execute", lambda *_: next(replies))
    executor = MaskedTraining("in_process", task_script_path="client.py")
    executor._keep.handle_event(EventType.START_RUN, End("server", tmp_path).manager.new_context())
    task = build_task(start, meta={MASK: pack_mask(mask, LAYOUT)})
    data = from_shareable(execute(executor, task, End("site-1", tmp_path))).data
    for name, live in LAYOUT.unflatten(mask.bits).items():
        assert np.array_equal(data[name], np.where(live, trained[name], 0 if is_delta else start[name]))
    assert execute(executor, task, End("site-1", tmp_path)).get_return_code() == ReturnCode.TASK_ABORTED


def test_result_that_cannot_be_held_is_an_error_of_the_site_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = to_numpy(torch.randn(LAYOUT.size), LAYOUT)
    result = DXO(DataKind.WEIGHTS, data={"other": np.ones(3)}).to_shareable()
    monkeypatch.setattr(ClientAPIExecutor, "execute", lambda *_: result)
    executor = MaskedTraining("in_process", task_script_path="client.py")
    reply = execute(executor, build_task(start), End("site-1", tmp_path))
    assert reply.get_return_code() == ReturnCode.EXECUTION_RESULT_ERROR
    assert "E_COMPONENT: the result is left out of this round: MaskedTraining: the result has 'other'" in caplog.text
