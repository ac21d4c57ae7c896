"""SCBF, SCBFwP, FAwP and DSSGD: the invariants of docs/algorithms.md, section 3.11, and vector 5 of section 8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_federation import LocalFederation
from thoroughness import count_cases
from torch import Tensor, nn
from toy import estimate_traffic

from flare_sparse.compute.structure.graph import build_channel_graph
from flare_sparse.compute.structure.removal import build_live_mask, find_removable_layers, get_kept_units
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Contribution, Patch, Update
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, compute_digest
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.scbf import ChannelSiteConfig
from flare_sparse.methods.support.selective import SelectiveState as State
from flare_sparse.methods.support.unit_pruning import PruningConfig
from flare_sparse.rounds.local.run import run_locally

EQUAL = {"training": {"optimizer": "sgd", "lr": 0.05}}


def update(values: Tensor, on: Tensor, site: str, examples: int = 1) -> Update:
    mask = Mask(on)
    return Contribution(site, Patch.from_vector(mask.take(values), mask), "weights", examples, {})


def test_sum_at_rate_one_adds_every_delta(plain: Any) -> None:
    """Invariant 2: W + sum of dW_k, in site-name order."""
    method = plain.method("scbf", rate=1.0)
    before = torch.randn(plain.layout.size)
    trained = [before + torch.randn(plain.layout.size) for _ in range(3)]
    all_entries = torch.ones(plain.layout.size, dtype=torch.bool)
    updates = [update(w, all_entries, f"site-{i}") for i, w in enumerate(trained)]
    state = method.learn(State(1, before, Mask.full(method.layout.size), Mask.full(method.layout.size)), updates)
    expected = before.double() + sum(w.double() - before.double() for w in trained)
    torch.testing.assert_close(state.weights, expected.float(), rtol=0, atol=3e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scbf", "dssgd"])
def test_mean_at_rate_one_equals_fedavg_bit_for_bit(name: str, bench: Any) -> None:
    """Invariant 2, with batch normalisation, dropout and sites of different sizes, through the wire."""
    assert bench.compute_digest(name, rate=1.0, aggregation="mean") == bench.compute_digest("fedavg")


@pytest.mark.parametrize("sites", [1, 3])
def test_sum_at_rate_one_equals_fedavg_with_a_server_step_of_k(sites: int, plain: Any) -> None:
    same = {f"site-{i}": plain.site(i) for i in range(1, sites + 1)}
    added = plain.run("scbf", same, rate=1.0, **EQUAL)[0].weights
    stepped = plain.run("fedavg", same, server={"lr": float(sites)}, **EQUAL)[0].weights
    torch.testing.assert_close(added, stepped, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "aggregation"), [("scbf", "sum"), ("scbf", "mean"), ("dssgd", "count")])
def test_sites_train_from_what_they_downloaded(name: str, aggregation: str, plain: Any) -> None:
    """A download has the largest changes that the sites lack; the server's own model is the result."""
    sites = {f"site-{i}": plain.site(i) for i in (1, 2)}
    chosen = {"rate": 1.0, "aggregation": aggregation, "download_rate": 0.4, **EQUAL}
    outcome, ledger = plain.run(name, sites, rounds=3, **chosen)
    config = plain.method(name, rounds=3, **chosen).config
    server = held = plain.weights
    count = int(0.4 * len(held))
    total = sum(site.num_examples for site in sites.values())
    for t in (1, 2, 3):
        deltas = {site: sites[site].train(held, Mask.full(len(held)), config.training, t) - held for site in sites}
        shares = {site: 1.0 if aggregation == "sum" else sites[site].num_examples / total for site in sites}
        server = server + sum(shares[site] * deltas[site] for site in sites)
        largest = (server - held).abs().topk(count).indices
        held = held.clone()
        held[largest] = server[largest]
    torch.testing.assert_close(outcome.weights, server, rtol=1e-5, atol=1e-6)
    assert not torch.equal(server, held)
    sent = [line.scalars_sent for line in ledger.lines if line.direction == "down" and line.kind == "train"]
    assert sent == [len(held)] * 2 + [count] * 4
    metric = plain.task.metric.name
    expected = sum(sites[site].evaluate(outcome.weights)[metric] for site in sites) / 2
    assert outcome.evaluation.overall[metric] == pytest.approx(expected, rel=1e-5)


def test_download_of_everything_changes_no_bit(plain: Any) -> None:
    sites = {f"site-{i}": plain.site(i) for i in (1, 2)}
    all_of_it = plain.run("scbf", sites, rate=0.3, **EQUAL)[0].weights
    nearly = plain.run("scbf", sites, rate=0.3, download_rate=0.9999999, **EQUAL)[0].weights
    assert torch.equal(all_of_it, nearly)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["sum", "mean", "count"])
@settings(max_examples=count_cases(40), deadline=None)
@given(seed=st.integers(0, 2**20))
def test_entries_that_no_site_revealed_keep_their_bits(aggregation: str, seed: int) -> None:
    layout = Layout.from_module(nn.Sequential(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 1)))
    kind = METHODS["scbf"]
    method = kind(kind.Config.model_validate({"aggregation": aggregation}), layout, 0)
    random = torch.Generator().manual_seed(seed)
    before = torch.randn(layout.size, generator=random)
    before[::7] = -0.0
    revealed_bits = [torch.rand(layout.size, generator=random) < 0.3 for _ in range(3)]
    updates = [update(before + 1, on, f"site-{i}", 3 + i) for i, on in enumerate(revealed_bits)]
    full = Mask.full(layout.size)
    after = method.learn(State(1, before, full, full), updates).weights
    untouched = ~(revealed_bits[0] | revealed_bits[1] | revealed_bits[2])
    assert torch.equal(after[untouched].view(torch.int32), before[untouched].view(torch.int32))
    parameters = torch.arange(layout.size) < layout.num_parameters
    owners = sum(on.long() for on in revealed_bits)
    share = {"sum": owners.float(), "count": (owners > 0).float()}
    share["mean"] = sum(on.float() * (3 + i) for i, on in enumerate(revealed_bits)) / 12
    step = torch.where(parameters, share[aggregation], share["mean" if aggregation == "mean" else "count"])
    torch.testing.assert_close(after, before + step, rtol=1e-5, atol=1e-6)


def test_zero_deltas_leave_the_weights_unchanged(plain: Any) -> None:
    method = plain.method("scbf")
    before = torch.randn(plain.layout.size)
    on = torch.rand(plain.layout.size) < 0.5
    full = Mask.full(plain.layout.size)
    after = method.learn(State(1, before, full, full), [update(before, on, s) for s in ("a", "b")])
    assert torch.equal(after.weights, before)


def test_upload_carries_the_revealed_entries(plain: Any) -> None:
    """It carries the trained values of these entries, and only these."""
    outcome, ledger = plain.run("scbf", rate=0.3, rounds=1)
    ups = [line for line in ledger.lines if line.direction == "up" and line.kind == "train"]
    site, method = plain.site(1, 24), plain.method("scbf", rate=0.3)
    site.weights = plain.weights
    trained = site.train(plain.weights, Mask.full(method.layout.size), method.config.training, 1)
    revealed = method.reveal(trained - plain.weights, site, 1)
    assert 0 < revealed.count < plain.layout.size
    assert ups[0].scalars_sent == revealed.count
    assert outcome.mask.is_full


@pytest.mark.parametrize("budget", [0.1, 0.37])
def test_budget_is_the_exact_share_of_parameters_in_every_upload(budget: float, plain: Any) -> None:
    _, ledger = plain.run("scbf", budget=budget)
    wanted = int(budget * plain.layout.size + 1e-9)
    assert {line.scalars_sent for line in ledger.lines if line.direction == "up" and line.kind == "train"} == {wanted}


def test_server_sends_only_changed_entries(plain: Any) -> None:
    """From the second round to the last evaluation; a site that missed a round receives the full model."""
    outcome, ledger = plain.run("scbf", budget=0.1, aggregation="count", participation=0.67, rounds=4)
    last_received = dict.fromkeys(plain.sites(), 0)
    for line in ledger.lines:
        if line.direction == "down":
            is_current = last_received[line.site] == line.sequence - 1 > 0
            assert (
                line.scalars_sent < 0.25 * plain.layout.size if is_current else line.scalars_sent == plain.layout.size
            )
            last_received[line.site] = line.sequence
    assert any(line.scalars_sent < plain.layout.size for line in ledger.lines if line.kind == "evaluate")
    again, _ = plain.run("scbf", budget=0.1, aggregation="count", participation=0.67, rounds=4)
    assert compute_digest(outcome.weights) == compute_digest(again.weights)


def test_site_may_set_its_own_rate_or_budget(plain: Any) -> None:
    sites = plain.sites()
    sites["site-2"].site_settings = ChannelSiteConfig(budget=0.1)
    sites["site-3"].site_settings = ChannelSiteConfig(rate=1.0)
    _, ledger = plain.run("scbf", sites, budget=0.5)
    sent = {line.site: line.scalars_sent for line in ledger.lines if line.direction == "up" and line.kind == "train"}
    assert sent == {"site-1": plain.layout.size // 2, "site-2": plain.layout.size // 10, "site-3": plain.layout.size}


def test_running_statistics_are_averaged_where_deltas_are_added(bench: Any) -> None:
    """A sum of variances is not a variance."""
    outcome, _ = bench.run("scbf", rate=1.0, **EQUAL)
    average, _ = bench.run("fedavg", server={"lr": 3.0}, **EQUAL)
    assert float(bench.layout.unflatten(outcome.weights)["1.running_var"].min()) > 0
    for name in ("1.running_mean", "1.running_var"):
        assert name in bench.layout.unflatten(average.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scbfwp", "fawp"])
def test_number_of_units_after_p_prunings_is_exact(name: str, plain: Any) -> None:
    """Invariant 9: round(N_0 (1 - theta)^p); removed entries are zero in the model and absent from the mask."""
    outcome, _ = plain.run(name, rounds=5, prunings=3, pruning_rate=0.2)
    kept = get_kept_units(plain.layout, find_removable_layers(build_channel_graph(plain.layout)), outcome.mask)
    assert [int(units.sum()) for units in kept] == [round(10 * 0.8**3)]
    assert bool((outcome.weights[~outcome.mask.bits] == 0).all())
    kinds = [record.kind for record in outcome.rounds]
    assert kinds == ["train", "count"] * 3 + ["train", "train", "evaluate"]


def test_pruning_schedule_counts_units_and_prunings() -> None:
    """Vector 5: 86 78 70 63 57 51 of 96 units; 7 4 2 2 1 prunings while strictly below 50 %."""
    config = PruningConfig(pruning_rate=0.1)
    assert [config.count_remaining(96, p) for p in range(1, 7)] == [86, 78, 70, 63, 57, 51]
    for theta, prunings in zip((0.1, 0.2, 0.3, 0.4, 0.5), (7, 4, 2, 2, 1), strict=True):
        half = PruningConfig(pruning_rate=theta, target_pruned_fraction=0.5)
        assert [half.is_due(done) for done in range(9)] == [done < prunings for done in range(9)]
    assert [PruningConfig().is_due(done) for done in range(8)] == [True] * 6 + [False] * 2


@pytest.mark.slow
def test_without_prunings_scbfwp_equals_scbf_and_fawp_equals_fedavg(bench: Any) -> None:
    for nothing in ({"prunings": 0}, {"target_pruned_fraction": 0.0}):
        assert bench.compute_digest("scbfwp", **nothing) == bench.compute_digest("scbf")
    assert bench.compute_digest("fawp", prunings=0) == bench.compute_digest("fedavg")


def test_messages_shrink_with_the_structure_which_is_sent_once(plain: Any) -> None:
    _, ledger = plain.run("fawp", rounds=4, prunings=2, pruning_rate=0.3)
    lines = [line for line in ledger.lines if line.site == "site-1"]
    seen = [(line.kind, line.direction, line.scalars_sent, line.selection_bytes > 0) for line in lines]
    per_unit, size = 12 + 1 + 1, plain.layout.size
    seven, five = size - 3 * per_unit, size - 5 * per_unit
    assert seen == [
        ("train", "down", size, False),
        ("train", "up", size, False),
        ("count", "down", size, False),
        ("count", "up", 10, True),
        ("train", "down", 0, True),  # the sites hold the model: only the removed units are new
        ("train", "up", seven, False),
        ("count", "down", seven, True),
        ("count", "up", 10, True),
        ("train", "down", 0, True),
        ("train", "up", five, False),
        ("train", "down", five, True),
        ("train", "up", five, False),
        ("evaluate", "down", five, False),
        ("evaluate", "up", 0, True),
    ]


@pytest.mark.parametrize(("name", "code"), [("fawp", "less"), ("fawp", "more"), ("scbfwp", "more")])
def test_update_outside_the_structure_is_refused(name: str, code: str, plain: Any) -> None:
    """No removed unit comes back; where all live entries must be sent, fewer are refused, too."""
    method = plain.method(name, prunings=1, pruning_rate=0.3)
    state = method.init(plain.weights, ["site-1", "site-2"])
    layers = find_removable_layers(build_channel_graph(plain.layout))
    units = [torch.arange(layer.units) > 2 for layer in layers]
    live = build_live_mask(plain.layout, layers, units)
    assignments = method.ask(replace(state, live=live, prunings=1, round=2), ["site-1", "site-2"])
    accepts = assignments["site-1"].expected.accepts
    wrong = Mask.full(live.size) if code == "more" else Mask.empty(live.size)
    assert accepts("site-1", live)
    assert not accepts("site-1", wrong)


def test_site_that_joins_late_receives_the_current_structure(plain: Any) -> None:
    """Its first message is the smaller model with its structure, and its update is accepted."""
    federation = LocalFederation("fawp", plain, rounds=4, prunings=2, pruning_rate=0.3)
    lines, present = federation.ledger.lines, ["site-1", "site-2"]

    def sites() -> list[str]:
        if len({line.sequence for line in lines}) >= 4:
            present[2:] = ["site-3"]
        return present

    outcome = federation.run(sites=sites)
    assert [record.sites_contributed for record in outcome.rounds][-3:] == [["site-1", "site-2", "site-3"]] * 3
    first = next(line for line in lines if line.site == "site-3")
    assert 0 < first.scalars_sent < plain.layout.size
    assert first.selection_bytes > 0


def test_pruning_that_removes_no_unit_sends_the_whole_model_to_a_site_without_it(plain: Any) -> None:
    """With all units live, the request itself is a patch of the last change over the previous model."""
    method = plain.method("scbfwp", prunings=1, pruning_rate=0.01)
    state = method.init(plain.weights, ["site-1"])
    changed = Mask(torch.arange(plain.layout.size) < 5)
    assignment = method.ask(replace(state, changed=changed, round=2, prunings=1, phase="counted"), ["site-1"])["site-1"]
    assert (assignment.request.model.mask.count, assignment.request.model.base) == (0, "previous")
    assert (assignment.full_model.mask.is_full, assignment.full_model.base) == (True, "zeros")
    assert torch.equal(assignment.full_model.to_vector(), plain.weights)


def test_network_without_hidden_relu_cannot_be_pruned(plain: Any) -> None:
    kind = METHODS["scbfwp"]
    with pytest.raises(ConfigError, match="no hidden layer with a ReLU"):
        kind(kind.Config(), Layout.from_module(nn.Sequential(nn.Linear(3, 2))), 0)


def test_dssgd_uploads_the_largest_deltas(bench: Any) -> None:
    method, site = bench.method("dssgd", rate=0.25), bench.site(1)
    delta = torch.randn(bench.layout.size)
    revealed = method.reveal(delta, site, 1)
    size = bench.layout.num_parameters
    assert int(revealed.bits[:size].sum()) == int(0.25 * size)
    assert bool(revealed.bits[size:].all())
    assert float(delta[:size][revealed.bits[:size]].abs().min()) >= float(
        delta[:size][~revealed.bits[:size]].abs().max()
    )


@pytest.mark.slow
def test_residual_network_trains_at_its_smaller_size(bench: Any) -> None:
    """Convolutions, batch normalisation and residual sums: the smaller network evaluates as the masked one."""
    from flare_sparse.tasks.models.resnet import ResidualBlock

    class Pictures(type(bench.task)):  # type: ignore[misc]
        """The twelve numbers as an image of 4 x 3."""

        def model(self) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(1, 6, 3, padding=1),
                ResidualBlock(6, 6, 1),
                ResidualBlock(6, 6, 1),
                nn.Flatten(),
                nn.Linear(72, 1),
            )

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, (batch[0].view(-1, 1, 4, 3), batch[1]))

        def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            return super().predict(model, (batch[0].view(-1, 1, 4, 3), batch[1]))

    images = type(bench)(Pictures())
    sites = images.sites()
    outcome, _ = images.run("scbfwp", sites, rounds=3, prunings=2, pruning_rate=0.3, aggregation="mean")
    kept = get_kept_units(images.layout, find_removable_layers(build_channel_graph(images.layout)), outcome.mask)
    assert sum(int(units.sum()) for units in kept) == round(12 * 0.7**2)
    site = sites["site-1"]
    site.weights = outcome.weights
    small = site.narrow(outcome.mask)
    assert small.layout.size == outcome.mask.count < images.layout.size
    assert small.evaluate(small.weights)["mse"] == pytest.approx(site.evaluate(outcome.weights)["mse"], rel=1e-4)


def test_estimate_needs_no_data(bench: Any) -> None:
    for name in ("scbf", "scbfwp", "fawp", "dssgd"):
        outcome, ledger = estimate_traffic(bench.method(name, rounds=3), bench.weights, 2, "float32")
        assert len(ledger.lines) == 4 * len(outcome.rounds)


def test_note_describes_threshold_and_removable_units(bench: Any) -> None:
    assert "threshold exact" in bench.method("scbf").describe()
    assert f"{bench.layout.num_parameters // 10:,} parameters a message" in bench.method("scbf", budget=0.1).describe()
    assert "10 units of 1 layers can be removed" in bench.method("scbfwp").describe()
    assert bench.method("fedavg").describe() == ""


class RevealsNothing:
    """A reveal function of sites that select nothing in round 1; ``remaining`` reveals all."""

    def __init__(self, method: Any, remaining: tuple[str, ...]):
        self.full_mask, self.remaining = Mask.full(method.layout.size), remaining

    def __call__(self, delta: Tensor, site: Any, t: int) -> Mask:
        return self.full_mask if site.name in self.remaining or t > 1 else Mask.empty(delta.numel())


@pytest.mark.parametrize("name", ["scbf", "dssgd"])
def test_empty_upload_counts_as_a_delta_of_zero(name: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = plain.method(name, aggregation="mean", rounds=1)
    monkeypatch.setattr(type(method), "reveal", staticmethod(RevealsNothing(method, ("site-1",))))
    outcome, _ = run_locally(method, plain.weights, plain.sites(), plain.task.metric)
    site = plain.sites()["site-1"]
    trained = site.train(plain.weights, Mask.full(method.layout.size), method.config.training, 1)
    expected = plain.weights + 24 / (24 + 32 + 40) * (trained - plain.weights)
    torch.testing.assert_close(outcome.weights, expected, rtol=1e-5, atol=1e-6)
    assert outcome.rounds[0].sites_contributed == ["site-1", "site-2", "site-3"]


@pytest.mark.parametrize("aggregation", ["sum", "mean", "count"])
def test_round_of_empty_uploads_leaves_the_model(aggregation: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = plain.method("scbf", aggregation=aggregation, rounds=1)
    monkeypatch.setattr(type(method), "reveal", staticmethod(RevealsNothing(method, ())))
    outcome, _ = run_locally(method, plain.weights, plain.sites(), plain.task.metric)
    assert torch.equal(outcome.weights, plain.weights)
    longer = plain.method("scbf", aggregation=aggregation, rounds=2)
    outcome, _ = run_locally(longer, plain.weights, plain.sites(), plain.task.metric)
    assert [record.attempts for record in outcome.rounds] == [1, 1, 1]
    assert not torch.equal(outcome.weights, plain.weights)
