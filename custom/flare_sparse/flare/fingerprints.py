"""nnU-Net's fingerprints of the sites, merged by the server: to the guards of a site, its answer is statistics."""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

from ..config.policy.policy import raise_refusals
from ..config.schema import JobConfig
from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError
from ..tasks.nnunet.fingerprint import (
    Fingerprint,
    compute_fingerprint,
    find_differences,
    merge_fingerprints,
    parse_fingerprint,
)
from ..tasks.nnunet.raw import select_cases
from ..tasks.nnunet.task import NnunetConfig
from .egress import install_recorder
from .payload import get_refusal_code
from .session import read_job
from .statistics import add_job_file, answer_with_statistics, open_described_data
from .workspace import get_workspace

RESULT = "nnunet/fingerprint.json"
"""File in the server's folder of the job: the sites, and the fingerprint of all their cases."""
LEAST_SITES = 2
TASK = "nnunet_fingerprint"
_KEY = "fingerprint"


class FingerprintRecipe(Recipe):
    """A job in which each site computes its fingerprint, and the server merges them.

    Args:
        config: the study's settings, whose task is ``nnunet``; it needs no plan.
        samples_per_case: foreground voxels drawn from each case, the same number at every site.
    """

    def __init__(self, config: JobConfig, samples_per_case: int):
        job = FedJob(name=config.name, min_clients=config.federation.min_sites)
        super().__init__(job)
        job.to_server(FingerprintController(int(config.federation.task_timeout_s)), id="controller")
        job.to_clients(FingerprintExecutor(samples_per_case), tasks=[TASK])
        add_job_file(self, job, config)


class FingerprintExecutor(Executor):
    """Answers with the fingerprint of the site's cases, if its policy lets statistics leave.

    Args:
        samples_per_case: foreground voxels drawn from each case.
    """

    def __init__(self, samples_per_case: int):
        super().__init__()
        self.samples_per_case = samples_per_case

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Log what leaves, from the start of the job."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            install_recorder(fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the fingerprint, or a refusal with the error code only; its text stays at the site."""
        return answer_with_statistics(lambda: {_KEY: self._compute(fl_ctx)}, fl_ctx)

    def _compute(self, fl_ctx: FLContext) -> bytes:
        policy, data = open_described_data(fl_ctx)
        config = read_job(fl_ctx).task.config
        if not isinstance(config, NnunetConfig):
            raise ConfigError("the job's task is not nnunet")
        cases = select_cases(data, config.derivative)
        raise_refusals(policy.check_cases(len({case.subject for case in cases.values()})))
        found = compute_fingerprint(
            data.path,
            self.samples_per_case,
            cases,
            least=max(policy.min_examples, 1),
            skip_bad_subjects=config.skip_bad_subjects,
        )
        # As bytes: the guard and the egress log count them.
        return found.model_dump_json().encode()


class FingerprintController(Controller):
    """Asks every site for its fingerprint, checks each, and writes the merged one; no single one is kept.

    Args:
        timeout_s: seconds in which a site must answer.
    """

    def __init__(self, timeout_s: int):
        super().__init__()
        self.timeout_s = timeout_s
        self._found: dict[str, Fingerprint] = {}
        self._refusals: dict[str, str] = {}

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: there is nothing to prepare."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: there is nothing to close."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Collect the answers of all sites; end the job with an error if one is missing."""
        sites = sorted(client.name for client in fl_ctx.get_engine().get_clients())
        task = Task(TASK, Shareable(), timeout=self.timeout_s, result_received_cb=self._receive)
        self.broadcast_and_wait(task, fl_ctx, min_responses=len(sites), abort_signal=abort_signal)
        if abort_signal.triggered:
            return
        silent = {site: "no answer" for site in sites if site not in self._found}
        if missing := silent | self._refusals:
            self.system_panic("; ".join(f"{site}: {reason}" for site, reason in sorted(missing.items())), fl_ctx)
        elif reason := self._find_obstacle(sites):
            self.system_panic(reason, fl_ctx)
        else:
            self._write_merged(sites, fl_ctx)

    def _find_obstacle(self, sites: list[str]) -> str:
        """Return why the fingerprints are not merged; empty if they are. No value of a site enters the text."""
        if len(sites) < LEAST_SITES:
            return f"E_QUORUM: {', '.join(sites)} alone is connected, whose own fingerprint the merged one would be"
        parts = [self._found[site] for site in sites]
        differences = [f"in {name} ({sites[0]}, {sites[other]})" for name, other in find_differences(parts).items()]
        return f"E_CONFIG: the fingerprints differ {', '.join(differences)}" if differences else ""

    def _write_merged(self, sites: list[str], fl_ctx: FLContext) -> None:
        try:
            merged = merge_fingerprints([self._found[site] for site in sites]).model_dump(mode="json")
        except Exception as error:  # noqa: BLE001 - its text has values of the sites
            self.system_panic(f"E_CONFIG: the fingerprints cannot be merged: {type(error).__name__}", fl_ctx)
            return
        folder = Path(get_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id()))
        (folder / RESULT).parent.mkdir(parents=True, exist_ok=True)
        write_json(folder / RESULT, {"sites": sites, "fingerprint": merged})

    def _receive(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Keep the fingerprint in an answer, or why there is none; FLARE ends the job if a callback raises."""
        result, site = client_task.result, client_task.client.name
        client_task.result = None
        if result.get_return_code() != ReturnCode.OK:
            self._refusals[site] = get_refusal_code(result)
            return
        try:
            self._found[site] = parse_fingerprint(from_shareable(result).data[_KEY])
        except Exception as error:  # noqa: BLE001 - whatever a site may send
            # Its text could carry names of subjects.
            self._refusals[site] = f"E_KIND: {type(error).__name__}"

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop a result that nobody waits for."""
