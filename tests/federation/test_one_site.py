"""One site of a few sends what is well formed and meant badly: it neither ends the job nor decides alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flare_sparse.checkpoint.store import Store
from flare_sparse.encryption import Contexts, ServerCipher, SiteCipher
from flare_sparse.errors import RoundFailed, WireError
from flare_sparse.exchange import Patch, Update
from flare_sparse.federation import Federation, Outcome, Rules
from flare_sparse.mask import Mask
from flare_sparse.server import Question, ServerDesk, digest
from flare_sparse.site import SiteDesk
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.plan import ValueType

_spec = importlib.util.spec_from_file_location("toy", Path(__file__).parents[1] / "methods" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy)

RUN, HOSTILE = "0" * 16, "site-3"
Said = tuple[Update, Any, dict[str, Any]]
Attack = Callable[[Update, Any, dict[str, Any]], Said]


def honest(update: Update, examples: Any, metrics: dict[str, Any]) -> Said:
    return update, examples, metrics


def nobody(site: str, question: Question) -> bool:
    return False


def play(
    name: str,
    attack: Attack = honest,
    rules: Rules | None = None,
    *,
    bench: Any = None,
    sites: int = 8,
    silent: Callable[[str, Question], bool] = nobody,
    store: Store | None = None,
    resume: bool = False,
    contexts: Contexts | None = None,
    values: ValueType = "float32",
    **settings: Any,
) -> Outcome:
    """A run in which ``site-3`` sends what ``attack`` makes of its answer, its examples and its metrics."""
    bench = bench or toy.Bench(toy.Plain())
    method = bench.method(name, **settings)
    cipher = SiteCipher(contexts.client) if contexts else None
    server = ServerDesk(bench.layout, RUN, values, Ledger(), ServerCipher(contexts.server) if contexts else None)
    desks = {n: SiteDesk(site, method, RUN, values, cipher=cipher) for n, site in bench.sites(sites).items()}

    def carry(question: Question) -> dict[str, Any]:
        replies: dict[str, Any] = {}
        for site, message in question.messages.items():
            if silent(site, question):
                continue
            request = desks[site].receive(message)
            update = desks[site].answer(request)
            said = (update, update.examples, update.metrics)
            update, examples, metrics = attack(*said) if site == HOSTILE else said
            try:
                replies[site] = server.decode(site, desks[site].encode(request, update).data, examples, metrics)
            except WireError as error:
                replies[site] = error
        return replies

    federation = Federation(method, server, bench.task.metric, rules, store=store)
    return federation.run(bench.weights, lambda: sorted(desks), carry, resume=resume)


def sending(make: Callable[[torch.Tensor], torch.Tensor], content: str = "weights") -> Attack:
    def attack(update: Update, examples: Any, metrics: dict[str, Any]) -> Said:
        if update.content == content:
            update = replace(update, patch=Patch(make(update.patch.values), update.patch.on))
        return update, examples, metrics

    return attack


def claiming(examples: int) -> Attack:
    return lambda update, _, metrics: (update, examples, metrics)


def silent_site(site: str, question: Question) -> bool:
    return site == HOSTILE and question.kind == "train"


# ---- a site that would end the job


HUGE = sending(lambda values: torch.full_like(values, 3e38))


def test_an_answer_whose_product_is_infinite_is_refused_and_the_result_is_that_of_the_others(tmp_path: Path) -> None:
    """FlexLoRA: 3e38 is a number, a product of two such is none. Nothing of it is committed, so a run goes on."""
    bench, rules = toy.Bench(toy.Adapted()), Rules(quarantine_after=0)
    store = Store(tmp_path / "server", {"run": RUN})
    outcome = play("flexlora", HUGE, rules, bench=bench, sites=3, store=store)
    assert [record.rejected for record in outcome.rounds] == [*[{HOSTILE: "E_RANGE"}] * 3, {}]
    assert all(record.balances for record in outcome.rounds)
    without = play("flexlora", honest, rules, bench=bench, sites=3, silent=silent_site)
    assert digest(outcome.weights) == digest(without.weights)
    again = play("flexlora", honest, rules, bench=bench, sites=3, store=store, resume=True)
    assert digest(again.weights) == digest(outcome.weights)


@pytest.mark.parametrize(("values", "largest"), [("float16", 65504.0), ("bfloat16", 3.38e38), ("float32", 3.4e38)])
def test_a_model_that_the_wires_format_cannot_hold_is_none(values: ValueType, largest: float) -> None:
    bench = toy.Bench(toy.Plain())
    server = ServerDesk(bench.layout, RUN, values, Ledger())
    for value, fits in ((largest, True), (1.1 * largest, False)):
        model = Patch(torch.tensor([1.0, -value]), Mask(torch.tensor([True, True])))
        assert server.sayable(model) is fits


def test_where_no_sum_is_finite_the_round_is_asked_again_and_the_last_model_is_left(tmp_path: Path) -> None:
    store, bench = Store(tmp_path / "server", {"run": RUN}), toy.Bench(toy.Adapted())
    with pytest.raises(RoundFailed, match=r"2 of 3 sites contributed.*rejected: \{'site-3': 'E_RANGE'\}"):
        play("flexlora", HUGE, Rules(min_sites=3), bench=bench, sites=3, store=store)
    assert store.numbers() == []


def test_who_gave_no_scores_has_no_mask_and_is_not_drawn() -> None:
    """A quarter of four sites is one; two of them have none."""

    def away(site: str, question: Question) -> bool:
        return question.kind == "score" and site in ("site-1", "site-2")

    settings = {"participation": 0.25, "rounds": 6, "scores": "individual_snip"}
    outcome = play("neurosfl", rules=Rules(), sites=4, silent=away, **settings)
    assert outcome.state.owners == ("site-3", "site-4")
    assert [len(record.sites_in) for record in outcome.rounds] == [2, *[1] * 6, 2]


def test_who_came_after_the_start_has_no_personal_model_and_is_not_drawn() -> None:
    bench = toy.Bench(toy.Plain())
    method = bench.method("dispfl", participation=0.25)
    state = method.init(bench.weights, ["site-4"])
    late = [f"site-{i}" for i in range(1, 5)]
    assert [sorted(method.ask(replace(state, round=t), late)) for t in (1, 2, 3)] == [["site-4"]] * 3


def test_a_question_to_nobody_is_a_failed_attempt() -> None:
    bench = toy.Bench(toy.Plain())
    method = bench.method("dispfl")
    server = ServerDesk(bench.layout, RUN, "float32", Ledger())
    there = iter([["site-1"], *[["site-2"]] * 9])
    federation = Federation(method, server, bench.task.metric, Rules(retries=1))
    desk = SiteDesk(bench.sites()["site-1"], method, RUN, "float32")

    def carry(question: Question) -> dict[str, Any]:
        request = desk.receive(question.messages["site-1"])
        update = desk.answer(request)
        return {"site-1": server.decode("site-1", desk.encode(request, update).data, 24, update.metrics)}

    with pytest.raises(RoundFailed, match=r"none of the sites present \(site-2\).* in 2 attempts"):
        federation.run(bench.weights, lambda: next(there), carry)


def test_a_registered_claim_does_not_stop_a_quorum_by_weight() -> None:
    """It says 2^52, then nothing: the other seven are enough."""

    def gone(site: str, question: Question) -> bool:
        return site == HOSTILE and question.round >= 2

    rules = Rules(min_sites=3, min_weight=0.5, max_share=0.5)
    outcome = play("fedavg", claiming(2**52), rules, silent=gone, rounds=3)
    assert [len(record.sites_in) for record in outcome.rounds] == [8, 7, 7, 7]


@pytest.mark.parametrize("examples", [2**47, 2**52])
def test_who_weighs_too_little_to_be_encrypted_is_left_out_of_the_sum_and_named(examples: int) -> None:
    contexts = Contexts.new()
    outcome = play("fedavg", claiming(examples), Rules(min_sites=2), sites=3, contexts=contexts, rounds=2)
    assert [record.capped for record in outcome.rounds] == [*[{"site-1": 0, "site-2": 0}] * 2, {}]
    capped = play("fedavg", claiming(examples), Rules(min_sites=2, max_share=0.5), sites=3, contexts=contexts, rounds=2)
    assert [record.capped for record in capped.rounds] == [*[{HOSTILE: 56}] * 2, {}]
