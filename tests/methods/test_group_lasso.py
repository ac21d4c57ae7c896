"""Group Lasso: docs/algorithms.md, section 6.8, invariant 6, and section 8, vector 10."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from flare_sparse.methods.metagater import compute_group_lasso_prox, compute_l1_prox

ROWS = [torch.arange(12).reshape(3, 4)]
numbers = st.lists(st.floats(-3, 3, width=32), min_size=14, max_size=14)


def vector(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_group_of_norm_five_shrinks_and_becomes_zero() -> None:
    v, groups = vector([3, 4, 7]), [torch.tensor([[0, 1]])]
    assert compute_group_lasso_prox(v, groups, 1 / 2**0.5).tolist() == pytest.approx([2.4, 3.2, 7])
    for threshold in (5, 6, 100):
        assert compute_group_lasso_prox(v, groups, threshold / 2**0.5).tolist()[:2] == [0, 0]


def test_threshold_zero_is_the_identity() -> None:
    v = torch.randn(14)
    assert torch.equal(compute_group_lasso_prox(v, ROWS, 0.0), v)


@settings(deadline=None)
@given(numbers, st.floats(0.01, 2))
def test_group_is_zero_exactly_when_its_norm_is_at_most_the_threshold(values: list[float], s: float) -> None:
    v = vector(values)
    out = compute_group_lasso_prox(v, ROWS, s)
    for row in ROWS[0]:
        norm = torch.linalg.vector_norm(v[row])
        assert bool((out[row] == 0).all()) == bool(norm <= s * 2)
        assert torch.linalg.vector_norm(out[row]).item() == pytest.approx(max(norm.item() - s * 2, 0), abs=1e-9)
    assert torch.equal(out[12:], v[12:])


@settings(deadline=None)
@given(numbers, numbers, st.floats(0.01, 2))
def test_prox_is_nonexpansive(a: list[float], b: list[float], s: float) -> None:
    x, y = vector(a), vector(b)
    moved = torch.linalg.vector_norm(compute_group_lasso_prox(x, ROWS, s) - compute_group_lasso_prox(y, ROWS, s))
    assert moved <= torch.linalg.vector_norm(x - y) + 1e-9


@pytest.mark.parametrize("step", [0.3, 1.7])
def test_prox_equals_the_numerical_argmin(step: float) -> None:
    mu, v = 0.2, np.array([0.9, -0.4, 0.3, 0.1, -2.0])
    groups = [torch.tensor([[0, 1], [2, 3]])]

    def objective(x: np.ndarray) -> float:
        penalty = sum(2**0.5 * np.linalg.norm(x[g]) for g in ([0, 1], [2, 3]))
        return float(mu * penalty + np.sum((x - v) ** 2) / (2 * step))

    best = min(
        (
            minimize(objective, s, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13, "maxiter": 20000})
            for s in (v, v / 2)
        ),
        key=lambda result: result.fun,
    )
    ours = compute_group_lasso_prox(torch.from_numpy(v), groups, step * mu).numpy()
    assert objective(ours) <= best.fun + 1e-10
    assert np.allclose(ours, best.x, atol=1e-4)


def test_groups_of_several_layers_shrink_separately() -> None:
    v = torch.ones(10, dtype=torch.float64)
    out = compute_group_lasso_prox(v, [torch.arange(4).reshape(2, 2), torch.arange(4, 7).reshape(1, 3)], 0.5)
    assert out.tolist() == pytest.approx([0.5] * 7 + [1] * 3)


def test_prox_of_l1_zeroes_single_entries_of_the_groups() -> None:
    v = torch.tensor([0.5, -0.25, 0.25, -2.0, 0.1])
    assert compute_l1_prox(v, [torch.tensor([[0, 1]]), torch.tensor([[2, 3]])], 0.25).tolist() == pytest.approx(
        [0.25, 0, 0, -1.75, 0.1]
    )
