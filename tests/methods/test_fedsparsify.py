"""FedSparsify: the invariants of docs/algorithms.md, section 2.6, and vectors 2, 3 and 14 of section 8."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import contribute

from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.core.mask import Mask, prune_mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.methods.fedsparsify import FedSparsify, FedSparsifyConfig, FedSparsifyState
from flare_sparse.methods.method import ask_next
from flare_sparse.training import Site

PAPER = Layout((TensorSpec("w", (2_950_401,), "weight"),))
OPTIMIZERS = [
    {"optimizer": "sgd", "lr": 0.05},
    {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam", "lr": 0.01},
    {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
]


@pytest.mark.parametrize("training", OPTIMIZERS, ids=["sgd", "momentum", "adam", "adamw"])
def test_masks_are_nested_and_pruned_entries_are_zero_at_sites_and_server(bench: Any, training: dict[str, Any]) -> None:
    method = bench.method("fedsparsify", sparsity=0.8, rounds=5, training=training)
    state, site = method.init(bench.weights, ["site-1"]), bench.site(1)
    while (assignments := ask_next(method, state, ["site-1"])) is not None:
        request = assignments["site-1"].request
        site.weights = request.model.to_vector()
        trained = site.train(site.weights, request.trainable, method.config.training, request.round)
        assert not trained[~request.trainable.bits].any()
        update = contribute("site-1", method.answer(request, site))
        after = method.learn(state, [update])
        assert after.mask <= state.mask
        assert not after.weights[~after.mask.bits].any()
        state = after
    assert state.round == 6


@given(st.data())
def test_pruning_is_exact_by_magnitude_and_idempotent(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 60))
    weights = torch.tensor(data.draw(st.lists(st.integers(-4, 4), min_size=size, max_size=size)), dtype=torch.float32)
    mask, pool = (
        Mask(torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))) for _ in range(2)
    )
    sparsity = data.draw(st.floats(0, 0.99))
    new = prune_mask(mask, weights.abs(), sparsity, pool)
    zeros = pool.count - (mask & pool).count
    assert new <= mask
    assert pool.count - (new & pool).count == max(zeros, int(sparsity * pool.count + 1e-9))
    kept, cut = weights.abs()[(new & pool).bits], weights.abs()[(mask - new).bits]
    assert not len(kept) or not len(cut) or kept.min() >= cut.max()
    assert prune_mask(new, weights.abs(), sparsity, pool) == new
    assert prune_mask(mask, (-4 * weights).abs(), sparsity, pool) == new


def test_sparsity_zero_equals_fedavg_bit_for_bit(bench: Any) -> None:
    assert bench.compute_digest("fedsparsify", sparsity=0) == bench.compute_digest("fedavg")


def test_live_counts_equal_those_of_the_paper() -> None:
    """N_t for n = 2,950,401 and S_T = .95 (docs/algorithms.md, section 8, vector 2)."""
    config = FedSparsifyConfig(rounds=40, sparsity=0.95)
    live = {t: 2_950_401 - int(config.compute_sparsity(t) * 2_950_401 + 1e-9) for t in (1, 2, 3, 4, 5, 20, 30, 39, 40)}
    assert live == {
        1: 2950401, 2: 2740276, 3: 2540924, 4: 2352062, 5: 2173406, 20: 525528, 30: 194772, 39: 147568, 40: 147521
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sparsity", "scalars", "final"),
    [
        (0.0, 1888256640, 2950401),
        (0.85, 714844688, 442561),
        (0.90, 645820416, 295041),
        (0.95, 576796176, 147521),
        (0.99, 521576720, 29505),
    ],
)
def test_paper_scalars_equal_the_papers_table(sparsity: float, scalars: int, final: int) -> None:
    """Eight learners (docs/algorithms.md, section 8, vector 3)."""
    method = FedSparsify(FedSparsifyConfig(rounds=40, sparsity=sparsity), PAPER)
    assert method.count_paper_scalars(8) == scalars
    assert PAPER.size - int(sparsity * PAPER.size + 1e-9) == final


def test_one_site_equals_centralised_gradual_pruning(bench: Any) -> None:
    method = bench.method("fedsparsify", sparsity=0.7, rounds=4)
    outcome, _ = bench.run("fedsparsify", {"site-1": bench.site(1)}, sparsity=0.7, rounds=4)
    site, weights, mask = bench.site(1), bench.weights, Mask.full(bench.layout.size)
    pool = Mask.from_preset(bench.layout, "all_but_norm")
    for t in range(1, 5):
        weights = site.train(weights, mask, method.config.training, t)
        mask = prune_mask(mask, weights.abs(), method.config.compute_sparsity(t), pool)
        weights = weights * mask.bits
    assert torch.equal(outcome.weights, weights)


def test_weights_that_start_at_zero_are_pruned_by_their_own_ranking() -> None:
    """A low-rank adapter: with one pool, each entry of B is smaller than any entry of A, and all of B is pruned."""
    layout = Layout((TensorSpec("a", (10,), "weight"), TensorSpec("b", (10,), "weight"), TensorSpec("c", (5,), "bias")))
    method = FedSparsify(FedSparsifyConfig(rounds=2, sparsity=0.75, initial_sparsity=0.75), layout)
    start = torch.cat([torch.arange(1.0, 11.0), torch.zeros(15)])
    state = method.init(start, ["site-1"])
    assert state.zero_start.indices.tolist() == list(range(10, 20))
    trained = torch.cat([start[:10], torch.linspace(0.01, 0.1, 10), torch.full((5,), 0.5)])
    update = Contribution("site-1", Patch.from_vector(trained, state.mask), "weights", 1)
    live = layout.unflatten(method.learn(state, [update]).mask.bits)
    # floor(0.75 * 25) = 18 are off: floor(0.75 * 10) = 7 of b by its own ranking, the 11 smallest of a and c.
    assert [(~live[name]).nonzero().flatten().tolist() for name in "abc"] == [[*range(6)], [*range(7)], [*range(5)]]


def test_updates_carry_exactly_the_live_entries(bench: Any) -> None:
    outcome, ledger = bench.run("fedsparsify", sparsity=0.9, rounds=4)
    assert not outcome.weights[~outcome.mask.bits].any()
    assert not outcome.state.weights[~outcome.mask.bits].any()
    up = [line for line in ledger.lines if line.direction == "up" and line.kind == "train"]
    down = [line for line in ledger.lines if line.direction == "down" and line.kind == "train"]
    assert len(up) == 3 * 4
    assert {line.encoding for line in up} <= {"dense", "shared"}
    received = {(line.round, line.site): line.scalars_sent for line in down}
    assert {(line.round, line.site): line.scalars_sent for line in up} == received
    assert received[4, "site-1"] < received[3, "site-1"] < received[1, "site-1"] == bench.layout.size
    pool = Mask.from_preset(bench.layout, "all_but_norm")
    assert pool.count - (outcome.mask & pool).count == int(0.9 * pool.count)


def test_pruning_of_six_weights_equals_the_result_by_hand() -> None:
    """docs/algorithms.md, section 8, vector 14."""
    weights = torch.tensor([0.5, -0.1, 0.3, 0, 0.2, -0.4])
    mask = Mask(torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.bool))
    full = Mask.full(6)
    assert prune_mask(mask, weights.abs(), 0.5, full).bits.tolist() == [True, False, True, False, False, True]
    assert prune_mask(mask, weights.abs(), 1 / 6, full) is mask


def test_norm_parameters_and_buffers_are_never_pruned(bench: Any) -> None:
    outcome, _ = bench.run("fedsparsify", sparsity=0.99)
    outside = ~Mask.from_preset(bench.layout, "all_but_norm")
    assert outside <= outcome.mask
    assert {entry.role for entry in bench.layout.tensors} == {"weight", "bias", "norm", "buffer"}


def train_one_shot(
    site: Site,
    weights: torch.Tensor,
    sparsity: float,
    *,
    config: FedSparsifyConfig,
    dense: int = 90,
    finetune: int = 10,
) -> FedSparsifyState:
    """Return the paper's centralised baseline: train, prune once by the same global ranking, fine-tune under the mask.

    Args:
        site: holds all the data.
        weights: ``(P,)`` initial weights.
        sparsity: share of pruned entries.
        config: training and prunable set; one of its rounds has ``config.training.epochs`` epochs.
        dense: rounds before the pruning (paper: 90 epochs).
        finetune: rounds after it (paper: 10).
    """
    full = Mask.full(site.layout.size)
    for t in range(1, dense + 1):
        weights = site.train(weights, full, config.training, t)
    mask = prune_mask(full, weights.abs(), sparsity, Mask.from_preset(site.layout, config.prunable))
    weights = weights * mask.bits
    for t in range(dense + 1, dense + finetune + 1):
        weights = site.train(weights, mask, config.training, t)
    return FedSparsifyState(dense + finetune + 1, weights, mask, Mask.empty(mask.size))


def test_centralised_baseline_prunes_once(bench: Any) -> None:
    config = FedSparsifyConfig(rounds=4)
    state = train_one_shot(bench.site(1), bench.weights, 0.6, config=config, dense=3, finetune=2)
    pool = Mask.from_preset(bench.layout, "all_but_norm")
    assert pool.count - (state.mask & pool).count == int(0.6 * pool.count)
    assert not state.weights[~state.mask.bits].any()
    assert state.round == 6


def test_sparsities_equal_those_of_the_paper() -> None:
    """Vector 1."""
    wanted = {
        1: 0.0, 2: 0.07121917092331298, 3: 0.13878689795849564, 5: 0.26335238287900997, 10: 0.5175921711424671,
        20: 0.8218791618199902, 30: 0.9339848952274987, 39: 0.9499839848952275, 40: 0.95,
    }  # fmt: skip
    for t, value in wanted.items():
        assert FedSparsifyConfig(sparsity=0.95, rounds=40).compute_sparsity(t) == pytest.approx(value, abs=1e-12)


@given(
    st.integers(1, 50), st.integers(1, 10), st.integers(1, 8), st.floats(0, 0.9), st.floats(0, 0.09), st.floats(1, 5)
)
def test_sparsity_rises_from_start_to_end_in_steps_of_f_rounds(
    length: int, first: int, every: int, start: float, rise: float, exponent: float
) -> None:
    end, last = start + rise, first + length
    config = FedSparsifyConfig(
        sparsity=end, initial_sparsity=start, first_round=first, prune_every=every, exponent=exponent, rounds=last
    )
    curve = [config.compute_sparsity(t) for t in range(1, last + 1)]
    assert all(a <= b + 1e-12 for a, b in pairwise(curve))
    assert all(start - 1e-12 <= value <= end + 1e-12 for value in curve)
    assert curve[: first - 1] == [start] * (first - 1)
    if every == 1:
        assert curve[first - 1] == pytest.approx(start, abs=1e-12)
    if last % every == 0:
        assert curve[-1] == end
    for t in range(every, last):
        if t % every:
            assert curve[t - 1] == curve[t - t % every - 1]


def test_exponent_one_is_linear_and_a_single_round_is_one_shot() -> None:
    assert FedSparsifyConfig(sparsity=0.5, rounds=11, exponent=1).compute_sparsity(6) == pytest.approx(0.25)
    assert FedSparsifyConfig(sparsity=0.5, rounds=1).compute_sparsity(1) == 0.5
    assert FedSparsifyConfig(sparsity=0.5, rounds=5, first_round=5).compute_sparsity(3) == 0


@pytest.mark.parametrize("force", [False, True])
def test_last_round_reaches_the_final_sparsity_only_by_force(force: bool) -> None:
    """F = 4 does not divide T = 10: the formula stops at s_8 = 0.9 - 0.9 * (2 / 9) ** 3 (docs/algorithms.md, 2.7.2)."""
    config = FedSparsifyConfig(sparsity=0.9, rounds=10, prune_every=4, force_final=force)
    by_formula = 0.9 - 0.9 * (2 / 9) ** 3
    assert [config.compute_sparsity(t) for t in (9, 10)] == pytest.approx([by_formula, 0.9 if force else by_formula])
