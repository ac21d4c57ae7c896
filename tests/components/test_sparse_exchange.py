"""Shareables through the filters of server and sites: what leaves is small, what arrives is ordinary."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ProcessType, ReturnCode, ServerCommandKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.decomposers import numpy_decomposers
from nvflare.fuel.utils import fobs

from flare_sparse.components.arrays import ComponentError
from flare_sparse.components.filters import WITHHELD
from flare_sparse.components.sparse_exchange import EXCHANGE_FILE, SUMS_FILE, SparseExchange, sum_exchange
from flare_sparse.core.errors import MissingBase, RejectedMessage

MODEL = {
    "conv.weight": np.arange(400, dtype=np.float32).reshape(20, 20) / 7,
    "bn.running_var": np.ones(3, np.float32),
    "bn.num_batches_tracked": np.array(5),
}
numpy_decomposers.register()


class End:
    """One process of a job, with the filter in all chains."""

    def __init__(self, name: str, root: Path, **settings: Any):
        self.name, self.folder = name, root / name
        self.folder.mkdir(exist_ok=True)
        is_server = name == "server"
        workspace = SimpleNamespace(get_run_dir=lambda job: str(self.folder))
        stickers = {FLContextKey.PROCESS_TYPE: ProcessType.SERVER_JOB if is_server else ProcessType.CLIENT_JOB}
        engine = SimpleNamespace(get_workspace=lambda: workspace, fire_event=lambda *_: None)
        self.manager = FLContextManager(engine, name, "job", {}, stickers)
        self.settings = settings

    def filter(self, shareable: Shareable, chain: str, direction: str, peer: str) -> Shareable:
        item = SparseExchange(**self.settings)
        item.set_prop(FilterContextKey.CHAIN_TYPE, chain)
        context = self.manager.new_context()
        context.set_prop(FLContextKey.FILTER_DIRECTION, direction, private=True, sticky=False)
        other = FLContext()
        other.put("__identity_name__", peer, private=False, sticky=False)
        context.set_peer_context(other)
        # What arrives has gone through FLARE's serializer.
        return item.process(shareable if direction == FilterKey.OUT else fobs.loads(fobs.dumps(shareable)), context)

    def send_task(
        self, model: dict[str, Any], peer: str, round_: int = 0, meta: dict[str, Any] | None = None
    ) -> Shareable:
        shareable = DXO(DataKind.WEIGHTS, data=model, meta=meta or {}).to_shareable()
        shareable.set_header("current_round", round_)
        return self.filter(shareable, FilterChainType.TASK_DATA_CHAIN, FilterKey.OUT, peer)

    def receive_task(self, shareable: Shareable) -> DXO:
        return from_shareable(self.filter(shareable, FilterChainType.TASK_DATA_CHAIN, FilterKey.IN, "server"))

    def send_result(self, dxo: DXO) -> Shareable:
        return self.filter(dxo.to_shareable(), FilterChainType.TASK_RESULT_CHAIN, FilterKey.OUT, "server")

    def receive_result(self, shareable: Shareable, site: str) -> Shareable:
        shareable.set_header(ServerCommandKey.FL_CLIENT, Client(site, "token"))
        return self.filter(shareable, FilterChainType.TASK_RESULT_CHAIN, FilterKey.IN, site)

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / EXCHANGE_FILE).read_text().splitlines()]


def train(model: dict[str, Any], step: float = 1.0) -> dict[str, Any]:
    """Return the model after a change of its first row, which is larger at higher columns."""
    changed = {name: array.copy() for name, array in model.items()}
    changed["conv.weight"][0] += step * np.arange(20, dtype=np.float32)
    changed["bn.num_batches_tracked"] += 1
    return changed


@pytest.fixture
def ends(tmp_path: Path) -> tuple[End, End]:
    return End("server", tmp_path, keep=0.02), End("site-1", tmp_path, keep=0.02)


def test_full_weights_arrive_as_the_model_of_the_server_plus_the_largest_changes(ends: tuple[End, End]) -> None:
    server, site = ends
    received = site.receive_task(server.send_task(MODEL, "site-1"))
    assert received.data_kind == DataKind.WEIGHTS
    for name, array in MODEL.items():
        assert np.array_equal(received.data[name], array)
        assert received.data[name].dtype == array.dtype
    meta = {"NUM_STEPS_CURRENT_ROUND": 4, "initial_metrics": {"accuracy": 0.5}}
    result = site.send_result(DXO(DataKind.WEIGHTS, data=train(received.data), meta=dict(meta)))
    assert _find_message(result).size < 300
    dxo = from_shareable(server.receive_result(result, "site-1"))
    expected = MODEL["conv.weight"].copy()
    # 2 % of 400 entries: the last 8 columns have the largest changes.
    expected[0, 12:] += np.arange(12, 20)
    assert np.allclose(dxo.data["conv.weight"], expected, rtol=1e-6)
    assert np.array_equal(dxo.data["conv.weight"][0, :12], MODEL["conv.weight"][0, :12])
    assert dxo.data["bn.num_batches_tracked"] == 6
    assert {name: dxo.meta[name] for name in meta} == meta
    assert dxo.data_kind == DataKind.WEIGHTS


def test_exact_settings_change_no_bit_in_either_direction(tmp_path: Path) -> None:
    server, site = End("server", tmp_path), End("site-1", tmp_path)
    model = MODEL
    for round_ in range(3):
        received = site.receive_task(server.send_task(model, "site-1", round_))
        trained = {name: np.asarray(array * np.float32(1.37)) for name, array in received.data.items()}
        assert trained["bn.num_batches_tracked"].dtype == np.float64
        dxo = from_shareable(server.receive_result(site.send_result(DXO(DataKind.WEIGHTS, data=trained)), "site-1"))
        assert all(np.array_equal(dxo.data[name], trained[name]) for name in trained)
        model = dxo.data


@pytest.mark.slow
def test_residual_reaches_the_server_in_later_rounds(ends: tuple[End, End]) -> None:
    server, site = ends
    total = np.zeros((20, 20), np.float32)
    diff = {"conv.weight": np.linspace(0.5, 1, 400, dtype=np.float32).reshape(20, 20)}
    for round_ in range(60):
        site.receive_task(server.send_task(MODEL, "site-1", round_))
        sent = diff if round_ == 0 else {"conv.weight": np.zeros((20, 20), np.float32)}
        dxo = from_shareable(server.receive_result(site.send_result(DXO(DataKind.WEIGHT_DIFF, data=sent)), "site-1"))
        assert dxo.data_kind == DataKind.WEIGHT_DIFF
        assert list(dxo.data) == ["conv.weight"]
        total += dxo.data["conv.weight"]
    assert np.array_equal(total, diff["conv.weight"])


def test_update_that_does_not_count_takes_nothing_with_it(ends: tuple[End, End]) -> None:
    """As in every job of FLARE a lost update is lost; what earlier ones left to send is not."""
    server, site = ends
    received = site.receive_task(server.send_task(MODEL, "site-1"))
    arrived = server.receive_result(site.send_result(DXO(DataKind.WEIGHTS, data=train(received.data))), "site-1")
    total = from_shareable(arrived).data["conv.weight"] - MODEL["conv.weight"]
    received = site.receive_task(server.send_task(MODEL, "site-1", 1))
    damaged = site.send_result(DXO(DataKind.WEIGHTS, data=train(received.data, step=5)))
    _damage(damaged)
    assert read_code(server.receive_result(damaged, "site-1")) == "E_CRC"
    for round_ in range(2, 7):
        received = site.receive_task(server.send_task(MODEL, "site-1", round_))
        result = site.send_result(DXO(DataKind.WEIGHT_DIFF, data={"conv.weight": np.zeros((20, 20), np.float32)}))
        total += from_shareable(server.receive_result(result, "site-1")).data["conv.weight"]
    assert np.allclose(total, train(MODEL)["conv.weight"] - MODEL["conv.weight"], rtol=1e-5)
    # The server did not know what the site held after the lost answer.
    sizes = [line["sent_bytes"] for line in server.ledger if line["direction"] == "down"]
    assert [size == 4 * 403 for size in sizes[:4]] == [True, False, True, False]


def test_site_that_lost_its_model_asks_for_the_whole_one(ends: tuple[End, End], tmp_path: Path) -> None:
    server, site = ends
    received = site.receive_task(server.send_task(MODEL, "site-1"))
    server.receive_result(site.send_result(DXO(DataKind.WEIGHTS, data=train(received.data))), "site-1")
    (tmp_path / "new").mkdir()
    fresh = End("site-1", tmp_path / "new", keep=0.02)
    with pytest.raises(MissingBase):
        fresh.receive_task(server.send_task(train(MODEL), "site-1", 1))
    server.receive_result(make_reply(ReturnCode.TASK_DATA_FILTER_ERROR), "site-1")
    received = fresh.receive_task(server.send_task(train(MODEL), "site-1", 2))
    assert np.array_equal(received.data["conv.weight"], train(MODEL)["conv.weight"])


def test_ledger_has_the_length_of_every_message(ends: tuple[End, End]) -> None:
    server, site = ends
    sizes = [4 * 403]
    model = MODEL
    for round_ in range(3):
        task = server.send_task(model, "site-1", round_)
        sizes += [_find_message(task).size] if round_ else []
        received = site.receive_task(task)
        result = site.send_result(DXO(DataKind.WEIGHTS, data=train(received.data)))
        sizes.append(_find_message(result).size)
        model = from_shareable(server.receive_result(result, "site-1")).data
    assert [line["sent_bytes"] for line in server.ledger] == sizes
    assert [line["dense_bytes"] for line in server.ledger] == [4 * 403] * 6
    assert "in 6 messages instead of" in sum_exchange(server.folder)
    sums = json.loads((server.folder / SUMS_FILE).read_text())
    assert sums["sent_bytes"] == sum(sizes)
    assert sums["sites"]["site-1"]["up"]["messages"] == 3


@pytest.mark.parametrize("is_coded", [True, False])
def test_run_in_which_no_message_was_coded_ends_with_one_warning(
    ends: tuple[End, End], caplog: pytest.LogCaptureFixture, is_coded: bool
) -> None:
    caplog.set_level("INFO")
    server, _ = ends
    filters = [SparseExchange(), SparseExchange()]
    for name in ("train", "validate", "train"):
        context = server.manager.new_context()
        context.set_prop(FLContextKey.TASK_NAME, name, private=True, sticky=False)
        for item in filters:
            item.handle_event(EventType.BEFORE_TASK_DATA_FILTER, context)
    if is_coded:
        server.send_task(MODEL, "site-1")
    for item in filters:
        item.handle_event(EventType.END_RUN, server.manager.new_context())
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (0 if is_coded else 1)
    saved = [record.message for record in caplog.records if "messages instead of" in record.message]
    assert len(saved) == is_coded
    assert all("no message was coded" in text and "The tasks were train, validate;" in text for text in warnings)


def test_messages_without_arrays_pass_unchanged(ends: tuple[End, End]) -> None:
    _, site = ends
    metrics = DXO(DataKind.METRICS, data={"accuracy": 0.5})
    assert from_shareable(site.send_result(metrics)).data == {"accuracy": 0.5}
    plain = Shareable()
    plain["text"] = "abc"
    chain = FilterChainType.TASK_RESULT_CHAIN
    assert site.filter(plain, chain, FilterKey.OUT, "server") == {"text": "abc", **plain}


@pytest.mark.parametrize(
    ("dxo", "reason"),
    [
        (DXO(DataKind.WEIGHTS, data={"w": b"ciphertext"}), "'w' is of type bytes.*encrypted"),
        (
            DXO(DataKind.WEIGHTS, data=MODEL, meta={MetaKey.PROCESSED_ALGORITHM: "CKKS"}),
            r"processed the values \(CKKS\)",
        ),
        (DXO(DataKind.COLLECTION, data={"a": DXO(DataKind.WEIGHTS, data={})}), "COLLECTION"),
        (DXO(DataKind.WEIGHTS, data={"w": np.ones(2, np.float32)}), "brought no model"),
        (DXO(DataKind.WEIGHTS, data=MODEL), "brought no model"),
    ],
)
def test_what_cannot_be_served_is_left_out_with_the_reason(
    ends: tuple[End, End], dxo: DXO, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_code(ends[1].send_result(dxo)) == "E_COMPONENT"
    assert re.search(reason, caplog.text)


def test_task_that_cannot_be_served_is_an_error(ends: tuple[End, End]) -> None:
    with pytest.raises(ComponentError, match="no arrays of floats"):
        ends[0].send_task({"n": np.array([1, 2])}, "site-1")
    with pytest.raises(ComponentError, match="keep is 0"):
        SparseExchange(keep=0)
    with pytest.raises(ComponentError, match="content is 'both'"):
        SparseExchange(content="both")  # type: ignore[arg-type]


def test_update_with_nan_does_not_leave_the_site(ends: tuple[End, End]) -> None:
    server, site = ends
    received = site.receive_task(server.send_task(MODEL, "site-1"))
    broken = train(received.data)
    broken["conv.weight"][3, 3] = np.nan
    assert read_code(site.send_result(DXO(DataKind.WEIGHTS, data=broken))) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda packet: packet.pop("message"),
        lambda packet: packet.update(message=np.zeros(3)),
        lambda packet: packet.update(message=np.zeros((3, 3), np.uint8)),
        lambda packet: packet.update(missing=None),
        lambda packet: packet.update(is_delta=1),
        lambda packet: packet.update(others=None),
    ],
)
def test_malformed_packet_is_left_out(ends: tuple[End, End], change: Any) -> None:
    server, site = ends
    received = site.receive_task(server.send_task(MODEL, "site-1"))
    result = site.send_result(DXO(DataKind.WEIGHTS, data=train(received.data)))
    change(result["DXO"]["data"]["flare_sparse"])
    assert read_code(server.receive_result(result, "site-1")) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda packet: packet.pop("model"),
        lambda packet: packet.update(model={"w": "text"}),
        lambda packet: packet.update(counted="../etc"),
        lambda packet: packet.update(others=3),
    ],
)
def test_malformed_task_is_refused(ends: tuple[End, End], change: Any) -> None:
    server, site = ends
    task = server.send_task(MODEL, "site-1")
    change(task["DXO"]["data"]["flare_sparse"])
    with pytest.raises((ComponentError, RejectedMessage)):
        site.receive_task(task)


def test_replayed_update_and_update_of_another_site_are_rejected(ends: tuple[End, End]) -> None:
    server, site = ends
    received = site.receive_task(server.send_task(MODEL, "site-1"))
    result = fobs.dumps(site.send_result(DXO(DataKind.WEIGHTS, data=train(received.data))))
    model = from_shareable(server.receive_result(fobs.loads(result), "site-1")).data
    server.send_task(model, "site-1", 1)
    for sender in ("site-1", "site-2"):
        assert read_code(server.receive_result(fobs.loads(result), sender)) == "E_REPLAY"


def test_peers_send_whole_models_and_sparse_updates_to_each_other(tmp_path: Path) -> None:
    """As in FLARE's swarm: one message for all receivers; any of them aggregates."""
    sites = {name: End(name, tmp_path, keep=0.02) for name in ("site-1", "site-2", "site-3")}

    def pass_on(sender: str, receiver: str, dxo: DXO, content: str) -> DXO:
        chain = FilterChainType.TASK_DATA_CHAIN
        shareable = dxo.to_shareable()
        for end in (sites[sender], sites[receiver]):
            end.settings["content"] = content
        shareable = sites[sender].filter(shareable, chain, FilterKey.OUT, "server")
        return from_shareable(sites[receiver].filter(shareable, chain, FilterKey.IN, sender))

    model = DXO(DataKind.WEIGHTS, data=MODEL)
    received = {name: pass_on("site-1", name, model, "model") for name in ("site-2", "site-3")}
    assert np.array_equal(received["site-2"].data["conv.weight"], MODEL["conv.weight"])
    # site-2 aggregates: from a site that received the model, and from the one that sent it.
    for name, trained in (("site-3", train(received["site-3"].data)), ("site-1", train(MODEL))):
        dxo = pass_on(name, "site-2", DXO(DataKind.WEIGHTS, data=trained), "update")
        assert np.count_nonzero(dxo.data["conv.weight"] - MODEL["conv.weight"]) == 8
    # site-1 aggregates what it sent itself.
    dxo = pass_on("site-3", "site-1", DXO(DataKind.WEIGHTS, data=train(received["site-3"].data)), "update")
    assert np.count_nonzero(dxo.data["conv.weight"] - MODEL["conv.weight"]) == 8


def read_code(shareable: Shareable) -> Any:
    """Return why an update was left out; None if it was not."""
    dxo = from_shareable(shareable)
    assert WITHHELD not in dxo.meta or not dxo.data
    return dxo.meta.get(WITHHELD)


def _find_message(shareable: Shareable) -> np.ndarray:
    message: np.ndarray = shareable["DXO"]["data"]["flare_sparse"]["message"]
    return message


def _damage(shareable: Shareable) -> None:
    _find_message(shareable)[-20] ^= 1
