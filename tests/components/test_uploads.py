"""Filters of what leaves a site: entries outside the selection are as received, whatever the script sends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tenseal
import torch
from flare_ends import End, build_task, send_result, to_numpy
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType
from nvflare.apis.fl_constant import FilterKey
from nvflare.apis.shareable import Shareable
from nvflare.app_common.ccwf.common import Constant
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_opt.he.model_encryptor import HEModelEncryptor
from nvflare.fuel.utils.fobs.decomposers.via_downloader import LazyDownloadRef
from torch import nn

from flare_sparse.components import masking
from flare_sparse.components.arrays import MASK, ComponentError, guess_layout, pack_mask, read_mask
from flare_sparse.components.csr import ToCSR
from flare_sparse.components.masking import KeepMask
from flare_sparse.components.uploads import ChannelUpload, RankUpload
from flare_sparse.core.mask import Mask, top_k
from flare_sparse.core.params import Layout
from flare_sparse.core.seeds import make_generator
from flare_sparse.methods.lora_a2 import LoRAA2
from flare_sparse.methods.scores.ranks import compute_slot_scores
from flare_sparse.methods.scores.scbf.selection import build_groups

NET = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))
LAYOUT = Layout.from_module(NET)


@pytest.fixture
def site(tmp_path: Path) -> End:
    return End("site-1", tmp_path)


def draw(seed: int, layout: Layout = LAYOUT) -> torch.Tensor:
    return torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))


def send(site: End, filters: Any, start: Any, trained: Any, *, is_delta: bool = False, **meta: Any) -> DXO:
    """Return what leaves after a round in which ``start`` became ``trained``."""
    data = {name: trained[name] - start[name] for name in trained} if is_delta else dict(trained)
    kind = DataKind.WEIGHT_DIFF if is_delta else DataKind.WEIGHTS
    filters = filters if isinstance(filters, list) else [filters]
    return send_result(site, filters, build_task(start, **meta), DXO(kind, data=data))


def test_masks_travel_by_tensor_name() -> None:
    mask = Mask(draw(0) > 0)
    turned = Layout(tuple(reversed(LAYOUT.tensors)))
    there = read_mask(pack_mask(mask, LAYOUT), turned, "test")
    assert all(torch.equal(turned.unflatten(there.bits)[n], bits) for n, bits in LAYOUT.unflatten(mask.bits).items())


def test_layout_of_names_alone_has_the_roles_and_the_vector_of_the_network() -> None:
    state = {name: value.numpy() for name, value in NET.state_dict().items()}
    assert guess_layout(state).tensors == LAYOUT.tensors


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("is_torch", [False, True])
def test_entries_outside_the_mask_of_the_task_keep_the_received_bits(site: End, is_delta: bool, is_torch: bool) -> None:
    start, trained = to_numpy(draw(1), LAYOUT), to_numpy(draw(2), LAYOUT)
    mask = Mask(draw(3) > 0)
    if is_torch:
        start, trained = ({n: torch.from_numpy(a) for n, a in arrays.items()} for arrays in (start, trained))
    sent = send(site, KeepMask(), start, trained, is_delta=is_delta, meta={MASK: pack_mask(mask, LAYOUT)})
    for name, live in LAYOUT.unflatten(mask.bits).items():
        assert type(sent.data[name]) is type(trained[name])
        off = torch.zeros(live.shape) if is_delta else torch.as_tensor(start[name])
        on = torch.as_tensor(trained[name]) - (torch.as_tensor(start[name]) if is_delta else 0)
        assert torch.equal(torch.as_tensor(sent.data[name]), torch.where(live, on, off))


def test_received_model_is_kept_even_if_the_script_changes_it_in_place(site: End) -> None:
    start, mask = to_numpy(draw(1), LAYOUT), Mask.empty(LAYOUT.size)
    task, item = build_task(start, meta={MASK: pack_mask(mask, LAYOUT)}), KeepMask()
    before = {name: array.copy() for name, array in start.items()}
    site.start_task([item], task)
    for array in start.values():
        np.add(array, 1, out=array)
    result = DXO(DataKind.WEIGHTS, data=start).to_shareable()
    sent = from_shareable(site.apply([item], result, FilterChainType.TASK_RESULT_CHAIN, FilterKey.OUT))
    assert all(np.array_equal(sent.data[name], before[name]) for name in before)


@pytest.mark.parametrize("is_sender", [False, True])
def test_swarm_is_held_to_the_model_of_the_round_whoever_sends_it(site: End, is_sender: bool) -> None:
    item, chain = KeepMask("zeros"), FilterChainType.TASK_DATA_CHAIN
    for first, trained in ((0.0, 5.0), (2.0, 0.0)):
        task = build_task({"w": np.array([[first, 1]], np.float32)})
        if is_sender:  # FLARE hands a site its own model without a message
            task.set_header(Constant.AGGREGATOR, "site-2")
        site.apply([item], task, chain, FilterKey.OUT if is_sender else FilterKey.IN)
        # A task of the workflow, which brings no model, may run meanwhile.
        site.start_task([item], Shareable())
        update = DXO(DataKind.WEIGHTS, data={"w": np.array([[trained, 3]], np.float32)}).to_shareable()
        sent = from_shareable(site.apply([item], update, chain, FilterKey.OUT))
        assert sent.data["w"].tolist() == [[0.0, 3.0]]


def test_zeros_of_weights_stay_and_a_bias_at_zero_trains(site: End) -> None:
    start = {"w": np.array([[0, 2], [0, 0]], np.float32), "b": np.zeros(2, np.float32)}
    trained = {name: array + 1 for name, array in start.items()}
    sent = send(site, KeepMask("zeros"), start, trained)
    assert sent.data["w"].tolist() == [[0, 3], [0, 0]]
    assert sent.data["b"].tolist() == [1, 1]


def test_mask_of_a_file_of_the_job_is_kept(site: End) -> None:
    start, trained = to_numpy(draw(1), LAYOUT), to_numpy(draw(2), LAYOUT)
    live = np.eye(5, 6, dtype=bool)
    np.savez(site.folder / "config" / "mask.npz", **{"0.weight": live})
    sent = send(site, KeepMask("mask.npz"), start, trained)
    assert np.array_equal(sent.data["0.weight"], np.where(live, trained["0.weight"], start["0.weight"]))
    assert np.array_equal(sent.data["3.weight"], trained["3.weight"])


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"0.weight": np.ones((6, 5), bool)}, "of another network: 0.weight is bool"),
        ({"9.weight": np.ones((5, 6), bool)}, "of another network: 9.weight"),
        ({"0.weight": np.ones((5, 6))}, "is float64"),
        (None, "mask.npz cannot be read"),
    ],
)
def test_mask_of_another_network_is_refused_by_name(
    site: End, arrays: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    if arrays is not None:
        np.savez(site.folder / "config" / "mask.npz", **arrays)
    sent = send(site, KeepMask("../elsewhere/mask.npz"), to_numpy(draw(1), LAYOUT), to_numpy(draw(2), LAYOUT))
    assert sent.data == {}
    assert reason in caplog.text
    assert "into the job's config folder" in caplog.text


def test_packed_mask_of_another_network_withholds_the_update(site: End, caplog: pytest.LogCaptureFixture) -> None:
    start = to_numpy(draw(1), LAYOUT)
    for packed in ({"x": bytes(1)}, {"0.weight": bytes(3)}, [1], {"0.weight": np.zeros(4, np.uint8)}):
        assert send(site, KeepMask(), start, start, meta={MASK: packed}).data == {}
    assert (
        caplog.text.count("E_COMPONENT: the update of site site-1 is left out of this round: KeepMask: the mask") == 4
    )


def test_job_in_which_no_mask_came_warns_at_its_end(site: End, caplog: pytest.LogCaptureFixture) -> None:
    item, start = KeepMask(), to_numpy(draw(1), LAYOUT)
    send(site, item, start, start)
    item.handle_event(EventType.END_RUN, site.manager.new_context())
    assert "source 'task' has never brought a mask; all entries trained" in caplog.text


@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 1.0]), st.booleans())
def test_channel_upload_reveals_what_the_method_selects(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rate: float, is_delta: bool
) -> None:
    site = End("site-1", tmp_path_factory.getbasetemp())
    start, trained = draw(seed), draw(seed + 1)
    sent = send(
        site, ChannelUpload(rate, model=NET), to_numpy(start, LAYOUT), to_numpy(trained, LAYOUT), is_delta=is_delta
    )
    generator = make_generator(0, "channels", "site-1", 1)
    mask = build_groups(LAYOUT, "selected").select_by_rate(trained - start, rate, "positive", generator)
    assert read_mask(sent.meta[MASK], LAYOUT, "test") == mask
    vector = LAYOUT.flatten({name: torch.from_numpy(array) for name, array in sent.data.items()})
    assert torch.equal(vector, torch.where(mask.bits, trained, start) - (start if is_delta else 0))


def test_channel_upload_without_the_network_selects_layer_by_layer_within_a_budget(site: End) -> None:
    item = ChannelUpload(budget=0.25)
    sent = send(site, item, to_numpy(draw(1), LAYOUT), to_numpy(draw(2), LAYOUT), is_delta=True)
    parameters = sum(np.count_nonzero(a) for name, a in sent.data.items() if "running" not in name)
    assert parameters == LAYOUT.num_parameters // 4


def test_integer_buffers_and_tensors_outside_the_network_do_not_leave(site: End) -> None:
    start = {**to_numpy(draw(1), LAYOUT), "1.num_batches_tracked": np.array(3), "extra": np.ones(2, np.float32)}
    trained = {name: array + 1 for name, array in start.items()}
    sent = send(site, ChannelUpload(1.0, model=NET), start, trained)
    assert (sent.data["1.num_batches_tracked"], sent.data["extra"].tolist()) == (3, [1, 1])
    assert np.array_equal(sent.data["0.weight"], trained["0.weight"])


class Adapted(nn.Module):
    """Two modules with adapters as peft names them, over a frozen base, and a head."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("one", "two"):
            module = nn.Module()
            module.base_layer = nn.Linear(6, 4)
            module.base_layer.requires_grad_(False)
            module.lora_A = nn.ModuleDict({"default": nn.Linear(6, 3, bias=False)})
            module.lora_B = nn.ModuleDict({"default": nn.Linear(3, 4, bias=False)})
            setattr(self, name, module)
        self.head = nn.Linear(4, 1)


ADAPTED = Layout.from_module(Adapted())


@pytest.mark.parametrize("round_", [0, 1])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_rank_upload_sends_whole_slots_of_the_active_factor_and_the_head(site: End, round_: int, rank: int) -> None:
    frozen = {"one.base_layer.weight": np.ones((4, 6), np.float32)}
    start = {**to_numpy(draw(1, ADAPTED), ADAPTED), **frozen}
    trained = {name: array + np.float32(0.1) * (i + 1) for i, (name, array) in enumerate(start.items())}
    item = RankUpload(rank, heads=["head.*"])
    task = build_task(start, round_)
    sent = send_result(site, [item], task, DXO(DataKind.WEIGHTS, data=dict(trained)))
    method = LoRAA2(LoRAA2.Config(rank=rank), ADAPTED)
    exchanged = method.select_exchanged(round_ + 1)
    told = from_shareable(task).meta[MASK]
    assert not any(told.pop("one.base_layer.weight"))
    assert read_mask(told, ADAPTED, "test") == exchanged
    mask = read_mask(sent.meta[MASK], ADAPTED, "test")
    slots = method.slots.find_slots(mask, method.get_active_factor(round_ + 1))
    assert slots is not None
    assert int(slots.sum()) == rank * 2
    before, after = (
        ADAPTED.flatten({n: torch.as_tensor(a[n]) for n in trained if n not in frozen}) for a in (start, trained)
    )
    scores = compute_slot_scores(method.slots, after - before, before, method.get_active_factor(round_ + 1))
    assert torch.equal(slots, top_k(scores, 2 * rank).bits)
    vector = ADAPTED.flatten({name: torch.as_tensor(array) for name, array in sent.data.items() if name not in frozen})
    assert torch.equal(vector, torch.where(mask.bits, after, before))
    assert np.array_equal(sent.data["one.base_layer.weight"], frozen["one.base_layer.weight"])


def test_network_without_adapters_is_refused(site: End) -> None:
    with pytest.raises(ComponentError, match=r"RankUpload: the network has no LoRA adapters.*inject adapters"):
        site.start_task([RankUpload()], build_task(to_numpy(draw(1), LAYOUT)))


FILTERS = {"channels": lambda: ChannelUpload(model=NET), "layers": ChannelUpload, "keep": KeepMask}


@pytest.mark.parametrize("build", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (DXO(DataKind.WEIGHTS, data={"0.weight": b"cipher"}), "'0.weight' is of type bytes.*encrypted"),
        (DXO(DataKind.WEIGHT_DIFF, data={"0.weight": np.ones((5, 6))}, meta={MetaKey.PROCESSED_ALGORITHM: "CKKS"}),
         r"processed the values \(CKKS\).*before that one in config_fed_client.json"),
        (DXO(DataKind.APP_DEFINED, data={"0.weight": np.ones((5, 6))}), "of kind APP_DEFINED, expected WEIGHTS"),
        (DXO(DataKind.WEIGHTS, data={"nobody": np.ones((5, 6))}), "has 'nobody', which the received model has not"),
        (DXO(DataKind.WEIGHTS, data={"0.weight": np.ones((6, 5))}), "0.weight has the shape"),
    ],
)  # fmt: skip
def test_update_that_cannot_be_limited_does_not_leave(
    site: End, build: Any, result: DXO, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent = send_result(site, [build()], build_task(to_numpy(draw(1), LAYOUT)), result)
    assert (sent.data, sent.meta) == ({}, {"flare_sparse_withheld": "E_COMPONENT"})
    (record,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert "E_COMPONENT: the update of site site-1 is left out of this round: " in record
    assert re.search(reason, record)


def test_update_with_nan_does_not_leave(site: End, caplog: pytest.LogCaptureFixture) -> None:
    start = to_numpy(draw(1), LAYOUT)
    broken = {**start, "0.bias": np.full(5, np.nan, np.float32)}
    assert send(site, ChannelUpload(model=NET), start, broken).meta == {"flare_sparse_withheld": "E_SELECTION"}


def test_tensors_that_another_filter_removed_are_named(site: End, caplog: pytest.LogCaptureFixture) -> None:
    start = to_numpy(draw(1), LAYOUT)
    assert send(site, [ExcludeVars(["0.bias"]), ChannelUpload(model=NET)], start, start).data == {}
    assert "the message lacks 0.bias" in caplog.text
    assert "leave out filters that remove tensors (ExcludeVars) before this one" in caplog.text
    removed = send(site, [KeepMask(), ExcludeVars(["0.bias"]), ToCSR()], start, start)
    assert sorted(removed.data) == sorted(start.keys() - {"0.bias"})


@pytest.mark.parametrize("build", FILTERS.values(), ids=FILTERS)
def test_filter_in_a_chain_of_the_server_is_refused(build: Any, tmp_path: Path) -> None:
    server, shareable = End("server", tmp_path), build_task(to_numpy(draw(1), LAYOUT))
    for chain, direction in (("task_data", FilterKey.OUT), ("task_result", FilterKey.IN)):
        with pytest.raises(ComponentError, match=r"task_result_filters of config_fed_client\.json"):
            server.apply([build()], shareable, chain, direction)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rate": 0}, "rate is 0: Input should be greater than 0"),
        ({"selection": "both"}, "selection is 'both'"),
        ({"budget": 2.0}, "budget is 2.0"),
    ],
)
def test_invalid_argument_is_refused_before_the_job_runs(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ComponentError, match=f"ChannelUpload: {reason}"):
        ChannelUpload(**settings)


def build_encryptor() -> HEModelEncryptor:
    """FLARE's encryptor with the key that a provisioned kit would hold."""
    item = HEModelEncryptor(weigh_by_local_iter=False)
    item.tenseal_context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 40, 60])
    item.tenseal_context.global_scale = 2**40
    item.encrypt_layers = [True]
    return item


def test_upload_is_limited_before_flare_encrypts_it_and_refused_after(
    site: End, caplog: pytest.LogCaptureFixture
) -> None:
    start, trained = to_numpy(draw(1), LAYOUT), to_numpy(draw(2), LAYOUT)
    limited = send(site, ChannelUpload(0.2, model=NET), start, trained, is_delta=True)
    sent = send(site, [KeepMask(), ChannelUpload(0.2, model=NET), build_encryptor()], start, trained, is_delta=True)
    assert sent.meta[MetaKey.PROCESSED_ALGORITHM] == "CKKS"
    for name, array in limited.data.items():
        assert np.allclose(sent.data[name].decrypt(), array.ravel(), atol=1e-5)
    # FLARE's decryptor gives flat lists, of values that are not exactly those that were encrypted.
    decrypted = {name: array.ravel().tolist() for name, array in start.items()}
    result = DXO(DataKind.WEIGHTS, data=trained)
    again = send_result(site, [KeepMask(), ChannelUpload(0.2, model=NET)], build_task(decrypted, 1), result)
    whole = send(site, ChannelUpload(0.2, model=NET), start, trained)
    assert all(np.array_equal(again.data[name], array) for name, array in whole.data.items())
    assert send_result(site, [KeepMask("zeros")], build_task(decrypted, 1), result).data == {}
    assert "KeepMask: a decrypted model has no exact zeros; name a mask file as its source" in caplog.text
    for item in (KeepMask(), ChannelUpload(model=NET), ToCSR()):
        assert send(site, [build_encryptor(), item], start, trained, is_delta=True).data == {}
    assert caplog.text.count("another filter has processed the values (CKKS); a selection cannot be made") == 3


def test_references_that_an_external_script_would_fetch_are_fetched_for_the_filter(
    site: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, trained = to_numpy(draw(1), LAYOUT), to_numpy(draw(2), LAYOUT)
    task = build_task({name: LazyDownloadRef("server", "transaction", name) for name in start})
    monkeypatch.setattr(masking, "materialize_lazy_download_refs", lambda shareable, cell: build_task(start))
    site.manager.engine.get_cell = lambda: None
    sent = send_result(site, [ChannelUpload(0.2, model=NET)], task, DXO(DataKind.WEIGHTS, data=trained))
    whole = send(site, ChannelUpload(0.2, model=NET), start, trained)
    assert all(np.array_equal(sent.data[name], array) for name, array in whole.data.items())
    # The script gets what the filter has fetched: FLARE serves one receiver.
    assert all(np.array_equal(from_shareable(task).data[name], array) for name, array in start.items())
