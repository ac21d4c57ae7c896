"""Two of eight sites are hostile: what is rejected, what a bound limits, and what no rule promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import toy
from local_federation import LocalFederation, Upload

from flare_sparse.core.params import compute_digest
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.federation.rules import RoundRules

HOSTILE = ("site-3", "site-6")
Attack = Callable[[Upload], Upload]


def get_base(upload: Upload) -> torch.Tensor:
    """Return the weights that the site received, at the entries of its update."""
    return upload.update.patch.mask.take(upload.endpoint.site.weights)


def scale_delta(upload: Upload, factor: float) -> Upload:
    base = get_base(upload)
    return upload.with_values(base + factor * (upload.update.patch.values - base))


def send_nan(upload: Upload) -> Upload:
    return upload.with_values(torch.full_like(upload.update.patch.values, float("nan")))


def send_millionfold(upload: Upload) -> Upload:
    return scale_delta(upload, 1e6)


def flip_sign(upload: Upload) -> Upload:
    base = get_base(upload)
    return upload.with_values(base - (upload.update.patch.values - base))


def claim_examples(upload: Upload) -> Upload:
    return replace(upload, examples=2**52)


def build_federation(
    attack: Attack | None, rules: RoundRules | None = None, method: str = "fedavg", **settings: Any
) -> LocalFederation:
    """Return a method over eight sites and 12 rounds; the hostile ones attack in every round from the first."""
    training = {"lr": 0.05, "epochs": 2, "batch_size": 8}
    settings = {"rounds": 12, "training": training, **settings}
    # Without the bound that rejects outliers: what is tested must hold alone.
    rules = (rules or RoundRules()).model_copy(update={"max_norm_ratio": None})
    federation = LocalFederation(method, toy.ToyBench(toy.Plain()), sites=8, rules=rules, **settings)

    def change_update(upload: Upload) -> Upload:
        is_attack = attack is not None and upload.site in HOSTILE and upload.update.content == "weights"
        return attack(upload) if is_attack else upload

    federation.change_update = change_update
    return federation


def run(attack: Attack | None, rules: RoundRules | None = None, **settings: Any) -> Outcome:
    return build_federation(attack, rules, **settings).run()


def compute_honest_error(outcome: Outcome) -> float:
    """Return the error of the final model, averaged over the honest sites."""
    errors = [metrics["mse"] for name, metrics in outcome.evaluation.sites.items() if name not in HOSTILE]
    return sum(errors) / len(errors)


@pytest.mark.long
def test_nan_is_rejected_and_the_honest_sites_decide_the_model() -> None:
    outcome = run(send_nan, RoundRules(quarantine_after=0))
    assert all(record.rejected == dict.fromkeys(HOSTILE, "E_FINITE") for record in outcome.rounds[:-1])
    without = build_federation(None)
    for name in HOSTILE:
        del without.endpoints[name]
    assert compute_digest(outcome.weights) == compute_digest(without.run().weights)


@dataclass
class History:
    """Models and updates of a run.

    Attributes:
        models: ``(P,)`` model that the sites receive in each round; the last is the final model.
        updates: ``(P,)`` weights that each site sends, by round.
    """

    models: list[torch.Tensor]
    updates: list[dict[str, torch.Tensor]]


def record_history(federation: LocalFederation) -> tuple[Outcome, History]:
    """Run a federation; return its outcome and history."""
    change_update, history = federation.change_update, History([], [])

    def record(upload: Upload) -> Upload:
        upload = change_update(upload)
        if upload.update.content == "weights":
            if len(history.models) < upload.attempt.round:
                history.models.append(upload.endpoint.site.weights.clone())
                history.updates.append({})
            history.updates[-1][upload.site] = upload.update.patch.to_vector()
        return upload

    federation.change_update = record
    outcome = federation.run()
    history.models.append(outcome.weights)
    return outcome, history


@pytest.mark.slow
def test_ratio_below_the_number_of_the_others_keeps_out_one_site_that_reverses_what_they_learn() -> None:
    federation = build_federation(lambda upload: scale_delta(upload, -20.0), rounds=3)
    federation.rules = RoundRules(max_norm_ratio=2.0, quarantine_after=0)
    outcome = federation.run()
    assert all(record.rejected == dict.fromkeys(HOSTILE, "E_NORM") for record in outcome.rounds[:-1])
    assert compute_honest_error(outcome) < compute_honest_error(run(None, rounds=1))


@pytest.mark.long
def test_norm_clip_bounds_a_scaled_delta_and_records_its_site() -> None:
    outcome, history = record_history(build_federation(send_millionfold, RoundRules(clip_norm=2.0)))
    assert all(set(HOSTILE) <= set(record.clipped) for record in outcome.rounds[:-1])
    assert all(float((after - before).norm()) <= 2.0 + 1e-5 for before, after in pairwise(history.models))
    assert compute_honest_error(outcome) < compute_honest_error(run(send_millionfold))


@pytest.mark.slow
def test_max_share_bounds_a_claim_of_examples() -> None:
    """Every model is the mean of its round's updates, weighted by capped numbers; uncapped, the claim decides alone."""
    federation = build_federation(claim_examples, RoundRules(max_share=0.2))
    outcome, history = record_history(federation)
    assert set(outcome.rounds[0].capped) >= set(HOSTILE)
    for t, record in enumerate(outcome.rounds[:-1]):
        counts = {name: site.num_examples for name, site in federation.sites.items()} | record.capped
        total = sum(counts.values())
        assert all(count <= 0.2 * total for count in counts.values())
        expected = sum(counts[name] / total * values for name, values in history.updates[t].items())
        assert torch.allclose(history.models[t + 1], expected, atol=1e-5)
    _, history = record_history(build_federation(claim_examples, rounds=1))
    hostile = torch.stack([history.updates[0][name] for name in HOSTILE]).mean(0)
    assert torch.allclose(history.models[1], hostile, atol=1e-5)


@pytest.mark.long
def test_flipped_signs_are_not_recognised_and_only_slow_training_down() -> None:
    """No rule promises more: these updates are finite and as long as honest ones."""
    outcome = run(flip_sign)
    assert all(record.rejected == {} for record in outcome.rounds)
    assert compute_honest_error(outcome) < compute_honest_error(run(None, rounds=1))
