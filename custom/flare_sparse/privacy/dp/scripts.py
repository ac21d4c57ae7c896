"""The budget of a training script: what the site tells the script's process, and what it reads from the ledger after.

The script's own process charges the site's ledger; the site's process compares the ledger before and after a training,
so that what a script trained without the engine does not leave.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ...core.checkpoint.writing import write_json
from ...core.errors import ConfigError
from .account import PrivacyAccount
from .config import PrivacyConfig

PRIVACY_VARIABLE = "FLARE_SPARSE_PRIVACY"
"""File with the budget of the running job, which a site names to its training script; never part of a job."""


@dataclass(frozen=True)
class ScriptBudget:
    """The budget of a job whose script trains, at one site.

    Attributes:
        config: settings of the job.
        account: the site's secret and ledger, in a folder.
        trainings: number of trainings of the job.
        run, job: id of the run and name of the job.
    """

    config: PrivacyConfig
    account: PrivacyAccount
    trainings: int
    run: str
    job: str

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> ScriptBudget:
        """Read the budget from the file that the site names in ``$FLARE_SPARSE_PRIVACY``.

        Raises:
            ConfigError: there is none, or its file cannot be read.
        """
        if not (file := environment.get(PRIVACY_VARIABLE)):
            raise ConfigError(
                f"make_private: this job has no budget (${PRIVACY_VARIABLE} is not set). Add a privacy section to a "
                "configuration with task.script"
            )
        try:
            budget = TypeAdapter(cls).validate_json(Path(file).read_bytes())
            if budget.account.folder is None:
                raise ValueError("no folder of the account, without which nothing would be charged")
            return budget
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: expected the budget of a job, as the site has written it: {error!r}") from error

    def write(self, file: Path) -> str:
        """Write the budget for the script's process; return the value of :data:`PRIVACY_VARIABLE`.

        The secret is not in the file, only the folder that it is in.
        """
        assert self.account.folder is not None, "another process cannot charge an account in memory"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, TypeAdapter(ScriptBudget).dump_python(self, mode="json"))
        return str(file.absolute())

    @property
    def noise_multiplier(self) -> float:
        """Smallest noise that the run was charged with, as a multiple of the clipping norm; 0 before the first."""
        charges = self.account.read().list_charges(self.run)
        return min((charge.noise_multiplier for charge in charges), default=0.0)

    def compute_spent(self) -> float:
        """Return the epsilon that the run has charged this site's records so far."""
        return self.account.compute_spent(self.run, self.config.delta)

    def count_charges(self) -> int:
        """Return how many times the run has charged the ledger."""
        return sum(entry.run == self.run for entry in self.account.read().entries)
