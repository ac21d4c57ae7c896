"""Pooled statistics are those of one table, and the scaler standardises by them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flare_sparse.compute.structure.graph import build_channel_graph
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.params import Layout
from flare_sparse.inputs.scaling import InputScaler, TargetScaler, build_statistics_mask


def draw_table(rows: int, seed: int) -> Tensor:
    """Ages, years such as 2019, large counts and a column that never varies, some of them missing."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, 4, generator=generator)
    table = noise * torch.tensor([15.0, 3.0, 1e6, 0.0]) + torch.tensor([60.0, 2019.0, 5e6, 7.0])
    table[torch.rand(rows, 4, generator=generator) < 0.2] = torch.nan
    return table


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 1000))
def test_pooled_statistics_are_those_of_one_table(sizes: list[int], seed: int) -> None:
    scaler, table = InputScaler([True] * 4), draw_table(sum(sizes), seed)
    parts = [scaler.compute_statistics(part) for part in table.split(sizes)]
    pooled, expected = scaler.pool_statistics(parts).double(), scaler.compute_statistics(table).double()
    assert torch.equal(pooled[0], expected[0])
    # 48 bits: mean and deviation agree far beyond float32.
    for row in (1, 3):
        torch.testing.assert_close(pooled[row] + pooled[row + 1], expected[row] + expected[row + 1], rtol=1e-11, atol=0)


def test_network_standardises_as_one_pooled_table_would() -> None:
    table = draw_table(60, 1)
    scaler = InputScaler([True, True, True, False])
    scaler.statistics.copy_(
        scaler.pool_statistics([scaler.compute_statistics(part) for part in table.split([1, 20, 39])])
    )
    values = table.double()
    present = ~values.isnan()
    columns = [column[mask] for column, mask in zip(values.T, present.T, strict=True)]
    mean = torch.stack([column.mean() for column in columns])
    deviation = torch.stack([column.std(correction=0) for column in columns])
    mean[3], deviation[3] = 0.0, 1.0
    expected = torch.nan_to_num((values - mean) / deviation, nan=0.0)
    torch.testing.assert_close(scaler(table).double(), expected, rtol=1e-5, atol=1e-5)


def test_scaler_without_statistics_passes_numbers_and_fills_missing_ones() -> None:
    assert InputScaler([True, True])(torch.tensor([[3.0, torch.nan]])).tolist() == [[3.0, 0.0]]


def test_input_that_never_varies_becomes_0() -> None:
    scaler = InputScaler([True])
    scaler.statistics.copy_(scaler.compute_statistics(torch.full((4, 1), 7.0)))
    assert scaler(torch.tensor([[7.0]])).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("row", "value"), [(0, 11.0), (0, 2.5), (0, -1.0), (3, -0.1)], ids=["too many", "no number", "negative", "spread"]
)
def test_statistics_that_no_table_has_are_invalid(row: int, value: float) -> None:
    statistics = InputScaler([True]).compute_statistics(torch.arange(10.0)[:, None])
    assert InputScaler([True]).is_valid(statistics, 10)
    statistics[row, 0] = value
    assert not InputScaler([True]).is_valid(statistics, 10)


def test_one_value_has_no_deviation() -> None:
    statistics = InputScaler([True]).compute_statistics(torch.tensor([[5.0]]))
    assert statistics[:, 0].tolist() == [1.0, 5.0, 0.0, 0.0, 0.0]
    statistics[3] = 1.0
    assert not InputScaler([True]).is_valid(statistics, 10)


def test_channels_are_traced_through_a_scaler() -> None:
    network = nn.Sequential(InputScaler([True] * 3), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    layout = Layout.from_module(network)
    graph = build_channel_graph(layout)
    assert graph.is_input_layer(graph.layers[0])
    assert build_statistics_mask(layout).count == 15


def test_statistics_that_are_not_exchanged_are_refused() -> None:
    network = nn.Sequential(InputScaler([True]), nn.Linear(1, 1))
    layout = Layout.from_module(network).drop({"0.statistics"})
    with pytest.raises(ConfigError, match=r"does not exchange 0\.statistics"):
        build_statistics_mask(layout)
    assert build_statistics_mask(Layout.from_module(nn.Linear(1, 1))).count == 0


def test_clip_bounds_standardised_inputs_only() -> None:
    scaler = InputScaler([True, False], clip=2.0)
    table = torch.tensor([[0.0, 9.0], [1.0, 9.0], [100.0, 9.0]])
    assert scaler(table).tolist() == table.tolist(), "unknown statistics clip nothing"
    scaler.statistics[:, 0] = torch.tensor([3.0, 0.0, 0.0, 1.0, 0.0])
    assert scaler(table).tolist() == [[0.0, 9.0], [1.0, 9.0], [2.0, 9.0]]
    scaler.statistics.copy_(scaler.compute_statistics(torch.full((4, 2), 7.0)))
    assert scaler(table).tolist() == [[-2.0, 9.0], [-2.0, 9.0], [2.0, 9.0]], "a column without deviation is bounded"


def test_target_scaler_has_center_and_spread_of_the_targets() -> None:
    scaler = TargetScaler()
    assert scaler(torch.tensor([[2.0]])).item() == 2.0
    scaler.statistics.copy_(scaler.measure_targets(torch.tensor([[20.0], [40.0]])))
    assert scaler.statistics.tolist() == [30.0, 10.0]
    assert scaler(torch.tensor([[2.0]])).item() == 50.0
    assert scaler.measure_targets(torch.tensor([[7.0]])).tolist() == [7.0, 1.0]
    assert scaler.measure_targets(torch.zeros(0, 1)).tolist() == [0.0, 1.0]
