"""Send the figures of a run from the server to TensorBoard, MLflow or Weights & Biases."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from ..core.errors import require_extra
from ..rounds.federation.records import RoundRecord

MLFLOW_VARIABLES = {
    # By default MLflow waits for minutes for a server that does not reply, and the round waits with it.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # MLflow 3 refuses a folder otherwise, which is all that a trial without an MLflow server needs.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
"""MLflow's own variables, unless the server's environment sets them."""
RETRY_S = 60.0
"""Seconds after a failed request until the next one, because each makes a round wait."""
FOLDERS = {"tensorboard": "tb_events", "mlflow": "mlruns", "wandb": "wandb"}
"""Folder in the server's job folder that a service's files are written to, where no address is set, by service."""
TRACKER_ID = "tracker"
Log = Callable[[Mapping[str, float], int], Any]


def collect_figures(record: RoundRecord) -> dict[str, float]:
    """Return the figures of a round: the metrics of the model after ``record.evaluated_round``, bytes, sites, time."""
    return {
        **record.evaluation.overall,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "contributed": len(record.sites_contributed),
        "seconds": record.seconds,
    }


class Tracker(FLComponent):
    """Logs the figures of every round, in one run of the service for each job.

    FLARE's own receivers open a run for each site, and none for a server's figures. The service's package is needed at
    the server only, and so are its own variables: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME, WANDB_API_KEY,
    WANDB_PROJECT and WANDB_MODE. Without an address or a key the figures stay in a folder of the job. A service that
    does not reply never ends a job: the server's log names the error, and the figures are sent later.

    Args:
        service: ``tensorboard``, ``mlflow`` or ``wandb``.
        experiment_name: experiment or project of the run, unless the server's variable names another.
        run_name: name of the run.
        run_tags: tags of the run.
    """

    def __init__(self, service: str, experiment_name: str, run_name: str, run_tags: Mapping[str, str] | None = None):
        super().__init__()
        self.service, self.experiment_name, self.run_name = service, experiment_name, run_name
        self.run_tags = dict(run_tags or {})
        self._unsent: list[tuple[Mapping[str, float], int]] = []
        self._opened: tuple[Log, Callable[[], Any]] | None = None
        self._retry_at = 0.0
        self._folder: Path | None = None

    def log(self, figures: Mapping[str, float], step: int, folder: Path) -> None:
        """Send the figures of a round, and those that could not be sent before.

        Args:
            figures: by name.
            step: round of the evaluated model.
            folder: the server's folder of the job.
        """
        self._unsent.append((figures, step))
        self._folder = folder
        if time.monotonic() >= self._retry_at:
            self._send(folder)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Send what is left at the end of the job, and close the run."""
        super().handle_event(event_type, fl_ctx)
        # Try even if the service replied to no round: it may by now.
        if event_type == EventType.END_RUN and self._folder is not None:
            self._send(self._folder)
            if self._opened is not None:
                self._opened[1]()

    def _send(self, folder: Path) -> None:
        try:
            if self._opened is None:
                openers = {"tensorboard": _open_tensorboard, "mlflow": _open_mlflow, "wandb": _open_wandb}
                with require_extra(f"deployment.track: {self.service}", "track"):
                    self._opened = openers[self.service](self, folder / FOLDERS[self.service])
            while self._unsent:
                self._opened[0](*self._unsent[0])
                del self._unsent[0]
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_S
            self.logger.exception("no figures go to %s for now: %s", self.service, error)


def _open_tensorboard(_tracker: Tracker, folder: Path) -> tuple[Log, Callable[[], Any]]:
    """Return how to log figures, and how to close the run; so do the other services' functions."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def log(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _open_mlflow(tracker: Tracker, folder: Path) -> tuple[Log, Callable[[], Any]]:
    for name, value in MLFLOW_VARIABLES.items():
        os.environ.setdefault(name, value)
    import mlflow

    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or folder.resolve().as_uri())
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or tracker.experiment_name)
    mlflow.start_run(run_name=tracker.run_name, tags=tracker.run_tags)
    return mlflow.log_metrics, mlflow.end_run


def _open_wandb(tracker: Tracker, folder: Path) -> tuple[Log, Callable[[], Any]]:
    import wandb

    mode: Any = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or tracker.experiment_name,
        name=tracker.run_name,
        config=tracker.run_tags,
        dir=str(folder.parent),
        mode=mode,
    )
    # run.finish would return before W&B's own process has written its file, and the job may be killed after that.
    return run.log, wandb.teardown
