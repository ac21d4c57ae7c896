"""A commit from which most sites diverge is discarded, once, and a run that is resumed recovers from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from local_federation import LocalFederation, Upload

from flare_sparse.core.checkpoint.store import STEPPED_BACK, Store
from flare_sparse.core.errors import FlareSparseError, RoundFailed
from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import compute_digest
from flare_sparse.rounds.endpoints.events import SERVER
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.federation.rounds import AttemptResult, reject_outliers
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.stage import Reply

UNBOUNDED = RoundRules(min_sites=2, retries=1, max_norm_ratio=None)
HUGE = 1e20
POISONED_ROUND = 2


class DivergingFederation(LocalFederation):
    """Sites that reply with the code of their error, as in FLARE."""

    def _exchange(self, name: str, attempt: Attempt) -> Reply | None:
        try:
            return super()._exchange(name, attempt)
        except FlareSparseError as error:
            return error.code


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


def build(
    folder: Path, *, poisons: int = 0, name: str = "fedavg", rules: RoundRules = UNBOUNDED, **settings: Any
) -> LocalFederation:
    """Return a run of four rounds in which ``site-3`` sends huge values, the first ``poisons`` times in one round."""
    bench = toy.ToyBench(validation=6)
    federation = DivergingFederation(
        name, bench, rules=rules, stores=lambda end: Store(folder / end, {}), rounds=4, **settings
    )
    remaining = iter(range(poisons))

    def poison(upload: Upload) -> Upload:
        if (upload.site, upload.attempt.round) == ("site-3", POISONED_ROUND) and next(remaining, None) is not None:
            return upload.with_values(torch.full_like(upload.update.patch.values, HUGE))
        return upload

    federation.change_update = poison
    return federation


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("fedavg", {}), ("topk_ef", {"down": 0.2, "decay": 0.8})])
def test_run_steps_back_from_a_poisoned_commit_and_ends_as_without_it(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    expected = build(tmp_path / "clean", name=name, **settings).run()
    federation = build(tmp_path / "run", poisons=1, name=name, **settings)
    outcome = federation.run()
    assert compute_digest(outcome.weights) == compute_digest(expected.weights)
    assert [record.round for record in outcome.rounds] == [1, 2, 3, 4, 5]
    assert [(event.round, event.site, event.event) for event in outcome.events] == [
        (2, SERVER, "stepped_back"),
        (2, "site-1", "update_discarded"),
        (2, "site-2", "update_discarded"),
        (2, "site-3", "update_discarded"),
    ]
    assert Store(tmp_path / "run" / SERVER, {}).list_numbers(STEPPED_BACK) == [2]


@pytest.mark.slow
def test_round_that_is_poisoned_again_stops_the_run_and_names_the_sites(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match=r"round 2 was committed twice.*of site-1, site-2, site-3, is harmful"):
        build(tmp_path / "run", poisons=2).run()
    resumed = build(tmp_path / "run").run(resume=True)
    assert compute_digest(resumed.weights) == compute_digest(build(tmp_path / "clean").run().weights)


def test_first_commit_is_discarded_for_the_initial_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "POISONED_ROUND", 1)
    outcome = build(tmp_path / "run", poisons=1).run()
    assert compute_digest(outcome.weights) == compute_digest(build(tmp_path / "clean").run().weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"finetune": {"epochs": 1}}),
        ("fedavg", {"finetune": {"epochs": 2, "lr": 0.05, "proximal": [0.1, 1.0]}}),
        ("fedavg_one_step", {"adapt_lr": 0.01}),
    ],
)
def test_harmful_update_of_the_last_round_is_not_taken_for_a_diverging_personal_training(
    name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "POISONED_ROUND", 4)
    outcome = build(tmp_path / "run", poisons=1, name=name, **settings).run()
    assert [event.round for event in outcome.events] == [4] * 4
    expected = build(tmp_path / "clean", name=name, **settings).run()
    assert compute_digest(outcome.weights) == compute_digest(expected.weights)


def test_minority_that_claims_to_diverge_discards_no_commit(tmp_path: Path) -> None:
    federation = build(tmp_path, rules=UNBOUNDED.model_copy(update={"min_sites": 3}))
    federation.change_message = lambda upload: (
        "E_DIVERGED" if (upload.site, upload.attempt.round) == ("site-1", 3) else upload
    )
    with pytest.raises(RoundFailed, match="2 of 3 sites contributed"):
        federation.run()
    assert Store(tmp_path / SERVER, {}).list_numbers(STEPPED_BACK) == []


@pytest.mark.slow
def test_step_back_by_hand_repeats_the_last_round(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(record: object) -> None:
        if len(killed.records) == 3:
            raise Killed

    killed = build(tmp_path / "run")
    killed.on_round = kill
    with pytest.raises(Killed):
        killed.run()
    Store(tmp_path / "run" / SERVER, {}).step_back()
    resumed = build(tmp_path / "run")
    outcome = resumed.run(resume=True)
    assert min(number for number, _ in resumed.requested) == 3
    assert compute_digest(outcome.weights) == compute_digest(build(tmp_path / "clean").run().weights)
    assert [(event.round, event.event) for event in outcome.events] == [(3, "stepped_back")]


def test_record_holds_one_line_per_round_after_a_step_back(tmp_path: Path) -> None:
    federation = build(tmp_path / "run", poisons=1)
    folder = federation.bench.open_record(tmp_path / "record", federation.method, federation.ledger)
    federation.on_round = folder.commit
    summary = folder.finish(federation.run())
    lines = [json.loads(line) for line in (tmp_path / "record" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert [event["event"] for event in summary["events"]] == ["stepped_back"] + ["update_discarded"] * 3
    assert summary["contributions"]["site-3"] == {"asked": 4, "contributed": 4, "missed": {}}


def test_huge_update_is_rejected_by_default(tmp_path: Path) -> None:
    federation = build(tmp_path, poisons=1, rules=RoundRules())
    outcome = federation.run()
    assert [record.rejected for record in outcome.rounds] == [{}, {"site-3": "E_NORM"}, {}, {}, {}]
    assert outcome.events == []


@pytest.mark.parametrize(
    ("norms", "rejected"),
    [
        ([1, 2, 2000], {}),
        ([1, 2, 2001], {"site-2": "E_NORM"}),
        ([1, 2001], {}),
        ([0, 0, 5], {}),
        ([1, 1, 1, 3e38], {"site-3": "E_NORM"}),
    ],
)
def test_outlier_exceeds_the_ratio_to_the_median(norms: list[float], rejected: dict[str, str]) -> None:
    assert reject_outliers(build_replies(norms), get_zeros, 1000.0).rejected == rejected


def build_replies(deltas: list[float]) -> AttemptResult:
    """Return replies of sites that change the first of four parameters."""
    values = [torch.tensor([delta, 0.0, 0.0, 0.0]) for delta in deltas]
    contributions = [
        Contribution(f"site-{i}", Patch(value, Mask.full(4)), "delta", 1) for i, value in enumerate(values)
    ]
    return AttemptResult(Attempt(1, "train", 1, {}), contributions, {}, [])


def get_zeros() -> Patch:
    return Patch.from_vector(torch.zeros(4), Mask.full(4))
