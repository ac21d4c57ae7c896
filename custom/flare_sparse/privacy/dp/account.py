"""A site's account: its secret and the ledger of what its subjects have been charged, over all jobs.

The ledger is a file of the site. Nothing rolls it back: a resumed run, a retry and a new start of the job add to it
what they compute anew, and only that.
"""

import fcntl
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core.checkpoint.writing import write_json
from ...core.errors import FlareSparseError
from .accounting import Charge, combine_answers, compute_epsilon, merge_charges
from .secret import create_secret, read_secret

PRIVACY_FOLDER = "flare_sparse_privacy"
"""Folder in a site's startup kit with its secret and its ledger, by name of the site."""
SECRET_FILE, LEDGER_FILE = "secret.key", "ledger.json"

_TOLERANCE = 1e-6
"""Relative excess over a budget that is rounding."""


class BudgetSpent(FlareSparseError):
    """The next training would exceed a privacy budget; the site abstains. Only the code leaves the site."""

    code = "E_BUDGET"


@dataclass(frozen=True)
class Budget:
    """Limit on what a subject is charged.

    Attributes:
        epsilon: largest epsilon.
        delta: probability that it does not bound.
        planned: steps for which the noise was computed, so that they keep the limit; None: there is no such plan.
    """

    epsilon: float
    delta: float
    planned: Charge | None = None

    def is_exceeded_by(self, charges: Sequence[Charge]) -> bool:
        """Return whether charges add up to more than the limit."""
        merged = merge_charges(charges)
        # The accountant takes a tenth of a second, and a round of a run has nothing new to compute.
        if self.planned is not None and len(merged) == 1:
            (only,), planned = merged, self.planned
            if only.steps <= planned.steps and replace(only, steps=planned.steps) == planned:
                return False
        return compute_epsilon(merged, self.delta) > self.epsilon * (1 + _TOLERANCE)


class Entry(BaseModel):
    """One answer that subjects were charged for.

    Attributes:
        run, job: id of the run and name of the job.
        round: round of the request.
        question: digest of all that the site was asked: model, live entries, steps.
        answer: digest of the values; the same answer again tells nothing new.
        noise_multiplier, sample_rate, steps: the charge.
        time: Unix time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    job: str
    round: int
    question: str
    answer: str
    noise_multiplier: float = Field(gt=0)
    sample_rate: float = Field(gt=0, le=1)
    steps: int = Field(ge=0)
    time: float

    @property
    def charge(self) -> Charge:
        """The charge of the answer."""
        return Charge(self.noise_multiplier, self.sample_rate, self.steps)


class PrivacyLedger(BaseModel):
    """All answers that a site's subjects were charged for."""

    model_config = ConfigDict(extra="forbid")

    entries: list[Entry] = Field(default_factory=list)

    def list_charges(self, run: str | None = None) -> list[Charge]:
        """Return one charge for each question of a run; None: of all runs."""
        answers: dict[object, list[Charge]] = {}
        for entry in self.entries:
            if run in (None, entry.run):
                question = entry.run, entry.question, entry.sample_rate, entry.steps
                answers.setdefault(question, []).append(entry.charge)
        return [combine_answers(charges) for charges in answers.values()]


@dataclass
class PrivacyAccount:
    """A site's secret, its ledger, and the limit that its policy sets over all jobs.

    Attributes:
        folder: folder of the site; None: secret and ledger are kept in memory, for a site that is never asked again.
        limit: largest epsilon over all jobs; None: each job's own budget is the only limit.
        secret: key of all random numbers of the mechanism.
    """

    folder: Path | None = None
    limit: Budget | None = None

    def __post_init__(self) -> None:
        # Another process, in another folder, may read where it is.
        self.folder = self.folder and self.folder.absolute()
        self.secret = create_secret() if self.folder is None else read_secret(self.folder / SECRET_FILE)
        self._memory = PrivacyLedger()

    def read(self) -> PrivacyLedger:
        """Return the ledger.

        Raises:
            BudgetSpent: it cannot be read; a budget that cannot be counted is not granted.
        """
        return self._memory if self.folder is None else read_ledger(self.folder / LEDGER_FILE)

    def compute_spent(self, run: str, delta: float) -> float:
        """Return the epsilon that a run has charged this site's subjects."""
        return compute_epsilon(self.read().list_charges(run), delta)

    def check(self, entry: Entry, budget: Budget | None) -> None:
        """Raise unless a question fits into the budgets, or was answered before.

        Args:
            entry: the question, with any answer.
            budget: budget of the run; None: it has none.

        Raises:
            BudgetSpent: the question would exceed a budget.
        """
        ledger = self.read()
        if not any((known.run, known.question) == (entry.run, entry.question) for known in ledger.entries):
            self._check_budgets(ledger, entry, budget)

    def charge(self, entry: Entry, budget: Budget | None) -> None:
        """Add an answer to the ledger, on disk when the call returns, before anything leaves; the same answer once.

        Raises:
            BudgetSpent: it would exceed a budget, or the ledger cannot be written.
        """
        with self._lock_and_update() as ledger:
            known = {(known.run, known.question, known.answer) for known in ledger.entries}
            if (entry.run, entry.question, entry.answer) in known:
                return
            self._check_budgets(ledger, entry, budget)
            ledger.entries.append(entry)

    def _check_budgets(self, ledger: PrivacyLedger, entry: Entry, budget: Budget | None) -> None:
        charged = PrivacyLedger(entries=[*ledger.entries, entry])
        for limit, run, source in (
            (budget, entry.run, "the job's privacy.epsilon"),
            (self.limit, None, "epsilon of this site's policy, over all jobs"),
        ):
            if limit is not None and limit.is_exceeded_by(charged.list_charges(run)):
                before, after = (compute_epsilon(part.list_charges(run), limit.delta) for part in (ledger, charged))
                raise BudgetSpent(
                    f"{source} is {limit.epsilon:g} at delta {limit.delta:g}; {before:.3f} is spent, and this round "
                    f"would make it {after:.3f}. The site abstains; the run continues without it"
                )

    @contextmanager
    def _lock_and_update(self) -> Iterator[PrivacyLedger]:
        """Yield the ledger under a lock, since jobs of a site run side by side; without an error, write it back."""
        if self.folder is None:
            yield self._memory
            return
        try:
            with (self.folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                ledger = self.read()
                yield ledger
                write_json(self.folder / LEDGER_FILE, ledger.model_dump())
        except OSError as error:
            raise BudgetSpent(f"{self.folder}: the privacy ledger cannot be read or written: {error}") from error


def build_entry(run: str, job: str, t: int, question: str, answer: str, charge: Charge) -> Entry:
    """Return the entry of an answer that is computed now."""
    return Entry(run=run, job=job, round=t, question=question, answer=answer, time=time.time(), **asdict(charge))


def read_ledger(file: Path) -> PrivacyLedger:
    """Read a ledger; one without a file is empty.

    Raises:
        BudgetSpent: it cannot be read.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return PrivacyLedger()
    except OSError as error:
        raise BudgetSpent(f"{file}: the privacy ledger cannot be read: {error}") from error
    try:
        return PrivacyLedger.model_validate(json.loads(content.decode("utf-8")))
    except (ValueError, ValidationError, RecursionError) as error:
        raise BudgetSpent(f"{file}: the privacy ledger is damaged: {error}; restore it from a backup") from error
