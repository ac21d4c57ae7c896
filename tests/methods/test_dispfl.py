"""DisPFL (docs/algorithms.md, section 5.8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from toy import contribute

from flare_sparse.core.exchange import Contribution
from flare_sparse.core.mask import Mask
from flare_sparse.methods.dispfl import DisPFLConfig, DisPFLState
from flare_sparse.methods.method import ask_next
from flare_sparse.methods.support.masks import compute_erk_densities
from flare_sparse.rounds.local.run import Transport, run_locally


def test_drop_fraction_falls_from_its_initial_value_to_zero() -> None:
    """docs/algorithms.md, section 8, vector 8."""
    config = DisPFLConfig(rounds=10)
    assert [config.compute_drop_fraction(r) for r in (0, 5, 10)] == pytest.approx([0.5, 0.25, 0])


def test_live_counts_per_tensor_never_change(bench: Any) -> None:
    method = bench.method("dispfl", sparsity=0.6)
    names = ["site-1", "site-2"]
    state = method.init(bench.weights, names)
    counts = [[int(part.sum()) for part in bench.layout.unflatten(row).values()] for row in state.masks]
    moved = False
    while (assignments := ask_next(method, state, names)) is not None:
        updates = []
        for index, name in enumerate(names, start=1):
            site = bench.site(index)
            site.weights = assignments[name].request.model.to_vector()
            updates.append(contribute(name, method.answer(assignments[name].request, site)))
        after = method.learn(state, updates)
        moved |= not torch.equal(after.masks, state.masks)
        assert not after.weights[~after.masks].any()
        state = after
        now = [[int(part.sum()) for part in bench.layout.unflatten(row).values()] for row in state.masks]
        assert now == counts
    assert moved


def test_equal_masks_and_all_neighbours_give_the_plain_average(bench: Any) -> None:
    method = bench.method("dispfl")
    weights = torch.rand(3, bench.layout.size, generator=torch.Generator().manual_seed(1))
    mask = torch.rand(bench.layout.size, generator=torch.Generator().manual_seed(2)) < 0.5
    owners = ("site-1", "site-2", "site-3")
    state = DisPFLState(1, owners, weights * mask, mask.expand(3, -1).clone())
    request = method.ask(state, owners)["site-2"]
    assert torch.allclose(request.request.model.to_vector(), (weights * mask).double().mean(0).float())


def test_site_that_never_trained_takes_no_part_in_averages(bench: Any) -> None:
    """A site without training examples keeps its start; it would pull its neighbours towards it in every round."""
    sites = {**bench.sites(2), "site-3": bench.site(3, examples=0)}
    settings = {"sparsity": 0.3, "rounds": 2}
    alone, _ = bench.run("dispfl", bench.sites(2), **settings)
    beside, _ = bench.run("dispfl", sites, **settings)
    assert beside.state.trained == ("site-1", "site-2")
    assert torch.equal(beside.state.weights[:2], alone.state.weights)
    assert torch.equal(beside.weights, alone.weights)
    method = bench.method("dispfl", **settings)
    last = method.ask_final(beside.state, ["site-3"])["site-3"].request.model
    assert torch.equal(last.to_vector(), beside.weights * beside.state.masks[2])


def test_random_neighbours_are_chosen_from_the_sites_that_have_trained(bench: Any) -> None:
    method, names = bench.method("dispfl", num_neighbours=1), tuple(f"site-{i}" for i in range(1, 9))
    state = replace(method.init(bench.weights, names), round=2, trained=("site-2", "site-5"))
    chosen = {other for name in names for other in method._select_neighbours(state, name, names) if other != name}
    assert chosen == {"site-2", "site-5"}


def test_regrown_entries_arrive_as_zero_in_bfloat16(bench: Any) -> None:
    """An entry that is dropped leaves no rounding residual behind, neither at the site nor at the server."""
    method = bench.method("dispfl", rounds=6, sparsity=0.5)
    regrown: list[torch.Tensor] = []
    masks: list[Mask] = []
    received: list[torch.Tensor] = []
    learn = method.learn

    def check(state: DisPFLState, contributions: list[Contribution]) -> DisPFLState:
        for contribution in contributions:
            before = Mask(state.masks[state.owners.index(contribution.site)])
            masks.append(contribution.patch.mask - before)
            regrown.append(masks[-1].take(contribution.patch.to_vector()))
        return learn(state, contributions)

    method.learn = check
    site = bench.site(1)
    train = site.train

    def record(start: torch.Tensor, trainable: Mask, *args: Any, **settings: Any) -> torch.Tensor:
        received.extend(mask.take(start) for mask in masks[-1:])
        return train(start, trainable, *args, **settings)

    site.train = record  # type: ignore[method-assign]
    outcome, _ = run_locally(
        method, bench.weights, {"site-1": site}, bench.task.metric, transport=Transport(values="bfloat16")
    )
    assert sum(values.numel() for values in regrown) > 40
    assert not torch.cat(regrown).any()
    assert outcome.rounds[-1].rejected == {}
    # With one site, an entry that has just regrown is zero in the request, too.
    assert len(received) == 5
    assert not torch.cat(received).any()


def test_regrowth_scores_with_running_statistics(bench: Any) -> None:
    """docs/algorithms.md, section 5.8: the gradient is that of the network in eval mode."""
    method, site = bench.method("dispfl", training={"batch_size": 24}), bench.site(1)
    request = method.ask(method.init(bench.weights, ["site-1"]), ["site-1"])["site-1"].request
    weights = site.train(bench.weights, Mask.full(method.layout.size), method.config.training, 1)
    scores = method._score_growth(request, site, weights)
    module = bench.task.model()
    module.load_state_dict({**module.state_dict(), **bench.layout.unflatten(weights)})
    module.eval()
    bench.task.loss(module, site.trainer.examples.train.tensors).backward()
    expected = torch.cat([parameter.grad.abs().flatten() for parameter in module.parameters()])
    torch.testing.assert_close(scores[: bench.layout.num_parameters], expected)


def test_erk_densities_average_to_the_overall_density(bench: Any) -> None:
    pool = Mask.from_preset(bench.layout, "all_trainable")
    densities = compute_erk_densities(bench.layout, pool, 0.4)
    sizes = {e.name: e.size for e in bench.layout.tensors if e.role != "buffer"}
    assert sum(densities[n] * sizes[n] for n in sizes) == pytest.approx(0.4 * pool.count)
    assert all(0 < d <= 1 for d in densities.values())
