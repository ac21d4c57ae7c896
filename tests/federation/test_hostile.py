"""Two of eight sites are hostile: what is refused, what a robust rule holds, and what nobody can promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import toy

from flare_sparse.endpoints.server import ServerDesk
from flare_sparse.endpoints.site import SiteDesk
from flare_sparse.errors import WireError
from flare_sparse.exchange import Patch, Update
from flare_sparse.federation import Federation, Outcome, Rules
from flare_sparse.params import digest
from flare_sparse.wire.ledger import Ledger

RUN, HOSTILE = "0" * 16, ("site-3", "site-6")
MEDIAN = {"combine": {"rule": "median"}}
Attack = Callable[[Update, torch.Tensor], tuple[Update, Any]]


def values(update: Update, new: torch.Tensor) -> Update:
    return replace(update, patch=Patch(new, update.patch.on))


ATTACKS: dict[str, Attack] = {
    "NaN": lambda u, start: (values(u, torch.full_like(u.patch.values, float("nan"))), u.examples),
    "x 1e6": lambda u, start: (values(u, start + 1e6 * (u.patch.values - start)), u.examples),
    "sign flip": lambda u, start: (values(u, start - (u.patch.values - start)), u.examples),
    "n_k 2^52": lambda u, start: (u, 2**52),
}


def run(attack: Attack | None, rules: Rules | None = None, sites: int = 8, **settings: Any) -> Outcome:
    """FedAvg over eight sites, 12 rounds; hostile ones attack in every round from the first."""
    bench = toy.Bench(toy.Plain())
    training = {"lr": 0.05, "epochs": 2, "batch_size": 8}
    method = bench.method("fedavg", **{"rounds": 12, "training": training, **settings})
    server = ServerDesk(bench.layout, RUN, "float32", Ledger())
    desks = {n: SiteDesk(site, method, RUN, "float32") for n, site in bench.sites(8).items()}
    if sites == 6:
        desks = {name: desk for name, desk in desks.items() if name not in HOSTILE}

    def carry(question: Any) -> dict[str, Any]:
        replies: dict[str, Any] = {}
        for name, message in question.messages.items():
            desk = desks[name]
            request = desk.receive(message)
            update = desk.answer(request)
            examples: Any = update.examples
            if attack is not None and name in HOSTILE and update.content == "weights":
                update, examples = attack(update, update.patch.on.take(desk.site.weights))
            try:
                replies[name] = server.decode(name, desk.encode(request, update).data, examples, update.metrics)
            except WireError as error:
                replies[name] = error
        return replies

    federation = Federation(method, server, bench.task.metric, rules)
    return federation.run(bench.weights, lambda: sorted(desks), carry)


def honest_error(outcome: Outcome) -> float:
    """Of the last model, over the honest sites' test examples."""
    mine = [figures["mse"] for name, figures in outcome.judgement.sites.items() if name not in HOSTILE]
    return sum(mine) / len(mine)


def test_nan_is_refused_and_the_result_is_that_of_the_others() -> None:
    outcome = run(ATTACKS["NaN"], Rules(quarantine_after=0))
    assert all(record.rejected == dict.fromkeys(HOSTILE, "E_FINITE") for record in outcome.rounds[:-1])
    assert digest(outcome.weights) == digest(run(None, sites=6).weights)


def test_the_median_holds_what_breaks_the_mean() -> None:
    clean, held = (honest_error(run(attack, **MEDIAN)) for attack in (None, ATTACKS["x 1e6"]))
    assert held < 1.05 * clean
    assert not honest_error(run(ATTACKS["x 1e6"])) < 2 * clean


def test_a_norm_clip_bounds_a_scaled_change_and_says_whose() -> None:
    outcome = run(ATTACKS["x 1e6"], Rules(clip_norm=2.0))
    assert all(set(HOSTILE) <= set(record.clipped) for record in outcome.rounds[:-1])
    assert honest_error(outcome) < honest_error(run(ATTACKS["x 1e6"]))


def test_a_share_bounds_a_claim_of_examples() -> None:
    outcome = run(ATTACKS["n_k 2^52"], Rules(max_share=0.2))
    assert set(outcome.rounds[0].capped) >= set(HOSTILE)
    assert honest_error(outcome) < 1.05 * honest_error(run(None))


def test_flipped_signs_are_not_recognised_and_only_slow_down() -> None:
    """No promise: the answers are finite and as long as honest ones."""
    outcome = run(ATTACKS["sign flip"], **MEDIAN)
    assert all(record.rejected == {} for record in outcome.rounds)
    assert honest_error(outcome) < honest_error(run(None, rounds=1))
