"""Bad input, section 3: the number of examples, which travels beside a message and becomes a site's weight."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from flare_sparse.core.params import compute_digest
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.encodings import ENCODINGS

every_encoding = pytest.mark.parametrize("encoding", list(ENCODINGS))


def claim_examples(*numbers: Any) -> list[Any]:
    return [("E_WEIGHT", lambda sent, n=n: replace(sent, examples=n)) for n in numbers]


@pytest.mark.slow
@every_encoding
@pytest.mark.row(30)
def test_examples_must_be_an_integer(wire: Any, encoding: str) -> None:
    """Missing, text, bool, NaN, infinity and other types are rejected; an integer of 10,000 digits is not printed."""
    nan, infinite = float("nan"), float("inf")
    wire.assert_rejects(
        *claim_examples(None, "32", b"32", True, nan, infinite, -infinite, 32.0, Decimal(32), np.int64(32), [32])
    )
    wire.assert_rejects(*claim_examples(10**10_000))


@every_encoding
@pytest.mark.row(31)
def test_site_without_examples_abstains(wire: Any, encoding: str) -> None:
    """Zero examples are valid: the site abstains and no sum is divided by zero."""
    outcome, _ = wire.run(lambda t, sent: replace(sent, examples=0))
    assert all(record.abstained == ["site-2"] and record.rejected == {} for record in outcome.rounds[:-1])
    assert all(record.is_balanced for record in outcome.rounds)
    assert compute_digest(outcome.weights) == wire.compute_digest_without_site()


@every_encoding
@pytest.mark.row(32)
def test_negative_examples_are_rejected(wire: Any, encoding: str) -> None:
    wire.assert_rejects(*claim_examples(-1, -(2**62), -0.0))


@pytest.mark.slow
@every_encoding
@pytest.mark.row(33)
def test_examples_are_bounded_by_registration_and_max_share(wire: Any, encoding: str) -> None:
    """1e30 is no integer, 10**30 too large; valid numbers are bounded by the registered one and ``max_share``."""
    wire.assert_rejects(*claim_examples(1e30, 10**30, 2**53))
    outcome, _ = wire.run(lambda t, sent: replace(sent, examples=2**52) if t > 1 else sent, rounds=3)
    assert [record.rejected for record in outcome.rounds] == [{}, *[{"site-2": "E_WEIGHT"}] * 2, {}]
    silent, _ = wire.run(lambda t, sent: sent if t == 1 else None, rounds=3)
    assert compute_digest(outcome.weights) == compute_digest(silent.weights)
    rules = RoundRules(max_share=0.5, quarantine_after=0)
    capped, _ = wire.run(lambda t, sent: replace(sent, examples=2**52), rules=rules)
    assert all(record.capped == {"site-2": 64} for record in capped.rounds[:-1])
    fair, _ = wire.run(lambda t, sent: replace(sent, examples=64))
    assert compute_digest(capped.weights) == compute_digest(fair.weights)
    agreed = RoundRules(examples={"site-2": 32}, quarantine_after=0)
    outcome, _ = wire.run(lambda t, sent: replace(sent, examples=2**52), rules=agreed)
    assert [record.rejected for record in outcome.rounds] == [*[{"site-2": "E_WEIGHT"}] * 2, {}]
    assert compute_digest(outcome.weights) == wire.compute_digest_without_site()


WRONG_METRICS: dict[str, Any] = {
    "NaN": {"mse": float("nan")},
    "text": "good",
    "no name": {3: 1.0},
    "truth": {"mse": True},
    "beyond float32": {"mse": 1e300},
    "a number of 10,000 digits": {"mse": 10**10_000},
    "weight 0": {"mse": 1.0, "test_examples": 0},
    "weight below 0": {"mse": 1.0, "test_examples": -32},
    "weight 1e30": {"mse": 1.0, "test_examples": 1e30},
    "too many": {f"m{i}": 1.0 for i in range(1025)},
}


@pytest.mark.slow
@every_encoding
def test_metrics_that_cannot_be_averaged_are_rejected(wire: Any, encoding: str) -> None:
    """Not in the table: metrics are weighted by each site's number of test examples and must not end the job."""
    wire.assert_rejects(
        *(("E_METRICS", lambda sent, wrong=wrong: replace(sent, metrics=wrong)) for wrong in WRONG_METRICS.values())
    )
