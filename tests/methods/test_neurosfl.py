"""NeuroSFL: the invariants of docs/algorithms.md, section 5.6, and vectors 7 and 12 of section 8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from toy import contribute

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.core.mask import Mask, floor_fraction, top_k
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.methods.aggregation.weighted import weigh_equally, weighted_sum
from flare_sparse.methods.neurosfl import NeuroSFL, NeuroSFLConfig
from flare_sparse.methods.scores.snip import compute_keep_counts, compute_saliency
from flare_sparse.tasks.models import build_model
from flare_sparse.training import Site
from flare_sparse.wire.envelope import HEADER_BYTES
from flare_sparse.wire.formats import FORMATS

OPTIMIZERS = [
    {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam", "lr": 0.01},
    {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
]


def mask_of(bench: Any, sites: dict[str, Site] | None = None, **settings: Any) -> Mask:
    """Return the maskable entries of the mask after phase 1."""
    outcome, _ = bench.run("neurosfl", sites, rounds=1, **{"sparsity": 0.7, "min_per_layer": 0, **settings})
    return outcome.mask & Mask.from_preset(bench.layout, "conv_linear_weights")


def test_exactly_k_maskable_entries_are_live_and_the_mask_never_changes(bench: Any) -> None:
    outcome, ledger = bench.run("neurosfl", sparsity=0.7, rounds=4)
    maskable = Mask.from_preset(bench.layout, "conv_linear_weights")
    assert (outcome.mask & maskable).count == floor_fraction(1 - 0.7, maskable.count)
    assert ~maskable <= outcome.mask
    train = [line for line in ledger.lines if line.kind == "train"]
    assert {line.scalars_sent for line in train} == {outcome.mask.count}
    assert [line.encoding for line in train if line.direction == "down"][3:] == ["shared"] * 9


@pytest.mark.parametrize(("values", "bits"), [("float32", 32), ("int4", 4.25), ("int1", 1.25)])
def test_budget_gives_the_sparsity_whose_messages_it_pays_for(values: str, bits: float) -> None:
    layout = Layout((TensorSpec("w", (300, 400), "weight"), TensorSpec("b", (300,), "bias")))
    method = NeuroSFL(NeuroSFLConfig(budget=0.02).fit(layout, FORMATS[values]), layout)
    live = method.draw_mask().count + 300
    section = FORMATS[values].compute_min_bytes(live)
    assert HEADER_BYTES + section <= 0.02 * 4 * layout.size < HEADER_BYTES + section + 8
    assert live == pytest.approx(0.02 * 32 / bits * layout.size, rel=0.1)


def test_budget_of_the_whole_model_in_fewer_bits_needs_no_mask() -> None:
    layout = Layout((TensorSpec("w", (100, 100), "weight"),))
    assert NeuroSFLConfig(budget=0.2).fit(layout, FORMATS["int4"]).sparsity == 0


def test_budget_that_pays_for_no_mask_is_refused() -> None:
    layout = Layout((TensorSpec("w", (30, 40), "weight"), TensorSpec("b", (300,), "bias")))
    with pytest.raises(ConfigError, match=r"method.budget is 0.1, 600 bytes a message of this model.*raise it"):
        NeuroSFLConfig(budget=0.1).fit(layout, FORMATS["float32"])
    with pytest.raises(ValueError, match="budget gives the sparsity"):
        NeuroSFLConfig(budget=0.1, sparsity=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("scores", ["snip", "random"])
def test_sparsity_zero_equals_fedavg_bit_for_bit(bench: Any, scores: str) -> None:
    assert bench.compute_digest("neurosfl", sparsity=0, scores=scores) == bench.compute_digest("fedavg")


def test_one_site_equals_local_snip_and_equal_sites_have_equal_masks(bench: Any) -> None:
    site = bench.site(1)
    scores = compute_saliency(site.trainer.compute_gradients(bench.weights, 8, None, 0), bench.weights)
    maskable = Mask.from_preset(bench.layout, "conv_linear_weights")
    assert mask_of(bench, {"site-1": bench.site(1)}) == top_k(scores, floor_fraction(0.3, maskable.count), maskable)
    same = {"training": {"batch_size": 24}}
    twins = {f"site-{i}": bench.site(i, data=9) for i in (1, 2)}
    one = {"site-1": bench.site(1, data=9)}
    assert mask_of(bench, twins, **same) == mask_of(bench, one, **same)
    assert mask_of(bench, dict(twins), **same) == mask_of(bench, dict(twins), scores="weighted_snip", **same)


def test_mask_is_invariant_to_scale_mean_order_and_sites_with_zero_scores(bench: Any) -> None:
    method = bench.method("neurosfl", sparsity=0.7)
    maskable = Mask.from_preset(bench.layout, "conv_linear_weights")
    draw = torch.Generator().manual_seed(5)
    a, b = (bench.scores(torch.rand(bench.layout.size, generator=draw), maskable, f"s{i}") for i in (1, 2))
    start = method.init(bench.weights, ["s1", "s2"])

    def chosen(*updates: Any) -> Mask:
        return method.learn(start, list(updates)).masks[0]

    scaled = [replace(u, patch=replace(u.patch, source=u.patch.values * 4)) for u in (a, b)]
    silent = replace(a, site="s3", patch=replace(a.patch, source=torch.zeros(maskable.count)))
    assert chosen(a, b) == chosen(b, a) == chosen(*scaled) == chosen(a, b, silent)
    total = weighted_sum([a, b], lambda updates: [1.0] * len(updates))
    mean = weighted_sum([a, b], weigh_equally)
    assert top_k(total, 20, maskable) == top_k(mean, 20, maskable)


def test_a_site_sends_its_largest_scores_and_the_mask_is_that_of_their_sum(bench: Any) -> None:
    settings = {"sparsity": 0.9, "score_share": 0.1, "min_per_layer": 0}
    _, ledger = bench.run("neurosfl", rounds=1, **settings)
    maskable = Mask.from_preset(bench.layout, "conv_linear_weights")
    sent = floor_fraction(0.1, maskable.count)
    up = [line for line in ledger.lines if line.kind == "score" and line.direction == "up"]
    assert [line.scalars_sent for line in up] == [sent] * 3
    largest = torch.zeros(bench.layout.size)
    for site in bench.sites().values():
        scores = compute_saliency(site.trainer.compute_gradients(bench.weights, 8, None, 0), bench.weights)
        largest += scores * top_k(scores, sent, maskable).bits
    assert mask_of(bench, **settings) == top_k(largest, sent, maskable)
    assert mask_of(bench, **settings) != mask_of(bench, sparsity=0.9), "the sum of all scores has another mask"


def test_a_share_of_the_scores_needs_one_exchange(bench: Any) -> None:
    with pytest.raises(ValidationError, match="score_share"):
        bench.method("neurosfl", score_share=0.2, scores="iter_snip", iter_snip="progressive")


def compute_signed(site: Site, weights: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return ``w * mean(g)`` ``(P,)``; summed over sites it is SNIP of the pooled loss."""
    parts = list(site.trainer.compute_gradients(weights, batch_size, None, 0))
    return weights * sum(weight * gradient for gradient, weight in parts) / sum(weight for _, weight in parts)


def test_signed_weighted_full_batch_scores_equal_snip_of_the_pooled_loss(plain: Any) -> None:
    one, two = plain.site(1, 16), plain.site(2, 32)
    s1, s2 = (compute_signed(site, plain.weights, 64) for site in (one, two))
    module = plain.task.model()
    weights = plain.weights.clone().requires_grad_()
    pairs = [site.trainer.examples.train.tensors for site in (one, two)]
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    output = torch.func.functional_call(module, plain.layout.unflatten(weights), x)
    (gradient,) = torch.autograd.grad(torch.nn.functional.mse_loss(output, y), weights)
    assert torch.allclose((16 * s1 + 32 * s2) / 48, gradient * plain.weights, atol=1e-6)


@pytest.mark.parametrize("batch_size", [3, 4, 8])
def test_signed_saliency_in_minibatches_equals_that_of_all_examples(batch_size: int, plain: Any) -> None:
    """Nine examples: the last minibatch of 4 or 8 has a single example, which weighs as much as any other."""
    site = plain.site(1, 9)
    whole, parts = (compute_signed(site, plain.weights, size) for size in (9, batch_size))
    assert torch.allclose(parts, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("training", OPTIMIZERS, ids=["momentum", "adam", "adamw"])
def test_entries_outside_the_mask_are_zero_at_sites_and_server(bench: Any, training: dict[str, Any]) -> None:
    outcome, _ = bench.run("neurosfl", sparsity=0.8, training=training)
    assert not outcome.weights[~outcome.mask.bits].any()
    assert not outcome.state.weights[~outcome.mask.bits].any()
    # What a message leaves out is zero by construction, so the site's own vector is checked, too.
    assert 0 < outcome.mask.count < bench.layout.size
    method, site = bench.method("neurosfl", sparsity=0.8, training=training), bench.site(1)
    trained = site.train(outcome.weights, outcome.mask, method.config.training, 1)
    assert not trained[~outcome.mask.bits].any()
    assert not torch.equal(trained, outcome.weights)


def test_score_is_the_derivative_by_a_multiplicative_mask(plain: Any) -> None:
    site = plain.site(1)
    score = compute_saliency(site.trainer.compute_gradients(plain.weights, 64, 1, 0), plain.weights)
    gate = torch.ones(plain.layout.size, requires_grad=True)
    x, y = site.trainer.examples.train.tensors
    tensors = plain.layout.unflatten(plain.weights * gate)
    loss = torch.nn.functional.mse_loss(torch.func.functional_call(plain.task.model(), tensors, x), y)
    (derivative,) = torch.autograd.grad(loss, gate)
    assert torch.allclose(score, derivative.abs(), atol=1e-6)


def test_weights_that_start_at_zero_are_scored_by_their_gradient_and_ranked_apart(adapted: Any) -> None:
    """An adapter ``B A`` with ``B = 0``: ``|w * g|`` is zero for both factors, since no gradient reaches ``A``."""
    layout, start = adapted.layout, adapted.layout.unflatten(adapted.weights)
    maskable = Mask.from_preset(layout, "conv_linear_weights")
    zero = {name for name in start if not start[name].any()} & {s.name for s in layout.tensors if s.role == "weight"}
    site, method = adapted.site(1), adapted.method("neurosfl", sparsity=0.5, min_per_layer=0, saliency_batches=1)
    state = method.init(adapted.weights, ["site-1"])
    request = method.ask(state, ["site-1"])["site-1"].request
    site.weights = request.model.to_vector()
    update = contribute("site-1", method.answer(request, site))
    (gradient, _), *_ = site.trainer.compute_gradients(adapted.weights, 8, 1, 0)
    scores = layout.unflatten(update.patch.to_vector())
    assert zero
    assert all(torch.equal(scores[name], layout.unflatten(gradient)[name].abs()) for name in zero)
    mask = method.learn(state, [update]).masks[0] & maskable
    apart = Mask(layout.select(lambda spec: spec.name in zero)) & maskable
    assert mask.count == floor_fraction(0.5, maskable.count)
    assert abs((mask & apart).count - apart.count / 2) < 1
    assert mask & apart == top_k(update.patch.to_vector(), (mask & apart).count, apart)
    # What the zeros hide from the gradient is ranked by magnitude.
    hidden = Mask(layout.select(lambda spec: not scores[spec.name].any())) & maskable
    assert hidden.count
    assert abs((mask & hidden).count - hidden.count / 2) < 1
    assert mask & hidden == top_k(adapted.weights.abs(), (mask & hidden).count, hidden)


def test_message_carries_only_the_live_values(bench: Any) -> None:
    outcome, ledger = bench.run("neurosfl", sparsity=0.8, rounds=3)
    later = [line for line in ledger.lines if line.kind == "train" and line.round > 1]
    padded = -(-4 * outcome.mask.count // 8) * 8
    assert {line.payload_bytes for line in later} == {128 + padded}
    first = [line for line in ledger.lines if line.kind == "train" and line.round == 1 and line.direction == "down"]
    assert all(line.selection_bytes <= bench.layout.size // 8 + 2 for line in first)


def test_progressive_masks_are_nested_and_have_the_scheduled_counts(bench: Any) -> None:
    progressive = {"scores": "iter_snip", "iter_snip": "progressive"}
    assert mask_of(bench, iterations=1, **progressive) == mask_of(bench)
    method = bench.method("neurosfl", sparsity=0.7, iterations=4, min_per_layer=0, **progressive)
    maskable = Mask.from_preset(bench.layout, "conv_linear_weights")
    counts = compute_keep_counts(maskable.count, floor_fraction(0.3, maskable.count), 4)
    state, site = method.init(bench.weights, ["site-1"]), bench.site(1)
    for count in counts:
        request = method.ask(state, ["site-1"])["site-1"].request
        site.weights = request.model.to_vector()
        after = method.learn(state, [contribute("site-1", method.answer(request, site))])
        assert after.masks[0] <= state.masks[0]
        assert (after.masks[0] & maskable).count == count
        state = after
    assert state.round == 1


def test_progressive_counts_are_spaced_exponentially() -> None:
    assert compute_keep_counts(1000, 10, 3) == [215, 46, 10]


@pytest.mark.parametrize("layers", ["uniform", "erk"])
def test_random_mask_needs_no_data(bench: Any, layers: str) -> None:
    settings = {"scores": "random", "random_layers": layers}
    mask = mask_of(bench, **settings)
    assert mask == mask_of(bench, {"site-9": bench.site(9)}, **settings)
    exact = floor_fraction(0.3, Mask.from_preset(bench.layout, "conv_linear_weights").count)
    assert mask.count == exact if layers == "uniform" else exact - 2 <= mask.count <= exact


def test_shuffled_snip_keeps_the_densities_of_the_tensors_and_no_choice(bench: Any) -> None:
    chosen, shuffled = mask_of(bench), mask_of(bench, scores="shuffled_snip")
    count = {name: int(bits.sum()) for name, bits in bench.layout.unflatten(chosen.bits).items()}
    assert {name: int(bits.sum()) for name, bits in bench.layout.unflatten(shuffled.bits).items()} == count
    assert len({n for n in count.values() if n}) > 1
    assert shuffled != chosen
    assert shuffled == mask_of(bench, scores="shuffled_snip")


def test_absolute_and_signed_scores_select_different_entries() -> None:
    """docs/algorithms.md, section 8, vector 12."""
    theta = torch.tensor([1.0, -2, 3])
    first, second = theta * torch.tensor([0.1, 0.2, -0.3]), theta * torch.tensor([-0.1, 0.3, 0.2])
    absolute, signed = first.abs() + second.abs(), first + second
    assert torch.allclose(absolute, torch.tensor([0.2, 1.0, 1.5]))
    assert top_k(absolute, 1).bits.tolist() == [False, False, True]
    assert top_k(signed.abs(), 1).bits.tolist() == [False, True, False]
    layout = Layout((TensorSpec("w", (3,), "weight"),))
    method = NeuroSFL(NeuroSFLConfig(sparsity=2 / 3, min_per_layer=0), layout)
    updates = [
        Contribution(f"site-{i}", Patch.from_vector(score.abs(), Mask.full(method.layout.size)), "scores", 1)
        for i, score in enumerate((first, second), start=1)
    ]
    state = method.learn(method.init(theta, ["site-1", "site-2"]), updates)
    assert state.masks[0].bits.tolist() == [False, False, True]


def test_live_counts_of_alexnet3d_equal_the_worked_numbers() -> None:
    """docs/algorithms.md, section 8, vector 7."""
    layout = Layout.from_module(build_model("alexnet3d", volume=(121, 145, 121), outputs=1))
    maskable = Mask.from_preset(layout, "conv_linear_weights").count
    assert (layout.num_parameters, maskable) == (2_570_241, 2_568_064)
    assert [floor_fraction(1 - p, maskable) for p in (0.5, 0.8, 0.9, 0.95)] == [1284032, 513612, 256806, 128403]


def test_each_site_exchanges_the_entries_of_its_individual_mask(bench: Any) -> None:
    outcome, ledger = bench.run("neurosfl", scores="individual_snip", sparsity=0.8)
    masks = outcome.state.masks
    assert len({mask.fingerprint for mask in masks}) == 3
    sent = {line.site: line.scalars_sent for line in ledger.lines if line.kind == "train"}
    assert sent == {name: mask.count for name, mask in zip(outcome.state.owners, masks, strict=True)}


def test_no_layer_dies_at_high_sparsity(bench: Any) -> None:
    with pytest.raises(ConfigError, match=r"min_per_layer: 1 needs 2 live entries of 130, but .*0\.99999 leaves 0"):
        bench.method("neurosfl", sparsity=0.99999)
    assert bench.method("neurosfl", sparsity=0.99999, scores="random")
    outcome, _ = bench.run("neurosfl", sparsity=0.97, min_per_layer=1)
    live = bench.layout.unflatten(outcome.mask.bits)
    assert all(part.any() for part in live.values())
    unprotected, _ = bench.run("neurosfl", sparsity=0.99, min_per_layer=0)
    assert not all(part.any() for part in bench.layout.unflatten(unprotected.mask.bits).values())


def test_all_sites_share_the_mask_of_one_random_site(bench: Any) -> None:
    own, _ = bench.run("neurosfl", scores="individual_snip", sparsity=0.8, rounds=1)
    shared, ledger = bench.run("neurosfl", scores="individual_snip", random_site=True, sparsity=0.8, rounds=1)
    assert shared.mask in own.state.masks
    assert shared.state.owners == ()
    assert {line.scalars_sent for line in ledger.lines if line.kind == "train"} == {shared.mask.count}


def test_random_site_requires_individual_scores(bench: Any) -> None:
    with pytest.raises(ValueError, match="random_site"):
        bench.method("neurosfl", scores="snip", random_site=True)
