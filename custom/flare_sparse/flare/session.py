"""State that the FLARE components of one process share: the job, its parts, and the endpoint of server or site."""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from torch import Tensor

from ..compute.kernels.threads import set_kernel_threads
from ..config.assemble import (
    Assembly,
    assemble,
    check_kernels,
    open_checkpoints,
    open_script_budget,
    open_script_trainer,
    open_site,
)
from ..config.choice import Choice
from ..config.loading import parse_job
from ..config.people import ReleaseGate
from ..config.policy.policy import POLICY_FILE, Policy, raise_refusals, read_policy
from ..config.schema import JobConfig
from ..config.yaml_files import read_yaml
from ..core.errors import ConfigError
from ..core.steps import STEP_FILE, StepFile
from ..methods.method import ConfiguredMethod, describe_site_model
from ..privacy.dp.account import PRIVACY_FOLDER, Budget, PrivacyAccount
from ..privacy.dp.scripts import PRIVACY_VARIABLE
from ..privacy.release import RELEASE_FOLDER, Rule
from ..results.runs.model_files import save_site_model
from ..rounds.endpoints.events import SERVER
from ..rounds.endpoints.plans import InitialModel
from ..rounds.endpoints.request_log import RequestLog
from ..rounds.endpoints.server import ServerEndpoint
from ..rounds.endpoints.site import SiteEndpoint
from ..rounds.endpoints.update_store import UpdateStore
from ..tasks.bundles.task import BundleTask
from ..tasks.data.source import find_site_data, has_site_data, read_withdrawn
from ..tasks.script import ScriptTask
from ..tasks.task import SiteData, Task
from ..training import Site
from ..wire.capabilities import local_capabilities
from ..wire.ledger import Ledger
from ..wire.stage import SiteStage, StageRun
from .checkpoints import KEPT_DAYS, delete_archived, delete_old, find_checkpoint_folder
from .egress import install_recorder
from .running import hold_data
from .script import FlareScript
from .watchdog import watch_command
from .workspace import JOB_FILE, find_job_file, get_workspace, read_kit

MODELS_FOLDER = "flare_sparse_models"
"""Folder in a startup kit that receives the site's own models, by run id, where tensors stay at the site."""
REQUESTS_FOLDER = "flare_sparse_requests"
"""Folder in a site's startup kit with the records of the requests that the site answered, a file per run."""
SITE_ID, TASK_ID, METHOD_ID = "site", "task", "method"
_BASES = {TASK_ID: "flare_sparse.Task", METHOD_ID: "flare_sparse.methods.Method"}

_LOG = logging.getLogger(__name__)


class UserPart(FLComponent):
    """Component of a user's task or method. FLARE builds it from its class path, which a site must allow, or BYOC."""

    def __init__(self, part: object):
        super().__init__()
        self.part = part


def read_job(fl_ctx: FLContext) -> JobConfig:
    """Read this participant's copy of the job's settings.

    Raises:
        ConfigError: the settings are invalid, or not those of the user's classes in the job.
    """
    task: Task | None = _find_user_part(fl_ctx, TASK_ID, Task)
    method: ConfiguredMethod | None = _find_user_part(fl_ctx, METHOD_ID, ConfiguredMethod)
    settings = read_yaml(find_job_file(fl_ctx))
    job = parse_job(settings, None if task is None else type(task), None if method is None else method.method_class)
    _check_part("task", job.task, task)
    _check_part("method", job.method, method)
    return job


def _check_part(section: str, choice: Choice[Any], part: Task | ConfiguredMethod | None) -> None:
    """Check that FLARE has built what the settings name: a method or a task of the user's if, and only if, they do.

    Raises:
        ConfigError: it is another class, or has other settings.
    """
    if (None if part is None else part.config) != (choice.config if choice.has_own_code else None):
        raise ConfigError(
            f"component {section!r}: its settings are not those of {section} in {JOB_FILE}; export the job again"
        )
    classes: Mapping[str, type] = {choice.name: choice.entry}
    if isinstance(part, ScriptTask):
        if part.script != choice.name:
            raise ConfigError(f"component 'task': its script is {part.script}, {JOB_FILE} names {choice.name}")
        classes = {part.config.model: part.network_class}
    elif isinstance(part, BundleTask):
        classes = part.code
    for dotted, built in classes.items() if part is not None else ():
        module, _, name = dotted.rpartition(".")
        if getattr(sys.modules.get(module), name, None) is not built:
            raise ConfigError(f"component {section!r}: it holds {built.__name__}, but {JOB_FILE} names {dotted}")


def _find_user_part(fl_ctx: FLContext, name: str, base: type) -> Any:
    """Return the user's task or method that FLARE has built; None: the job has none.

    Raises:
        ConfigError: it is none.
    """
    found = fl_ctx.get_engine().get_component(name)
    part = found.part if isinstance(found, UserPart) else None
    if part is not None and not isinstance(part, base):
        raise ConfigError(f"component {name!r}: expected a subclass of {_BASES[name]}, found {type(part).__name__}")
    return part


def _assemble(fl_ctx: FLContext) -> tuple[JobConfig, Assembly]:
    job, task = read_job(fl_ctx), _find_user_part(fl_ctx, TASK_ID, Task)
    # Float sums depend on the number of threads: server and sites must use the same for the same bits.
    torch.set_num_threads(job.torch_threads)
    set_kernel_threads(job.federation.threads)
    return job, assemble(job, task, read_site_policy(fl_ctx).max_model_entries)


class ServerSession:
    """The server's state: settings, model, method, ledger, endpoint and checkpoints.

    Attributes:
        unarchived: folder of an earlier, finished run of this job whose result FLARE never archived; None: none.

    Raises:
        ConfigError: the settings are invalid for this server.
        CheckpointError: the same job is already running.
    """

    def __init__(self, fl_ctx: FLContext) -> None:
        self.job, self.assembly = _assemble(fl_ctx)
        self.ledger = Ledger()
        root = find_checkpoint_folder(get_workspace(fl_ctx), SERVER)
        self.store = open_checkpoints(self.job, self.assembly, root, SERVER) if root else None
        self.unarchived: Path | None = None
        if root is not None and self.store is not None:
            delete_archived(root)
            if (days := read_site_policy(fl_ctx).checkpoint_days) is not None:
                delete_old(root, SERVER, days=days)
            # Claimed before the mark is read: two processes of one job must not both deliver or both continue it.
            self.store.claim()
            self.unarchived = self.store.get_result_folder()
            self.store.unmark_finished()
        layout, run_id, method = self.assembly.layout, self.assembly.run_id, self.assembly.method
        stage_run = StageRun(layout, run_id, method.get_sum_weights)
        stage = self.job.stage.build_server(stage_run, self.ledger, partial(read_kit, fl_ctx))
        updates = UpdateStore(folder=Path(get_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id())))
        self.endpoint = ServerEndpoint(layout, run_id, self.job.wire.values, self.ledger, stage, self.job.seed, updates)


SITE_MODELS_VARIABLE = "FLARE_SPARSE_SITE_MODELS"
"""Folder that a simulated site writes its own model to; set by the simulator only, never where sites are apart."""


class SiteSession(FLComponent):
    """A site's state: its endpoint, built with the site's data when the first task arrives."""

    def __init__(self) -> None:
        super().__init__()
        self._endpoint: SiteEndpoint | None = None
        self._script: FlareScript | None = None
        self._hello: dict[str, str | int | float] | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Watch the command that started the simulator, log what leaves; save the site's own model at the end."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            watch_command()
            install_recorder(fl_ctx)
        if self._script is not None:
            self._script.handle_event(event_type, fl_ctx)
        if event_type == EventType.END_RUN:
            self.save_own_model(fl_ctx)

    def save_own_model(self, fl_ctx: FLContext) -> None:
        """Save the site's own model, if its method gives it one: beside the others' in a simulation, else in its kit.

        The server cannot rebuild such a model, and the site's checkpoints end with the job.
        """
        folder, endpoint = os.environ.get(SITE_MODELS_VARIABLE), self._endpoint
        if endpoint is None or not describe_site_model(endpoint.method.config):
            return
        own = Path(get_workspace(fl_ctx).get_root_dir()) / MODELS_FOLDER / endpoint.run
        save_site_model(Path(folder) if folder else own, endpoint.site)

    def get_endpoint(self, fl_ctx: FLContext) -> SiteEndpoint:
        """Return this site's endpoint; the first call loads the site's data.

        Raises:
            ConfigError, DataError: the job's settings or the site's data cannot be used.
            CheckpointError: the same job is already running here.
            PolicyRefusal: this site takes part under another permit.
        """
        if self._endpoint is None:
            name = fl_ctx.get_identity_name()
            job, assembly = _assemble(fl_ctx)
            # Hold the data before it is read: no update of such a job may leave.
            hold_data(fl_ctx)
            policy = read_site_policy(fl_ctx)
            raise_refusals(policy.find_job_refusals(job.permit))
            initial = InitialModel(assembly.weights, assembly.layout) if job.builds_initial else None
            # Otherwise the site receives the initial weights from the server; its own copy would only take memory.
            assembly = replace(assembly, weights=torch.zeros(0))
            local = Path(get_workspace(fl_ctx).get_site_config_dir())
            site = self._open_site(assembly, name, local, fl_ctx)
            folder = Path(get_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id()))
            site.step_file = StepFile(folder / STEP_FILE, name)
            root = find_checkpoint_folder(get_workspace(fl_ctx), name)
            store = open_checkpoints(job, assembly, root, name) if root else None
            if root is not None and store is not None:
                store.claim()
                store.unmark_finished()
                days = KEPT_DAYS if policy.checkpoint_days is None else policy.checkpoint_days
                delete_old(root, name, days=days, and_finished=True)
            requests = _open_request_log(fl_ctx, job, assembly)
            self._endpoint = SiteEndpoint(
                site,
                assembly.method,
                assembly.run_id,
                job.wire.values,
                store,
                _build_stage(fl_ctx, job, assembly, requests),
                requests,
                initial,
            )
        return self._endpoint

    def build_initial_weights(self, fl_ctx: FLContext) -> Tensor:
        """Return the initial weights ``(P,)`` that this site's copy of the job defines.

        Raises:
            ConfigError: the job's settings cannot be used.
        """
        # Built again instead of kept: only the first rounds need it, and it takes the memory of a model.
        return _assemble(fl_ctx)[1].weights

    def attach(self, fl_ctx: FLContext, abort_signal: Signal) -> None:
        """Set FLARE's context and signal of the task that is executed now; a training script needs them."""
        if self._script is not None:
            self._script.attach(fl_ctx, abort_signal)

    def _open_site(self, assembly: Assembly, name: str, local: Path, fl_ctx: FLContext) -> Site:
        task = assembly.task
        if not isinstance(task, ScriptTask):
            # Check the kernels before the data is read, and not in the first training, after scores and messages.
            check_kernels(assembly.method)
            account = None if assembly.privacy is None else PrivacyAccount(*describe_account(fl_ctx))
            site = open_site(assembly, find_site_data(name, local), account, open_gate(fl_ctx))
            for finding in site.trainer.examples.find_warnings(name):
                _LOG.warning("%s", finding)
            return site
        # A script may know itself where its data lies, so a site need not say it.
        data = find_site_data(name, local) if has_site_data(local) else None
        workspace, job_id = get_workspace(fl_ctx), fl_ctx.get_job_id()
        # The name alone: a job must not name a file elsewhere on this machine, only the one that came as its code.
        script = Path(workspace.get_app_custom_dir(job_id)) / Path(task.script).name
        folder = Path(workspace.get_run_dir(job_id)) / "script"
        budget = open_script_budget(assembly, *describe_account(fl_ctx))
        if budget is not None:
            os.environ[PRIVACY_VARIABLE] = budget.write(folder / "budget.json")
        self._script = FlareScript(script, task.config.args, data, folder, task.config.launch)
        location = data or SiteData(name, Path(), withdrawn=read_withdrawn(local))
        return open_script_trainer(assembly, location, self._script, budget, open_gate(fl_ctx))

    def build_hello(self, fl_ctx: FLContext) -> dict[str, str | int | float]:
        """Return the message with which this site introduces itself: its versions and its limits on uploads.

        Never raises: a site that cannot load its data sends its versions only; the first request reports the error.
        """
        if self._hello is None:
            try:
                self._hello = self.get_endpoint(fl_ctx).build_hello(**read_site_policy(fl_ctx).upload_caps)
            # Settings of another version may raise any exception. The server derives the reason from the versions.
            except Exception:  # noqa: BLE001
                self._hello = local_capabilities().to_message()
        return self._hello


def _open_request_log(fl_ctx: FLContext, job: JobConfig, assembly: Assembly) -> RequestLog:
    """Open the site's record of answered requests, which lies in the startup kit and not in a folder of the job."""
    policy = read_site_policy(fl_ctx)
    return RequestLog(
        assembly.run_id,
        assembly.method.count_requests,
        attempts=job.federation.retries + 1,
        max_starts=policy.max_starts,
        max_model_change=policy.max_model_change,
        file=find_record(fl_ctx, job.name, assembly.run_id),
    )


def find_record(fl_ctx: FLContext, job: str, run: str) -> Path:
    """Return the file of the requests of a run in the site's record of all requests."""
    folder = Path(get_workspace(fl_ctx).get_root_dir()) / REQUESTS_FOLDER / fl_ctx.get_identity_name()
    return folder / f"{job}-{run}.json"


def describe_account(fl_ctx: FLContext) -> tuple[Path, Budget | None]:
    """Return the folder of the site's secret and privacy ledger, in the startup kit for all jobs, and its limit."""
    folder = Path(get_workspace(fl_ctx).get_root_dir()) / PRIVACY_FOLDER / fl_ctx.get_identity_name()
    return folder, read_site_policy(fl_ctx).privacy_budget


def open_gate(fl_ctx: FLContext) -> ReleaseGate | None:
    """Return what decides on numbers about people at this site; None: its policy lets exact ones leave."""
    policy = read_site_policy(fl_ctx)
    if policy.release == "exact":
        return None
    folder = Path(get_workspace(fl_ctx).get_root_dir()) / RELEASE_FOLDER / fl_ctx.get_identity_name()
    local = Path(get_workspace(fl_ctx).get_site_config_dir())
    return ReleaseGate(local, folder, Rule(policy.min_cell), policy.approved_rows)


def _build_stage(fl_ctx: FLContext, job: JobConfig, assembly: Assembly, requests: RequestLog) -> SiteStage:
    """Return what the values of this site's updates pass on their way to the server."""
    run = StageRun(assembly.layout, assembly.run_id, assembly.method.get_sum_weights)
    fewest = read_site_policy(fl_ctx).min_sum_sites
    name, read = fl_ctx.get_identity_name(), partial(read_kit, fl_ctx)
    return job.stage.build_site(name, run, read, requests.admit_sum, fewest)


def read_site_policy(fl_ctx: FLContext) -> Policy:
    """Read the policy of the site at which this process runs.

    Raises:
        ConfigError: the policy's file is malformed; nothing may leave the site then.
    """
    return read_policy(Path(get_workspace(fl_ctx).get_site_config_dir()) / POLICY_FILE)


def get_site_session(fl_ctx: FLContext) -> SiteSession:
    """Return the site session of this process.

    Raises:
        ConfigError: the job has no such component.
    """
    session = fl_ctx.get_engine().get_component(SITE_ID)
    if not isinstance(session, SiteSession):
        raise ConfigError(f"this app of the job has no component {SITE_ID!r} (SiteSession); export the job again")
    return session
