"""What the components of one process share: the job, and this end of the wire."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from ..assemble import Assembly, assemble, open_checkpoints, open_site
from ..capabilities import local_capabilities
from ..config import JobConfig, parse_job
from ..config.yaml_files import read_yaml
from ..data.source import site_data
from ..endpoints.server import SERVER, ServerEndpoint
from ..endpoints.site import SiteEndpoint
from ..errors import ConfigError, FlareSparseError
from ..policy.policy import POLICY_FILE, Policy, read_policy
from ..task import Task
from ..wire.ledger import Ledger
from .checkpoints import checkpoint_folder, delete_archived
from .he_keys import server_cipher, site_cipher

JOB_FILE = "flare_sparse.yaml"
SITE_ID, SERVER_ID, AGGREGATOR_ID, TASK_ID = "site", "server_session", "aggregator", "task"


class UserTask(FLComponent):
    """Holds a user's own task. FLARE builds ``task`` itself, so its class must be allow-listed or BYOC."""

    def __init__(self, task: object):
        super().__init__()
        self.task = task


def get_workspace(fl_ctx: FLContext) -> Workspace:
    """The workspace of this process."""
    return fl_ctx.get_engine().get_workspace()


def _assemble(fl_ctx: FLContext) -> tuple[JobConfig, Assembly]:
    job_id = fl_ctx.get_job_id()
    user_task = fl_ctx.get_engine().get_component(TASK_ID)
    task = user_task.task if isinstance(user_task, UserTask) else None
    if task is not None and not isinstance(task, Task):
        raise ConfigError(f"component {TASK_ID!r} is a {type(task).__name__}; expected a subclass of flare_sparse Task")
    settings = read_yaml(Path(get_workspace(fl_ctx).get_app_config_dir(job_id)) / JOB_FILE)
    job = parse_job(settings, None if task is None else type(task))
    torch.set_num_threads(job.federation.threads)
    return job, assemble(job, task)


class ServerSession(FLComponent):
    """The server's end: built from the job's own file when the controller starts.

    Attributes:
        unarchived: folder of an earlier run of this job that ended, and whose result FLARE never archived.
    """

    def open(self, fl_ctx: FLContext) -> None:
        """Read the job, build model and method.

        Raises:
            ConfigError: the job's file is not usable here.
            CheckpointError: the same job runs already.
        """
        self.job, self.assembly = _assemble(fl_ctx)
        self.ledger = Ledger()
        root = checkpoint_folder(get_workspace(fl_ctx), SERVER)
        self.store = open_checkpoints(self.job, self.assembly, root, SERVER) if root else None
        self.unarchived: Path | None = None
        if root is not None and self.store is not None:
            delete_archived(root)
            self.store.claim()
            self.unarchived = self.store.get_finished()
            self.store.clear_finished()
        cipher = server_cipher(fl_ctx) if self.job.encrypted else None
        self.endpoint = ServerEndpoint(
            self.assembly.layout, self.assembly.run_id, self.job.wire.values, self.ledger, cipher
        )


class SiteSession(FLComponent):
    """A site's end: opens the site's data when the first question comes."""

    def __init__(self) -> None:
        super().__init__()
        self._desk: SiteEndpoint | None = None
        self._said: dict[str, str | int | float] | None = None

    def endpoint(self, fl_ctx: FLContext) -> SiteEndpoint:
        """This site's desk.

        Raises:
            ConfigError, DataError: the job or the site's data is not usable.
            CheckpointError: the same job runs here already.
        """
        if self._desk is None:
            name = fl_ctx.get_identity_name()
            job, assembly = _assemble(fl_ctx)
            local = Path(get_workspace(fl_ctx).get_site_config_dir())
            site = open_site(assembly, site_data(name, local))
            root = checkpoint_folder(get_workspace(fl_ctx), name)
            store = open_checkpoints(job, assembly, root, name) if root else None
            if store is not None:
                store.claim()
            cipher = site_cipher(fl_ctx) if job.encrypted else None
            self._desk = SiteEndpoint(site, assembly.method, assembly.run_id, job.wire.values, store, cipher)
        return self._desk

    def hello(self, fl_ctx: FLContext) -> dict[str, str | int | float]:
        """What this site says of itself before it is asked: its versions, and the limits that it could read.

        Never raises: a site that cannot be opened says its versions only, and why with the first question.
        """
        if self._said is None:
            try:
                self._said = self.endpoint(fl_ctx).build_hello(**read_site_policy(fl_ctx).limits())
            except Exception:  # noqa: BLE001 - the job may need another version to be read at all
                self._said = local_capabilities().to_message()
        return self._said


def read_site_policy(fl_ctx: FLContext) -> Policy:
    """The policy of the site that this process runs at.

    Raises:
        ConfigError: the policy's file is malformed; nothing may leave then.
    """
    return read_policy(Path(get_workspace(fl_ctx).get_site_config_dir()) / POLICY_FILE)


def write_site_error(error: Exception, code: str, fl_ctx: FLContext) -> None:
    """Write an error to ``site_error.txt`` in the job's folder at this site.

    Its text may name subjects and files, so it goes to no log: FLARE streams logs to the server.
    """
    report = Path(get_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id())) / "site_error.txt"
    unexpected = "" if isinstance(error, FlareSparseError) else "".join(traceback.format_exception(error))
    report.write_text(f"{code}: {error}\n{unexpected}")


def get_site_session(fl_ctx: FLContext) -> SiteSession:
    """The site session of this process.

    Raises:
        ConfigError: the job lacks it.
    """
    session = fl_ctx.get_engine().get_component(SITE_ID)
    if not isinstance(session, SiteSession):
        raise ConfigError(f"the client app has no component {SITE_ID!r} (SiteSession); export the job again")
    return session


def get_server_session(fl_ctx: FLContext) -> ServerSession:
    """The server session of this process.

    Raises:
        ConfigError: the job lacks it.
    """
    session = fl_ctx.get_engine().get_component(SERVER_ID)
    if not isinstance(session, ServerSession):
        raise ConfigError(f"the server app has no component {SERVER_ID!r} (ServerSession); export the job again")
    return session
