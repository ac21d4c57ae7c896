"""LoRA-A2: the invariants of docs/algorithms.md, section 4.5."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toy import contribute

from flare_sparse.core.exchange import Contribution, Patch, Update
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import compute_digest
from flare_sparse.core.seeds import seed_torch
from flare_sparse.methods.lora_a2 import LoRAA2, LoRAA2State
from flare_sparse.methods.scores.ranks import Factor, Slots
from flare_sparse.methods.scores.snip import average_gradients
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.tasks.models.adapters import AdapterConfig, add_adapters
from flare_sparse.training import Site, build_site

RANK = 4
TRAINING = {"epochs": 1, "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.05, "batch_size": 8}


@pytest.fixture
def uneven(make_bench: Callable[..., Any], plain: Any) -> Any:
    """Three adapted layers of different sizes, everything else frozen."""

    class Uneven(type(plain.task)):  # type: ignore[misc]
        def model(self) -> nn.Module:
            with seed_torch(0):
                widths = [12, 10, 8, 6]
                layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
                network = nn.Sequential(*layers, nn.Linear(6, 1))
            return add_adapters(network, AdapterConfig(rank=RANK))

    return make_bench(Uneven())


def build_method(bench: Any, **settings: Any) -> LoRAA2:
    lora: LoRAA2 = bench.method("lora_a2", **{"rank": 2, "training": TRAINING, **settings})
    return lora


def collect_updates(lora: LoRAA2, state: LoRAA2State, sites: dict[str, Site]) -> list[Update]:
    """Return the updates of one round, without the wire."""
    requests = lora.ask(state, sorted(sites))
    assert requests is not None
    updates = []
    for name, site in sites.items():
        site.weights = state.weights.clone()
        updates.append(contribute(name, lora.answer(requests[name].request, site)))
    return updates


def play_rounds(lora: LoRAA2, bench: Any, count: int) -> list[tuple[LoRAA2State, list[Update]]]:
    """Return the states of some rounds, each with the updates that followed."""
    sites, state, seen = bench.sites(), lora.init(bench.weights, []), []
    for _ in range(count):
        updates = collect_updates(lora, state, sites)
        seen.append((state, updates))
        state = lora.learn(state, updates)
    return [*seen, (state, [])]


def multiply_factors(slots: Slots, vector: torch.Tensor, module: int) -> torch.Tensor:
    adapter = slots.adapters[module]
    return adapter.view_matrix(vector, "B").double() @ adapter.view_matrix(vector, "A").double()


def test_only_the_active_factor_changes_in_a_round(adapted: Any) -> None:
    lora = build_method(adapted, rounds=4)
    seen = play_rounds(lora, adapted, 4)
    for (state, updates), (after, _) in itertools.pairwise(seen):
        active: Factor = "B" if state.round % 2 else "A"
        frozen = ~(lora.slots.factors[active] | lora.slots.other_entries)
        assert torch.equal(state.weights[frozen.bits], after.weights[frozen.bits])
        assert not torch.equal(state.weights, after.weights)
        assert all(not (update.patch.mask & frozen).count for update in updates)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_learning_rate_ratio_is_that_of_b_alone(optimizer: str, adapted: Any) -> None:
    """A trained head learns with training.lr in every round, as if B and the head had optimisers of their own."""
    training = {**TRAINING, "optimizer": optimizer, "batch_size": 100, "epochs": 1}
    lora, site = build_method(adapted, rank=RANK, b_lr_ratio=5.0, training=training), adapted.site(1)
    slow = build_method(adapted, rank=RANK, b_lr_ratio=1.0, training=training)
    fast = build_method(adapted, rank=RANK, b_lr_ratio=1.0, training={**training, "lr": 0.05})
    state = lora.init(adapted.weights, [])
    site.weights = state.weights.clone()
    request = lora.ask(state, ["site-1"])["site-1"].request
    update, with_a, with_b = (m.answer(request, site).patch.to_vector() for m in (lora, slow, fast))
    head, b = lora.slots.other_entries.bits, lora.slots.factors["B"].bits
    assert with_a[head].any()
    torch.testing.assert_close(update[head], with_a[head], rtol=1e-4, atol=1e-7)
    assert torch.equal(update[b], with_b[b])


def test_base_model_of_a_site_keeps_its_bits(uneven: Any) -> None:
    local = uneven.open_task(1)
    network = local.model.module
    before = {name: p.clone() for name, p in network.named_parameters() if not p.requires_grad}
    uneven.run("lora_a2", {"site-1": build_site(local)}, rank=2, training=TRAINING)
    after = dict(network.named_parameters())
    assert len(before) == 8
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_average_of_products_is_product_of_averages(uneven: Any) -> None:
    lora = build_method(uneven, rounds=2)
    for state, updates in play_rounds(lora, uneven, 2)[:2]:
        after = lora.learn(state, updates)
        shares = [update.num_examples / sum(u.num_examples for u in updates) for update in updates]
        for module in range(lora.slots.num_modules):
            moved = [
                multiply_factors(lora.slots, state.weights + update.patch.to_vector(), module) for update in updates
            ]
            exact = sum((w * m for w, m in zip(shares, moved, strict=True)), torch.zeros_like(moved[0]))
            assert torch.allclose(multiply_factors(lora.slots, after.weights, module), exact, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, RANK, 9])
def test_site_sends_its_budget_and_keeps_other_slots_bit_for_bit(uneven: Any, rank: int) -> None:
    """Under AdamW with weight decay, which changes every entry that is not frozen."""
    lora = build_method(uneven, rounds=2, rank=rank, ranks={"site-2": 1})
    for state, updates in play_rounds(lora, uneven, 2)[:2]:
        active = lora.get_active_factor(state.round)
        for update in updates:
            chosen = lora.slots.find_slots(update.patch.mask, active)
            assert chosen is not None
            assert int(chosen.sum()) == min(lora.config.get_rank(update.site), RANK) * 3
            site = uneven.sites()[update.site]
            trained = site.train(state.weights, update.patch.mask, lora._get_training(active, state.round), state.round)
            assert torch.equal(trained[~update.patch.mask.bits], state.weights[~update.patch.mask.bits])
            assert torch.equal((trained - state.weights)[update.patch.mask.bits], update.patch.values)


@pytest.mark.slow
def test_budget_of_all_ranks_equals_alternating_fedavg(uneven: Any) -> None:
    lora = build_method(uneven, rounds=3, rank=RANK)
    seen = play_rounds(lora, uneven, 3)
    for (state, updates), (after, _) in itertools.pairwise(seen):
        active = lora.get_active_factor(state.round)
        total = sum(update.num_examples for update in updates)
        expected = state.weights.double().clone()
        for update in updates:
            assert update.patch.mask == lora.slots.factors[active]
            site = uneven.sites()[update.site]
            trained = site.train(
                state.weights, lora.slots.factors[active], lora._get_training(active, state.round), state.round
            )
            expected += (trained - state.weights).double() * update.num_examples / total
        assert torch.allclose(after.weights.double(), expected, atol=1e-6)


@pytest.mark.slow
def test_b_only_with_all_ranks_equals_ffa_lora_bit_for_bit(uneven: Any, adapted: Any) -> None:
    for bench in (uneven, adapted):
        always = bench.compute_digest("lora_a2", rank=RANK, training=TRAINING, schedule="b_only", b_lr_ratio=1.0)
        assert always == bench.compute_digest("ffa_lora", training=TRAINING)


def test_learning_rate_zero_changes_nothing(uneven: Any) -> None:
    lora = build_method(uneven)
    lora.config = lora.config.model_copy(update={"training": lora.config.training.model_copy(update={"lr": 0.0})})
    outcome, _ = run_locally(lora, uneven.weights, uneven.sites(), uneven.task.metric)
    assert torch.equal(outcome.weights, uneven.weights)


def test_first_round_adds_the_mean_of_db_times_a_to_the_base_model(uneven: Any) -> None:
    with seed_torch(0):
        module = uneven.task.model()
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    with module.disable_adapter():
        base = module(x)
    assert torch.equal(module(x), base)
    lora = build_method(uneven)
    (state, updates), (after, _) = play_rounds(lora, uneven, 1)
    total = sum(update.num_examples for update in updates)
    for index, adapter in enumerate(lora.slots.adapters):
        mean = sum(
            update.num_examples / total * adapter.view_matrix(update.patch.to_vector(), "B").double()
            for update in updates
        )
        expected = mean @ adapter.view_matrix(state.weights, "A").double()
        assert torch.allclose(multiply_factors(lora.slots, after.weights, index), expected, atol=1e-7)


def test_unselected_slots_keep_their_bits_and_single_selections_count_with_their_weight(uneven: Any) -> None:
    lora = build_method(uneven)
    state = LoRAA2State(1, torch.full((uneven.layout.size,), -0.0), Mask.full(lora.layout.size))
    first, second = torch.zeros(12, dtype=torch.bool), torch.zeros(12, dtype=torch.bool)
    first[[0, 5]], second[[5, 7]] = True, True
    delta = torch.randn(uneven.layout.size, generator=torch.Generator().manual_seed(1))
    updates = [
        Contribution("a", Patch.from_vector(delta, lora.slots.build_mask(first, "B")), "delta", 1),
        Contribution("b", Patch.from_vector(delta, lora.slots.build_mask(second, "B")), "delta", 3),
    ]
    after = lora.learn(state, updates).weights
    single, both = lora.slots.build_mask(first & ~second, "B"), lora.slots.build_mask(first & second, "B")
    untouched = ~lora.slots.build_mask(first | second, "B")
    assert torch.equal(after[single.bits], (delta.double() * 0.25).float()[single.bits])
    assert torch.allclose(after[both.bits], delta[both.bits])
    assert not after[untouched.bits].any()
    weights = torch.randn(uneven.layout.size, generator=torch.Generator().manual_seed(2))
    again = lora.learn(LoRAA2State(1, weights, Mask.full(lora.layout.size)), updates).weights
    assert torch.equal(again[untouched.bits], weights[untouched.bits])


def test_merged_weights_give_the_same_output(uneven: Any) -> None:
    outcome, _ = uneven.run("lora_a2", rank=2, training=TRAINING)
    with seed_torch(0):
        module = uneven.task.model()
    module.load_state_dict(uneven.layout.unflatten(outcome.weights), strict=False)
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    unmerged = module(x)
    with module.disable_adapter():
        assert not torch.allclose(unmerged, module(x))
    assert torch.allclose(module.merge_and_unload()(x), unmerged, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["slots", "scalars"])
def test_ledger_counts_the_entries_of_the_selected_slots(uneven: Any, budget: str) -> None:
    """The slots are known from a run without the wire; the ledger of a run over it has the same numbers."""
    lora = build_method(uneven, rounds=2, budget=budget, ranks={"site-1": 1, "site-3": 3})
    widths = {factor: lora.slots.get_slot_widths(factor) for factor in ("A", "B")}  # type: ignore[arg-type]
    expected = {}
    for state, updates in play_rounds(lora, uneven, 2)[:2]:
        for update in updates:
            chosen = lora.slots.find_slots(update.patch.mask, lora.get_active_factor(state.round))
            expected[state.round, update.site] = int(widths[lora.get_active_factor(state.round)][chosen].sum())
    _, ledger = run_locally(lora, uneven.weights, uneven.sites(), uneven.task.metric)
    sent = {(line.round, line.site): line.scalars_sent for line in ledger.lines if line.direction == "up"}
    assert {key: sent[key] for key in expected} == expected
    if budget == "scalars":
        for (t, site), scalars in expected.items():
            assert scalars <= lora.config.get_rank(site) * int(widths[lora.get_active_factor(t)].sum()) // RANK


def test_server_sends_the_changed_factor_and_both_to_a_new_site(uneven: Any) -> None:
    lora = build_method(uneven, rounds=4, participation=0.67)  # two of three sites a round
    _, ledger = run_locally(lora, uneven.weights, uneven.sites(), uneven.task.metric)
    down = {(line.round, line.site): line for line in ledger.lines if line.direction == "down"}
    seen = set()
    for t in range(1, 5):
        sampled = {site for at, site in down if at == t}
        previous = {site for at, site in down if at == t - 1}
        for site in sampled:
            changed = lora.slots.factors[lora.get_active_factor(t - 1)].count
            has_base = site in previous and t > 1
            seen.add(has_base)
            assert down[t, site].scalars_sent == (changed if has_base else uneven.layout.size)
    assert seen == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("score", ["contribution", "magnitude", "sensitivity"])
def test_training_improves_with_every_score(uneven: Any, score: str) -> None:
    settings = {"rank": 2, "training": {**TRAINING, "epochs": 5}, "rounds": 6, "score": score}
    outcome, _ = uneven.run("lora_a2", **settings)
    before = outcome.rounds[0].evaluation.overall["mse"]
    assert outcome.evaluation.overall["mse"] < before


def test_b_trains_first_and_at_five_times_the_rate_of_a(uneven: Any) -> None:
    lora = build_method(uneven)
    assert [lora.get_active_factor(t) for t in range(1, 5)] == ["B", "A", "B", "A"]
    assert lora._get_training("B", 1).lr == pytest.approx(5 * lora._get_training("A", 1).lr)
    default = LoRAA2.Config().training
    assert (default.optimizer, default.lr, default.epochs) == ("adamw", 5e-4, 5)


def test_trained_head_is_part_of_every_update(adapted: Any) -> None:
    lora = build_method(adapted, rank=1)
    for state, updates in play_rounds(lora, adapted, 2)[:2]:
        assert lora.slots.other_entries.count == 13
        assert all(lora.slots.other_entries <= update.patch.mask for update in updates)
        assert all(lora._accepts(lora.get_active_factor(state.round), u.site, u.patch.mask) for u in updates)
        assert not lora._accepts(
            lora.get_active_factor(state.round), "site-1", updates[0].patch.mask - lora.slots.other_entries
        )


@pytest.mark.slow
def test_different_ranks_give_different_models(uneven: Any) -> None:
    one, two = (uneven.compute_digest("lora_a2", rank=rank, training=TRAINING) for rank in (1, 2))
    assert one != two
    assert compute_digest(uneven.weights) != one


@pytest.mark.parametrize("batch_size", [3, 4, 8])
def test_gradient_trial_in_minibatches_is_the_full_batch_gradient(batch_size: int, uneven: Any) -> None:
    """Nine examples: the last minibatch of 4 or 8 has a single example, which weighs as much as any other."""
    site = uneven.site(1, 9)
    whole, parts = (
        average_gradients(site.trainer.compute_gradients(uneven.weights, size, None, 1), uneven.layout.size)
        for size in (9, batch_size)
    )
    assert torch.allclose(parts, whole, rtol=1e-5, atol=1e-7)
