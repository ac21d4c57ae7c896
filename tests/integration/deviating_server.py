"""A server whose controller asks other questions than its job's, before the job's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import StatisticsConstants

from flare_sparse.flare.payload import get_refusal_code, question_to_shareable
from flare_sparse.flare.statistics import DescriptionController
from flare_sparse.flare.workspace import get_workspace


def build_deviations(question: str) -> dict[str, Shareable]:
    """Return deviating messages by name."""
    flare = Shareable(
        {
            StatisticsConstants.STATISTICS_TASK_KEY: StatisticsConstants.STATS_2nd_STATISTICS,
            StatisticsConstants.STATS_GLOBAL_MEAN: {"site": {"a": [1.0, 0.0, 0.0]}},
        }
    )
    few, other = question.replace("least: 10", "least: 1"), question.replace("describe", "fingerprint")
    bins = question.replace("bins: 15", "bins: 1000")
    return {"flare": flare} | {
        name: question_to_shareable(text) for name, text in {"few": few, "other": other, "bins": bins}.items()
    }


class DeviatingController(DescriptionController):
    """Writes the codes of the sites' answers to deviating questions, and then those to the honest one."""

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        codes: dict[str, dict[str, str]] = {}
        for name, data in build_deviations(self.question).items():

            def receive(client_task: Any, fl_ctx: Any, name: str = name) -> None:
                codes.setdefault(name, {})[client_task.client.name] = get_refusal_code(client_task.result)
                client_task.result = None

            task = Task("question", data, timeout=self.timeout_s, result_received_cb=receive)
            self.broadcast_and_wait(task, fl_ctx, min_responses=3, abort_signal=abort_signal)
        super().control_flow(abort_signal, fl_ctx)
        folder = Path(get_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id()))
        (folder / "codes.json").write_text(json.dumps(codes))
