"""FFA-LoRA, FlexLoRA and HetLoRA, and FL+LoRA as FedAvg of the adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import contribute

from flare_sparse.core.exchange import Contribution, Patch, Update
from flare_sparse.core.mask import Mask
from flare_sparse.methods.aggregation.weighted import weigh_by_examples
from flare_sparse.methods.flexlora import factorise
from flare_sparse.methods.hetlora import HetLoRAState

TRAINING = {"epochs": 1, "optimizer": "adamw", "lr": 0.01, "batch_size": 8}
RANKS = {"site-1": 1, "site-2": 2, "site-3": 4}


def collect_updates(method: Any, state: Any, bench: Any) -> list[Update]:
    sites = bench.sites()
    assignments = method.ask(state, sorted(sites))
    for name, site in sites.items():
        site.weights = assignments[name].request.model.to_vector()
    return [contribute(name, method.answer(assignments[name].request, site)) for name, site in sites.items()]


def count_scalars(ledger: Any, direction: str) -> dict[tuple[int, str], int]:
    lines = [line for line in ledger.lines if line.direction == direction and line.kind == "train"]
    return {(line.round, line.site): line.scalars_sent for line in lines}


def test_fedavg_of_both_factors_does_not_average_the_products(adapted: Any) -> None:
    """The product of the averages is not the average of the products: the reason for FFA-LoRA and LoRA-A2."""
    lora = adapted.method("lora_a2")
    method = adapted.method("fedavg", training=TRAINING)
    sent = collect_updates(method, method.init(adapted.weights, []), adapted)
    after = method.learn(method.init(adapted.weights, []), sent).weights
    for adapter in lora.slots.adapters:
        exact = sum(
            w * adapter.view_matrix(u.patch.values, "B") @ adapter.view_matrix(u.patch.values, "A")
            for w, u in zip(weigh_by_examples(sent), sent, strict=True)
        )
        assert not torch.allclose(adapter.view_matrix(after, "B") @ adapter.view_matrix(after, "A"), exact, atol=1e-5)


def test_ffa_lora_keeps_a_and_sends_it_once(adapted: Any) -> None:
    outcome, ledger = adapted.run("ffa_lora", training=TRAINING)
    slots = adapted.method("ffa_lora").slots
    a = slots.factors["A"]
    assert torch.equal(a.take(outcome.weights), a.take(adapted.weights))
    exchanged = (~a).count
    assert set(count_scalars(ledger, "up").values()) == {exchanged}
    assert {t: n for (t, _), n in count_scalars(ledger, "down").items()} == {
        1: adapted.layout.size,
        2: exchanged,
        3: exchanged,
    }


@given(st.integers(0, 500), st.integers(1, 6))
def test_factorisation_is_the_best_approximation_of_its_rank(seed: int, rank: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((7, 4), (4, 9)))
    b, a = factorise(left, right, rank)
    u, s, v = torch.linalg.svd(left @ right, full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ v[:rank]
    assert b.shape == (7, rank)
    assert a.shape == (rank, 9)
    assert torch.allclose(b @ a, best, atol=1e-9)


def test_flexlora_averages_the_products(adapted: Any) -> None:
    method = adapted.method("flexlora", rank=2, training=TRAINING)
    state = method.init(adapted.weights, [])
    sent = collect_updates(method, state, adapted)
    after = method.learn(state, sent).weights
    for adapter in method.slots.adapters:
        exact = sum(
            w * adapter.view_matrix(v, "B").double() @ adapter.view_matrix(v, "A").double()
            for w, v in zip(weigh_by_examples(sent), [u.patch.to_vector() for u in sent], strict=True)
        )
        left, strengths, right = torch.linalg.svd(exact)
        best = left[:, :4] * strengths[:4] @ right[:4]
        product = adapter.view_matrix(after, "B").double() @ adapter.view_matrix(after, "A").double()
        assert torch.allclose(product, best, atol=1e-6)
        norms = torch.linalg.vector_norm(adapter.view_matrix(after, "B"), dim=0)
        assert (norms[:-1] >= norms[1:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flexlora", "hetlora"])
def test_site_exchanges_the_ranks_of_its_budget(adapted: Any, name: str) -> None:
    """A slot has 12 + 12 scalars, there are two modules, and the head has 13."""
    _, ledger = adapted.run(name, ranks=RANKS, training=TRAINING)
    for direction in ("down", "up"):
        for (_, site), count in count_scalars(ledger, direction).items():
            assert count == 2 * 24 * RANKS[site] + 13


def test_hetlora_weighs_sites_by_the_norm_of_the_product(adapted: Any) -> None:
    method = adapted.method("hetlora", rank=4)
    vectors = [torch.randn(adapted.layout.size, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    parts = [
        Contribution(f"s{n}", Patch.from_vector(v, Mask.full(method.layout.size)), "weights", n)
        for n, v in enumerate(vectors, start=1)
    ]
    sizes = [
        sum(
            float((a.view_matrix(v, "B") @ a.view_matrix(v, "A")).double().square().sum())
            for a in method.slots.adapters
        )
        ** 0.5
        for v in vectors
    ]
    assert method._weigh_by_size(parts) == pytest.approx([size / sum(sizes) for size in sizes])
    nothing = Patch.from_vector(torch.zeros(adapted.layout.size), Mask.full(adapted.layout.size))
    zero = [replace(part, patch=nothing) for part in parts]
    assert method._weigh_by_size(zero) == weigh_by_examples(zero)


def test_hetlora_site_gives_up_ranks_that_shrink(adapted: Any) -> None:
    method = adapted.method("hetlora", rank=4, decay=0.5, training={**TRAINING, "lr": 0.05, "weight_decay": 0.9})
    large = torch.full((adapted.layout.size,), 3.0)
    state = HetLoRAState(1, large, (), ())
    sent = collect_updates(method, state, adapted)
    assert {method._count_ranks(update.patch.mask) for update in sent} == {2}  # weight decay shrinks every entry
    after = method.learn(state, sent)
    assert after.ranks == (2, 2, 2)
    given_up = Mask.full(method.layout.size) - method.select_first_ranks(2)
    assert not (method.slots.factors["B"] & given_up).take(after.weights).any()
    # A keeps its values: with both factors zero, a site of higher rank that contributes later could not train the slot.
    assert torch.equal((method.slots.factors["A"] & given_up).take(after.weights), torch.full((48,), 3.0))
    late = collect_updates(method, replace(after, owners=after.owners[:2], ranks=(2, 2)), adapted)[2]
    moved = late.patch.to_vector() - after.weights
    assert (method.slots.factors["B"] & given_up & late.patch.mask).take(moved).any()
    again = method.ask(after, ["site-1"])["site-1"]
    assert again.request.model.mask == method.slots.select_first(2) | method.slots.other_entries
    assert again.expected.accepts("site-1", method.select_first_ranks(1))
    assert not again.expected.accepts("site-1", method.select_first_ranks(4))


def test_flexlora_keeps_slots_that_no_contributing_site_has(adapted: Any) -> None:
    """A round with a site of rank 1 alone; with both factors zero the other slots would never train again."""
    method = adapted.method("flexlora", ranks=RANKS, training=TRAINING)
    state = method.init(adapted.weights, [])
    only_one, *_ = collect_updates(method, state, adapted)
    after = method.learn(state, [only_one])
    upper = Mask.full(method.layout.size) - method.select_first_ranks(1)
    assert torch.equal(upper.take(after.weights), upper.take(adapted.weights))
    highest = collect_updates(method, after, adapted)[2]
    assert bool((highest.patch.to_vector() != after.weights)[(upper & method.slots.factors["B"]).bits].any())


def test_flexlora_keeps_a_where_the_product_is_zero(adapted: Any) -> None:
    """Sites that return B = 0 leave A as it is; the product stays zero."""
    method = adapted.method("flexlora")
    state = method.init(adapted.weights, [])
    sent = Contribution("site-1", Patch.from_vector(adapted.weights, Mask.full(method.layout.size)), "weights", 8)
    assert torch.equal(method.learn(state, [sent]).weights, adapted.weights)


def test_hetlora_keeps_slots_that_no_contributing_site_has(adapted: Any) -> None:
    method = adapted.method("hetlora", ranks=RANKS, training=TRAINING)
    state = method.init(adapted.weights, [])
    updates = collect_updates(method, state, adapted)
    after = method.learn(state, updates[:2])
    upper = Mask.full(method.layout.size) - method.select_first_ranks(2)
    assert torch.equal(upper.take(after.weights), upper.take(adapted.weights))
    owned = method.select_first_ranks(2)
    full = method.learn(state, updates)
    assert not torch.equal(owned.take(after.weights), owned.take(adapted.weights))
    assert not torch.equal(upper.take(full.weights), upper.take(adapted.weights))


def test_hetlora_keeps_slots_of_a_site_whose_weight_is_zero(adapted: Any) -> None:
    """The product of site-3 is zero, so its weight is; a mean without its slots would set them to zero."""
    method = adapted.method("hetlora", ranks=RANKS, training=TRAINING)
    state = method.init(adapted.weights, [])
    low, _, high = collect_updates(method, state, adapted)
    high = replace(high, patch=Patch.from_vector(adapted.weights, Mask.full(method.layout.size)))
    upper = Mask.full(method.layout.size) - method.select_first_ranks(1)
    assert torch.equal(upper.take(method.learn(state, [low, high]).weights), upper.take(adapted.weights))
