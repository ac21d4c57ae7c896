"""The record of a running job, sent line by line to an admin: the server's part and the command's part."""

import json
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.fuel.flare_api.api_spec import AuthorizationError
from nvflare.fuel.flare_api.flare_api import Session

TOPIC = "flare_sparse.lines"
"""Topic of FLARE's app command that asks a running job for its rounds."""

STATS = "flare_sparse"
"""Group of a running job's statistics (``show_stats``) that holds the rounds so far."""

MAX_LINES = 2000
"""Most lines in an answer, so that the record of a long run does not hold up the server."""


class RecordFeed:
    """Answers an admin's app command with the lines that were written since the admin's last one.

    FLARE's statistics cannot be asked for a part.
    """

    def __init__(self) -> None:
        self._rounds: list[dict[str, Any]] = []

    def commit(self, line: dict[str, Any]) -> None:
        """Add a line of ``rounds.jsonl``."""
        self._rounds.append(line)

    def dump_rounds(self) -> list[str]:
        """Return the lines of ``rounds.jsonl`` so far, for an admin who may not use app commands."""
        return [json.dumps(line) for line in self._rounds]

    def answer(self, topic: str, data: Any, fl_ctx: FLContext) -> dict[str, Any]:
        """Return the lines after those that the admin has.

        Args:
            topic: the command's topic.
            data: ``{"rounds": n}``: number of lines that the admin has; anything else counts as none.
            fl_ctx: unused; FLARE passes it.
        """
        given = data.get("rounds") if isinstance(data, dict) else 0
        known = max(given, 0) if isinstance(given, int) else 0
        # Serialized here: FLARE's own encoding of messages knows neither numpy numbers nor NaN in nested lists.
        return {"rounds": json.dumps(self._rounds[known : known + MAX_LINES])}


def fetch_rounds(session: Session, job: str, known: int) -> list[dict[str, Any]]:
    """Return the lines of a running job's ``rounds.jsonl`` after the first ones.

    Args:
        session: session of an admin.
        job: id of the job.
        known: number of lines to pass over.

    Raises:
        Exception: of several kinds: the job starts or ends, the connection is lost, or this admin may not ask.
    """
    try:
        answer = session.do_app_command(job, TOPIC, {"rounds": known})
    except AuthorizationError:
        # FLARE's role ``lead`` may submit jobs and read their statistics, but not use app commands.
        lines = session.show_stats(job, "server")["server"][STATS]["lines"]
        return [json.loads(line) for line in lines[known:]]
    rounds: list[dict[str, Any]] = json.loads(answer["rounds"])
    return rounds
