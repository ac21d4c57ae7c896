"""The initial model that both ends build: the first request does not carry it, and the run has the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_federation import LocalFederation, Upload
from torch import nn
from toy import Plain, Toy, ToyBench

from flare_sparse.inputs.scaling import InputScaler, build_statistics_mask
from flare_sparse.rounds.endpoints.plans import InitialModel
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.dry_run import DryTrainer, dry_run
from flare_sparse.rounds.local.run import Transport, run_locally
from flare_sparse.training import Site
from flare_sparse.wire.formats import FORMATS
from flare_sparse.wire.ledger import Ledger


class Scaled(Toy):
    def model(self) -> nn.Module:
        return nn.Sequential(InputScaler([True] * 12), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 1))


def run(bench: ToyBench, name: str, values: Any = "float32", *, built: bool, **settings: Any) -> tuple[Outcome, Ledger]:
    method = bench.method(name, rounds=3, short=built and FORMATS[values].sends_differences, **settings)
    transport = Transport(values, builds_initial=built)
    return run_locally(method, bench.weights, bench.sites(), bench.task.metric, transport=transport)


def build(bench: ToyBench, values: Any = "float32", method: str = "topk_ef", **options: Any) -> LocalFederation:
    """Return a federation whose sites build the initial model."""
    federation = LocalFederation(method, bench, values=values, rounds=3, **options)
    for endpoint in federation.endpoints.values():
        endpoint.initial = InitialModel(bench.weights.clone(), bench.layout)
    return federation


def list_sent(ledger: Ledger, t: int = 1) -> list[int]:
    lines = [line for line in ledger.lines if line.direction == "down" and line.kind != "statistics"]
    return [line.scalars_sent for line in lines if line.sequence == lines[0].sequence + t - 1]


@pytest.mark.slow
@pytest.mark.parametrize("task", [Plain, Scaled, Toy])
@pytest.mark.parametrize("name", ["fedavg", "topk_ef", "neurosfl"])
@pytest.mark.parametrize("values", ["float32", "float32_zstd"])
def test_runs_have_the_bits_of_those_whose_first_request_has_the_model(task: Any, name: str, values: Any) -> None:
    bench = ToyBench(task())
    (sent, sent_ledger), (built, built_ledger) = (run(bench, name, values, built=flag) for flag in (False, True))
    assert torch.equal(sent.weights, built.weights)
    assert [record.evaluation for record in sent.rounds] == [record.evaluation for record in built.rounds]
    statistics = build_statistics_mask(bench.layout).count
    assert list_sent(sent_ledger) == [bench.layout.size] * 3
    assert list_sent(built_ledger) == [statistics] * 3
    assert list_sent(built_ledger, 2) == list_sent(sent_ledger, 2)


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "bfloat16", "int8", "int2"])
def test_estimate_has_the_bytes_of_the_first_request(values: Any) -> None:
    bench = ToyBench(Toy() if values == "bfloat16" else Scaled())
    _, ledger = run(bench, "fedavg", values, built=True)
    method = bench.method("fedavg", rounds=3)
    dry_sites = {name: Site(name, DryTrainer(name, bench.layout)) for name in bench.sites()}
    _, dry = dry_run(method, bench.weights, dry_sites, Transport(values, builds_initial=True))
    estimated = {(line.kind, line.round, line.direction, line.site): line.payload_bytes for line in dry.lines}
    assert len(estimated) == len(ledger.lines)
    for line in ledger.lines:
        # Values decide how far statistics compress.
        if line.values != "float32_zstd":
            assert line.payload_bytes == estimated[line.kind, line.round, line.direction, line.site]


@pytest.mark.slow
@pytest.mark.parametrize("values", ["int8", "int2"])
def test_statistics_travel_compressed_and_without_their_rests(values: Any) -> None:
    bench = ToyBench(Scaled())
    mask = build_statistics_mask(bench.layout)
    (sent, sent_ledger), (built, built_ledger) = (run(bench, "fedavg", values, built=flag) for flag in (False, True))
    exact, short = (mask.take(outcome.weights).reshape(5, -1) for outcome in (sent, built))
    assert exact[2::2].any(), "the rests that the test is about"
    assert not short[2::2].any()
    assert torch.allclose(short, exact, rtol=2**-22, atol=1e-6)
    formats = {
        (line.kind, line.direction, line.values)
        for line in built_ledger.lines
        if line.scalars_sent and line.round < 2 and line.kind != "evaluate"
    }
    assert formats == {
        ("statistics", "up", "float32_zstd"), ("train", "down", "float32_zstd"), ("train", "up", values)
    }  # fmt: skip
    assert "float32_zstd" not in {line.values for line in sent_ledger.lines}


def test_site_with_another_model_receives_all_of_it() -> None:
    bench = ToyBench(Scaled())
    federation = build(bench)
    other = federation.endpoints["site-2"]
    other.initial = InitialModel(bench.weights + 1, bench.layout)
    federation.run(handshake=federation.build_hellos)
    own = build_statistics_mask(bench.layout).count
    assert list_sent(federation.ledger) == [own, bench.layout.size, own]


@pytest.mark.parametrize("values", ["float32", "bfloat16", "int2"])
def test_site_that_no_longer_has_its_model_asks_for_everything(values: Any) -> None:
    """``LocalFederation`` compares the vectors of both ends after every message."""
    bench = ToyBench(Plain())
    federation = build(bench, values, rules=RoundRules(min_sites=3))
    hellos = federation.build_hellos(federation.list_sites())
    federation.endpoints["site-2"].initial = None
    federation.run(handshake=lambda names: hellos)
    assert list_sent(federation.ledger) == [0, 0, 0]
    assert list_sent(federation.ledger, 2) == [bench.layout.size], "site-2, in the same round"
    assert len(federation.records) == 4


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "int2"])
@pytest.mark.parametrize("task", [Plain, Scaled])
def test_lost_messages_of_the_first_round_do_not_change_the_run(values: Any, task: Any) -> None:
    bench = ToyBench(task())
    undisturbed = build(bench, values).run(handshake=lambda names: build(bench).build_hellos(names))
    federation = build(bench, values, rules=RoundRules(min_sites=3, retries=4))
    lost = {"site-1": 2, "site-3": 1}

    def lose(upload: Upload) -> Upload | None:
        if upload.request.round != 1 or not lost.get(upload.site):
            return upload
        lost[upload.site] -= 1
        return None

    federation.change_message = lose
    outcome = federation.run(handshake=federation.build_hellos)
    assert not any(lost.values())
    assert torch.equal(outcome.weights, undisturbed.weights)
