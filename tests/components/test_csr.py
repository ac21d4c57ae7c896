"""CSR as scipy writes it: round trips, and tables of a sender that deviates."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flare_ends import End, build_task, send_result
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter, FilterChainType
from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.fuel.utils import fobs
from scipy import sparse

from flare_sparse.components.arrays import ComponentError
from flare_sparse.components.csr import FromCSR, ToCSR, decode_csr, encode_csr
from flare_sparse.components.filters import check_last
from flare_sparse.components.sparse_exchange import SparseExchange

SPARSE = np.array([[0, 0, 5, 0, 0, 0, 0, 0], [0] * 8, [0, 0, 0, -2, 0, 0, 0, 1]], np.float32)


def pass_on(item: Any, dxo: DXO, root: Path, direction: str = FilterKey.OUT) -> DXO:
    end = End("site-1" if direction == FilterKey.OUT else "server", root)
    return from_shareable(end.apply([item], dxo.to_shareable(), FilterChainType.TASK_RESULT_CHAIN, direction))


def test_table_is_what_scipy_reads() -> None:
    table = encode_csr(SPARSE)
    matrix = sparse.csr_matrix((table["values"], table["indices"], table["indptr"]), table["shape"])
    assert np.array_equal(matrix.toarray(), SPARSE)
    assert (table["indptr"].tolist(), table["indices"].tolist()) == ([0, 1, 1, 3], [2, 3, 7])
    assert table["values"].dtype == np.float32


@given(
    hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
        elements=st.sampled_from([0.0, 0.0, 0.0, 0.0, -0.0, 1.5, -3.0, float("nan"), float("inf")]),
    ),
    st.booleans(),
)
def test_array_comes_back_in_its_type_and_shape(array: np.ndarray, is_torch: bool) -> None:
    sent = torch.from_numpy(array) if is_torch else array
    encoded = encode_csr(sent)
    back = decode_csr("w", encoded) if isinstance(encoded, dict) else encoded
    assert type(back) is type(sent)
    assert (back.dtype, tuple(back.shape)) == (sent.dtype, tuple(sent.shape))
    assert np.array_equal(np.asarray(back), array, equal_nan=True)


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_message_of_both_kinds_comes_back_with_its_meta(kind: DataKind, tmp_path: Path) -> None:
    data = {"w": SPARSE, "t": torch.from_numpy(SPARSE), "dense": np.ones((2, 2), np.float32), "n": np.array(3)}
    sent = pass_on(ToCSR(), DXO(kind, data=dict(data), meta={"steps": 4}), tmp_path)
    assert sent.data_kind == DataKind.APP_DEFINED
    assert (type(sent.data["w"]), type(sent.data["dense"]), type(sent.data["n"])) == (dict, np.ndarray, np.ndarray)
    dxo = pass_on(FromCSR(), from_shareable(fobs.loads(fobs.dumps(sent.to_shareable()))), tmp_path, FilterKey.IN)
    assert dxo.data_kind == kind
    assert {key: dxo.meta[key] for key in ("steps",)} == {"steps": 4}
    assert all(np.array_equal(np.asarray(dxo.data[name]), np.asarray(array)) for name, array in data.items())
    assert isinstance(dxo.data["t"], torch.Tensor)


def test_negative_zeros_of_a_masked_delta_take_no_bytes() -> None:
    delta = np.full((8, 8), -1.0, np.float32) * (np.arange(64).reshape(8, 8) < 4)
    assert np.signbit(delta).all()
    assert encode_csr(delta)["values"].tolist() == [-1.0] * 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": [3, 2**31]}, "shape is no list"),
        ({"shape": [3, -8]}, "shape is no list"),
        ({"shape": [3.0, 8]}, "shape is no list"),
        ({"shape": [2, 8]}, "4 row pointers"),
        ({"indptr": np.array([0, 1, 1, 3])}, "indptr is int64"),
        ({"indptr": np.array([0, 2, 1, 3], np.int32)}, "row pointers"),
        ({"indptr": np.array([1, 1, 1, 3], np.int32)}, "row pointers"),
        ({"indptr": np.array([0, 1, 1, 2**31 - 1], np.int32)}, "row pointers"),
        ({"indices": np.array([2, 7, 3], np.int32)}, "columns"),
        ({"indices": np.array([2, 3, 3], np.int32)}, "columns"),
        ({"indices": np.array([2, 3, 8], np.int32)}, "columns"),
        ({"indices": np.array([2, 3, -1], np.int32)}, "columns"),
        ({"indices": np.array([2, 3, 7], np.int64)}, "indices is int64"),
        ({"values": np.ones(4, np.float32)}, "4 values"),
        ({"values": np.ones(3, np.complex64)}, "values is complex64"),
        ({"values": [1.0, 2.0, 3.0]}, "values is list"),
        ({"is_torch": 1}, "a table has"),
        ({"more": 1}, "a table has"),
    ],
)
def test_malformed_table_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ComponentError, match=f"FromCSR: w: .*{reason}"):
        decode_csr("w", {**encode_csr(SPARSE), **change})


def test_declared_size_is_refused_before_it_is_allocated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = {
        "indptr": np.zeros(2, np.int32), "indices": np.zeros(0, np.int32), "values": np.zeros(0, np.float32),
        "shape": [1, 2**31 - 1], "is_torch": False,
    }  # fmt: skip
    message = DXO(DataKind.APP_DEFINED, data={"a": table, "b": table}, meta={"flare_sparse_csr_of": "WEIGHTS"})
    dxo = pass_on(FromCSR(), message, tmp_path, FilterKey.IN)
    assert (dxo.data, dxo.meta["flare_sparse_withheld"]) == ({}, "E_COMPONENT")
    assert "declares 4294967294 entries, max_entries is 268435456" in caplog.text


@given(st.binary(max_size=64), st.binary(max_size=64), st.lists(st.integers(0, 9), max_size=3))
def test_any_table_is_decoded_or_refused(pointers: bytes, columns: bytes, shape: list[int]) -> None:
    indptr = np.frombuffer(pointers[: len(pointers) // 4 * 4], "<i4")
    indices = np.frombuffer(columns[: len(columns) // 4 * 4], "<i4")
    table = {"indptr": indptr, "indices": indices, "values": np.ones(indices.size, np.float32), "shape": shape}
    try:
        array = decode_csr("w", {**table, "is_torch": False})
    except ComponentError:
        return
    assert array.shape == tuple(shape)
    assert np.count_nonzero(array) == indices.size


@pytest.mark.parametrize(
    ("dxo", "reason"),
    [
        (DXO(DataKind.WEIGHTS, data={"w": SPARSE}, meta={MetaKey.PROCESSED_ALGORITHM: "CKKS"}), r"\(CKKS\)"),
        (DXO(DataKind.WEIGHTS, data={"w": b"ciphertext"}), "'w' is of type bytes"),
        (DXO(DataKind.APP_DEFINED, data={"w": SPARSE}), "of kind APP_DEFINED, expected WEIGHTS or WEIGHT_DIFF"),
        (DXO(DataKind.COLLECTION, data={"a": DXO(DataKind.WEIGHTS, data={})}), "of kind COLLECTION"),
    ],
)
def test_what_cannot_be_encoded_does_not_leave(
    dxo: DXO, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert pass_on(ToCSR(), dxo, tmp_path).data == {}
    (record,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert "E_COMPONENT: the update of site site-1 is left out of this round: ToCSR: " in record
    assert re.search(reason, record)


@pytest.mark.parametrize("item", [ToCSR(), SparseExchange()], ids=lambda item: type(item).__name__)
def test_filter_that_would_pass_it_unchanged_may_not_stand_behind(item: Filter, tmp_path: Path) -> None:
    """FLARE's encryptor takes weights alone, so that whatever else came would leave in the clear."""
    site, chain = End("site-1", tmp_path), [item, ExcludeVars(["w"])]
    context = site.manager.new_context()
    context.set_prop(
        FLContextKey.RUNNER, SimpleNamespace(task_result_filters={f"train{FilterKey.DELIMITER}out": chain})
    )
    with pytest.raises(ComponentError, match=rf"{type(item).__name__}: ExcludeVars stands behind it.*put it last"):
        check_last(item, context)
    check_last(chain[1], context)
    if isinstance(item, ToCSR):
        message = DXO(DataKind.WEIGHTS, data={"w": SPARSE})
        assert send_result(site, chain, build_task(message.data), message).data == {}


def test_metrics_pass(tmp_path: Path) -> None:
    assert pass_on(ToCSR(), DXO(DataKind.METRICS, data={"auc": 0.5}), tmp_path).data == {"auc": 0.5}
    assert pass_on(FromCSR(), DXO(DataKind.WEIGHTS, data={"w": SPARSE}), tmp_path).data["w"] is SPARSE
