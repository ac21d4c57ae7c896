"""LoRA-A2: the invariants of ALGORITHMS 3.6, by number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flare_sparse.exchange import Contribution, Patch, Update
from flare_sparse.local.run import run_locally
from flare_sparse.methods.lora_a2 import LoRAA2, State
from flare_sparse.models.adapters import AdapterConfig, adapt
from flare_sparse.models.base import drawn
from flare_sparse.params import compute_digest
from flare_sparse.scores.ranks import Factor, Slots
from flare_sparse.training import Site

RANK = 4
TRAINING = {"epochs": 1, "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.05, "batch_size": 8}


@pytest.fixture
def uneven(make_bench: Callable[..., Any], plain: Any) -> Any:
    """Three adapted layers of different sizes, everything else frozen."""

    class Uneven(type(plain.task)):  # type: ignore[misc]
        def model(self) -> nn.Module:
            with drawn(0):
                widths = [12, 10, 8, 6]
                layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
                network = nn.Sequential(*layers, nn.Linear(6, 1))
            return adapt(network, AdapterConfig(rank=RANK))

    return make_bench(Uneven())


def method(bench: Any, **settings: Any) -> LoRAA2:
    made: LoRAA2 = bench.method("lora_a2", **{"rank": 2, "training": TRAINING, **settings})
    return made


def answers(made: LoRAA2, state: State, sites: dict[str, Site]) -> list[Update]:
    """One round's updates, without the wire."""
    requests = made.ask(state, sorted(sites))
    assert requests is not None
    found = []
    for name, site in sites.items():
        site.weights = state.weights.clone()
        found.append(Contribution.from_update(name, made.answer(requests[name].request, site)))
    return found


def rounds(made: LoRAA2, bench: Any, count: int) -> list[tuple[State, list[Update]]]:
    """The states of some rounds and the updates that followed."""
    sites, state, seen = bench.sites(), made.init(bench.weights, []), []
    for _ in range(count):
        updates = answers(made, state, sites)
        seen.append((state, updates))
        state = made.learn(state, updates)
    return [*seen, (state, [])]


def product(slots: Slots, vector: torch.Tensor, module: int) -> torch.Tensor:
    adapter = slots.adapters[module]
    return adapter.matrix(vector, "B").double() @ adapter.matrix(vector, "A").double()


def test_01_one_factor_moves_at_a_time_bitwise_and_nothing_else(adapted: Any) -> None:
    made = method(adapted, rounds=4)
    seen = rounds(made, adapted, 4)
    for (state, updates), (after, _) in itertools.pairwise(seen):
        active: Factor = "B" if state.round % 2 else "A"
        still = ~(made.slots.factors[active] | made.slots.rest)
        assert torch.equal(state.weights[still.bits], after.weights[still.bits])
        assert not torch.equal(state.weights, after.weights)
        assert all(not (update.patch.mask & still).count for update in updates)


def test_01_the_base_of_a_site_is_what_it_was(uneven: Any) -> None:
    site = uneven.site(1)
    before = {name: p.clone() for name, p in site._model.module.named_parameters() if not p.requires_grad}
    uneven.run("lora_a2", {"site-1": site}, rank=2, training=TRAINING)
    after = dict(site._model.module.named_parameters())
    assert len(before) == 8
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_02_the_average_of_the_products_is_the_product_of_the_averages(uneven: Any) -> None:
    made = method(uneven, rounds=2)
    for state, updates in rounds(made, uneven, 2)[:2]:
        after = made.learn(state, updates)
        shares = [update.num_examples / sum(u.num_examples for u in updates) for update in updates]
        for module in range(made.slots.modules):
            moved = [product(made.slots, state.weights + update.patch.to_vector(), module) for update in updates]
            exact = sum((w * m for w, m in zip(shares, moved, strict=True)), torch.zeros_like(moved[0]))
            assert torch.allclose(product(made.slots, after.weights, module), exact, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, RANK, 9])
def test_03_every_site_sends_its_budget_and_leaves_other_slots_bitwise(uneven: Any, rank: int) -> None:
    """Under AdamW with weight decay, which moves whatever is not held."""
    made = method(uneven, rounds=2, rank=rank, ranks={"site-2": 1})
    for state, updates in rounds(made, uneven, 2)[:2]:
        active = made.active(state.round)
        for update in updates:
            chosen = made.slots.find_slots(update.patch.mask, active)
            assert chosen is not None
            assert int(chosen.sum()) == min(made.config.rank_of(update.site), RANK) * 3
            site = uneven.sites()[update.site]
            trained = site.train(state.weights, update.patch.mask, made._training(active), state.round)
            assert torch.equal(trained[~update.patch.mask.bits], state.weights[~update.patch.mask.bits])
            assert torch.equal((trained - state.weights)[update.patch.mask.bits], update.patch.values)


def test_04_a_budget_of_all_ranks_is_plain_alternating_averaging(uneven: Any) -> None:
    made = method(uneven, rounds=3, rank=RANK)
    seen = rounds(made, uneven, 3)
    for (state, updates), (after, _) in itertools.pairwise(seen):
        active = made.active(state.round)
        total = sum(update.num_examples for update in updates)
        expected = state.weights.double().clone()
        for update in updates:
            assert update.patch.mask == made.slots.factors[active]
            site = uneven.sites()[update.site]
            trained = site.train(state.weights, made.slots.factors[active], made._training(active), state.round)
            expected += (trained - state.weights).double() * update.num_examples / total
        assert torch.allclose(after.weights.double(), expected, atol=1e-6)


def test_04_it_does_not_depend_on_the_trial(uneven: Any) -> None:
    long = uneven.compute_digest("lora_a2", rank=RANK, training=TRAINING, trial_epochs=5)
    assert long == uneven.compute_digest("lora_a2", rank=RANK, training=TRAINING)
    assert long == uneven.compute_digest("lora_a2", rank=RANK, training=TRAINING, trial="gradient")


def test_04_always_b_with_all_ranks_is_ffa_lora_bit_for_bit(uneven: Any, adapted: Any) -> None:
    for bench in (uneven, adapted):
        always = bench.compute_digest("lora_a2", rank=RANK, training=TRAINING, schedule="b_only", b_lr_ratio=1.0)
        assert always == bench.compute_digest("ffa_lora", training=TRAINING)


def test_05_without_a_learning_rate_nothing_changes(uneven: Any) -> None:
    made = method(uneven)
    made.config = made.config.model_copy(update={"training": made.config.training.model_copy(update={"lr": 0.0})})
    outcome, _ = run_locally(made, uneven.weights, uneven.sites(), uneven.task.metric)
    assert torch.equal(outcome.weights, uneven.weights)


def test_05_the_start_is_the_base_and_one_round_adds_the_mean_of_db_times_a(uneven: Any) -> None:
    with drawn(0):
        module = uneven.task.model()
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    with module.disable_adapter():
        base = module(x)
    assert torch.equal(module(x), base)
    made = method(uneven)
    (state, updates), (after, _) = rounds(made, uneven, 1)
    total = sum(update.num_examples for update in updates)
    for index, adapter in enumerate(made.slots.adapters):
        mean = sum(
            update.num_examples / total * adapter.matrix(update.patch.to_vector(), "B").double() for update in updates
        )
        expected = mean @ adapter.matrix(state.weights, "A").double()
        assert torch.allclose(product(made.slots, after.weights, index), expected, atol=1e-7)


def test_08_a_slot_that_nobody_chose_keeps_its_bits_and_a_lone_choice_counts_with_its_weight(uneven: Any) -> None:
    made = method(uneven)
    state = State(1, torch.full((uneven.layout.size,), -0.0), made.full_mask)
    first, second = torch.zeros(12, dtype=torch.bool), torch.zeros(12, dtype=torch.bool)
    first[[0, 5]], second[[5, 7]] = True, True
    delta = torch.randn(uneven.layout.size, generator=torch.Generator().manual_seed(1))
    updates = [
        Contribution("a", Patch.from_vector(delta, made.slots.mask(first, "B")), "delta", 1),
        Contribution("b", Patch.from_vector(delta, made.slots.mask(second, "B")), "delta", 3),
    ]
    after = made.learn(state, updates).weights
    lone, both = made.slots.mask(first & ~second, "B"), made.slots.mask(first & second, "B")
    untouched = ~made.slots.mask(first | second, "B")
    assert torch.equal(after[lone.bits], (delta.double() * 0.25).float()[lone.bits])
    assert torch.allclose(after[both.bits], delta[both.bits])
    assert not after[untouched.bits].any()
    held = torch.randn(uneven.layout.size, generator=torch.Generator().manual_seed(2))
    again = made.learn(State(1, held, made.full_mask), updates).weights
    assert torch.equal(again[untouched.bits], held[untouched.bits])


def test_09_merged_weights_give_the_same_output(uneven: Any) -> None:
    outcome, _ = uneven.run("lora_a2", rank=2, training=TRAINING)
    with drawn(0):
        module = uneven.task.model()
    module.load_state_dict(uneven.layout.unflatten(outcome.weights), strict=False)
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    apart = module(x)
    with module.disable_adapter():
        assert not torch.allclose(apart, module(x))
    assert torch.allclose(module.merge_and_unload()(x), apart, atol=1e-6)


@pytest.mark.parametrize("budget", ["slots", "scalars"])
def test_10_the_ledger_is_the_sum_over_the_chosen_slots(uneven: Any, budget: str) -> None:
    """Without the wire the choices are known; over it, the same numbers are counted."""
    made = method(uneven, rounds=2, budget=budget, ranks={"site-1": 1, "site-3": 3})
    widths = {factor: made.slots.widths(factor) for factor in ("A", "B")}  # type: ignore[arg-type]
    expected = {}
    for state, updates in rounds(made, uneven, 2)[:2]:
        for update in updates:
            chosen = made.slots.find_slots(update.patch.mask, made.active(state.round))
            expected[state.round, update.site] = int(widths[made.active(state.round)][chosen].sum())
    _, ledger = run_locally(made, uneven.weights, uneven.sites(), uneven.task.metric)
    sent = {(line.round, line.site): line.scalars_sent for line in ledger.lines if line.direction == "up"}
    assert {key: sent[key] for key in expected} == expected
    if budget == "scalars":
        for (t, site), scalars in expected.items():
            assert scalars <= made.config.rank_of(site) * int(widths[made.active(t)].sum()) // RANK


def test_only_the_factor_that_changed_travels_down_and_a_newcomer_gets_both(uneven: Any) -> None:
    made = method(uneven, rounds=4, participation=0.67)  # two of three sites a round
    _, ledger = run_locally(made, uneven.weights, uneven.sites(), uneven.task.metric)
    down = {(line.round, line.site): line for line in ledger.lines if line.direction == "down"}
    seen = set()
    for t in range(1, 5):
        asked = {site for at, site in down if at == t}
        previous = {site for at, site in down if at == t - 1}
        for site in asked:
            changed = made.slots.factors[made.active(t - 1)].count
            held = site in previous and t > 1
            seen.add(held)
            assert down[t, site].scalars_sent == (changed if held else uneven.layout.size)
    assert seen == {True, False}


@pytest.mark.parametrize("score", ["contribution", "magnitude", "sensitivity"])
@pytest.mark.parametrize("trial", ["epochs", "gradient"])
def test_every_score_learns_and_the_trial_leaves_no_trace_but_the_choice(uneven: Any, score: str, trial: str) -> None:
    settings = {"rank": 2, "training": {**TRAINING, "epochs": 5}, "rounds": 6, "score": score, "trial": trial}
    outcome, _ = uneven.run("lora_a2", **settings)
    before = outcome.rounds[0].evaluation.overall["mse"]
    assert outcome.evaluation.overall["mse"] < before


def test_the_first_round_trains_b_at_five_times_the_rate_of_a(uneven: Any) -> None:
    made = method(uneven)
    assert [made.active(t) for t in range(1, 5)] == ["B", "A", "B", "A"]
    assert made._training("B").lr == pytest.approx(5 * made._training("A").lr)
    default = LoRAA2.Config().training
    assert (default.optimizer, default.lr, default.epochs) == ("adamw", 5e-4, 5)


def test_a_head_that_trains_travels_whole_with_every_answer(adapted: Any) -> None:
    made = method(adapted, rank=1)
    for state, updates in rounds(made, adapted, 2)[:2]:
        assert made.slots.rest.count == 13
        assert all(made.slots.rest <= update.patch.mask for update in updates)
        assert all(made._allowed(made.active(state.round), u.site, u.patch.mask) for u in updates)
        assert not made._allowed(made.active(state.round), "site-1", updates[0].patch.mask - made.slots.rest)


def test_digests_differ_where_settings_do(uneven: Any) -> None:
    one, two = (uneven.compute_digest("lora_a2", rank=rank, training=TRAINING) for rank in (1, 2))
    assert one != two
    assert compute_digest(uneven.weights) != one
