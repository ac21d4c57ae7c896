"""A site's ledger: durable, over all jobs, and never charged twice for one answer."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from flare_sparse.privacy.dp.account import (
    LEDGER_FILE,
    Budget,
    BudgetSpent,
    Entry,
    PrivacyAccount,
    build_entry,
    read_ledger,
)
from flare_sparse.privacy.dp.accounting import Charge, compute_epsilon

RUN, OTHER = "a" * 16, "b" * 16
CHARGE = Charge(2.0, 0.2, 10)
DELTA = 1e-5


def entry(question: str, answer: str = "x", run: str = RUN, t: int = 1) -> Entry:
    return build_entry(run, "job", t, question, answer, CHARGE)


def spend(count: int) -> float:
    return compute_epsilon([CHARGE] * count, DELTA)


@pytest.mark.slow
def test_same_answer_is_charged_once_and_others_as_less_noise_on_the_same_sample(tmp_path: Path) -> None:
    account = PrivacyAccount(tmp_path)
    account.charge(entry("q"), None)
    account.charge(entry("q"), None)
    assert account.compute_spent(RUN, DELTA) == spend(1)
    for answer in "yzw":
        account.charge(entry("q", answer), None)
    # Four answers: half the noise. Four samples of their own would cost less.
    four = compute_epsilon([Charge(1.0, CHARGE.sample_rate, CHARGE.steps)], DELTA)
    assert account.compute_spent(RUN, DELTA) == four > spend(4)
    with pytest.raises(BudgetSpent):
        account.charge(entry("q", "v"), Budget(four, DELTA))


@pytest.mark.slow
def test_ledger_survives_the_process_and_adds_up_all_jobs(tmp_path: Path) -> None:
    PrivacyAccount(tmp_path).charge(entry("q"), None)
    PrivacyAccount(tmp_path).charge(entry("q", run=OTHER), None)
    account = PrivacyAccount(tmp_path, Budget(spend(3), DELTA))
    assert account.compute_spent(RUN, DELTA) == account.compute_spent(OTHER, DELTA) == spend(1)
    account.charge(entry("r"), None)
    message = (
        rf"epsilon of this site's policy, over all jobs is {spend(3):g} at delta 1e-05; {spend(3):.3f} is spent, and "
        rf"this round would make it {spend(4):.3f}"
    )
    with pytest.raises(BudgetSpent, match=message):
        account.check(entry("s"), None)
    with pytest.raises(BudgetSpent, match=message):
        account.charge(entry("s"), None)
    assert len(account.read().entries) == 3


@pytest.mark.slow
def test_budget_of_a_job_counts_its_own_run_only() -> None:
    account, budget = PrivacyAccount(), Budget(spend(1), DELTA)
    account.charge(entry("q", run=OTHER), budget)
    account.charge(entry("q"), budget)
    with pytest.raises(BudgetSpent, match=r"the job's privacy\.epsilon is"):
        account.check(entry("r"), budget)


@pytest.mark.slow
def test_question_answered_before_may_be_asked_when_the_budget_is_spent() -> None:
    account, budget = PrivacyAccount(), Budget(spend(1), DELTA)
    account.charge(entry("q"), budget)
    account.check(entry("q"), budget)
    account.charge(entry("q"), budget)
    # The same question with another answer, as after a change of the data, is not free.
    with pytest.raises(BudgetSpent):
        account.charge(entry("q", "y"), budget)


def test_planned_steps_are_not_accounted_again_and_all_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare_sparse.privacy.dp.account.compute_epsilon", lambda charges, delta: 9.0)
    budget = Budget(1.0, DELTA, planned=CHARGE)
    first, last = replace(CHARGE, steps=4), replace(CHARGE, steps=6)
    others = [replace(CHARGE, noise_multiplier=1.9), replace(CHARGE, sample_rate=0.3), replace(CHARGE, steps=1)]
    found = [
        budget.is_exceeded_by(charges) for charges in ([first], [first, last], *([last, first, o] for o in others))
    ]
    assert found == [False, False, True, True, True]
    assert Budget(1.0, DELTA).is_exceeded_by([first])


def test_code_of_a_spent_budget_is_stable() -> None:
    assert BudgetSpent.code == "E_BUDGET"


@pytest.mark.parametrize("content", [b"{", b'{"entries": [{"run": "a"}]}', b"[]", '{"entries": []}'.encode("utf-16")])
def test_damaged_ledger_grants_nothing(tmp_path: Path, content: bytes) -> None:
    account = PrivacyAccount(tmp_path)
    (tmp_path / LEDGER_FILE).write_bytes(content)
    with pytest.raises(BudgetSpent, match="the privacy ledger is damaged"):
        account.charge(entry("q"), None)
    with pytest.raises(BudgetSpent, match="the privacy ledger is damaged"):
        account.check(entry("q"), None)
    assert (tmp_path / LEDGER_FILE).read_bytes() == content


def test_ledger_without_a_file_is_empty(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / LEDGER_FILE).list_charges() == []
    assert PrivacyAccount(tmp_path).compute_spent(RUN, DELTA) == 0.0


def test_charge_waits_for_the_job_that_holds_the_ledger(tmp_path: Path) -> None:
    account = PrivacyAccount(tmp_path)
    account.charge(entry("q"), None)
    waiting = Thread(target=account.charge, args=(entry("r"), None))
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        assert len(account.read().entries) == 1
    waiting.join()
    assert len(account.read().entries) == 2
