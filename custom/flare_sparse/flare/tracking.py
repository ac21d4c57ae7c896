"""Send the figures of a run to MLflow through FLARE's receiver."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

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


class MlflowTracker(FLComponent):
    """Runs FLARE's MLflow receiver at the server: one MLflow run for each job, with the figures of every round.

    The package ``mlflow`` is needed at the server only. An MLflow that does not reply never ends a job: the
    server's log names the error. Figures that could not be sent are sent later, at the latest at the end of the job;
    if MLflow does not reply at the start, none are sent.

    Args:
        tracking_uri: MLflow's tracking URI, as the server reaches it.
        experiment_name: experiment of the run; it is created if MLflow has none of this name.
        run_name: name of the run.
        run_tags: tags of the run.
    """

    def __init__(
        self, tracking_uri: str, experiment_name: str, run_name: str, run_tags: Mapping[str, str] | None = None
    ):
        super().__init__()
        self.tracking_uri = tracking_uri
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.run_tags = dict(run_tags or {})
        self._receiver: Any = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Pass the run's events to FLARE's receiver, which is built when the run starts."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            try:
                self._receiver = _build_receiver(self)
            except ImportError as error:
                self.log_error(
                    fl_ctx,
                    f"no figures go to MLflow: {error}. Install it at the server: pip install 'flare-sparse[mlflow]'",
                    fire_event=False,
                )
        if self._receiver is not None:
            self._receiver.handle_event(event_type, fl_ctx)


def _build_receiver(tracker: MlflowTracker) -> Any:
    """Return FLARE's receiver, changed to record what the server itself measures.

    Raises:
        ImportError: MLflow is not installed.
    """
    # Only a server that tracks a run needs MLflow: the lead builds the job without it.
    from mlflow.tracking.client import MlflowClient
    from nvflare.app_opt.tracking.mlflow.mlflow_receiver import MLflowReceiver

    class ServerReceiver(MLflowReceiver):
        def initialize(self, fl_ctx: FLContext) -> None:
            # At a server FLARE opens one run for each site and none for the server, whose own figures it would drop.
            # Sites send no figures here: theirs come in their updates, where their policies decide about them.
            for name, value in MLFLOW_VARIABLES.items():
                os.environ.setdefault(name, value)
            client = MlflowClient(tracking_uri=tracker.tracking_uri)
            experiment = client.get_experiment_by_name(tracker.experiment_name)
            # No artifact location as FLARE sets it: a path of this server means nothing to a remote MLflow.
            self.experiment_id = (
                experiment.experiment_id if experiment else client.create_experiment(tracker.experiment_name)
            )
            tags = {**tracker.run_tags, "job_id": fl_ctx.get_job_id()}
            run = client.create_run(self.experiment_id, run_name=tracker.run_name, tags=tags)
            server = fl_ctx.get_identity_name()
            self.mlflow_clients[server] = client
            self.run_ids[server] = run.info.run_id
            self._init_buffer([server])
            self._retry_at = 0.0

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

    return ServerReceiver(tracking_uri=tracker.tracking_uri, events=[ANALYTIC_EVENT_TYPE])
