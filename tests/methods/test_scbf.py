"""SCBF, SCBFwP, FAwP and DSSGD: the invariants of ALGORITHMS 2.6, by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flare_sparse.errors import ConfigError
from flare_sparse.exchange import Contribution, Patch, Update
from flare_sparse.local.dry_run import estimate
from flare_sparse.local.run import run_locally
from flare_sparse.mask import Mask
from flare_sparse.methods import METHODS
from flare_sparse.methods.scbf import State
from flare_sparse.methods.scbfwp import Pruning
from flare_sparse.params import Layout, compute_digest
from flare_sparse.structure import build_channel_graph, build_live_mask, find_removable_layers, get_kept_units

EQUAL = {"training": {"optimizer": "sgd", "lr": 0.05}}


def update(values: Tensor, on: Tensor, site: str, examples: int = 1) -> Update:
    mask = Mask(on)
    return Contribution(site, Patch.from_vector(mask.take(values), mask), "weights", examples, {})


def test_2_at_rate_1_the_server_adds_every_change(plain: Any) -> None:
    """W + sum of dW_k, in site-name order."""
    method = plain.method("scbf", rate=1.0)
    before = torch.randn(plain.layout.size)
    changed = [before + torch.randn(plain.layout.size) for _ in range(3)]
    everything = torch.ones(plain.layout.size, dtype=torch.bool)
    updates = [update(w, everything, f"site-{i}") for i, w in enumerate(changed)]
    state = method.learn(State(1, before, method.full_mask, method.full_mask), updates)
    expected = before.double() + sum(w.double() - before.double() for w in changed)
    torch.testing.assert_close(state.weights, expected.float(), rtol=0, atol=3e-7)


@pytest.mark.parametrize("name", ["scbf", "dssgd"])
def test_2_at_rate_1_with_mean_it_is_fedavg_bit_for_bit(name: str, bench: Any) -> None:
    """With batch normalisation and dropout, sites of different sizes, through the real wire."""
    assert bench.compute_digest(name, rate=1.0, aggregation="mean") == bench.compute_digest("fedavg")


@pytest.mark.parametrize("sites", [1, 3])
def test_2_at_rate_1_the_sum_is_fedavg_with_a_k_fold_server_step(sites: int, plain: Any) -> None:
    same = {f"site-{i}": plain.site(i) for i in range(1, sites + 1)}
    added = plain.run("scbf", same, rate=1.0, **EQUAL)[0].weights
    stepped = plain.run("fedavg", same, server_lr=float(sites), **EQUAL)[0].weights
    torch.testing.assert_close(added, stepped, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["sum", "mean", "count"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_3_what_no_site_revealed_keeps_its_bits(aggregation: str, seed: int) -> None:
    layout = Layout.from_module(nn.Sequential(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 1)))
    kind = METHODS["scbf"]
    method = kind(kind.Config.model_validate({"aggregation": aggregation}), layout, 0)
    random = torch.Generator().manual_seed(seed)
    before = torch.randn(layout.size, generator=random)
    before[::7] = -0.0
    ons = [torch.rand(layout.size, generator=random) < 0.3 for _ in range(3)]
    updates = [update(before + 1, on, f"site-{i}", 3 + i) for i, on in enumerate(ons)]
    after = method.learn(State(1, before, method.full_mask, method.full_mask), updates).weights
    outside = ~(ons[0] | ons[1] | ons[2])
    assert torch.equal(after[outside].view(torch.int32), before[outside].view(torch.int32))
    parameters = torch.arange(layout.size) < layout.trainable_size
    owners = sum(on.long() for on in ons)
    share = {"sum": owners.float(), "count": (owners > 0).float()}
    share["mean"] = sum(on.float() * (3 + i) for i, on in enumerate(ons)) / 12
    step = torch.where(parameters, share[aggregation], share["mean" if aggregation == "mean" else "count"])
    torch.testing.assert_close(after, before + step, rtol=1e-5, atol=1e-6)


def test_6_without_a_change_the_server_stays_as_it_is(plain: Any) -> None:
    method = plain.method("scbf")
    before = torch.randn(plain.layout.size)
    on = torch.rand(plain.layout.size) < 0.5
    after = method.learn(
        State(1, before, method.full_mask, method.full_mask), [update(before, on, s) for s in ("a", "b")]
    )
    assert torch.equal(after.weights, before)


def test_an_upload_is_what_the_selection_reveals(plain: Any) -> None:
    """The message carries the trained values of the revealed entries, and only these."""
    outcome, ledger = plain.run("scbf", rate=0.3, rounds=1)
    ups = [line for line in ledger.lines if line.direction == "up" and line.kind == "train"]
    site, method = plain.site(1, 24), plain.method("scbf", rate=0.3)
    site.weights = plain.weights
    trained = site.train(plain.weights, method.full_mask, method.config.training, 1)
    revealed = method.revealed(trained - plain.weights, site, 1)
    assert 0 < revealed.count < plain.layout.size
    assert ups[0].scalars_sent == revealed.count
    assert outcome.mask.is_full


@pytest.mark.parametrize("budget", [0.1, 0.37])
def test_a_budget_is_the_share_of_parameters_in_every_message(budget: float, plain: Any) -> None:
    _, ledger = plain.run("scbf", budget=budget)
    wanted = int(budget * plain.layout.size + 1e-9)
    assert {line.scalars_sent for line in ledger.lines if line.direction == "up" and line.kind == "train"} == {wanted}


def test_only_what_changed_travels_down(plain: Any) -> None:
    """From the second round on, and to the last judging; a site that was away gets everything."""
    outcome, ledger = plain.run("scbf", budget=0.1, aggregation="count", participation=0.67, rounds=4)
    held = dict.fromkeys(plain.sites(), 0)
    for line in ledger.lines:
        if line.direction == "down":
            fresh = held[line.site] == line.sequence - 1 > 0
            assert line.scalars_sent < 0.25 * plain.layout.size if fresh else line.scalars_sent == plain.layout.size
            held[line.site] = line.sequence
    assert any(line.scalars_sent < plain.layout.size for line in ledger.lines if line.kind == "evaluate")
    again, _ = plain.run("scbf", budget=0.1, aggregation="count", participation=0.67, rounds=4)
    assert compute_digest(outcome.weights) == compute_digest(again.weights)


def test_a_site_may_set_its_own_rate(plain: Any) -> None:
    sites = plain.sites()
    sites["site-2"].site_settings = METHODS["scbf"].SiteConfig.model_validate({"budget": 0.1})  # type: ignore[union-attr]
    sites["site-3"].site_settings = METHODS["scbf"].SiteConfig.model_validate({"rate": 1.0})  # type: ignore[union-attr]
    _, ledger = plain.run("scbf", sites, budget=0.5)
    sent = {line.site: line.scalars_sent for line in ledger.lines if line.direction == "up" and line.kind == "train"}
    assert sent == {"site-1": plain.layout.size // 2, "site-2": plain.layout.size // 10, "site-3": plain.layout.size}


def test_running_statistics_are_averaged_when_changes_are_added(bench: Any) -> None:
    """A sum of five sites' variances would not be one."""
    outcome, _ = bench.run("scbf", rate=1.0, **EQUAL)
    average, _ = bench.run("fedavg", server_lr=3.0, **EQUAL)
    assert float(bench.layout.unflatten(outcome.weights)["1.running_var"].min()) > 0
    for name in ("1.running_mean", "1.running_var"):
        assert name in bench.layout.unflatten(average.weights)


@pytest.mark.parametrize("name", ["scbfwp", "fawp"])
def test_9_units_after_p_prunings(name: str, plain: Any) -> None:
    """round(N_0 (1 - theta)^p), and what is removed is zero in the model and absent from the mask."""
    outcome, _ = plain.run(name, rounds=5, prunings=3, pruning_rate=0.2)
    left = get_kept_units(plain.layout, find_removable_layers(build_channel_graph(plain.layout)), outcome.mask)
    assert [int(units.sum()) for units in left] == [round(10 * 0.8**3)]
    assert bool((outcome.weights[~outcome.mask.bits] == 0).all())
    kinds = [record.kind for record in outcome.rounds]
    assert kinds == ["train", "count"] * 3 + ["train", "train", "evaluate"]


def test_vector_5_prunings_and_units() -> None:
    """Units 86 78 70 63 57 51 of 96; prunings 7 4 2 2 1 below a total of 50 % (strictly)."""
    config = Pruning(pruning_rate=0.1)
    assert [config.units_left(96, p) for p in range(1, 7)] == [86, 78, 70, 63, 57, 51]
    for theta, prunings in zip((0.1, 0.2, 0.3, 0.4, 0.5), (7, 4, 2, 2, 1), strict=True):
        half = Pruning(pruning_rate=theta, pruned_share=0.5)
        assert [half.due(done) for done in range(9)] == [done < prunings for done in range(9)]
    assert [Pruning().due(done) for done in range(8)] == [True] * 6 + [False] * 2


def test_10_without_pruning_it_is_scbf(bench: Any) -> None:
    for nothing in ({"prunings": 0}, {"pruned_share": 0.0}):
        assert bench.compute_digest("scbfwp", **nothing) == bench.compute_digest("scbf")
    assert bench.compute_digest("fawp", prunings=0) == bench.compute_digest("fedavg")


def test_messages_fall_with_the_structure_which_travels_once(plain: Any) -> None:
    _, ledger = plain.run("fawp", rounds=4, prunings=2, pruning_rate=0.3)
    lines = [line for line in ledger.lines if line.site == "site-1"]
    seen = [(line.kind, line.direction, line.scalars_sent, line.selection_bytes > 0) for line in lines]
    per_unit, whole = 12 + 1 + 1, plain.layout.size
    seven, five = whole - 3 * per_unit, whole - 5 * per_unit
    assert seen == [
        ("train", "down", whole, False),
        ("train", "up", whole, False),
        ("count", "down", whole, False),
        ("count", "up", 30, True),
        ("train", "down", 0, True),  # the model is there: only the units that went are news
        ("train", "up", seven, False),
        ("count", "down", seven, True),
        ("count", "up", 30, True),
        ("train", "down", 0, True),
        ("train", "up", five, False),
        ("train", "down", five, True),
        ("train", "up", five, False),
        ("evaluate", "down", five, False),
        ("evaluate", "up", 0, True),
    ]


def test_a_validation_site_counts_and_does_not_train(plain: Any) -> None:
    outcome, ledger = plain.run("scbfwp", prunings=2, counted_at="site-3", pruning_rate=0.2)
    asked = {(line.kind, line.site) for line in ledger.lines}
    assert {site for kind, site in asked if kind == "count"} == {"site-3"}
    assert {site for kind, site in asked if kind == "train"} == {"site-1", "site-2"}
    assert outcome.mask.count < plain.layout.size
    with pytest.raises(ConfigError, match=r"method\.counted_at: no site 'nowhere'"):
        plain.run("scbfwp", counted_at="nowhere")
    with pytest.raises(ConfigError, match="no site would train"):
        plain.run("scbfwp", {"site-1": plain.site(1)}, counted_at="site-1")


@pytest.mark.parametrize(("name", "code"), [("fawp", "less"), ("fawp", "more"), ("scbfwp", "more")])
def test_an_answer_beyond_the_structure_is_refused(name: str, code: str, plain: Any) -> None:
    """A removed unit does not come back because a site sends it; where everything must be sent, less is refused."""
    method = plain.method(name, prunings=1, pruning_rate=0.3)
    state = method.init(plain.weights, ["site-1", "site-2"])
    layers = find_removable_layers(build_channel_graph(plain.layout))
    units = [torch.arange(layer.units) > 2 for layer in layers]
    live = build_live_mask(plain.layout, layers, units)
    asked = method.ask(replace(state, live=live, prunings=1, round=2), ["site-1", "site-2"])
    fits = asked["site-1"].expected.accepts
    wrong = Mask.full(live.size) if code == "more" else Mask.empty(live.size)
    assert fits("site-1", live)
    assert not fits("site-1", wrong)


def test_a_site_that_joins_late_gets_the_current_structure(plain: Any) -> None:
    """Its first message is the smaller model with its structure; its answer fits."""
    from flare_sparse.endpoints.server import ServerEndpoint
    from flare_sparse.endpoints.site import SiteEndpoint
    from flare_sparse.federation import Federation
    from flare_sparse.local.run import deliver
    from flare_sparse.wire.ledger import Ledger

    method, run, ledger = plain.method("fawp", rounds=4, prunings=2, pruning_rate=0.3), "0" * 16, Ledger()
    server = ServerEndpoint(plain.layout, run, "float32", ledger)
    endpoints = {name: SiteEndpoint(site, method, run, "float32") for name, site in plain.sites().items()}
    present = ["site-1", "site-2"]

    def sites() -> list[str]:
        if len({line.sequence for line in ledger.lines}) >= 4:
            present[2:] = ["site-3"]
        return present

    federation = Federation(method, server, plain.task.metric)
    outcome = federation.run(plain.weights, sites, lambda q: dict(deliver(q, server, endpoints)))
    assert [record.sites_contributed for record in outcome.rounds][-3:] == [["site-1", "site-2", "site-3"]] * 3
    first = next(line for line in ledger.lines if line.site == "site-3")
    assert 0 < first.scalars_sent < plain.layout.size
    assert first.selection_bytes > 0


def test_a_network_without_hidden_relu_cannot_be_pruned(plain: Any) -> None:
    kind = METHODS["scbfwp"]
    with pytest.raises(ConfigError, match="no hidden layer with a ReLU"):
        kind(kind.Config(), Layout.from_module(nn.Sequential(nn.Linear(3, 2))), 0)


def test_dssgd_uploads_the_largest_changes_one_by_one(bench: Any) -> None:
    method, site = bench.method("dssgd", rate=0.25), bench.site(1)
    change = torch.randn(bench.layout.size)
    revealed = method.revealed(change, site, 1)
    size = bench.layout.trainable_size
    assert int(revealed.bits[:size].sum()) == int(0.25 * size)
    assert bool(revealed.bits[size:].all())
    assert float(change[:size][revealed.bits[:size]].abs().min()) >= float(
        change[:size][~revealed.bits[:size]].abs().max()
    )


def test_a_residual_network_trains_pruned(bench: Any) -> None:
    """Convolutions, batch normalisation and residual sums: physically smaller, and judged like the masked network."""
    from flare_sparse.models.resnet import Block

    class Pictures(type(bench.task)):  # type: ignore[misc]
        """The twelve numbers as a picture of 4 x 3."""

        def model(self) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(1, 6, 3, padding=1), Block(6, 6, 1), Block(6, 6, 1), nn.Flatten(), nn.Linear(72, 1)
            )

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, (batch[0].view(-1, 1, 4, 3), batch[1]))

        def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            return super().predict(model, (batch[0].view(-1, 1, 4, 3), batch[1]))

    pictures = type(bench)(Pictures())
    sites = pictures.sites()
    outcome, _ = pictures.run("scbfwp", sites, rounds=3, prunings=2, pruning_rate=0.3, aggregation="mean")
    left = get_kept_units(pictures.layout, find_removable_layers(build_channel_graph(pictures.layout)), outcome.mask)
    assert sum(int(units.sum()) for units in left) == round(12 * 0.7**2)
    site = sites["site-1"]
    site.weights = outcome.weights
    small = site.narrow(outcome.mask)
    assert small.layout.size == outcome.mask.count < pictures.layout.size
    assert small.evaluate(small.weights)["mse"] == pytest.approx(site.evaluate(outcome.weights)["mse"], rel=1e-4)


def test_an_estimate_needs_no_data(bench: Any) -> None:
    for name in ("scbf", "scbfwp", "fawp", "dssgd"):
        outcome, ledger = estimate(bench.method(name, rounds=3), bench.weights, 2, "float32")
        assert len(ledger.lines) == 4 * len(outcome.rounds)


def test_the_note_says_how_the_threshold_is_found(bench: Any) -> None:
    assert "threshold exact" in bench.method("scbf").note
    assert f"{bench.layout.trainable_size // 10:,} parameters a message" in bench.method("scbf", budget=0.1).note
    assert "drawn at random" in bench.method("scbf", listed_channels=1).note
    assert "layer by layer" in bench.method("scbf", channels="layerwise").note
    assert "10 units of 1 layers can be removed" in bench.method("scbfwp").note
    assert bench.method("fedavg").note == ""


def test_the_same_seed_gives_the_same_bits_with_drawn_channels(bench: Any) -> None:
    settings = {"listed_channels": 1, "drawn_channels": 5000}
    first, second = (
        run_locally(bench.method("scbf", **settings), bench.weights, bench.sites(), bench.task.metric) for _ in range(2)
    )
    assert (
        compute_digest(first[0].weights) == compute_digest(second[0].weights) != bench.compute_digest("scbf", rate=0.9)
    )
