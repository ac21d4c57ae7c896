"""Columns of a site as statistics that are each computed from enough rows."""

from __future__ import annotations

import numpy as np
import pytest

from flare_sparse.tasks.columns import compute_figures, compute_quantile, count_cells, encode_columns
from flare_sparse.tasks.task import Column


def test_rare_label_takes_others_with_it_until_it_does_not_follow_from_them() -> None:
    column = Column("sex", "category", 0, np.zeros(0), {"F": 30, "M": 3, "X": 25})
    encoded = encode_columns([column], 10)
    # 3 of M would follow from the rows of F and X; of F and the total only 28 of M and X.
    assert {name: values.sum() for name, values in encoded.items()} == {"sex=F": 30}
    assert len(encoded["sex=F"]) == 58


def test_few_missing_values_and_columns_of_few_rows_are_left_out() -> None:
    many, few = np.arange(40.0), np.arange(4.0)
    columns = [Column("age", "number", 12, many), Column("dose", "number", 3, many), Column("rare", "number", 48, few)]
    encoded = encode_columns(columns, 10)
    # Of rare, 48 of 52 rows are missing: the label would show the 4 others.
    assert {name: len(values) for name, values in encoded.items()} == {"age": 40, "age=missing": 52, "dose": 40}
    assert encoded["age=missing"].mean() == 12 / 52


def test_what_is_left_out_follows_from_the_bounds_of_the_counts_alone() -> None:
    """Two tables whose released numbers are equal have the same columns and labels, however many rows each has."""

    def list_names(rows: int) -> set[str]:
        numbers, labels = Column("dose", "number", 0, np.arange(float(rows))), {"F": rows, "M": 70}
        columns = [numbers, Column("sex", "category", 0, np.zeros(0), labels)]
        return {*encode_columns(columns, 20, lambda name, count: count // 10 * 10)}

    assert [list_names(rows) for rows in (20, 24, 29)] == [{"dose", "sex=F", "sex=M"}] * 3
    assert [list_names(rows) for rows in (11, 15, 19)] == [set()] * 3


def test_cells_of_few_rows_are_merged_with_their_neighbours() -> None:
    values = np.repeat([-7.0, 1.5, 2.5, 9.0], [20, 2, 12, 5])
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    # Values beyond the outer edges count in the outer cells.
    assert count_cells(values, edges, 10) == [(0, 1, 20), (1, 4, 19)]
    assert count_cells(values, edges, 2) == [(0, 1, 20), (1, 2, 2), (2, 3, 12), (3, 4, 5)]
    assert count_cells(values, edges, 39) == [(0, 4, 39)]


def test_no_figure_is_the_value_of_one_row() -> None:
    values = np.concatenate([np.zeros(10), np.ones(19), [1000.0]])
    cells = compute_figures(values, 10).histogram
    assert (cells[0][0], cells[-1][1]) == (0.0, pytest.approx((9 + 1000) / 10))
    assert compute_quantile(values, 0.5, 10) == 1.0
    assert compute_quantile(values, 0.95, 10) is None
    assert compute_quantile(values[:9], 0.5, 10) is None


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_quantile_is_close_to_that_of_all_values(share: float) -> None:
    values = np.random.default_rng(0).normal(60, 10, 2000)
    assert compute_quantile(values, share, 10) == pytest.approx(np.quantile(values, share), abs=0.1)
