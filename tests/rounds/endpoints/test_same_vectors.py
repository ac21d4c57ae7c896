"""Sites that miss rounds read what the server believes that they read, in every quantized format.

``LocalFederation`` compares the vectors of both ends after every message.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from local_federation import LocalFederation
from toy import Plain, ToyBench

from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.link import KEPT_VECTORS
from flare_sparse.wire.envelope import Header, read_header
from flare_sparse.wire.plan import NO_NAME


@pytest.mark.slow
@pytest.mark.parametrize("values", ["int8", "int4", "int2", "int1"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("fedavg", {}), ("fedsparsify", {"sparsity": 0.5}), ("neurosfl", {"sparsity": 0.5}), ("topk_ef", {})],
)
def test_both_ends_hold_the_same_vectors_where_sites_take_part_in_some_rounds(
    name: str, settings: dict[str, Any], values: Any
) -> None:
    bench = ToyBench(Plain())
    federation = LocalFederation(name, bench, sites=4, values=values, rounds=5, participation=0.6, **settings)
    assert len(federation.run().rounds) >= 5


@pytest.mark.slow(rows=6)
@pytest.mark.parametrize("values", ["bfloat16", "float16", "int8", "int4", "int2"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {}),
        ("fedsparsify", {"sparsity": 0.5}),
        ("neurosfl", {"sparsity": 0.5}),
        ("scbf", {"rate": 0.5}),
        ("topk_ef", {"fraction": 0.1, "down": 0.1}),
    ],
)
def test_models_of_the_outcome_are_those_that_the_sites_evaluated(
    name: str, settings: dict[str, Any], values: Any
) -> None:
    """Also if a site missed a round, and so holds another vector than the others."""
    bench = ToyBench(Plain(), validation=8)
    rules = RoundRules(min_sites=1, retries=0)
    federation = LocalFederation(name, bench, sites=4, values=values, rounds=5, rules=rules, **settings)
    federation.is_silent = lambda site, attempt: (site, attempt.round) == ("site-2", 4)
    outcome = federation.run()
    best = outcome.best.model.to_vector()
    for weights, evaluation in ((outcome.weights, outcome.evaluation), (best, outcome.best.evaluation)):
        found = {site: federation.sites[site].evaluate(weights) for site in evaluation.sites}
        assert found == evaluation.sites


def test_site_that_missed_one_round_gets_a_difference_of_its_own() -> None:
    federation = LocalFederation(sites=3, values="int2", rounds=4, rules=RoundRules(min_sites=1, retries=0))
    buffers: dict[int, int] = {}

    def is_silent(site: str, attempt: Attempt) -> bool:
        buffers[attempt.round] = len({id(message) for message in attempt.messages.values()})
        return (site, attempt.round) == ("site-2", 2)

    federation.is_silent = is_silent
    federation.run()
    assert buffers == {1: 1, 2: 1, 3: 2, 4: 2, 5: 2}


@pytest.mark.slow
def test_server_keeps_a_bounded_number_of_vectors_and_messages_however_many_sites_miss_rounds() -> None:
    federation = LocalFederation(sites=8, values="int4", rounds=6, rules=RoundRules(min_sites=1, retries=0))
    random, kept = np.random.default_rng(5), []

    def is_silent(site: str, attempt: Attempt) -> bool:
        kept.append(len({id(message) for message in attempt.messages.values()}))
        return bool(random.random() < 0.5)

    federation.is_silent = is_silent
    federation.run()
    assert 1 < max(kept) <= KEPT_VECTORS + 1, "one more for the sites that receive the full model"


def test_requests_over_a_base_say_that_they_are_weights() -> None:
    """A difference would be rounded to other values: the model of a run with few bits would have other bits."""
    federation = LocalFederation("topk_ef", ToyBench(Plain()), values="int2", rounds=3, down=0.1)
    headers: list[Header] = []
    deliver = federation.deliver

    def watch(attempt: Attempt) -> Any:
        headers.extend(read_header(message) for message in attempt.messages.values())
        return deliver(attempt)

    federation.deliver = watch  # type: ignore[method-assign]
    federation.run()
    # Code 0 is weights (docs/wire-format.md).
    assert {header.content for header in headers} == {0}
    # The first is a whole model.
    assert [header.base == NO_NAME for header in headers[:4]] == [True, True, True, False]
