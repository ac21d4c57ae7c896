"""Properties of every method; a new one needs no change in shared code."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from toy import estimate_traffic

from flare_sparse.config.policy.initial import find_changed_tensor
from flare_sparse.core.checkpoint.packing import pack, unpack
from flare_sparse.core.exchange import Patch, Request, Update
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.method import Method, MethodConfig
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.support.masks import unite_masks
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.local.run import run_locally


def save_and_restore(state: Any) -> Any:
    """Return a copy through JSON and tensors, as a checkpoint makes it."""
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(state, tensors)))
    return unpack(packed, type(state), {name: tensor.clone() for name, tensor in tensors.items()})


INDIVIDUAL = {"scores": "individual_snip", "sparsity": 0.6}


class Restarting:
    """A method whose state is saved and restored around every call."""

    def __init__(self, method: Method[Any, Any]):
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def ask(self, state: Any, sites: Sequence[str]) -> Any:
        return self._method.ask(save_and_restore(state), sites)

    def configure_for(self, capabilities: Any) -> Restarting:
        return Restarting(self._method.configure_for(capabilities))

    def learn(self, state: Any, updates: Sequence[Update]) -> Any:
        return save_and_restore(self._method.learn(save_and_restore(state), updates))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_same_seed_gives_the_same_bits_in_any_order_of_sites(name: str, bench: Any) -> None:
    backwards = dict(reversed(bench.sites().items()))
    assert bench.compute_digest(name) == bench.compute_digest(name) == bench.compute_digest(name, backwards)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_state_is_frozen_and_can_be_saved_around_every_call(name: str, bench: Any) -> None:
    """It is frozen, and a run whose state is saved and restored around every call ends with the same bits."""
    method = bench.method(name)
    state = method.init(bench.weights, ["site-1", "site-2", "site-3"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.weights = bench.weights
    restarting: Any = Restarting(method)
    restarted, _ = run_locally(restarting, bench.weights, bench.sites(), bench.task.metric)
    assert compute_digest(restarted.weights) == bench.compute_digest(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_round_is_committed_and_every_message_costs_at_least_its_floor(name: str, bench: Any) -> None:
    outcome, ledger = bench.run(name)
    assert outcome.evaluation.sites.keys() == {"site-1", "site-2", "site-3"}
    assert all(record.sites_contributed == ["site-1", "site-2", "site-3"] for record in outcome.rounds)
    assert all(line.payload_bytes >= line.floor_bytes + 128 for line in ledger.lines)
    assert len(ledger.lines) == 6 * len(outcome.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_one_site_is_enough_and_a_site_without_training_examples_abstains(name: str, bench: Any) -> None:
    bench.run(name, {"site-1": bench.site(1)})
    idle = {**bench.sites(2), "site-3": bench.site(3, 0)}
    outcome, _ = bench.run(name, idle)
    training = [record for record in outcome.rounds if record.kind == "train"]
    assert all(record.abstained == ["site-3"] for record in training)
    # It evaluates the models that the others evaluate: none while scores are exchanged.
    assert all(set(map(bool, record.evaluation.sites.values())) <= {True} for record in outcome.rounds)
    if name != "local_only":
        assert training
    else:  # it has no rounds of training; the idle site evaluates the initial model, the others have trained
        evaluated, initial = outcome.evaluation.sites, {n: site.evaluate(bench.weights) for n, site in idle.items()}
        assert not training
        assert {n for n in idle if evaluated[n] == initial[n]} == {"site-3"}


class Witness(Restarting):
    """A method whose every next state is compared with the one before it."""

    def configure_for(self, capabilities: Any) -> Witness:
        return Witness(self._method.configure_for(capabilities))

    def learn(self, state: Any, updates: Sequence[Any]) -> Any:
        following = self._method.learn(state, updates)
        before, after = self._method.model(state), self._method.model(following)
        sent = unite_masks(update.patch.mask for update in updates)
        kept = (before.mask & after.mask) - sent
        assert torch.equal(kept.take(before.to_vector()), kept.take(after.to_vector()))
        return following


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in METHODS), ("neurosfl", INDIVIDUAL)])
def test_entry_that_no_site_sent_keeps_its_value(name: str, settings: dict[str, Any], bench: Any) -> None:
    sites = bench.sites()
    train, rounds = sites["site-2"].trainer.train, iter([True, False])

    def miss_a_round(training: Any) -> torch.Tensor:
        if training.round > 1 and next(rounds, False):
            raise RuntimeError("the site's machine is away")
        return train(training)

    sites["site-2"].trainer.train = miss_a_round
    witness: Any = Witness(bench.method(name, **settings))
    outcome, _ = run_locally(witness, bench.weights, sites, bench.task.metric)
    assert outcome.rounds


DATA_DECIDES = {"topk_ef", "scbf", "scbfwp", "fawp", "dssgd"}
"""Methods whose message sizes depend on the data: what changed, which channels, which units remain."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.keys() - DATA_DECIDES))
def test_dry_run_sends_the_bytes_of_a_real_run(name: str, bench: Any) -> None:
    """The estimated messages carry as many scalars as the real ones."""
    _, real = bench.run(name)
    _, dry = estimate_traffic(bench.method(name), bench.weights, 3, "float32")
    sizes = [(line.kind, line.direction, line.scalars_sent) for line in real.lines]
    assert [(line.kind, line.direction, line.scalars_sent) for line in dry.lines] == sizes


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_first_model_of_every_method_is_the_initial_one(name: str, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = SiteEndpoint.receive
    checked: list[str | None] = []

    def check(endpoint: SiteEndpoint, *arguments: Any) -> Any:
        request = receive(endpoint, *arguments)
        if endpoint.method.sends_initial_model(request.kind, request.round):
            site = endpoint.site
            assert site.live_patch is not None
            checked.append(
                find_changed_tensor(site.weights, bench.weights, site.live_patch.mask, site.layout, endpoint.values)
            )
        return request

    monkeypatch.setattr(SiteEndpoint, "receive", check)
    bench.run(name)
    assert set(checked) == ({None} if name != "local_only" else set())


@dataclasses.dataclass(frozen=True)
class Votes:
    round: int
    total: torch.Tensor


class Ballot(Method[MethodConfig, Votes]):
    """A toy method: its module, its line in METHODS, its test, its YAML, and nothing else."""

    name = "ballot"
    update_content = "delta"

    def init(self, weights: torch.Tensor, sites: Sequence[str]) -> Votes:
        return Votes(1, torch.zeros_like(weights))

    def answer(self, request: Request, site: Any) -> Update:
        return Update(
            Patch.from_vector(torch.ones(site.layout.size), request.trainable), self.update_content, site.num_examples
        )

    def learn(self, state: Votes, updates: Sequence[Update]) -> Votes:
        votes = sum((update.patch.values for update in updates), torch.zeros(self.layout.size))
        return Votes(state.round + 1, state.total + votes)

    def model(self, state: Votes) -> Patch:
        return Patch.from_vector(state.total, Mask.full(self.layout.size))


def test_new_method_runs_from_a_configuration_without_changes_to_shared_code(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from flare_sparse.config.loading import build_method, load_config

    monkeypatch.setitem(METHODS, Ballot.name, Ballot)
    file = tmp_path / "ballot_brain_age.yaml"
    file.write_text("name: ballot\nmethod: {name: ballot, rounds: 4}\ntask: {name: brain_age}\n")
    method = build_method(load_config(file), bench.layout)
    outcome, _ = run_locally(method, bench.weights, bench.sites(), bench.task.metric)
    assert outcome.weights.tolist() == [12.0] * bench.layout.size


def test_example_of_the_docs_runs(bench: Any) -> None:
    """docs/new-method.md: a third of the entries train in a round, and the model is sent whole."""
    page = (Path(__file__).parents[2] / "docs/new-method.md").read_text(encoding="utf-8")
    source = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    module = ModuleType("docs_example")
    sys.modules[module.__name__] = module
    exec(source, module.__dict__)
    method = module.RandomMasks(module.Config(rounds=2, density=1 / 3), bench.layout, 1)
    outcome, ledger = run_locally(method, bench.weights, bench.sites(), bench.task.metric)
    sent = {(line.direction, line.scalars_sent) for line in ledger.lines if line.kind == "train"}
    assert sent == {("down", bench.layout.size), ("up", bench.layout.size // 3)}
    assert not torch.equal(outcome.weights, bench.weights)
