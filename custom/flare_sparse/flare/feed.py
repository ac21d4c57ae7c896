"""The record of a running job, sent line by line to an admin: the server's part and the command's part."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.fuel.flare_api.api_spec import AuthorizationError
from nvflare.fuel.flare_api.flare_api import Session

from ..wire.ledger import LedgerLine

TOPIC = "flare_sparse.lines"
"""Topic of FLARE's app command that asks a running job for lines of its record."""

STATS = "flare_sparse"
"""Group of a running job's statistics (``show_stats``) that holds the rounds so far."""

MAX_LINES = 2000
"""Most lines of one file in an answer, so that the record of a long run does not hold up the server."""


class RecordFeed:
    """Answers an admin's app command with the lines that were written since the admin's last one.

    FLARE's statistics cannot be asked for a part, and the ledger of a long run has many megabytes.
    """

    def __init__(self, messages: Sequence[LedgerLine]):
        self._rounds: list[dict[str, Any]] = []
        self._messages, self._num_committed = messages, 0

    def commit(self, line: dict[str, Any]) -> None:
        """Add a line of ``rounds.jsonl``; the messages so far belong to committed rounds."""
        self._rounds.append(line)
        self._num_committed = len(self._messages)

    def dump_rounds(self) -> list[str]:
        """Return the lines of ``rounds.jsonl`` so far, for an admin who may not use app commands."""
        return [json.dumps(line) for line in self._rounds]

    def answer(self, topic: str, data: Any, fl_ctx: FLContext) -> dict[str, Any]:
        """Return the lines after those that the admin has.

        Args:
            topic: the command's topic.
            data: ``{"rounds": n, "ledger": m}``: numbers of lines that the admin has; anything else counts as none.
            fl_ctx: unused; FLARE passes it.
        """
        counts = data if isinstance(data, dict) else {}
        rounds, ledger = (_read_count(counts.get(name)) for name in ("rounds", "ledger"))
        messages = self._messages[ledger : min(ledger + MAX_LINES, self._num_committed)]
        return {
            # Serialized here: FLARE's own encoding of messages knows neither numpy numbers nor NaN in nested lists.
            "rounds": json.dumps(self._rounds[rounds : rounds + MAX_LINES]),
            "ledger": json.dumps([asdict(line) for line in messages]),
        }


def _read_count(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def fetch_lines(
    session: Session, job: str, rounds: int, ledger: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lines of a running job's ``rounds.jsonl`` and ``ledger.jsonl`` after the first ones.

    Args:
        session: session of an admin.
        job: id of the job.
        rounds: number of lines of ``rounds.jsonl`` to pass over.
        ledger: number of lines of ``ledger.jsonl`` to pass over.

    Returns:
        The lines of both files.

    Raises:
        Exception: of several kinds: the job starts or ends, the connection is lost, or this admin may not ask.
    """
    try:
        answer = session.do_app_command(job, TOPIC, {"rounds": rounds, "ledger": ledger})
    except AuthorizationError:
        # FLARE's role ``lead`` may submit jobs and read their statistics, but not use app commands.
        lines = session.show_stats(job, "server")["server"][STATS]["lines"]
        return [json.loads(line) for line in lines[rounds:]], []
    return json.loads(answer["rounds"]), json.loads(answer["ledger"])
