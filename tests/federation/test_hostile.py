"""Two of eight sites are hostile: what is refused, what a robust rule holds, and what nobody can promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import toy

from flare_sparse.endpoints.server import ServerEndpoint
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.errors import WireError
from flare_sparse.exchange import Patch, Update
from flare_sparse.federation import Federation, Outcome, RoundRules
from flare_sparse.params import compute_digest
from flare_sparse.wire.ledger import Ledger

RUN, HOSTILE = "0" * 16, ("site-3", "site-6")
MEDIAN = {"aggregation": {"rule": "median"}}
Attack = Callable[[Update, torch.Tensor], tuple[Update, Any]]


def values(update: Update, new: torch.Tensor) -> Update:
    return replace(update, patch=Patch(new, update.patch.mask))


ATTACKS: dict[str, Attack] = {
    "NaN": lambda u, start: (values(u, torch.full_like(u.patch.values, float("nan"))), u.num_examples),
    "x 1e6": lambda u, start: (values(u, start + 1e6 * (u.patch.values - start)), u.num_examples),
    "sign flip": lambda u, start: (values(u, start - (u.patch.values - start)), u.num_examples),
    "n_k 2^52": lambda u, start: (u, 2**52),
}


def run(attack: Attack | None, rules: RoundRules | None = None, sites: int = 8, **settings: Any) -> Outcome:
    """FedAvg over eight sites, 12 rounds; hostile ones attack in every round from the first."""
    bench = toy.Bench(toy.Plain())
    training = {"lr": 0.05, "epochs": 2, "batch_size": 8}
    method = bench.method("fedavg", **{"rounds": 12, "training": training, **settings})
    server = ServerEndpoint(bench.layout, RUN, "float32", Ledger())
    endpoints = {n: SiteEndpoint(site, method, RUN, "float32") for n, site in bench.sites(8).items()}
    if sites == 6:
        endpoints = {name: endpoint for name, endpoint in endpoints.items() if name not in HOSTILE}

    def carry(question: Any) -> dict[str, Any]:
        replies: dict[str, Any] = {}
        for name, message in question.messages.items():
            endpoint = endpoints[name]
            request = endpoint.receive(message)
            update = endpoint.answer(request)
            examples: Any = update.num_examples
            if attack is not None and name in HOSTILE and update.content == "weights":
                update, examples = attack(update, update.patch.mask.take(endpoint.site.weights))
            try:
                replies[name] = server.decode(name, endpoint.encode(request, update).data, examples, update.metrics)
            except WireError as error:
                replies[name] = error
        return replies

    federation = Federation(method, server, bench.task.metric, rules)
    return federation.run(bench.weights, lambda: sorted(endpoints), carry)


def honest_error(outcome: Outcome) -> float:
    """Of the last model, over the honest sites' test examples."""
    mine = [figures["mse"] for name, figures in outcome.evaluation.sites.items() if name not in HOSTILE]
    return sum(mine) / len(mine)


def test_nan_is_refused_and_the_result_is_that_of_the_others() -> None:
    outcome = run(ATTACKS["NaN"], RoundRules(quarantine_after=0))
    assert all(record.rejected == dict.fromkeys(HOSTILE, "E_FINITE") for record in outcome.rounds[:-1])
    assert compute_digest(outcome.weights) == compute_digest(run(None, sites=6).weights)


def test_the_median_holds_what_breaks_the_mean() -> None:
    clean, held = (honest_error(run(attack, **MEDIAN)) for attack in (None, ATTACKS["x 1e6"]))
    assert held < 1.05 * clean
    assert not honest_error(run(ATTACKS["x 1e6"])) < 2 * clean


def test_a_norm_clip_bounds_a_scaled_change_and_says_whose() -> None:
    outcome = run(ATTACKS["x 1e6"], RoundRules(clip_norm=2.0))
    assert all(set(HOSTILE) <= set(record.clipped) for record in outcome.rounds[:-1])
    assert honest_error(outcome) < honest_error(run(ATTACKS["x 1e6"]))


def test_a_share_bounds_a_claim_of_examples() -> None:
    outcome = run(ATTACKS["n_k 2^52"], RoundRules(max_share=0.2))
    assert set(outcome.rounds[0].capped) >= set(HOSTILE)
    assert honest_error(outcome) < 1.05 * honest_error(run(None))


def test_flipped_signs_are_not_recognised_and_only_slow_down() -> None:
    """No promise: the answers are finite and as long as honest ones."""
    outcome = run(ATTACKS["sign flip"], **MEDIAN)
    assert all(record.rejected == {} for record in outcome.rounds)
    assert honest_error(outcome) < honest_error(run(None, rounds=1))
