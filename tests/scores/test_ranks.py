"""Slots of LoRA adapters: scores and selections (ALGORITHMS 3.1, 3.6; vector 15)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.errors import ConfigError, SelectionError
from flare_sparse.mask import Mask
from flare_sparse.params import Layout, TensorSpec
from flare_sparse.scores.ranks import Slots, choose_slots, compute_contribution


def layout(rank: int = 3, sizes: tuple[tuple[int, int], ...] = ((2, 3), (4, 5))) -> Layout:
    """Adapters of matrices (d1, d2), the second one of a convolution, and a head."""
    entries = []
    for i, (d1, d2) in enumerate(sizes):
        tail = (1, 1, 1) if i == 1 else ()
        entries.append(TensorSpec(f"net.{i}.lora_A.default.weight", (rank, d2, *tail)))
        entries.append(TensorSpec(f"net.{i}.lora_B.default.weight", (d1, rank, *tail)))
    return Layout((*entries, TensorSpec("net.head.weight", (1, 2))))


def vector(at: Layout, seed: int) -> torch.Tensor:
    return torch.randn(at.size, generator=torch.Generator().manual_seed(seed))


def test_vector_15() -> None:
    at = layout(1, ((2, 3),))
    change, held = torch.zeros(at.size), torch.zeros(at.size)
    slots = Slots(at)
    slots.adapters[0].matrix(change, "B")[:, 0] = torch.tensor([3.0, 4.0])
    slots.adapters[0].matrix(held, "A")[0] = torch.tensor([1.0, 2.0, 2.0])
    assert compute_contribution(slots, change, held, "B").tolist() == [15.0]


@given(st.integers(0, 1000), st.sampled_from(["A", "B"]))
def test_06_the_score_is_the_norm_of_the_outer_product(seed: int, active: str) -> None:
    at = layout()
    slots, change, held = Slots(at), vector(at, seed), vector(at, seed + 1)
    slow = []
    for adapter, i in itertools.product(slots.adapters, range(3)):
        b = adapter.matrix(change if active == "B" else held, "B")[:, i]
        a = adapter.matrix(held if active == "B" else change, "A")[i]
        slow.append(torch.linalg.matrix_norm(torch.outer(b, a)))
    assert torch.allclose(compute_contribution(slots, change, held, active), torch.stack(slow))  # type: ignore[arg-type]


@given(st.integers(0, 1000), st.sampled_from(["A", "B"]))
def test_07_permuting_the_ranks_permutes_the_selection(seed: int, active: str) -> None:
    at = layout()
    slots, change, held = Slots(at), vector(at, seed), vector(at, seed + 1)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed))

    def permuted(v: torch.Tensor) -> torch.Tensor:
        moved = v.clone()
        for adapter in slots.adapters:
            for factor in ("A", "B"):
                adapter.slots(moved, factor).copy_(adapter.slots(v, factor)[order].clone())  # type: ignore[arg-type]
        return moved

    chosen = choose_slots(slots, compute_contribution(slots, change, held, active), 1, active)  # type: ignore[arg-type]
    scores = compute_contribution(slots, permuted(change), permuted(held), active)  # type: ignore[arg-type]
    again = choose_slots(slots, scores, 1, active)  # type: ignore[arg-type]
    assert torch.equal(permuted(chosen.bits), again.bits)
    for adapter in slots.adapters:
        product = adapter.matrix(held, "B") @ adapter.matrix(held, "A")
        moved = permuted(held)
        assert torch.allclose(product, adapter.matrix(moved, "B") @ adapter.matrix(moved, "A"), atol=1e-6)


@given(st.integers(1, 6), st.integers(0, 1000), st.sampled_from(["A", "B"]))
def test_03_10_a_budget_buys_that_many_slots_and_their_scalars(budget: int, seed: int, active: str) -> None:
    at = layout()
    slots = Slots(at)
    on = choose_slots(slots, vector(at, seed)[:6].abs(), budget, active)  # type: ignore[arg-type]
    chosen = slots.find_slots(on, active)  # type: ignore[arg-type]
    assert chosen is not None
    assert int(chosen.sum()) == min(budget, 3) * 2
    assert on.count == int(slots.widths(active)[chosen].sum())  # type: ignore[arg-type]
    assert on <= slots.factors[active]  # type: ignore[index]


def test_the_selection_equals_enumerating_all_slots_and_ties_go_to_the_first() -> None:
    slots = Slots(layout())
    scores = torch.tensor([1.0, 5.0, 2.0, 5.0, 0.0, 2.0])
    best = sorted(range(6), key=lambda i: (-scores[i].item(), i))[:2]
    chosen = slots.find_slots(choose_slots(slots, scores, 1, "B"), "B")
    assert chosen is not None
    assert chosen.nonzero().flatten().tolist() == sorted(best) == [1, 3]
    tied = slots.find_slots(choose_slots(slots, torch.zeros(6), 1, "A"), "A")
    assert tied is not None
    assert tied.nonzero().flatten().tolist() == [0, 1]


def test_scalars_buy_by_score_per_scalar_what_fits() -> None:
    """A slots cost 3 (first module) and 5; one rank of both modules costs 8."""
    slots = Slots(layout())
    chosen = slots.find_slots(
        choose_slots(slots, torch.tensor([3.0, 0, 0, 10.0, 4.9, 4.0]), 1, "A", per_scalar=True), "A"
    )
    assert chosen is not None
    assert chosen.nonzero().flatten().tolist() == [0, 3]  # 2, 1 and 0.98, 0.8 a scalar: 5 + 3 of 8
    everything = choose_slots(slots, torch.ones(6), 9, "A", per_scalar=True)
    assert everything == slots.factors["A"]


def test_parts_of_slots_and_other_factors_are_not_slots() -> None:
    slots = Slots(layout())
    half = slots.factors["B"].bits.clone()
    half[int(slots.factors["B"].indices[0])] = False
    assert slots.find_slots(Mask(half), "B") is None
    assert slots.find_slots(slots.factors["A"], "B") is None
    assert slots.find_slots(slots.factors["B"] | slots.rest, "B") is not None


def test_the_first_slots_of_every_module() -> None:
    slots = Slots(layout())
    assert slots.select_first(3) | slots.rest == Mask.full(slots.layout.size)
    assert slots.select_first(1).count == (2 + 3) + (4 + 5)
    assert slots.select_first(1) <= slots.select_first(2)


def test_scores_that_are_not_numbers_are_refused() -> None:
    slots = Slots(layout())
    scores = torch.tensor([1.0, float("nan"), 0, 0, 0, 0])
    for per_scalar in (False, True):
        with pytest.raises(SelectionError, match="NaN"):
            choose_slots(slots, scores, 1, "B", per_scalar=per_scalar)


def test_networks_without_proper_adapters_are_refused() -> None:
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
