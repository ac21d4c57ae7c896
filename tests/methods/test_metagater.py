"""MetaGater: the invariants of docs/algorithms.md, section 6.8, and vector 11 of section 8."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset
from toy import Toy, contribute

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Contribution, Patch, Update
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.metagater import MetaGaterState, MetaLearningConfig, advance, predict
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.support.adaptation import take_one_step
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.tasks.models import ModelConfig
from flare_sparse.tasks.task import Examples, Task
from flare_sparse.training import LocalTask, Site, build_site
from flare_sparse.wire.ledger import Ledger

FULL_BATCH = {"optimizer": "sgd", "lr": 0.3, "batch_size": 1000}
PAPER = MetaLearningConfig()


class Base(Toy):
    """Half the squared error, so that gradients are the residuals."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return 0.5 * (model(batch[0]) - batch[1]).square().mean()


class Scalar(Base):
    """L_i(w) = (w - c_i)^2 / 2."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)


class Images(Base):
    """The mean of the first channel of 8x8 images, by a network whose second and third convolutions are gated."""

    def __init__(self, gates: dict[str, Any] | None = None, layers: tuple[str, ...] = ("1", "2")):
        super().__init__()
        self.gates = {"layers": list(layers), "hidden": 5, **(gates or {})} if layers else None

    def model(self) -> nn.Module:
        section = {"name": "image_cnn", "channels": [4, 6, 6], "gates": self.gates}
        return ModelConfig.model_validate(section).build(image=(2, 8, 8), outputs=1)


def build_images(index: int, count: int = 20) -> Examples:
    draw = torch.Generator().manual_seed(index)
    x = torch.randn(count + 6, 2, 8, 8, generator=draw)
    y = x[:, 0].mean((1, 2)).unsqueeze(1) + 0.2 * index
    return Examples(TensorDataset(x[6:], y[6:]), TensorDataset(x[:6], y[:6]))


def build_constants(value: float) -> Examples:
    data = TensorDataset(torch.ones(4, 1), torch.full((4, 1), value))
    return Examples(data, data)


class Net:
    """A task, its initial weights and its sites."""

    def __init__(self, task: Task, examples: dict[str, Examples], start: float | None = None):
        self.task, self.examples = task, examples
        self.layout, self.weights = build_initial_model(task, 1)
        if start is not None:
            self.weights.fill_(start)

    def site(self, name: str) -> Site:
        return build_site(LocalTask.open(name, self.task, self.examples[name], self.layout, 1))

    def method(self, name: str = "metagater", **settings: Any) -> Any:
        settings = {"rounds": 3, "lasso": 0, "training": FULL_BATCH, **settings}
        return METHODS[name](METHODS[name].Config.model_validate(settings), self.layout, 1)

    def run(self, name: str = "metagater", **settings: Any) -> tuple[Outcome, Ledger]:
        sites = {site: self.site(site) for site in self.examples}
        return run_locally(self.method(name, **settings), self.weights, sites, self.task.metric)

    def states(self, rounds: int, **settings: Any) -> list[MetaGaterState]:
        """States before every round, and after the last."""
        method, sites = self.method(rounds=rounds, **settings), {n: self.site(n) for n in self.examples}
        states = [method.init(self.weights, sorted(sites))]
        for _ in range(rounds):
            states.append(method.learn(states[-1], collect_updates(method, states[-1], sites)))
        return states


def collect_updates(method: Any, state: Any, sites: dict[str, Site]) -> list[Update]:
    updates = []
    for name, assignment in sorted((method.ask(state, sorted(sites)) or {}).items()):
        request = assignment.request
        sites[name].weights = request.model.to_vector()
        updates.append(contribute(name, method.answer(request, sites[name])))
    return updates


@pytest.fixture
def two() -> Net:
    return Net(Scalar(), {"a": build_constants(1.0), "b": build_constants(3.0)}, start=0.0)


@pytest.fixture
def gated() -> Net:
    return Net(Images(), {f"site-{i}": build_images(i) for i in (1, 2, 3)})


@pytest.fixture
def ungated() -> Net:
    return Net(Images(layers=()), {f"site-{i}": build_images(i) for i in (1, 2, 3)})


def test_three_rounds_on_two_parabolas_equal_the_worked_numbers(two: Net) -> None:
    """Vector 11."""
    states = two.states(3, training={**FULL_BATCH, "lr": 1.0})
    values = [(after.sent.item(), after.w.item(), after.ag.item()) for after in states[1:]]
    assert values == [pytest.approx(row, abs=1e-6) for row in [(0, 0.4, 0.4), (0.4, 0.88, 0.72), (0.8, 1.36, 1.04)]]
    outcome, _ = two.run(training={**FULL_BATCH, "lr": 1.0})
    assert outcome.weights.item() == pytest.approx(0.8, abs=1e-6)


def test_record_of_a_round_has_the_gradient_mapping(two: Net) -> None:
    """Q = (w_t^pr - w_t^ag) / beta_t, of the worked numbers."""
    outcome, _ = two.run(training={**FULL_BATCH, "lr": 1.0})
    expected = [{"gradient_mapping": pytest.approx(value, abs=1e-6)} for value in (0.16, 0.1024, 0.0576)]
    assert [record.figures for record in outcome.rounds] == [*expected, {}]


@pytest.mark.parametrize("accuracy", [100.0, 1e-2, 1e-9])
def test_site_stops_where_the_gradient_of_its_problem_is_small_enough(two: Net, accuracy: float) -> None:
    """Algorithm 1, line 6: ||grad G||^2 <= xi_t, with G = (w - 3)^2 / 2 + 0.1 w^2 at this site."""
    method = two.method(local_steps=30, local_accuracy=accuracy)
    state = method.init(two.weights, ["b"])
    (update,) = collect_updates(method, state, {"b": two.site("b")})
    w, steps = 0.0, 0
    while (1.2 * w - 3) ** 2 > accuracy and steps < 30:
        w, steps = w - 0.3 * (1.2 * w - 3), steps + 1
    assert steps == {100.0: 0, 1e-2: 8, 1e-9: 26}[accuracy]
    assert update.patch.values.item() == pytest.approx(w, abs=1e-5)


def test_l1_zeroes_weights_of_gates_alone(gated: Net) -> None:
    weights = gated.states(3, lasso=0.5, penalty="l1")[-1].ag
    groups = torch.cat([g.flatten() for g in gated.method().gates.groups])
    others = torch.ones(len(weights), dtype=torch.bool)
    others[groups] = False
    assert (weights[groups] == 0).all()
    assert (weights[others] != 0).float().mean() > 0.9


def test_without_penalty_the_sequences_are_those_of_nesterov(gated: Net) -> None:
    for t, (before, after) in enumerate(pairwise(gated.states(6)), start=1):
        alpha = PAPER.compute_alpha(t)
        assert torch.allclose(after.ag, (1 - alpha) * before.ag + alpha * after.w, atol=1e-5)
        momentum = (t - 1) / (t + 2)
        following = predict(after.w, after.ag, PAPER.compute_alpha(t + 1))
        assert torch.allclose(following, after.ag + momentum * (after.ag - before.ag), atol=1e-5)


def test_nesterov_holds_in_float64_over_many_rounds() -> None:
    draw = torch.Generator().manual_seed(3)
    w = ag = torch.randn(7, generator=draw, dtype=torch.float64)
    x, y_before = w.clone(), w.clone()
    for t in range(1, 60):
        alpha = PAPER.compute_alpha(t)
        pr = predict(w, ag, alpha)
        assert torch.allclose(pr, x, atol=1e-12)
        g = torch.randn(7, generator=draw, dtype=torch.float64)
        w, ag = advance(w, pr, g, alpha, 1.0, lambda v, step: v)
        y = x - g  # beta = 1
        x, y_before = y + (t - 1) / (t + 2) * (y - y_before), y
        assert torch.allclose(ag, y, atol=1e-12)


def test_first_model_sent_is_the_initial_one_bit_for_bit(gated: Net) -> None:
    method = gated.method()
    state = method.init(gated.weights, ["site-1"])
    assert torch.equal(state.ag, gated.weights)
    assert torch.equal(method.ask(state, ["site-1"])["site-1"].request.model.to_vector(), gated.weights)
    assert torch.equal(gated.states(1)[1].sent, gated.weights)


@pytest.mark.slow
@pytest.mark.parametrize("local_proximity", [None, 0.0])
def test_without_acceleration_a_round_equals_fedprox_or_fedavg(gated: Net, local_proximity: float | None) -> None:
    """Step = 1 / lambda: the uniform mean of the sites' models, with proximal term (FedProx) or without (FedAvg)."""
    settings = {"momentum_cap": 0, "step": 5.0, "proximity": 0.2, "local_proximity": local_proximity}
    method = gated.method(local_steps=3, **settings)
    state = method.init(gated.weights, sorted(gated.examples))
    pull = 0.2 if local_proximity is None else 0.0
    for t in (1, 2):
        sites = {name: gated.site(name) for name in gated.examples}
        start = state.w
        alone = [
            s.train(start, Mask.full(method.layout.size), method.config.training, t, steps=3, proximal_strength=pull)
            for s in sites.values()
        ]
        state = method.learn(state, collect_updates(method, state, sites))
        assert torch.allclose(state.w, torch.stack(alone).mean(0), atol=1e-6)
        assert torch.equal(state.w, state.ag)


@pytest.mark.slow
def test_without_acceleration_a_run_equals_uniform_fedavg(gated: Net) -> None:
    settings = {"local_steps": 2, "rounds": 3}
    ours, _ = gated.run(momentum_cap=0, step=5.0, local_proximity=0.0, output="ag", **settings)
    sites = {name: gated.site(name) for name in gated.examples}
    method = METHODS["fedavg_one_step"](
        METHODS["fedavg_one_step"].Config.model_validate({"weighting": "uniform", "training": FULL_BATCH, **settings}),
        gated.layout,
        1,
    )
    theirs, _ = run_locally(method, gated.weights, sites, gated.task.metric)
    assert torch.allclose(ours.weights, theirs.weights, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_shorter_step_equals_reptile(gated: Net, epsilon: float) -> None:
    before, after = gated.states(1, momentum_cap=0, step=epsilon / 0.2, local_proximity=0.0, local_steps=4)
    method, sites = gated.method(), {name: gated.site(name) for name in gated.examples}
    ends = [
        s.train(before.w, Mask.full(method.layout.size), method.config.training, 1, steps=4) for s in sites.values()
    ]
    assert torch.allclose(after.w, before.w + epsilon * (torch.stack(ends).mean(0) - before.w), atol=1e-6)


def test_one_local_step_gives_the_mean_gradient(gated: Net) -> None:
    method, sites = gated.method(), {name: gated.site(name) for name in gated.examples}
    state = method.init(gated.weights, sorted(sites))
    delta = torch.stack([u.patch.to_vector() for u in collect_updates(method, state, sites)]).mean(0)
    gradients = [next(s.trainer.compute_gradients(gated.weights, 1000, 1, 1))[0] for s in sites.values()]
    assert torch.allclose(-0.2 * delta, 0.2 * 0.3 * torch.stack(gradients).mean(0), atol=1e-6)


def test_zero_deltas_interpolate_the_sequences(gated: Net) -> None:
    method = gated.method()
    zero = Contribution(
        "a", Patch.from_vector(torch.zeros(gated.layout.size), Mask.full(method.layout.size)), "delta", 1
    )
    first = method.learn(method.init(gated.weights, ["a"]), [zero])
    assert all(torch.equal(x, gated.weights) for x in (first.w, first.ag, first.sent))
    apart = MetaGaterState(4, gated.weights, gated.weights + 1, gated.weights)
    after = method.learn(apart, [zero])
    assert torch.equal(after.w, apart.w)
    assert torch.allclose(after.ag, 0.4 * apart.w + 0.6 * apart.ag, atol=1e-6)


def test_penalty_does_not_change_the_backbone_in_the_same_round(gated: Net) -> None:
    with_h, without = (gated.states(1, lasso=mu)[1] for mu in (0.05, 0.0))
    phi = gated.method().gates.phi
    assert torch.equal(with_h.w[~phi.bits], without.w[~phi.bits])
    assert torch.equal(with_h.ag[~phi.bits], without.ag[~phi.bits])
    assert not torch.equal(with_h.w[phi.bits], without.w[phi.bits])


def test_penalty_changes_nothing_without_gates(ungated: Net) -> None:
    assert ungated.method().gates.phi.count == 0
    assert compute_digest(ungated.run(lasso=0.5)[0].weights) == compute_digest(ungated.run(lasso=0.0)[0].weights)


def zero_group(net: Net, layer: str, channel: int) -> torch.Tensor:
    """Return the initial weights with the gate group of one channel at zero."""
    weights = net.weights.clone()
    named = net.layout.unflatten(weights)
    named[f"{layer}.gate.open.weight"][channel] = 0
    named[f"{layer}.gate.open.bias"][channel] = 0
    return weights


@pytest.mark.slow
def test_permanently_closed_channel_and_its_filter_are_not_sent(gated: Net) -> None:
    """Group: 5 + 1 scalars; filter: 6 x 3 x 3 + 1 in layer 2. Both stay zero at site and server."""
    gated.weights = zero_group(gated, "2", 4)
    outcome, ledger = gated.run(lasso=1e-3, rounds=4, closed_channels="permanent")
    saved = (5 + 1) + (6 * 9 + 1)
    train = [line for line in ledger.lines if line.kind == "train"]
    assert {line.scalars_sent for line in train} == {gated.layout.size - saved}
    assert all(line.payload_bytes < line.dense_bytes for line in train)
    named = gated.layout.unflatten(outcome.weights)
    assert not named["2.gate.open.weight"][4].any()
    assert not named["2.body.0.conv.weight"][4].any()
    assert named["2.body.0.conv.weight"][3].any()
    assert all(0 < figures["channel_sparsity"] < 1 for figures in outcome.evaluation.sites.values())


def test_reopenable_channel_is_sent_and_reopens(gated: Net) -> None:
    gated.weights = zero_group(gated, "2", 4)
    outcome, ledger = gated.run(rounds=4)
    assert {line.scalars_sent for line in ledger.lines if line.kind == "train"} == {gated.layout.size}
    assert gated.layout.unflatten(outcome.weights)["2.gate.open.weight"][4].any()


@pytest.mark.slow
def test_lasso_closes_channels_and_messages_shrink(gated: Net) -> None:
    outcome, ledger = gated.run(lasso=0.06, rounds=12, closed_channels="permanent")
    sent = [line.scalars_sent for line in ledger.lines if line.kind == "train" and line.direction == "up"]
    assert sent[-1] < sent[0] == gated.layout.size
    assert sent == sorted(sent, reverse=True)
    assert outcome.mask.count < gated.layout.size


def test_first_stage_keeps_the_backbone_and_second_the_gates_bit_for_bit(gated: Net) -> None:
    method, site = gated.method(adapt_lr=0.5), gated.site("site-1")
    phi, theta = method.gates.phi, ~method.gates.phi
    site.weights = gated.weights
    first = take_one_step(site, gated.weights, [phi], method.config)
    assert torch.equal(first[theta.bits], gated.weights[theta.bits])
    assert not torch.equal(first[phi.bits], gated.weights[phi.bits])
    adapted = method.adapt(site, Mask.full(method.layout.size))
    assert torch.equal(adapted[phi.bits], first[phi.bits])
    assert not torch.equal(adapted[theta.bits], gated.weights[theta.bits])
    gradient, _ = next(site.trainer.compute_gradients(first, 1000, 1, 0))
    assert torch.allclose(adapted[theta.bits], (first - 0.5 * gradient)[theta.bits], atol=1e-6)


@pytest.mark.parametrize("detach", [False, True])
def test_filter_closed_for_all_examples_keeps_its_weights_bit_for_bit(detach: bool) -> None:
    net = Net(Images({"detach_input": detach}), {"site-1": build_images(1)})
    weights = net.weights.clone()
    named = net.layout.unflatten(weights)
    named["1.gate.open.weight"][2] = 0
    named["1.gate.open.bias"][2] = -100  # closed for all examples, which one step cannot delta
    site = net.site("site-1")
    site.weights = weights
    adapted = net.layout.unflatten(net.method(adapt_lr=0.5).adapt(site, Mask.full(net.layout.size)))
    for name in ("1.body.0.conv.weight", "1.body.0.conv.bias"):
        assert torch.equal(adapted[name][2], named[name][2])
        assert not torch.equal(adapted[name][3], named[name][3])


@pytest.mark.parametrize("closed", [(2,), (0, 5), tuple(range(6))])
def test_adaptation_leaves_closed_channels_as_they_are(closed: tuple[int, ...]) -> None:
    net = Net(Images({}), {"site-1": build_images(1)})
    method, weights = net.method(adapt_lr=0.5), net.weights.clone()
    gates = method.gates
    weights[gates.groups[0][list(closed)]] = 0
    weights[gates.filters[0][list(closed)]] = 0
    live = ~gates.select_closed(weights)
    site = net.site("site-1")
    site.weights = weights
    adapted = method.adapt(site, live)
    assert not torch.equal(adapted, weights)
    assert not adapted[~live.bits].any()


def test_adaptation_has_no_gate_noise() -> None:
    quiet, noisy = (Net(Images({"noise": noise}), {"site-1": build_images(1)}) for noise in (False, True))
    assert quiet.layout == noisy.layout
    ends = []
    for net in (quiet, noisy):
        site = net.site("site-1")
        site.weights = quiet.weights
        ends.append(net.method().adapt(site, Mask.full(net.layout.size)))
    assert torch.equal(*ends)


def test_result_is_invariant_to_order_and_duplication_of_sites(gated: Net) -> None:
    method, sites = gated.method(), {name: gated.site(name) for name in gated.examples}
    start = method.init(gated.weights, sorted(sites))
    updates = collect_updates(method, start, sites)
    once = method.learn(start, updates)
    backwards = method.learn(start, updates[::-1])
    copies = method.learn(start, updates + [replace(u, site=f"{u.site}-twin") for u in updates])
    assert torch.equal(once.w, backwards.w)
    assert torch.allclose(once.w, copies.w, atol=1e-6)
    assert torch.allclose(once.ag, copies.ag, atol=1e-6)


def test_sites_weigh_equally_whatever_their_number_of_examples() -> None:
    net = Net(Scalar(), {"a": build_constants(1.0), "b": build_constants(3.0)}, start=0.0)
    many = TensorDataset(torch.ones(400, 1), torch.full((400, 1), 3.0))
    uneven = Net(Scalar(), {"a": build_constants(1.0), "b": Examples(many, many)}, start=0.0)
    assert torch.allclose(net.run()[0].weights, uneven.run()[0].weights, atol=1e-6)


@pytest.mark.parametrize("output", ["pr", "ag"])
def test_output_selects_the_sequence(two: Net, output: str) -> None:
    """After three rounds of vector 11: 0.8 was sent last; 1.04 is w^ag."""
    outcome, _ = two.run(output=output, training={**FULL_BATCH, "lr": 1.0})
    wanted = {"pr": 0.8, "ag": 1.04}[output]
    assert outcome.weights.item() == pytest.approx(wanted, abs=1e-6)


def test_momentum_cap_bounds_alpha(two: Net) -> None:
    states = two.states(40, momentum_cap=0.0)
    assert all(torch.equal(s.w, s.ag) for s in states)
    capped = two.method(momentum_cap=0.5).config
    assert [capped.compute_alpha(t) for t in (1, 2, 3, 4, 100)] == pytest.approx([1, 2 / 3, 0.5, 0.5, 0.5])


@pytest.mark.slow
def test_unscaled_prox_shrinks_less(gated: Net) -> None:
    shrunk: list[float] = []
    for scale in (True, False):
        states = gated.states(8, lasso=0.01, scale_prox=scale)
        groups = gated.method().gates.groups
        shrunk.append(sum(float(states[-1].w[g].norm()) for g in groups))
    assert shrunk[0] < shrunk[1]


def test_running_statistics_are_plain_means(bench: Any) -> None:
    method = bench.method("metagater", rounds=4)
    buffers = bench.layout.select(lambda entry: entry.role == "buffer")
    state = replace(method.init(bench.weights, ["a"]), round=3)
    delta = torch.randn(bench.layout.size)
    updates = [
        Contribution(str(k), Patch.from_vector(delta * k, Mask.full(method.layout.size)), "delta", 1) for k in (1, 2)
    ]
    after = method.learn(state, updates)
    for vector in (after.w, after.ag):
        assert torch.allclose(vector[buffers], (bench.weights + 1.5 * delta)[buffers], atol=1e-6)


def test_targets_only_adapt(gated: Net) -> None:
    outcome, ledger = gated.run(targets=["site-3"])
    assert {line.site for line in ledger.lines if line.kind == "train"} == {"site-1", "site-2"}
    assert {line.site for line in ledger.lines if line.kind == "adapt"} == {"site-3"}
    assert [(line.scalars_sent, line.direction) for line in ledger.lines if line.site == "site-3"][-1] == (0, "up")
    figures = outcome.evaluation.sites["site-3"]
    assert figures["mse"] < figures["mse_before"]
    assert {"channel_sparsity", "channel_sparsity_before", "test_examples"} <= figures.keys()
    with pytest.raises(ConfigError, match="all sites present"):
        gated.run(targets=sorted(gated.examples))


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_run_continued_from_a_saved_state_equals_the_uninterrupted_one(gated: Net, stop: int, tmp_path: Any) -> None:
    """The state is three tensors and a number; saving and loading it changes no bit of what follows."""
    settings = {"lasso": 0.02, "rounds": 6, "participation": 0.67}
    states = gated.states(**settings)
    saved = tmp_path / "state.pt"
    torch.save(
        {"round": states[stop].round, "w": states[stop].w, "ag": states[stop].ag, "sent": states[stop].sent}, saved
    )
    state = MetaGaterState(**torch.load(saved, weights_only=True))
    method = gated.method(**settings)
    sites = {name: gated.site(name) for name in gated.examples}  # new sites, without memory
    for _ in range(stop, 6):
        state = method.learn(state, collect_updates(method, state, sites))
    assert compute_digest(method.model(state).to_vector()) == compute_digest(gated.run(**settings)[0].weights)
    assert all(torch.equal(getattr(state, n), getattr(states[6], n)) for n in ("w", "ag", "sent"))


def test_alpha_of_the_first_rounds_equals_the_worked_numbers() -> None:
    """Vector 9."""
    alphas = [PAPER.compute_alpha(t) for t in range(1, 7)]
    assert alphas[:5] == pytest.approx([1, 2 / 3, 1 / 2, 2 / 5, 1 / 3])
    gamma = [1.0]
    for alpha in alphas[1:5]:
        gamma.append((1 - alpha) * gamma[-1])
    assert gamma == pytest.approx([1, 1 / 3, 1 / 6, 1 / 10, 1 / 15])
    momentum = [after * (1 / before - 1) for before, after in pairwise(alphas)]
    assert momentum == pytest.approx([0, 1 / 4, 2 / 5, 1 / 2, 4 / 7])


@given(st.floats(0.1, 3), st.floats(0.1, 1))
def test_length_of_the_other_step_is_beta_over_alpha(beta: float, alpha: float) -> None:
    steps: list[float] = []
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    w, ag = advance(zero, zero, one, alpha, beta, lambda v, step: steps.append(step) or v)  # type: ignore[func-returns-value]
    assert steps == pytest.approx([beta / alpha, beta])
    assert [-w.item(), -ag.item()] == pytest.approx(steps)


@given(st.integers(1, 1000), st.floats(0, 1))
def test_momentum_stays_below_its_cap(t: int, cap: float) -> None:
    """By default Gamma_t = 2 / (t (t + 1)) and momentum (t - 1) / (t + 2)."""
    capped = MetaLearningConfig(momentum_cap=cap)
    assert capped.compute_alpha(t + 1) * (1 / capped.compute_alpha(t) - 1) <= cap + 1e-12
    plain, following = PAPER.compute_alpha(t), PAPER.compute_alpha(t + 1)
    assert following * (1 / plain - 1) == pytest.approx((t - 1) / (t + 2))
    gamma_ratio = 1 - following
    assert gamma_ratio * 2 / (t * (t + 1)) == pytest.approx(2 / ((t + 1) * (t + 2)))
