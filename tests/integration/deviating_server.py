"""Servers whose controllers ask other questions than their jobs', before the jobs' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import StatisticsConstants

from flare_sparse.flare.payload import QUESTION, get_refusal_code, wrap
from flare_sparse.flare.questions import DescriptionController, FingerprintController, QuestionController
from flare_sparse.flare.workspace import get_workspace


def build_deviations(question: str) -> dict[str, Shareable]:
    """Return deviating messages by name: FLARE's own question, another kind, and another value of each term."""
    flare = Shareable(
        {
            StatisticsConstants.STATISTICS_TASK_KEY: StatisticsConstants.STATS_2nd_STATISTICS,
            StatisticsConstants.STATS_GLOBAL_MEAN: {"site": {"a": [1.0, 0.0, 0.0]}},
        }
    )
    kind, *terms = question.split("; ")
    other = "fingerprint" if kind == "describe" else "describe"
    texts = {"kind": "; ".join([other, *terms]), "no terms": kind}
    for term in terms:
        name, _, value = term.partition(": ")
        texts[name] = question.replace(term, f"{name}: {[1, *json.loads(value)] if value[0] == '[' else 1}")
    return {"flare": flare} | {name: wrap(QUESTION, text) for name, text in texts.items()}


class Deviating(QuestionController[Any]):
    """Writes the codes of the sites' answers to deviating questions, and then those to the honest one."""

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        codes: dict[str, dict[str, str]] = {}
        sites = fl_ctx.get_engine().get_clients()
        for name, data in build_deviations(self.question).items():

            def receive(client_task: Any, fl_ctx: Any, name: str = name) -> None:
                codes.setdefault(name, {})[client_task.client.name] = get_refusal_code(client_task.result)
                client_task.result = None

            task = Task("question", data, timeout=self.timeout_s, result_received_cb=receive)
            self.broadcast_and_wait(task, fl_ctx, min_responses=len(sites), abort_signal=abort_signal)
        super().control_flow(abort_signal, fl_ctx)
        folder = Path(get_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id()))
        (folder / "codes.json").write_text(json.dumps(codes))


class DeviatingDescription(Deviating, DescriptionController):
    """Deviates from ``flare-sparse describe``."""


class DeviatingFingerprint(Deviating, FingerprintController):
    """Deviates from ``flare-sparse plan``."""
