"""The privacy budget of a job of FLARE's own recipes, whose script trains with ``flare_sparse.client.make_private``."""

import os
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from pydantic import ValidationError

from ..config.problems import describe_problem
from ..core.errors import ConfigError, PolicyRefusal
from ..privacy.dp.account import LEDGER_FILE, PrivacyAccount, read_ledger
from ..privacy.dp.config import PrivacyConfig
from ..privacy.dp.scripts import PRIVACY_VARIABLE, ScriptBudget
from .egress import install_recorder
from .session import describe_account
from .workspace import get_workspace


class ChargeCheck:
    """Lets a result of a job leave only if the job has charged the site's ledger since the result before it."""

    def __init__(self) -> None:
        self._charges = 0

    def start(self, fl_ctx: FLContext) -> None:
        """Count the charges before the first result.

        Raises:
            BudgetSpent: the ledger cannot be read.
        """
        self._charges = _count_charges(fl_ctx)

    def check(self, result: Shareable, fl_ctx: FLContext) -> None:
        """Pass metrics, failures and bare return codes, and each other result once for a charge.

        Raises:
            PolicyRefusal: nothing was charged for it.
            BudgetSpent: the ledger cannot be read.
        """
        if _has_no_values(result):
            return
        before, self._charges = self._charges, _count_charges(fl_ctx)
        if self._charges == before:
            raise PolicyRefusal(
                "privacy: a result would leave for which nothing was charged; the script trains with what "
                "flare_sparse.client.make_private returns, in a job with add_privacy(recipe, ...)"
            )


class RecipeBudget(Filter):
    """Names the job's budget to the training script at a site, and lets only charged updates leave.

    Args:
        job: name of the job.
        trainings: number of trainings of each site.
        epsilon, noise_multiplier, delta, clip: as in :class:`~flare_sparse.privacy.dp.config.PrivacyConfig`.

    Raises:
        ConfigError: a setting is invalid.
    """

    def __init__(
        self,
        job: str,
        trainings: int,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float = 1e-5,
        clip: float = 1.0,
    ):
        super().__init__()
        # FLARE exports the arguments that are stored under their own names.
        self.job, self.trainings = job, trainings
        self.epsilon, self.noise_multiplier, self.delta, self.clip = epsilon, noise_multiplier, delta, clip
        settings: dict[str, Any] = {
            "epsilon": epsilon, "noise_multiplier": noise_multiplier, "delta": delta, "clip": clip, "unit": "record",
        }  # fmt: skip
        try:
            self._config = PrivacyConfig.model_validate(settings)
        except ValidationError as error:
            problems = [
                f"privacy{'.' if part['loc'] else ': '}{describe_problem(part, PrivacyConfig, settings, {})}"
                for part in error.errors(include_url=False)
            ]
            raise ConfigError("; ".join(problems)) from error
        self._check = ChargeCheck()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Write the budget before FLARE starts the script, which it does at the start of the run."""
        if fl_ctx.get_process_type() != ProcessType.CLIENT_JOB:
            return
        if event_type == EventType.ABOUT_TO_START_RUN:
            self._check.start(fl_ctx)
            os.environ[PRIVACY_VARIABLE] = self._write_budget(fl_ctx)
        elif event_type == EventType.START_RUN:
            install_recorder(fl_ctx)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result unchanged.

        Raises:
            PolicyRefusal: nothing was charged for it; FLARE then reports an error instead of a result.
        """
        self._check.check(shareable, fl_ctx)
        return shareable

    def _write_budget(self, fl_ctx: FLContext) -> str:
        run = str(fl_ctx.get_job_id())
        budget = ScriptBudget(self._config, PrivacyAccount(*describe_account(fl_ctx)), self.trainings, run, self.job)
        return budget.write(Path(get_workspace(fl_ctx).get_run_dir(run)) / "privacy" / "budget.json")


def _has_no_values(result: Shareable) -> bool:
    """Return whether a result is a failure, metrics or a bare return code."""
    if result.get_return_code(ReturnCode.OK) != ReturnCode.OK:
        return True
    try:
        return bool(from_shareable(result).data_kind == DataKind.METRICS)
    except ValueError:
        return not set(result) - {ReservedHeaderKey.HEADERS}


def _count_charges(fl_ctx: FLContext) -> int:
    """Return how many times the running job has charged the site's ledger."""
    folder, _ = describe_account(fl_ctx)
    return sum(entry.run == fl_ctx.get_job_id() for entry in read_ledger(folder / LEDGER_FILE).entries)
