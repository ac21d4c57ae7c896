"""Top-k with error feedback (docs/algorithms.md, section 7.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_federation import LocalFederation, Upload
from torch import nn
from toy import Plain, Toy, ToyBench, contribute

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.inputs.scaling import InputScaler
from flare_sparse.methods.aggregation.weighted import weigh_by_examples, weighted_sum
from flare_sparse.methods.topk_ef import TopKEF, TopKEFConfig
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.encodings import count_entries_within
from flare_sparse.wire.formats import FORMATS

LAYOUT = ToyBench(Toy()).layout
PARAMETERS, BUFFERS = slice(LAYOUT.num_parameters), slice(LAYOUT.num_parameters, None)
VARIANCES = LAYOUT.select(lambda spec: spec.name.endswith("running_var"))
TRAINING = {"optimizer": "sgd", "lr": 0.01, "epochs": 3}
DECAYING = {"optimizer": "sgd", "lr": 0.01, "epochs": 1, "lr_decay": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "bfloat16", "int8", "int4", "int2", "int1"])
def test_running_variances_of_small_activations_stay_positive(values: Any) -> None:
    """A sum of their deltas over rounds led below 0, and every metric was NaN."""
    bench = ToyBench(Toy())
    bench.layout.unflatten(bench.weights)["0.weight"].mul_(0.1)
    federation = LocalFederation("topk_ef", bench, values=values, rounds=6, fraction=0.02, training=TRAINING)
    variances: list[torch.Tensor] = []

    def record(upload: Upload) -> Upload:
        variances.append(upload.endpoint.site.weights[VARIANCES])
        return upload

    federation.change_update = record
    outcome = federation.run()
    assert len(variances) == 3 * 7
    assert 0 < torch.stack(variances).min() < 0.1
    assert outcome.evaluation.overall["mse"] > 0


def test_buffers_of_the_next_model_are_the_mean_of_the_sites(bench: Any) -> None:
    method, names = bench.method("topk_ef", fraction=0.02), ["site-1", "site-2"]
    state, trained, updates = method.init(bench.weights, names), [], []
    for index, name in enumerate(names, start=1):
        request, site = method.ask(state, names)[name].request, bench.site(index)
        site.weights = state.weights.clone()
        trained.append(site.train(site.weights, request.trainable, method.config.training, 1)[BUFFERS])
        updates.append(contribute(name, method.answer(request, site)))
        assert not site.memory["residual"][BUFFERS].any()
    assert torch.allclose(method.learn(state, updates).weights[BUFFERS], sum(trained) / 2, atol=1e-7)


class Scaled(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(InputScaler([True] * 12), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 1))


def test_statistics_of_inputs_are_not_sent_again() -> None:
    """They are buffers that training does not change."""
    bench = ToyBench(Scaled())
    _, ledger = bench.run("topk_ef", fraction=0.1)
    sent = {line.scalars_sent for line in ledger.lines if line.kind == "train" and line.direction == "up"}
    assert sent == {int(0.1 * bench.layout.size)}


def test_invented_variances_do_not_reach_below_zero() -> None:
    federation = LocalFederation("topk_ef", ToyBench(Toy()), fraction=0.1)

    def invent(upload: Upload) -> Upload:
        if upload.site != "site-2" or upload.update.content != "delta":
            return upload
        invented = torch.zeros(LAYOUT.size).masked_fill(VARIANCES, -1e6)
        return upload.with_values(upload.update.patch.mask.take(upload.update.patch.to_vector() + invented))

    federation.change_update = invent
    # The bound on norms would reject the update.
    federation.rules = RoundRules(max_norm_ratio=None)
    outcome = federation.run()
    assert (outcome.weights[VARIANCES] >= 0).all()
    assert outcome.evaluation.overall["mse"] < float("inf")


def test_sent_entries_plus_residual_equal_the_delta_plus_the_previous_residual(bench: Any) -> None:
    method = bench.method("topk_ef", fraction=0.1)
    state, site = method.init(bench.weights, ["site-1"]), bench.site(1)
    residual = torch.zeros(bench.layout.size)
    for _ in range(3):
        request = method.ask(state, ["site-1"])["site-1"].request
        site.weights = state.weights.clone()
        delta = site.train(site.weights, request.trainable, method.config.training, request.round) - site.weights
        update = contribute("site-1", method.answer(request, site))
        sent = update.patch.mask.bits
        assert int(sent[PARAMETERS].sum()) == int(0.1 * bench.layout.size)
        assert sent[BUFFERS].all()
        assert torch.equal(update.patch.to_vector() + site.memory["residual"], delta + residual)
        residual = site.memory["residual"]
        state = method.learn(state, [update])


def test_sites_that_missed_a_round_receive_the_full_model(bench: Any) -> None:
    outcome, ledger = bench.run("topk_ef", fraction=0.05, participation=0.67, rounds=6)
    down = [line for line in ledger.lines if line.direction == "down" and line.kind == "train"]
    last_received: dict[str, int] = {}
    for line in down:
        is_current = last_received.get(line.site) == line.sequence - 1
        assert (line.scalars_sent < bench.layout.size) == is_current
        last_received[line.site] = line.sequence
    assert any(line.scalars_sent < bench.layout.size for line in down)
    assert outcome.rounds[-1].round == 7


def test_the_last_evaluation_sends_the_last_change_alone(bench: Any) -> None:
    outcome, ledger = bench.run("topk_ef", fraction=0.1, down=0.2, rounds=3)
    sent = {line.scalars_sent for line in ledger.lines if line.kind == "evaluate" and line.direction == "down"}
    assert sent == {int(0.2 * LAYOUT.size) + LAYOUT.size - LAYOUT.num_parameters}
    assert outcome.evaluation.overall["mse"] > 0


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**16), decay=st.sampled_from([1.0, 0.8, 0.5]))
def test_what_arrived_and_what_both_ends_keep_is_the_sum_of_all_deltas(seed: int, decay: float) -> None:
    """With decay: and what was decayed away. Rounds that a site loses for good, it starts over from its last memory."""
    bench, random = ToyBench(Plain()), np.random.default_rng(seed)
    federation = LocalFederation(
        "topk_ef", bench, rules=RoundRules(min_sites=2, retries=9), rounds=50, fraction=0.05, down=0.08, decay=decay,
        training={"optimizer": "sgd", "lr": 0.01, "epochs": 1},
    )  # fmt: skip
    deltas: dict[tuple[str, int], torch.Tensor] = {}
    arrived: dict[tuple[str, int], torch.Tensor] = {}
    residuals = {name: torch.zeros(bench.layout.size) for name in federation.sites}
    decayed = {name: torch.zeros(bench.layout.size) for name in federation.sites}
    kept: dict[tuple[str, int], torch.Tensor] = {}
    steps = torch.zeros(bench.layout.size, dtype=torch.float64)
    server_decayed = torch.zeros(bench.layout.size)

    def record_training(name: str, train: Any) -> Any:
        def record(weights: torch.Tensor, mask: Any, training: Any, t: int, **options: Any) -> torch.Tensor:
            trained = train(weights, mask, training, t, **options)
            deltas[name, t] = trained - weights
            return trained

        return record

    for name, site in federation.sites.items():
        site.train = record_training(name, site.train)  # type: ignore[method-assign]
    federation.is_silent = lambda site, attempt: bool(random.random() < 0.2)

    def change_message(upload: Upload) -> Upload | None:
        key = (upload.site, upload.request.round)
        kept[key] = upload.endpoint.site.memory.get("residual", torch.zeros(bench.layout.size)).clone()
        return None if random.random() < 0.15 else upload

    federation.change_message = change_message
    learn = federation.method.learn

    def record_step(state: Any, contributions: Any) -> Any:
        nonlocal server_decayed
        for contribution in contributions:
            key = (contribution.site, state.round)
            arrived[key] = contribution.patch.to_vector()
            decayed[contribution.site] += (1 - decay) * residuals[contribution.site]
            residuals[contribution.site] = kept[key]
        steps.add_(weighted_sum(contributions, weigh_by_examples))
        server_decayed = server_decayed + (1 - decay) * state.residual
        return learn(state, contributions)

    federation.method.learn = record_step  # type: ignore[method-assign]
    outcome = federation.run()
    assert len(outcome.rounds) == 51
    for name in federation.sites:
        own = [key for key in arrived if key[0] == name]
        assert 0 < len(own) < 50
        total = sum(deltas[key] for key in own)
        found = sum(arrived[key] for key in own) + residuals[name] + decayed[name]
        assert torch.allclose(found, total, atol=1e-5)
    final = outcome.weights - bench.weights + outcome.state.residual + server_decayed
    assert torch.allclose(final.double(), steps, atol=1e-5)


SERVER = {"optimizer": "momentum", "lr": 0.5, "beta1": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"server": SERVER}, {"server": {"lr": 0.5}}, {"model_average": {"kind": "swa"}}])
def test_server_step_and_model_average_are_those_of_fedavg_where_all_entries_travel(settings: Any) -> None:
    runs = {}
    for name, own in (("topk_ef", {"fraction": 1.0}), ("fedavg", {})):
        bench = ToyBench(Toy())
        runs[name] = LocalFederation(name, bench, rounds=4, training=TRAINING, **own, **settings).run()
    assert torch.allclose(runs["topk_ef"].weights, runs["fedavg"].weights, atol=1e-5)
    # Of the model that is delivered: of an average the sites hold no entry.
    mse = {name: outcome.evaluation.overall["mse"] for name, outcome in runs.items()}
    assert mse["topk_ef"] == pytest.approx(mse["fedavg"], rel=1e-4)


def test_momentum_moves_entries_that_no_site_sent(bench: Any) -> None:
    method = bench.method("topk_ef", fraction=0.02, server=SERVER)
    size = bench.layout.size
    first = torch.zeros(size)
    first[0] = 1.0
    state = method.init(torch.zeros(size), ["site-1"])
    for delta, expected in ((first, 0.5), (torch.zeros(size), 0.75)):
        patch = Patch.from_vector(delta, Mask(delta != 0))
        state = method.learn(state, [Contribution("site-1", patch, "delta", 10)])
        assert float(state.weights[0]) == expected
        assert state.changed.indices.tolist() == [0]


def test_budget_gives_the_shares_of_both_directions() -> None:
    """Each message has at most its share of the dense model's bytes, and most of it."""
    layout = Layout((TensorSpec("w", (100_000,), "weight"),))
    config = TopKEFConfig(budget=0.01).fit(layout, FORMATS["int2"])
    count = count_entries_within(4_000, layout.num_parameters, layout.size - layout.num_parameters, FORMATS["int2"])
    assert config.down == config.fraction
    assert TopKEF(config, layout).upload_size == count == 3_520


def test_what_is_kept_shrinks_with_the_learning_rate() -> None:
    """Also over rounds in which a site was not asked; a warm-up does not make it larger."""
    schedule = {"kind": "cosine", "warmup": 0.2}
    config = TopKEFConfig(decay="rate", rounds=10, training={"lr": 0.1, "schedule": schedule})
    rates = [config.get_training(t).lr for t in range(1, 11)]
    assert config.compute_decay(6, 5) == pytest.approx(rates[5] / rates[4])
    assert config.compute_decay(9, 4) == pytest.approx(rates[8] / rates[3])
    assert config.compute_decay(2, 1) == 1.0
    assert TopKEFConfig(decay="rate", training={"lr_decay": 0.5}).compute_decay(4, 2) == pytest.approx(0.25)
    layout = Layout((TensorSpec("w", (100_000,), "weight"),))
    fitted = [TopKEFConfig(budget=0.01, **own).fit(layout, FORMATS["int1"]).decay for own in ({}, {"decay": 1.0})]
    assert fitted == ["rate", 1.0]


def test_a_site_and_the_server_decay_what_they_kept_by_the_rates_of_its_rounds(bench: Any) -> None:
    method = bench.method("topk_ef", fraction=0.1, down=0.1, decay="rate", rounds=8, training=DECAYING)
    state, site = method.init(bench.weights, ["site-1"]), bench.site(1)
    site_kept = server_kept = torch.zeros(bench.layout.size)
    last = 1
    for t in range(1, 7):
        assert state.round == t
        if t in (2, 3):
            update = Contribution(
                "site-1", Patch.from_vector(torch.ones(bench.layout.size), Mask.full(bench.layout.size)), "delta", 1
            )
        else:
            request = method.ask(state, ["site-1"])["site-1"].request
            site.weights = state.weights.clone()
            delta = site.train(site.weights, request.trainable, method.config.get_training(t), t) - site.weights
            update = contribute("site-1", method.answer(request, site))
            expected = delta[PARAMETERS] + 0.5 ** (t - last) * site_kept[PARAMETERS]
            found = (update.patch.to_vector() + site.memory["residual"])[PARAMETERS]
            assert torch.allclose(found, expected, atol=1e-7)
            site_kept, last = site.memory["residual"], t
        before, state = state, method.learn(state, [update])
        step = (state.weights - before.weights + state.residual)[PARAMETERS]
        total = update.patch.to_vector()[PARAMETERS] + (0.5 * server_kept[PARAMETERS] if t > 1 else 0)
        assert torch.allclose(step, total, atol=1e-6)
        server_kept = state.residual


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0.01, "down": 0.1}, "budget gives the shares of both directions; remove it, or down"),
        ({"budget": 0.01, "down": 0.1, "fraction": 0.1}, "remove it, or down and fraction"),
    ],
)
def test_budget_beside_shares_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopKEFConfig(**settings)


def test_budget_below_a_header_is_refused() -> None:
    layout = Layout((TensorSpec("w", (1_000,), "weight"),))
    with pytest.raises(ConfigError, match=r"method.budget is 0.01, 40 bytes a message of this model.*raise it"):
        TopKEFConfig(budget=0.01).fit(layout, FORMATS["int2"])


def test_few_entries_of_adam_are_advised_against(bench: Any) -> None:
    def describe(fraction: float, optimizer: str) -> str:
        return bench.method("topk_ef", fraction=fraction, training={"optimizer": optimizer}).describe()

    assert describe(0.01, "adamw").startswith("adamw begins anew in every round")
    assert describe(0.01, "sgd") == describe(0.2, "adamw") == ""
