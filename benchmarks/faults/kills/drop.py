"""A VPN drop: every connection of a site is reset, and new ones are refused for a while; the job must not abort."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .damage import VICTIM
from .federation import Federation, Unexpected, wait_for
from .jobs import LEAVING_OUT, WAITING, Result, follow, submit, write_job
from .proxy import Proxy

SECONDS = 40
"""FLARE's timeouts are divided by nine, so that this drop stands for one of 6 minutes."""
ROUND = 2
ROUNDS_LEFT_OUT = 8
"""Rounds of a job that goes on without the site: enough for the site to come back before the last."""


@dataclass(frozen=True)
class Drop:
    """A drop of a site's connections.

    Attributes:
        method: method of the job.
        phase: what the site does when its connections are cut: ``training`` or ``sending``.
        waits: whether the round waits for the site; otherwise it times out and goes on without it.
        number: tells repetitions apart.
    """

    method: str
    phase: str
    waits: bool
    number: int = 1

    @property
    def name(self) -> str:
        """Name of the cell."""
        return f"drop:{self.method}:{self.phase}:{'waits' if self.waits else 'leaves out'}:{self.number}"

    def run(self, federation: Federation, proxy: Proxy, folder: Path, planned: Result) -> dict[str, Any]:
        """Run a job with one drop; return the checks and what happened.

        Raises:
            Unexpected: the job did not end with a model, or there was no connection to cut.
        """
        began = time.monotonic()
        federation.clear_checkpoints()
        (federation.faults / "reached.json").unlink(missing_ok=True)
        armed = federation.faults / "armed.json"
        armed.write_text(json.dumps({"phase": self.phase, "participant": VICTIM, "round": ROUND}))
        cut: list[int] = []

        def disturb() -> None:
            wait_for((federation.faults / "reached.json").is_file, 180, f"the job at {self.phase}")
            cut.append(proxy.cut(SECONDS))
            armed.unlink()

        rules, rounds = (WAITING, 4) if self.waits else (LEAVING_OUT, ROUNDS_LEFT_OUT)
        job = write_job(folder.parent, self.method, rules, rounds)
        thread = threading.Thread(target=disturb, daemon=True)
        thread.start()
        result = follow(federation, submit(federation, job), folder, seconds=400)
        thread.join(timeout=10)
        if not cut or not cut[0]:
            raise Unexpected("no connection to cut")
        missed = [line["round"] for line in result.rounds if VICTIM not in line["sites_contributed"]]
        return {
            **asdict(self),
            "checks": {
                "no abort": True,
                "balanced": result.is_balanced(),
                "the others in every round": all(len(line["sites_contributed"]) >= 2 for line in result.rounds),
                "back before the end": VICTIM in result.rounds[-1]["sites_contributed"],
                **(
                    {"same model": result.digest == planned.digest, "in every round": not missed}
                    if self.waits
                    else {
                        "the record names it": bool(missed)
                        and all(VICTIM in line["timed_out"] for line in result.rounds if line["round"] in missed)
                    }
                ),
            },
            "connections reset": cut[0],
            "missed": missed,
            "slowest round": round(max(line["seconds"] for line in result.rounds), 1),
            "seconds": round(time.monotonic() - began, 1),
        }
