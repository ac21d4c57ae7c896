"""Bad input, section 3: the number of examples that stands beside a message and becomes a site's weight."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from flare_sparse.federation import RoundRules
from flare_sparse.params import compute_digest
from flare_sparse.wire.encodings import ENCODINGS

every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)


def claiming(*numbers: Any) -> list[Any]:
    return [("E_WEIGHT", lambda sent, n=n: replace(sent, examples=n)) for n in numbers]


@every_encoding
def test_row_30_no_number_of_examples(wire: Any, encoding: str) -> None:
    """Missing, text, a truth value, NaN, infinity, other types; a whole number of 10,000 digits is not printed."""
    nan, infinite = float("nan"), float("inf")
    wire.refuses(*claiming(None, "32", b"32", True, nan, infinite, -infinite, 32.0, Decimal(32), np.int64(32), [32]))
    wire.refuses(*claiming(10**10_000))


@every_encoding
def test_row_31_no_examples_abstain(wire: Any, encoding: str) -> None:
    """Weight 0 is no fault: the site is counted as abstaining, and nothing is divided by its 0."""
    outcome, _ = wire.play(lambda t, sent: replace(sent, examples=0))
    assert all(record.abstained == ["site-2"] and record.rejected == {} for record in outcome.rounds[:-1])
    assert all(record.is_balanced for record in outcome.rounds)
    assert compute_digest(outcome.weights) == wire.without()


@every_encoding
def test_row_32_fewer_than_no_examples(wire: Any, encoding: str) -> None:
    wire.refuses(*claiming(-1, -(2**62), -0.0))


@every_encoding
def test_row_33_more_examples_than_can_be(wire: Any, encoding: str) -> None:
    """1e30 is no whole number, 10**30 beyond any; what may be is held to what the site registered, and to its share."""
    wire.refuses(*claiming(1e30, 10**30, 2**53))
    outcome, _ = wire.play(lambda t, sent: replace(sent, examples=2**52) if t > 1 else sent, rounds=3)
    assert [record.rejected for record in outcome.rounds] == [{}, *[{"site-2": "E_WEIGHT"}] * 2, {}]
    silent, _ = wire.play(lambda t, sent: sent if t == 1 else None, rounds=3)
    assert compute_digest(outcome.weights) == compute_digest(silent.weights)
    rules = RoundRules(max_share=0.5, quarantine_after=0)
    capped, _ = wire.play(lambda t, sent: replace(sent, examples=2**52), rules=rules)
    assert all(record.capped == {"site-2": 64} for record in capped.rounds[:-1])
    fair, _ = wire.play(lambda t, sent: replace(sent, examples=64))
    assert compute_digest(capped.weights) == compute_digest(fair.weights)
    agreed = RoundRules(examples={"site-2": 32}, quarantine_after=0)
    told, _ = wire.play(lambda t, sent: replace(sent, examples=2**52), rules=agreed)
    assert [record.rejected for record in told.rounds] == [*[{"site-2": "E_WEIGHT"}] * 2, {}]
    assert compute_digest(told.weights) == wire.without()


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
    "too many": {f"m{i}": 1.0 for i in range(65)},
}


@every_encoding
def test_metrics_that_cannot_be_averaged(wire: Any, encoding: str) -> None:
    """Beside the catalogue: metrics are weighted by a site's own number of test examples, and must not end the job."""
    wire.refuses(
        *(("E_METRICS", lambda sent, wrong=wrong: replace(sent, metrics=wrong)) for wrong in WRONG_METRICS.values())
    )
