"""The estimate of every number format against the ledger of a run: exact, or bounds that no run leaves."""

from __future__ import annotations

from typing import Any

import pytest
import toy

from flare_sparse.privacy.secure_aggregation.limits import SumRules
from flare_sparse.rounds.local.dry_run import DryTrainer, dry_run
from flare_sparse.rounds.local.estimate import CERTIFICATES_REASON, BytesRange, bound_messages
from flare_sparse.rounds.local.run import Transport, run_locally
from flare_sparse.training import Site
from flare_sparse.wire.ledger import LedgerLine

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedsparsify": ("fedsparsify", {"sparsity": 0.8}),
    "neurosfl": ("neurosfl", {"sparsity": 0.8, "scores": "random"}),
    "top-k": ("topk_ef", {"fraction": 0.1}),
    "top-k both ways": ("topk_ef", {"fraction": 0.1, "down": 0.2, "decay": 0.8}),
}
KEY_MESSAGES = {("keys", "up"), ("shares", "down")}


def identify(line: LedgerLine) -> tuple[int, str, str]:
    return line.round, line.site, line.direction


@pytest.mark.slow
@pytest.mark.parametrize("values", ["int8", "int4", "int2", "float32_zstd", "bfloat16_zstd"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("task", ["Plain", "Toy"])
def test_every_message_lies_within_its_estimate(task: str, name: str, values: Any) -> None:
    bench = toy.ToyBench(getattr(toy, task)())
    method = bench.method(METHODS[name][0], rounds=3, **METHODS[name][1])
    dry_sites = {site: Site(site, DryTrainer(site, bench.layout)) for site in bench.sites()}
    _, dry = dry_run(method, bench.weights, dry_sites, values)
    estimates: dict[tuple[int, str, str], BytesRange] = {
        identify(line): size for line, size, _ in bound_messages(method, dry.lines, dry_sites)
    }
    _, ledger = run_locally(method, bench.weights, bench.sites(), bench.task.metric, transport=Transport(values=values))
    assert {identify(line) for line in ledger.lines} == set(estimates)
    for line in ledger.lines:
        size = estimates[identify(line)]
        assert size.least <= line.payload_bytes <= size.most
        assert line.floor_bytes <= line.payload_bytes
    if values.startswith("int") and name in ("fedavg", "neurosfl"):
        assert all(size.is_exact for size in estimates.values())
        assert sum(line.payload_bytes for line in ledger.lines) == sum(size.typical for size in estimates.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedsparsify", "neurosfl"])
def test_every_message_of_a_masked_run_lies_within_its_estimate(name: str) -> None:
    """Certificates of a federation have another length than those of a run on one machine."""
    bench, rules = toy.ToyBench(toy.Toy()), SumRules(64.0)
    method = bench.method(name, rounds=2, **METHODS[name][1])
    dry_sites = {site: Site(site, DryTrainer(site, bench.layout)) for site in bench.sites()}
    _, dry = dry_run(method, bench.weights, dry_sites, "float32", sum_rules=rules)
    bounds = list(bound_messages(method, dry.lines, dry_sites))
    sizes = [size for _, size, _ in bounds]
    _, ledger = run_locally(
        method, bench.weights, bench.sites(), bench.task.metric, transport=Transport(sum_rules=rules)
    )
    assert [(line.site, line.direction, line.encoding) for line in ledger.lines if line.values == "masked"] == [
        (line.site, line.direction, line.encoding) for line in dry.lines if line.values == "masked"
    ]
    assert all(size.least <= line.payload_bytes <= size.most for line, size in zip(ledger.lines, sizes, strict=True))
    assert any(size.is_exact and line.values == "masked" for line, size in zip(dry.lines, sizes, strict=True))
    # Here the certificates are those of the dry run, so that the typical figures are the ledger's; elsewhere they are
    # not, and the estimate says so.
    assert sum(line.payload_bytes for line in ledger.lines) == sum(size.typical for size in sizes)
    with_keys = [reason for line, _, reason in bounds if (line.encoding, line.direction) in KEY_MESSAGES]
    assert set(with_keys) == {CERTIFICATES_REASON}
    assert all(reason != CERTIFICATES_REASON for line, _, reason in bounds if line.values != "masked")
