"""What holds for every method, and that a new one needs no change in shared code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flare_sparse.checkpoint.packing import pack, unpack
from flare_sparse.exchange import Assignment, Patch, Request, Update, UpdateSpec
from flare_sparse.local.dry_run import estimate
from flare_sparse.local.run import run_locally
from flare_sparse.methods import METHODS, Method
from flare_sparse.methods.method import broadcast
from flare_sparse.params import compute_digest


def _saved_and_restored(state: Any) -> Any:
    """A copy through JSON and tensors, as a checkpoint makes it."""
    tensors: dict[str, torch.Tensor] = {}
    said = json.loads(json.dumps(pack(state, tensors)))
    return unpack(said, type(state), {name: tensor.clone() for name, tensor in tensors.items()})


class Restarting:
    """A method whose state goes to disk and back between all verbs."""

    def __init__(self, method: Method[Any]):
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def ask(self, state: Any, sites: Sequence[str]) -> Any:
        return self._method.ask(_saved_and_restored(state), sites)

    def planned(self, able: Any) -> Restarting:
        return Restarting(self._method.configured_for(able))

    def learn(self, state: Any, updates: Sequence[Update]) -> Any:
        return _saved_and_restored(self._method.learn(_saved_and_restored(state), updates))


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_bits_in_any_order_of_sites(name: str, bench: Any) -> None:
    backwards = dict(reversed(bench.sites().items()))
    assert bench.compute_digest(name) == bench.compute_digest(name) == bench.compute_digest(name, backwards)


@pytest.mark.parametrize("name", METHODS)
def test_state_is_a_value(name: str, bench: Any) -> None:
    """Frozen, of plain values, and a run that is saved and restored between all verbs ends with the same bits."""
    method = bench.method(name)
    state = method.init(bench.weights, ["site-1", "site-2", "site-3"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.weights = bench.weights
    restarted, _ = run_locally(Restarting(method), bench.weights, bench.sites(), bench.task.metric)  # type: ignore[arg-type]
    assert compute_digest(restarted.weights) == bench.compute_digest(name)


@pytest.mark.parametrize("name", METHODS)
def test_every_round_is_committed_and_every_message_costs_at_least_its_floor(name: str, bench: Any) -> None:
    outcome, ledger = bench.run(name)
    assert outcome.evaluation.sites.keys() == {"site-1", "site-2", "site-3"}
    assert all(record.sites_contributed == ["site-1", "site-2", "site-3"] for record in outcome.rounds)
    assert all(line.payload_bytes >= line.floor_bytes + 128 for line in ledger.lines)
    assert len(ledger.lines) == 6 * len(outcome.rounds)


@pytest.mark.parametrize("name", METHODS)
def test_one_site_works_and_a_site_without_training_examples_is_left_out(name: str, bench: Any) -> None:
    bench.run(name, {"site-1": bench.site(1)})
    idle = {**bench.sites(2), "site-3": bench.site(3, 0)}
    outcome, _ = bench.run(name, idle)
    training = [record for record in outcome.rounds if record.kind == "train"]
    assert all(record.abstained == ["site-3"] for record in training)


DATA_DECIDES = {"topk_ef", "scbf", "scbfwp", "fawp", "dssgd"}
"""Methods whose messages have other sizes for other data: what changed, which channels, which units are left."""


@pytest.mark.parametrize("name", sorted(METHODS.keys() - DATA_DECIDES))
def test_a_dry_run_sends_what_a_real_one_sends(name: str, bench: Any) -> None:
    """The estimate's messages carry as many scalars as the real ones."""
    _, real = bench.run(name)
    _, dry = estimate(bench.method(name), bench.weights, 3, "float32")
    size = [(line.kind, line.direction, line.scalars_sent) for line in real.lines]
    assert [(line.kind, line.direction, line.scalars_sent) for line in dry.lines] == size


@dataclasses.dataclass(frozen=True)
class Votes:
    round: int
    total: torch.Tensor


class Ballot(Method[Votes]):
    """A toy method: its module, its line in METHODS, its test, its YAML, and nothing else."""

    name = "ballot"

    def init(self, weights: torch.Tensor, sites: Sequence[str]) -> Votes:
        return Votes(1, torch.zeros_like(weights))

    def ask(self, state: Votes, sites: Sequence[str]) -> dict[str, Request] | None:
        if state.round > self.config.rounds:
            return None
        return broadcast(
            sites, Assignment(Request("vote", state.round, self.model(state), self.full_mask), UpdateSpec("delta"))
        )

    def answer(self, request: Request, site: Any) -> Update:
        return Update(Patch.from_vector(torch.ones(site.layout.size), request.trainable), "delta", site.num_examples)

    def learn(self, state: Votes, updates: Sequence[Update]) -> Votes:
        votes = sum((update.patch.values for update in updates), torch.zeros(self.layout.size))
        return Votes(state.round + 1, state.total + votes)

    def model(self, state: Votes) -> Patch:
        return Patch.from_vector(state.total, self.full_mask)


def test_a_new_method_runs_from_a_configuration_without_touching_shared_code(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from flare_sparse.config import build_method, load_config

    monkeypatch.setitem(METHODS, Ballot.name, Ballot)
    file = tmp_path / "ballot_brain_age.yaml"
    file.write_text("name: ballot\nmethod: {name: ballot, rounds: 4}\ntask: {name: brain_age}\n")
    method = build_method(load_config(file), bench.layout)
    outcome, _ = run_locally(method, bench.weights, bench.sites(), bench.task.metric)
    assert outcome.weights.tolist() == [12.0] * bench.layout.size
