"""Send the figures of a run to MLflow or Weights & Biases through FLARE's receivers."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ProcessType
from nvflare.apis.fl_context import FLContext
from nvflare.recipe import add_experiment_tracking
from nvflare.recipe.spec import Recipe

MLFLOW_VARIABLES = {
    # By default MLflow waits for minutes for a server that does not reply, and the round waits with it.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # MLflow 3 refuses a folder otherwise, which is all that a trial without an MLflow server needs.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
"""MLflow's own variables, unless the server's environment sets them."""
RETRY_S = 60.0
"""Seconds after a failed request to MLflow until the next one, because each makes a round wait."""
FINISH_S = 60.0
"""Seconds in which W&B may write the end of a run; FLARE's 10 cut it short on a busy machine."""
FOLDERS = {"tensorboard": "tb_events", "mlflow": "mlruns", "wandb": "wandb"}
"""Folder in the server's job folder that a service's files are written to, where no address is set, by service."""


class Tracker(FLComponent):
    """Runs FLARE's receiver for a service at the server: one run of it for each job, with the figures of every round.

    The service's package is needed at the server only, and so are its own variables: MLFLOW_TRACKING_URI and
    MLFLOW_EXPERIMENT_NAME, WANDB_API_KEY, WANDB_PROJECT and WANDB_MODE. Without an address or a key the figures stay
    in a folder of the job. A service that does not reply never ends a job: the server's log names the error.

    Args:
        service: ``mlflow`` or ``wandb``.
        experiment_name: experiment or project of the run, unless the server's variable names another.
        run_name: name of the run.
        run_tags: tags of the run.
    """

    def __init__(self, service: str, experiment_name: str, run_name: str, run_tags: Mapping[str, str] | None = None):
        super().__init__()
        self.service = service
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.run_tags = dict(run_tags or {})
        self._receiver: Any = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Pass the run's events to FLARE's receiver, which is built when the run starts."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            folder = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
            try:
                self._receiver = {"mlflow": _build_mlflow, "wandb": _build_wandb}[self.service](self, folder)
            except ImportError as error:
                self.log_error(
                    fl_ctx,
                    f"no figures go to {self.service}: {error}. Install it at the server: pip install "
                    "'flare-sparse[track]'",
                    fire_event=False,
                )
        if self._receiver is not None:
            self._receiver.handle_event(event_type, fl_ctx)


def track_in_tensorboard(recipe: Recipe) -> None:
    """Add FLARE's receiver for TensorBoard, which has a folder for the server's own figures."""
    add_experiment_tracking(recipe, "tensorboard")


class _OwnContext:
    """FLARE's context as a site's, whose receivers open one run, for the figures of their own process.

    At a server they open one run for each site and none for the server, whose own figures they would drop. Sites send
    no figures here: theirs come in their updates, where their policies decide about them.
    """

    def __init__(self, fl_ctx: FLContext):
        self._fl_ctx = fl_ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fl_ctx, name)

    def get_process_type(self) -> str:
        return str(ProcessType.CLIENT_JOB)


def _build_wandb(tracker: Tracker, folder: Path) -> Any:
    """Return FLARE's receiver for Weights & Biases; without a key in the environment it writes to the job's folder.

    Raises:
        ImportError: the package is not installed.
    """
    from nvflare.app_opt.tracking.wandb.wandb_receiver import WandBReceiver

    class ServerReceiver(WandBReceiver):
        def initialize(self, fl_ctx: FLContext) -> None:
            super().initialize(_OwnContext(fl_ctx))

    arguments = {
        "project": os.environ.get("WANDB_PROJECT") or tracker.experiment_name,
        "name": tracker.run_name,
        "group": tracker.run_name,
        "job_type": "server",
        "config": dict(tracker.run_tags),
        "dir": str(folder),
    }
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    return ServerReceiver(arguments, mode=mode, events=[ANALYTIC_EVENT_TYPE], process_timeout=FINISH_S)


def _build_mlflow(tracker: Tracker, folder: Path) -> Any:
    """Return FLARE's receiver for MLflow; without an address in the environment it writes to the job's folder.

    Raises:
        ImportError: the package is not installed.
    """
    from nvflare.app_opt.tracking.mlflow.mlflow_receiver import MLflowReceiver

    class ServerReceiver(MLflowReceiver):
        _retry_at = 0.0

        def initialize(self, fl_ctx: FLContext) -> None:
            for name, value in MLFLOW_VARIABLES.items():
                os.environ.setdefault(name, value)
            super().initialize(_OwnContext(fl_ctx))

        def _get_or_create_experiment(self, client: Any, name: str, *_: Any) -> Any:
            # No artifact location as FLARE sets it: a path of this server means nothing to a remote MLflow.
            found = client.get_experiment_by_name(name)
            return found.experiment_id if found else client.create_experiment(name)

        def _get_run_name(self, *_: Any) -> str:
            return tracker.run_name

        def flush_buffers(self, record_origin: str) -> None:
            if time.monotonic() < self._retry_at:
                return
            buffers = self.buffer[record_origin]
            unsent = {kind: list(items) for kind, items in buffers.items()}
            try:
                super().flush_buffers(record_origin)
            except Exception:
                # FLARE empties the buffers before it sends them, and would try again with every single figure.
                buffers.update(unsent)
                self._retry_at = time.monotonic() + RETRY_S
                raise

        def finalize(self, fl_ctx: FLContext) -> None:
            self._retry_at = 0.0
            super().finalize(fl_ctx)

    names = {
        "experiment_name": os.environ.get("MLFLOW_EXPERIMENT_NAME") or tracker.experiment_name,
        "run_tags": dict(tracker.run_tags),
    }
    address = os.environ.get("MLFLOW_TRACKING_URI") or (folder.resolve() / FOLDERS["mlflow"]).as_uri()
    return ServerReceiver(tracking_uri=address, kw_args=names, events=[ANALYTIC_EVENT_TYPE])
