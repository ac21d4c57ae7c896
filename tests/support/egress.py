"""Comparison of the sites' egress logs with the server's ledger."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from flare_sparse.rounds.endpoints.egress import find_logs, read_chain


def assert_logs_equal_ledger(run: Path) -> None:
    """Assert that each site's log, whose chain is intact, has the messages and bytes of the ledger of a run."""
    ledger: Counter[tuple[str, str, int, int]] = Counter()
    for text in (run / "ledger.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["direction"] == "up":
            ledger[line["site"], line["kind"], line["round"], line["payload_bytes"]] += 1
    logged: Counter[tuple[str, str, int, int]] = Counter()
    for site, folder in find_logs(run).items():
        hello, *lines = read_chain(folder)[0]
        assert (hello["kind"], hello["bytes"]) == ("hello", 0)
        logged += Counter((site, line["kind"], line["round"], line["bytes"]) for line in lines)
    assert logged == ledger
