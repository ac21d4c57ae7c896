"""The harmonised inputs of a federation are those of ComBat on one pooled table."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flare_sparse.inputs import harmonization
from flare_sparse.inputs.harmonization import Harmonizer, _shrink

SIZES = (12, 30, 7)
COVARIATES = 2


def draw_tables(seed: int = 0, features: int = 9) -> list[Tensor]:
    """Return the table ``(n, 2 + features)`` of each site: sex, age, and features with effects of site and both."""
    generator = torch.Generator().manual_seed(seed)
    base = 10 ** torch.linspace(0, 6, features, dtype=torch.float64)
    effect = torch.randn(COVARIATES, features, generator=generator, dtype=torch.float64)
    tables = []
    for site, size in enumerate(SIZES):
        sex = (torch.rand(size, 1, generator=generator) < 0.3 + 0.2 * site).double()
        age = 20 + 15 * site + 5 * torch.randn(size, 1, generator=generator, dtype=torch.float64)
        covariates = torch.hstack([sex, age])
        shift, scale = (torch.randn(features, generator=generator, dtype=torch.float64) for _ in range(2))
        noise = torch.randn(size, features, generator=generator, dtype=torch.float64)
        values = 5 + shift + covariates @ (effect / 10) + noise * (1 + 0.3 * scale.abs())
        # Inputs of a network are float32: both sides see the same numbers.
        tables.append(torch.hstack([covariates, base * values]).float().double())
    return tables


def build(tables: list[Tensor], covariates: int = COVARIATES) -> list[Harmonizer]:
    """Return the layer of each site after the exchange."""
    kept = list(range(covariates))
    width = tables[0].shape[1]
    layers = [Harmonizer([column >= COVARIATES for column in range(width)], kept) for _ in tables]
    parts = [layer.compute_statistics(table) for layer, table in zip(layers, tables, strict=True)]
    for layer, part, table in zip(layers, parts, tables, strict=True):
        assert layer.is_valid(part, len(table))
        layer.statistics.copy_(layer.pool_statistics(parts))
        layer.site.copy_(part)
    return layers


def run_pooled_combat(tables: list[Tensor], covariates: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the harmonised features of one table, their mean, and sigma (Fortin et al. 2017, as in neuroCombat)."""
    data = np.vstack([table.numpy() for table in tables])
    site = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    x, y = data[:, :covariates], data[:, COVARIATES:]
    design = np.hstack([np.eye(len(tables))[site], x])
    coefficients = np.linalg.lstsq(design, y, rcond=None)[0]
    sizes = np.bincount(site)
    alpha = sizes / sizes.sum() @ coefficients[: len(tables)]
    effects = x @ coefficients[len(tables) :]
    sigma = np.sqrt(((y - design @ coefficients) ** 2).mean(0))
    z = (y - alpha - effects) / sigma
    result = np.empty_like(z)
    for number in range(len(tables)):
        own = z[site == number]
        gamma, delta = own.mean(0), own.var(0, ddof=1)
        gamma_star, delta_star = iterate_bayes(own, gamma, delta)
        result[site == number] = (own - gamma_star) / np.sqrt(delta_star)
    return result * sigma + alpha + effects, alpha, sigma


def iterate_bayes(z: np.ndarray, gamma: np.ndarray, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    center, spread, n = gamma.mean(), gamma.var(ddof=1), len(z)
    m, s2 = delta.mean(), delta.var(ddof=1)
    a, b = (2 * s2 + m**2) / s2, (m * s2 + m**3) / s2
    g_old, d_old, change = gamma, delta, 1.0
    while change > 1e-4:
        g_new = (spread * n * gamma + d_old * center) / (spread * n + d_old)
        d_new = (0.5 * ((z - g_new) ** 2).sum(0) + b) / (n / 2 + a - 1)
        change = max((abs(g_new - g_old) / abs(g_old)).max(), (abs(d_new - d_old) / d_old).max())
        g_old, d_old = g_new, d_new
    return g_old, d_old


@pytest.mark.parametrize("covariates", [COVARIATES, 0])
def test_harmonised_inputs_are_those_of_one_pooled_table(covariates: int) -> None:
    tables = draw_tables()
    expected, alpha, sigma = run_pooled_combat(tables, covariates)
    x = np.vstack([table.numpy() for table in tables])[:, :covariates]
    parts = [layer.harmonize(table) for layer, table in zip(build(tables, covariates), tables, strict=True)]
    harmonized = torch.vstack(parts).numpy()[:, COVARIATES:]
    # The layer centres at the mean over subjects; ComBat's alpha belongs to covariates of 0.
    pooled = np.vstack([table.numpy() for table in tables])[:, COVARIATES:]
    np.testing.assert_allclose(harmonized * sigma + pooled.mean(0), expected, rtol=1e-10)
    assert np.abs(alpha - pooled.mean(0)).max() > 0 or not covariates
    assert x.shape[1] == covariates


def test_shift_and_scale_of_the_sites_are_removed_and_effects_of_covariates_are_kept() -> None:
    tables = draw_tables()
    shifted = [table.clone() for table in tables]
    shifted[1][:, COVARIATES:] = 3 * shifted[1][:, COVARIATES:] + 1e4
    means = [layer.harmonize(t)[:, COVARIATES:].mean(0) for layer, t in zip(build(shifted), shifted, strict=True)]
    spread = [table[:, COVARIATES:].mean(0) for table in shifted]
    assert float((means[0] - means[1]).abs().mean()) < 2
    assert float((spread[0] - spread[1]).abs().min()) > 1e3


def test_inputs_pass_unchanged_before_the_exchange_and_where_they_are_not_harmonised() -> None:
    table = draw_tables()[0]
    layer = Harmonizer([False, False, *[True] * 9], [0])
    assert torch.equal(layer(table.float()), table.float())
    (layer, *_) = build(draw_tables(), covariates=0)
    assert torch.equal(layer.harmonize(table)[:, :COVARIATES], table[:, :COVARIATES])


def test_site_of_one_row_keeps_its_values_in_common_units() -> None:
    tables = draw_tables()
    pooled = build(tables)[0].statistics
    layer = Harmonizer([False, False, *[True] * 9], [0, 1], clip=3.0)
    layer.statistics.copy_(pooled)
    layer.site.copy_(layer.compute_statistics(tables[0][:1]))
    harmonized = layer(tables[0][:1].float())
    assert torch.isfinite(harmonized).all()
    assert harmonized[:, COVARIATES:].abs().max() <= 3


@pytest.mark.parametrize(("row", "value"), [(0, 11.0), (3, -1.0), (5, 1e30)], ids=["count", "squares", "products"])
def test_impossible_statistics_are_recognised(row: int, value: float) -> None:
    table, layer = draw_tables()[0], build(draw_tables())[0]
    statistics = layer.compute_statistics(table)
    assert layer.is_valid(statistics, len(table))
    wrong: Any = statistics.clone()
    wrong[row, -1] = value
    assert not layer.is_valid(wrong, len(table))


def test_site_with_constant_inputs_loses_its_shift_alone() -> None:
    """No input varies at the first site, so that it has no scale; at the second one, some do not."""
    tables = draw_tables()
    tables[0][:, COVARIATES:] = tables[0][0, COVARIATES:]
    tables[1][:, -3:] = tables[1][0, -3:]
    for layer, table in zip(build(tables, 0), tables, strict=True):
        harmonized = layer.harmonize(table)
        assert torch.isfinite(harmonized).all()
    constant = build(tables, 0)[0].harmonize(tables[0])[:, COVARIATES:]
    torch.testing.assert_close(constant, torch.zeros_like(constant), atol=1e-9, rtol=0)


def test_input_that_is_constant_at_each_site_loses_the_mean_of_the_site() -> None:
    """Such as a parameter of the scanner, which would otherwise be the largest input and tell the sites apart."""
    tables = [
        torch.cat([table, torch.full((len(table), 1), 2300.0 + 350 * i)], 1) for i, table in enumerate(draw_tables())
    ]
    layers = [Harmonizer([False, False, *[True] * 10], [0, 1], clip=3.0) for _ in tables]
    pooled = layers[0].pool_statistics([layers[0].compute_statistics(table) for table in tables])
    for layer, table in zip(layers, tables, strict=True):
        layer.statistics.copy_(pooled)
        layer.site.copy_(layer.compute_statistics(table))
        assert torch.equal(layer(table.float())[:, -1], torch.zeros(len(table)))
        table[0, -1] += 50
        assert layer(table.float())[0, -1] == 3


def test_input_that_the_covariates_determine_is_standardised_as_they_are() -> None:
    tables = [torch.cat([table, 12 * table[:, 1:2] - 5], 1) for table in draw_tables()]
    layers = [Harmonizer([False, False, *[True] * 10], [0, 1], clip=0.5) for _ in tables]
    pooled = layers[0].pool_statistics([layers[0].compute_statistics(table) for table in tables])
    for layer, table in zip(layers, tables, strict=True):
        layer.statistics.copy_(pooled)
        layer.site.copy_(layer.compute_statistics(table))
        harmonized = layer.harmonize(table)
        torch.testing.assert_close(harmonized[:, -1], harmonized[:, 1])
        assert harmonized[:, 1].std() > 0.5


def test_shifts_of_zero_end_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one site alone, all shifts are 0, and 0 / 0 is no change above the tolerance."""
    iterations: list[int] = []

    def count(stop: int) -> Iterator[int]:
        for number in range(stop):
            iterations.append(number)
            yield number

    monkeypatch.setattr(harmonization, "range", count, raising=False)
    shifts = torch.zeros(9, dtype=torch.float64)
    gamma, _ = _shrink(shifts, torch.linspace(5, 20, 9, dtype=torch.float64), 12.0)
    assert torch.equal(gamma, shifts)
    assert len(iterations) < 10


def test_equal_scales_leave_the_shrinkage_of_the_shifts() -> None:
    """The limit of nearly equal scales, whose prior becomes a point."""
    shifts = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    squares = torch.full((3,), 22.0, dtype=torch.float64)
    gamma, delta = _shrink(shifts, squares, 12.0)
    near, _ = _shrink(shifts, squares * torch.tensor([1.0, 1 + 1e-9, 1 - 1e-9], dtype=torch.float64), 12.0)
    assert torch.equal(delta, torch.full((3,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(gamma, (12 * shifts.var() * shifts + 2 * shifts.mean()) / (12 * shifts.var() + 2))
    torch.testing.assert_close(gamma, near, atol=1e-6, rtol=0)


def test_equal_shifts_of_inputs_without_deviation_stay_finite() -> None:
    shifts, squares = torch.full((3,), 0.5, dtype=torch.float64), torch.tensor([0.0, 4.0, 9.0], dtype=torch.float64)
    gamma, delta = _shrink(shifts, squares, 4.0)
    assert torch.equal(gamma, shifts)
    assert (delta > 0).all()


def test_site_effects_are_estimated_once_for_each_set_of_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = draw_tables()
    calls: list[None] = []
    layer, other = build(tables)[:2]

    def count(*arguments: Any) -> Any:
        calls.append(None)
        return _shrink(*arguments)

    monkeypatch.setattr(harmonization, "_shrink", count)
    with torch.inference_mode():
        first = layer.harmonize(tables[0]).clone()
    second = copy.deepcopy(layer).harmonize(tables[0])
    assert torch.equal(first, second)
    inputs = tables[0].clone().requires_grad_()
    layer.harmonize(inputs).sum().backward()
    assert inputs.grad is not None
    assert len(calls) == 1
    # Through .data, as a vector is loaded: the version of the buffer stays.
    layer.site.data.copy_(other.site)
    assert torch.equal(layer.harmonize(tables[1]), other.harmonize(tables[1]))
    assert len(calls) == 3
