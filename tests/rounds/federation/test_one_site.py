"""One hostile site of several sends well-formed messages: it neither ends the job nor decides the model alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from local_federation import RUN, LocalFederation, Upload

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import RoundFailed
from flare_sparse.core.exchange import Patch
from flare_sparse.core.params import compute_digest
from flare_sparse.rounds.endpoints.events import SERVER
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.formats import FORMATS, ValueType

HOSTILE = "site-3"
Attack = Callable[[Upload], Upload]


def send_honestly(upload: Upload) -> Upload:
    return upload


def run(
    name: str,
    attack: Attack = send_honestly,
    rules: RoundRules | None = None,
    *,
    bench: Any = None,
    sites: int = 8,
    is_silent: Callable[[str, Attempt], bool] = lambda site, attempt: False,
    store: Store | None = None,
    resume: bool = False,
    **settings: Any,
) -> Outcome:
    """Run a method over sites of which ``site-3`` sends what ``attack`` makes of its upload."""
    federation = LocalFederation(
        name,
        bench or toy.ToyBench(toy.Plain()),
        sites=sites,
        # Without the bound that rejects outliers: every other rule must hold alone.
        rules=(rules or RoundRules()).model_copy(update={"max_norm_ratio": None}),
        stores=lambda end: store if end == SERVER else None,
        **settings,
    )
    federation.is_silent = is_silent
    federation.change_update = lambda upload: attack(upload) if upload.site == HOSTILE else upload
    return federation.run(resume=resume)


def change_values(change: Callable[[torch.Tensor], torch.Tensor], content: str = "weights") -> Attack:
    """Return an attack that replaces the values of every update with this content."""

    def attack(upload: Upload) -> Upload:
        return upload.with_values(change(upload.update.patch.values)) if upload.update.content == content else upload

    return attack


def claim_examples(count: int) -> Attack:
    """Return an attack that claims ``count`` training examples."""
    return lambda upload: replace(upload, examples=count)


def is_silent_in_training(site: str, attempt: Attempt) -> bool:
    return site == HOSTILE and attempt.kind == "train"


# ---- updates that could end the job


SEND_HUGE_VALUES = change_values(lambda values: torch.full_like(values, 3e38))


@pytest.mark.slow
def test_update_with_an_infinite_product_is_rejected_and_the_others_decide_the_model(tmp_path: Path) -> None:
    """FlexLoRA multiplies two factors: 3e38 is finite, its square is not. Nothing of it is committed, so the run can
    be resumed.
    """
    bench, rules = toy.ToyBench(toy.Adapted()), RoundRules(quarantine_after=0)
    store = Store(tmp_path / "server", {"run": RUN})
    outcome = run("flexlora", SEND_HUGE_VALUES, rules, bench=bench, sites=3, store=store)
    assert [record.rejected for record in outcome.rounds] == [*[{HOSTILE: "E_RANGE"}] * 3, {}]
    assert all(record.is_balanced for record in outcome.rounds)
    without = run("flexlora", rules=rules, bench=bench, sites=3, is_silent=is_silent_in_training)
    assert compute_digest(outcome.weights) == compute_digest(without.weights)
    resumed = run("flexlora", rules=rules, bench=bench, sites=3, store=store, resume=True)
    assert compute_digest(resumed.weights) == compute_digest(outcome.weights)


@pytest.mark.parametrize(("values", "largest"), [("float16", 65504.0), ("bfloat16", 3.38e38), ("float32", 3.4e38)])
def test_model_beyond_the_range_of_the_number_format_is_not_encodable(values: ValueType, largest: float) -> None:
    for value, is_encodable in ((largest, True), (1.1 * largest, False)):
        assert FORMATS[values].can_hold(torch.tensor([1.0, -value])) is is_encodable


def test_round_without_a_finite_sum_is_retried_and_the_last_model_stays(tmp_path: Path) -> None:
    store, bench = Store(tmp_path / "server", {"run": RUN}), toy.ToyBench(toy.Adapted())
    with pytest.raises(RoundFailed, match=r"2 of 3 sites contributed.*rejected: site-3 E_RANGE"):
        run("flexlora", SEND_HUGE_VALUES, RoundRules(min_sites=3), bench=bench, sites=3, store=store)
    assert store.list_numbers() == []


def test_site_that_sent_no_scores_has_no_mask_and_is_not_sampled() -> None:
    """A quarter of four sites is one site; two of the four have no mask."""

    def is_silent_in_scoring(site: str, attempt: Attempt) -> bool:
        return attempt.kind == "score" and site in ("site-1", "site-2")

    settings = {"participation": 0.25, "rounds": 6, "scores": "individual_snip"}
    outcome = run("neurosfl", rules=RoundRules(), sites=4, is_silent=is_silent_in_scoring, **settings)
    assert outcome.state.owners == ("site-3", "site-4")
    assert [len(record.sites_contributed) for record in outcome.rounds] == [2, *[1] * 6, 2]


def test_site_that_joins_after_the_start_has_no_personal_model_and_is_not_sampled() -> None:
    bench = toy.ToyBench(toy.Plain())
    method = bench.method("dispfl", participation=0.25)
    state = method.init(bench.weights, ["site-4"])
    sites = [f"site-{i}" for i in range(1, 5)]
    assert [sorted(method.ask(replace(state, round=t), sites)) for t in (1, 2, 3)] == [["site-4"]] * 3


def test_empty_set_of_requests_counts_as_a_failed_attempt() -> None:
    federation = LocalFederation("dispfl", toy.ToyBench(toy.Plain()), rules=RoundRules(retries=1))
    present = iter([["site-1"], *[["site-2"]] * 9])
    with pytest.raises(RoundFailed, match=r"none of the connected sites \(site-2\).* in 2 attempts"):
        federation.run(sites=lambda: next(present))


def test_huge_registered_claim_does_not_stop_a_quorum_by_weight() -> None:
    """The site claims 2^52 examples, then falls silent: the other seven meet the quorum."""

    def is_silent_after_round_1(site: str, attempt: Attempt) -> bool:
        return site == HOSTILE and attempt.round >= 2

    rules = RoundRules(min_sites=3, min_weight=0.5, max_share=0.5)
    outcome = run("fedavg", claim_examples(2**52), rules, is_silent=is_silent_after_round_1, rounds=3)
    assert [len(record.sites_contributed) for record in outcome.rounds] == [8, 7, 7, 7]


# ---- updates that could decide the model alone


@pytest.mark.slow
def test_claimed_test_examples_do_not_choose_the_best_model() -> None:
    """The site claims 2^52 test examples, with a perfect metric in the first round."""
    calls: list[int] = []

    def lie(upload: Upload) -> Upload:
        calls.append(1)
        return replace(upload, metrics={"mse": 4e-14 if len(calls) == 1 else 1e6, "test_examples": 2**52})

    def grow(upload: Upload) -> Upload:
        count = 80.0 if upload.update.patch.mask.count else 8.0
        return replace(upload, metrics={**upload.metrics, "test_examples": count})

    rules = RoundRules(max_share=0.2, quarantine_after=0)
    outcome = run("fedavg", lie, rules, rounds=5)
    assert outcome.evaluation.overall["test_examples"] == 8 * 7 + 14
    grown = run("fedavg", grow, rules)
    assert [record.rejected for record in grown.rounds] == [*[{}] * 3, {HOSTILE: "E_METRICS"}]


@pytest.mark.slow
def test_scaled_adapter_weighs_no_more_than_max_share_in_hetlora(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(toy.ToyBench(toy.Adapted()).method("hetlora"))
    weigh, weights = kind._weigh_by_size, []
    monkeypatch.setattr(
        kind, "_weigh_by_size", lambda self, updates: weights.append(weigh(self, updates)) or weights[-1]
    )
    attack, settings = change_values(lambda values: values * 30), {"bench": toy.ToyBench(toy.Adapted()), "rounds": 1}
    run("hetlora", attack, RoundRules(max_share=0.34), **settings)
    run("hetlora", attack, RoundRules(), **settings)
    assert weights[0][2] == pytest.approx(0.34)
    assert weights[1][2] > 0.9


def prune(attack: Attack, rules: RoundRules, bench: Any) -> Outcome:
    """Return the outcome of a run with one pruning by SCBFwP."""
    settings = {"rounds": 3, "pruning_rate": 0.4, "prunings": 1, "rate": 1.0}
    return run("scbfwp", attack, rules, bench=bench, **settings)


@pytest.mark.slow
def test_claimed_counts_give_no_extra_weight_in_pruning() -> None:
    bench = toy.ToyBench(toy.Plain())
    offsets = bench.method("scbfwp")._count_entries

    def claim(upload: Upload, share: float = 1.0) -> Upload:
        if upload.update.content != "scores":
            return upload
        vector = upload.update.patch.to_vector()
        vector[offsets] = 0.0
        vector[offsets[:4]] = share
        patch = Patch.from_vector(vector, upload.update.patch.mask)
        return replace(upload, update=replace(upload.update, patch=patch))

    rules = RoundRules(max_share=0.2)
    attacked = prune(claim, rules, bench).mask
    honest = prune(send_honestly, rules, bench).mask
    assert (attacked & honest).count > 0.75 * honest.count
    for other in (RoundRules(max_share=0.18), RoundRules()):
        assert prune(send_honestly, other, bench).mask == honest
    # More zeros than outputs would weigh more than all other sites.
    outcome = prune(lambda upload: claim(upload, 1.5), rules, bench)
    assert [record.rejected for record in outcome.rounds if record.kind == "count"] == [{HOSTILE: "E_RANGE"}]


def test_negative_saliencies_are_rejected() -> None:
    outcome = run("neurosfl", change_values(torch.neg, "scores"), sparsity=0.7, rounds=1)
    assert [record.rejected for record in outcome.rounds] == [{HOSTILE: "E_RANGE"}, {}, {}]
