"""A site that answers a job of statistics in this process, with its guards and its egress log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from flare_sparse.config.schema import JobConfig
from flare_sparse.flare.egress import EgressRecorder
from flare_sparse.flare.session import SiteSession
from flare_sparse.flare.site.guards import SiteLastGate, SiteResultPolicy


class DescribedSite:
    """A site with data of its own, from a task to the result that leaves."""

    def __init__(
        self,
        folder: Path,
        job: JobConfig,
        data: Path,
        executor: Executor,
        policy: dict[str, Any] | None = None,
        session: SiteSession | None = None,
    ):
        local = folder / "local"
        local.mkdir(parents=True, exist_ok=True)
        (local / "flare_sparse.yaml").write_text(yaml.safe_dump({"data": str(data)}))
        (local / "flare_sparse_policy.yaml").write_text(yaml.safe_dump(policy or {}))
        (folder / "flare_sparse.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_unset=True)))
        workspace = SimpleNamespace(
            get_root_dir=lambda: str(folder),
            get_site_config_dir=lambda: str(local),
            get_run_dir=lambda job: str(folder),
            get_app_config_dir=lambda job: str(folder),
        )
        engine = SimpleNamespace(
            get_workspace=lambda: workspace, get_component=lambda name: session, fire_event=lambda *event: None
        )
        self.folder, self.executor = folder, executor
        self.fl_ctx: FLContext = FLContextManager(engine=engine, identity_name=folder.name, job_id="id").new_context()

    def answer(self, name: str, task: Shareable, job_filter: Any = lambda result: result) -> Shareable:
        """Return what leaves after the site's filter, a filter of the job, the gate and the egress log."""
        result = self.executor.execute(name, task, self.fl_ctx, Signal())
        result = job_filter(SiteResultPolicy().process(result, self.fl_ctx))
        self.fl_ctx.set_prop(FLContextKey.TASK_RESULT, result, private=True, sticky=False)
        for handler in (SiteLastGate(), EgressRecorder()):
            handler.handle_event(EventType.AFTER_TASK_RESULT_FILTER, self.fl_ctx)
        return result

    def read_error(self) -> str:
        """Return the error that stays at the site."""
        return (self.folder / "site_error.txt").read_text()
