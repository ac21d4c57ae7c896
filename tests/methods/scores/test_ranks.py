"""Slots of LoRA adapters: scores and selections (docs/algorithms.md, sections 4.1, 4.3 and 4.5)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.core.errors import ConfigError, SelectionError
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.methods.scores.ranks import Slots, compute_slot_scores, select_slots


def layout(rank: int = 3, sizes: tuple[tuple[int, int], ...] = ((2, 3), (4, 5))) -> Layout:
    """Build adapters of matrices (d1, d2), the second one of a convolution, and a head."""
    specs = []
    for i, (d1, d2) in enumerate(sizes):
        tail = (1, 1, 1) if i == 1 else ()
        specs.append(TensorSpec(f"net.{i}.lora_A.default.weight", (rank, d2, *tail)))
        specs.append(TensorSpec(f"net.{i}.lora_B.default.weight", (d1, rank, *tail)))
    return Layout((*specs, TensorSpec("net.head.weight", (1, 2))))


def vector(layout: Layout, seed: int) -> torch.Tensor:
    return torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))


def test_slot_score_of_the_worked_example() -> None:
    """docs/algorithms.md, section 8, vector 15."""
    network_layout = layout(1, ((2, 3),))
    delta, weights = torch.zeros(network_layout.size), torch.zeros(network_layout.size)
    slots = Slots(network_layout)
    slots.adapters[0].view_matrix(delta, "B")[:, 0] = torch.tensor([3.0, 4.0])
    slots.adapters[0].view_matrix(weights, "A")[0] = torch.tensor([1.0, 2.0, 2.0])
    assert compute_slot_scores(slots, delta, weights, "B").tolist() == [15.0]


@given(st.integers(0, 1000), st.sampled_from(["A", "B"]))
def test_slot_score_is_the_norm_of_the_outer_product(seed: int, active: str) -> None:
    network_layout = layout()
    slots, delta, weights = Slots(network_layout), vector(network_layout, seed), vector(network_layout, seed + 1)
    expected = []
    for adapter, i in itertools.product(slots.adapters, range(3)):
        b = adapter.view_matrix(delta if active == "B" else weights, "B")[:, i]
        a = adapter.view_matrix(weights if active == "B" else delta, "A")[i]
        expected.append(torch.linalg.matrix_norm(torch.outer(b, a)))
    scores = compute_slot_scores(slots, delta, weights, active)  # type: ignore[arg-type]
    assert torch.allclose(scores, torch.stack(expected))


@given(st.integers(0, 1000), st.sampled_from(["A", "B"]))
def test_permuting_ranks_permutes_the_selection(seed: int, active: str) -> None:
    network_layout = layout()
    slots, delta, weights = Slots(network_layout), vector(network_layout, seed), vector(network_layout, seed + 1)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed))

    def permuted(v: torch.Tensor) -> torch.Tensor:
        moved = v.clone()
        for adapter in slots.adapters:
            for factor in ("A", "B"):
                permuted = adapter.view_slots(v, factor)[order].clone()  # type: ignore[arg-type]
                adapter.view_slots(moved, factor).copy_(permuted)  # type: ignore[arg-type]
        return moved

    plain_scores = compute_slot_scores(slots, delta, weights, active)  # type: ignore[arg-type]
    chosen = select_slots(slots, plain_scores, 1, active)  # type: ignore[arg-type]
    scores = compute_slot_scores(slots, permuted(delta), permuted(weights), active)  # type: ignore[arg-type]
    permuted_choice = select_slots(slots, scores, 1, active)  # type: ignore[arg-type]
    assert torch.equal(permuted(chosen.bits), permuted_choice.bits)
    for adapter in slots.adapters:
        product = adapter.view_matrix(weights, "B") @ adapter.view_matrix(weights, "A")
        moved = permuted(weights)
        assert torch.allclose(product, adapter.view_matrix(moved, "B") @ adapter.view_matrix(moved, "A"), atol=1e-6)


@given(st.integers(1, 6), st.integers(0, 1000), st.sampled_from(["A", "B"]))
def test_budget_selects_that_many_slots_and_only_their_scalars(budget: int, seed: int, active: str) -> None:
    network_layout = layout()
    slots = Slots(network_layout)
    mask = select_slots(slots, vector(network_layout, seed)[:6].abs(), budget, active)  # type: ignore[arg-type]
    chosen = slots.find_slots(mask, active)  # type: ignore[arg-type]
    assert chosen is not None
    assert int(chosen.sum()) == min(budget, 3) * 2
    assert mask.count == int(slots.get_slot_widths(active)[chosen].sum())  # type: ignore[arg-type]
    assert mask <= slots.factors[active]  # type: ignore[index]


def test_selection_equals_enumeration_and_ties_go_to_the_lowest_slot() -> None:
    slots = Slots(layout())
    scores = torch.tensor([1.0, 5.0, 2.0, 5.0, 0.0, 2.0])
    best = sorted(range(6), key=lambda i: (-scores[i].item(), i))[:2]
    chosen = slots.find_slots(select_slots(slots, scores, 1, "B"), "B")
    assert chosen is not None
    assert chosen.nonzero().flatten().tolist() == sorted(best) == [1, 3]
    tied = slots.find_slots(select_slots(slots, torch.zeros(6), 1, "A"), "A")
    assert tied is not None
    assert tied.nonzero().flatten().tolist() == [0, 1]


def test_scalar_budget_takes_slots_by_score_per_scalar_while_they_fit() -> None:
    """Slots of A cost 3 scalars in the first module and 5 in the second; one rank of both costs 8."""
    slots = Slots(layout())
    chosen = slots.find_slots(
        select_slots(slots, torch.tensor([3.0, 0, 0, 10.0, 4.9, 4.0]), 1, "A", per_scalar=True), "A"
    )
    assert chosen is not None
    assert chosen.nonzero().flatten().tolist() == [0, 3]  # scores per scalar are 1 and 2: 3 + 5 of 8 scalars
    everything = select_slots(slots, torch.ones(6), 9, "A", per_scalar=True)
    assert everything == slots.factors["A"]


def test_cut_slots_and_the_other_factor_are_not_slots() -> None:
    slots = Slots(layout())
    half = slots.factors["B"].bits.clone()
    half[int(slots.factors["B"].indices[0])] = False
    assert slots.find_slots(Mask(half), "B") is None
    assert slots.find_slots(slots.factors["A"], "B") is None
    assert slots.find_slots(slots.factors["B"] | slots.other_entries, "B") is not None


def test_select_first_takes_the_first_slots_of_every_module() -> None:
    slots = Slots(layout())
    assert slots.select_first(3) | slots.other_entries == Mask.full(slots.layout.size)
    assert slots.select_first(1).count == (2 + 3) + (4 + 5)
    assert slots.select_first(1) <= slots.select_first(2)


def test_nan_scores_raise() -> None:
    slots = Slots(layout())
    scores = torch.tensor([1.0, float("nan"), 0, 0, 0, 0])
    for per_scalar in (False, True):
        with pytest.raises(SelectionError, match="NaN"):
            select_slots(slots, scores, 1, "B", per_scalar=per_scalar)


def test_networks_without_valid_adapters_raise() -> None:
    with pytest.raises(ConfigError, match=r"task\.adapter"):
        Slots(Layout((TensorSpec("net.weight", (2, 3)),)))
    with pytest.raises(ConfigError, match="both must"):
        Slots(Layout((TensorSpec("net.lora_A.default.weight", (2, 3)),)))
    mixed = Layout(layout(2).tensors + layout(3, ((7, 7),)).tensors[:2])
    with pytest.raises(ConfigError, match="same"):
        Slots(
            Layout(
                tuple(
                    TensorSpec(f"{i}.{e.name}", e.shape)
                    for i, e in zip((0, 0, 1, 1, 2, 3, 3), mixed.tensors, strict=True)
                )
            )
        )
