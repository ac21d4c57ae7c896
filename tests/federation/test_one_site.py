"""One site of a few sends what is well formed and meant badly: it neither ends the job nor decides alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from flare_sparse.checkpoint.store import Store
from flare_sparse.encryption import KeyContexts, ServerCipher, SiteCipher
from flare_sparse.endpoints.server import Attempt, ServerEndpoint
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.errors import RoundFailed, WireError
from flare_sparse.exchange import Patch, Update
from flare_sparse.federation import Federation, Outcome, RoundRules
from flare_sparse.mask import Mask
from flare_sparse.params import compute_digest
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.plan import ValueType

RUN, HOSTILE = "0" * 16, "site-3"
Said = tuple[Update, Any, dict[str, Any]]
Attack = Callable[[Update, Any, dict[str, Any]], Said]


def honest(update: Update, examples: Any, metrics: dict[str, Any]) -> Said:
    return update, examples, metrics


def nobody(site: str, question: Attempt) -> bool:
    return False


def play(
    name: str,
    attack: Attack = honest,
    rules: RoundRules | None = None,
    *,
    bench: Any = None,
    sites: int = 8,
    silent: Callable[[str, Attempt], bool] = nobody,
    store: Store | None = None,
    resume: bool = False,
    contexts: KeyContexts | None = None,
    values: ValueType = "float32",
    **settings: Any,
) -> Outcome:
    """A run in which ``site-3`` sends what ``attack`` makes of its answer, its examples and its metrics."""
    bench = bench or toy.Bench(toy.Plain())
    method = bench.method(name, **settings)
    cipher = SiteCipher(contexts.client) if contexts else None
    server = ServerEndpoint(bench.layout, RUN, values, Ledger(), ServerCipher(contexts.server) if contexts else None)
    endpoints = {n: SiteEndpoint(site, method, RUN, values, cipher=cipher) for n, site in bench.sites(sites).items()}

    def carry(question: Attempt) -> dict[str, Any]:
        replies: dict[str, Any] = {}
        for site, message in question.messages.items():
            if silent(site, question):
                continue
            request = endpoints[site].receive(message)
            update = endpoints[site].answer(request)
            said = (update, update.num_examples, update.metrics)
            update, examples, metrics = attack(*said) if site == HOSTILE else said
            try:
                replies[site] = server.decode(site, endpoints[site].encode(request, update).data, examples, metrics)
            except WireError as error:
                replies[site] = error
        return replies

    federation = Federation(method, server, bench.task.metric, rules, store=store)
    return federation.run(bench.weights, lambda: sorted(endpoints), carry, resume=resume)


def sending(make: Callable[[torch.Tensor], torch.Tensor], content: str = "weights") -> Attack:
    def attack(update: Update, examples: Any, metrics: dict[str, Any]) -> Said:
        if update.content == content:
            update = replace(update, patch=Patch(make(update.patch.values), update.patch.mask))
        return update, examples, metrics

    return attack


def claiming(examples: int) -> Attack:
    return lambda update, _, metrics: (update, examples, metrics)


def silent_site(site: str, question: Attempt) -> bool:
    return site == HOSTILE and question.kind == "train"


# ---- a site that would end the job


HUGE = sending(lambda values: torch.full_like(values, 3e38))


def test_an_answer_whose_product_is_infinite_is_refused_and_the_result_is_that_of_the_others(tmp_path: Path) -> None:
    """FlexLoRA: 3e38 is a number, a product of two such is none. Nothing of it is committed, so a run goes on."""
    bench, rules = toy.Bench(toy.Adapted()), RoundRules(quarantine_after=0)
    store = Store(tmp_path / "server", {"run": RUN})
    outcome = play("flexlora", HUGE, rules, bench=bench, sites=3, store=store)
    assert [record.rejected for record in outcome.rounds] == [*[{HOSTILE: "E_RANGE"}] * 3, {}]
    assert all(record.is_balanced for record in outcome.rounds)
    without = play("flexlora", honest, rules, bench=bench, sites=3, silent=silent_site)
    assert compute_digest(outcome.weights) == compute_digest(without.weights)
    again = play("flexlora", honest, rules, bench=bench, sites=3, store=store, resume=True)
    assert compute_digest(again.weights) == compute_digest(outcome.weights)


@pytest.mark.parametrize(("values", "largest"), [("float16", 65504.0), ("bfloat16", 3.38e38), ("float32", 3.4e38)])
def test_a_model_that_the_wires_format_cannot_hold_is_none(values: ValueType, largest: float) -> None:
    bench = toy.Bench(toy.Plain())
    server = ServerEndpoint(bench.layout, RUN, values, Ledger())
    for value, fits in ((largest, True), (1.1 * largest, False)):
        model = Patch(torch.tensor([1.0, -value]), Mask(torch.tensor([True, True])))
        assert server.is_encodable(model) is fits


def test_where_no_sum_is_finite_the_round_is_asked_again_and_the_last_model_is_left(tmp_path: Path) -> None:
    store, bench = Store(tmp_path / "server", {"run": RUN}), toy.Bench(toy.Adapted())
    with pytest.raises(RoundFailed, match=r"2 of 3 sites contributed.*rejected: \{'site-3': 'E_RANGE'\}"):
        play("flexlora", HUGE, RoundRules(min_sites=3), bench=bench, sites=3, store=store)
    assert store.list_numbers() == []


def test_who_gave_no_scores_has_no_mask_and_is_not_drawn() -> None:
    """A quarter of four sites is one; two of them have none."""

    def away(site: str, question: Attempt) -> bool:
        return question.kind == "score" and site in ("site-1", "site-2")

    settings = {"participation": 0.25, "rounds": 6, "scores": "individual_snip"}
    outcome = play("neurosfl", rules=RoundRules(), sites=4, silent=away, **settings)
    assert outcome.state.owners == ("site-3", "site-4")
    assert [len(record.sites_contributed) for record in outcome.rounds] == [2, *[1] * 6, 2]


def test_who_came_after_the_start_has_no_personal_model_and_is_not_drawn() -> None:
    bench = toy.Bench(toy.Plain())
    method = bench.method("dispfl", participation=0.25)
    state = method.init(bench.weights, ["site-4"])
    late = [f"site-{i}" for i in range(1, 5)]
    assert [sorted(method.ask(replace(state, round=t), late)) for t in (1, 2, 3)] == [["site-4"]] * 3


def test_a_question_to_nobody_is_a_failed_attempt() -> None:
    bench = toy.Bench(toy.Plain())
    method = bench.method("dispfl")
    server = ServerEndpoint(bench.layout, RUN, "float32", Ledger())
    there = iter([["site-1"], *[["site-2"]] * 9])
    federation = Federation(method, server, bench.task.metric, RoundRules(retries=1))
    endpoint = SiteEndpoint(bench.sites()["site-1"], method, RUN, "float32")

    def carry(question: Attempt) -> dict[str, Any]:
        request = endpoint.receive(question.messages["site-1"])
        update = endpoint.answer(request)
        return {"site-1": server.decode("site-1", endpoint.encode(request, update).data, 24, update.metrics)}

    with pytest.raises(RoundFailed, match=r"none of the sites present \(site-2\).* in 2 attempts"):
        federation.run(bench.weights, lambda: next(there), carry)


def test_a_registered_claim_does_not_stop_a_quorum_by_weight() -> None:
    """It says 2^52, then nothing: the other seven are enough."""

    def gone(site: str, question: Attempt) -> bool:
        return site == HOSTILE and question.round >= 2

    rules = RoundRules(min_sites=3, min_weight=0.5, max_share=0.5)
    outcome = play("fedavg", claiming(2**52), rules, silent=gone, rounds=3)
    assert [len(record.sites_contributed) for record in outcome.rounds] == [8, 7, 7, 7]


@pytest.mark.parametrize("examples", [2**47, 2**52])
def test_who_weighs_too_little_to_be_encrypted_is_left_out_of_the_sum_and_named(examples: int) -> None:
    contexts = KeyContexts.generate()
    outcome = play("fedavg", claiming(examples), RoundRules(min_sites=2), sites=3, contexts=contexts, rounds=2)
    assert [record.capped for record in outcome.rounds] == [*[{"site-1": 0, "site-2": 0}] * 2, {}]
    capped = play(
        "fedavg", claiming(examples), RoundRules(min_sites=2, max_share=0.5), sites=3, contexts=contexts, rounds=2
    )
    assert [record.capped for record in capped.rounds] == [*[{HOSTILE: 56}] * 2, {}]


# ---- a site that would decide alone


def test_test_examples_do_not_make_a_model_the_best() -> None:
    """A claim of 2^52 of them, with a perfect figure in the first round."""
    rounds: list[int] = []

    def lie(update: Update, examples: Any, metrics: dict[str, Any]) -> Said:
        rounds.append(1)
        return update, examples, {"mse": 4e-14 if len(rounds) == 1 else 1e6, "test_examples": 2**52}

    rules = RoundRules(max_share=0.2, quarantine_after=0)
    outcome = play("fedavg", lie, rules, rounds=5)
    assert outcome.evaluation.overall["test_examples"] == 8 * 7 + 14
    grown = play("fedavg", lambda u, n, m: (u, n, {**m, "test_examples": 80.0 if u.patch.mask.count else 8.0}), rules)
    assert [record.rejected for record in grown.rounds] == [*[{}] * 3, {HOSTILE: "E_METRICS"}]


def test_a_scaled_adapter_weighs_no_more_than_its_share_in_hetlora(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(toy.Bench(toy.Adapted()).method("hetlora"))
    weigh, seen = kind._by_size, []
    monkeypatch.setattr(kind, "_by_size", lambda self, updates: seen.append(weigh(self, updates)) or seen[-1])
    louder, settings = sending(lambda values: values * 30), {"bench": toy.Bench(toy.Adapted()), "rounds": 1}
    play("hetlora", louder, RoundRules(max_share=0.34), **settings)
    play("hetlora", louder, RoundRules(), **settings)
    assert seen[0][2] == pytest.approx(0.34)
    assert seen[1][2] > 0.9


def pruned(attack: Attack, rules: RoundRules, bench: Any) -> Mask:
    settings = {"rounds": 3, "pruning_rate": 0.4, "prunings": 1, "rate": 1.0}
    return play("scbfwp", attack, rules, bench=bench, **settings).mask


def test_claimed_positions_give_no_weight_when_units_go() -> None:
    bench = toy.Bench(toy.Plain())
    at = bench.method("scbfwp")._places

    def claim(update: Update, examples: Any, metrics: dict[str, Any]) -> Said:
        if update.content != "scores":
            return update, examples, metrics
        vector = update.patch.to_vector()
        vector[at[:, :2]], vector[at[:, 2]] = 0.0, 1e12
        vector[at[:4, 0]] = 1e15
        return replace(update, patch=Patch.from_vector(vector, update.patch.mask)), examples, metrics

    rules = RoundRules(max_share=0.2)
    claimed = pruned(claim, rules, bench)
    usual = pruned(honest, rules, bench)
    assert (claimed & usual).count > 0.75 * usual.count
    assert pruned(honest, RoundRules(max_share=0.18), bench) == usual == pruned(honest, RoundRules(), bench)


ROBUST = {"aggregation": {"rule": "median"}, "sparsity": 0.7, "rounds": 1}


def test_saliencies_below_zero_are_refused() -> None:
    outcome = play("neurosfl", sending(torch.neg, "scores"), **ROBUST)
    assert [record.rejected for record in outcome.rounds] == [{HOSTILE: "E_RANGE"}, {}, {}]
    signed = play("neurosfl", sending(torch.neg, "scores"), signed=True, **ROBUST)
    assert all(record.rejected == {} for record in signed.rounds)


@pytest.mark.parametrize("combine", [{"rule": "median"}, {"rule": "trimmed_mean", "trim": 0.2}])
def test_one_sites_scores_do_not_choose_the_mask_under_a_robust_rule(combine: dict[str, Any]) -> None:
    bench = toy.Bench(toy.Plain())
    maskable = bench.method("neurosfl")._maskable

    def masks(attack: Attack, **settings: Any) -> Mask:
        return play("neurosfl", attack, bench=bench, **{**ROBUST, **settings}).mask & maskable

    def huge(values: torch.Tensor) -> torch.Tensor:
        picked = torch.rand(values.shape, generator=torch.Generator().manual_seed(7)) < 0.3
        return torch.where(picked, 1e30, values)

    attack = sending(huge, "scores")
    usual, held = masks(honest, aggregation=combine), masks(attack, aggregation=combine)
    assert (held & usual).count > 0.8 * usual.count
    alone = masks(attack, aggregation={"rule": "mean"})
    assert (alone & usual).count < 0.6 * usual.count
