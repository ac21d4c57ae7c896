"""Lets a job's processes stop at a named place of a named round; Python imports it from PYTHONPATH by itself.

For fault injection only, and no part of the package: it wraps a few functions as their modules are loaded. A process
that comes to the place that ``FAULTS/armed.json`` names writes ``FAULTS/reached.json`` and waits until the former is
gone. Every question that a server asks is a line of ``FAULTS/asked.jsonl``. SIGUSR1 ends a process as the kernel's
out-of-memory killer would end a trainer: at once, with status 137.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FAULTS = Path(os.environ.get("FLARE_SPARSE_FAULTS", ""))
_now = {"round": 0}


def _who() -> str:
    """The participant whose process this is: the name of the startup kit in its command line."""
    line = sys.argv
    return Path(line[line.index("-m") + 1]).name if "-m" in line[:-1] else ""


def place(phase: str) -> None:
    """Stop here for as long as this place is armed."""
    armed = FAULTS / "armed.json"
    try:
        wanted = json.loads(armed.read_text())
    except (OSError, ValueError):
        return
    here = {"phase": phase, "who": _who(), "round": _now["round"]}
    if wanted != here:
        return
    part = FAULTS / "reached.part"
    part.write_text(json.dumps({**here, "pid": os.getpid()}))
    part.replace(FAULTS / "reached.json")
    while armed.exists():
        time.sleep(0.02)


def _before(phase: str) -> Callable[[Any], Any]:
    def wrap(function: Any) -> Any:
        @functools.wraps(function)
        def stopping(*arguments: Any, **named: Any) -> Any:
            place(phase)
            return function(*arguments, **named)

        return stopping

    return wrap


def _answering(function: Any) -> Any:
    @functools.wraps(function)
    def answer(endpoint: Any, request: Any) -> Any:
        _now["round"] = -1 if request.kind == "evaluate" else request.round
        place("training")
        return function(endpoint, request)

    return answer


def _asking(function: Any) -> Any:
    @functools.wraps(function)
    def ask(endpoint: Any, requests: Any) -> Any:
        question = function(endpoint, requests)
        _now["round"] = -1 if question.kind == "evaluate" else question.round
        line = {"pid": os.getpid(), "round": question.round, "kind": question.kind, "sites": sorted(requests)}
        with (FAULTS / "asked.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return question

    return ask


def _receiving(function: Any) -> Any:
    @functools.wraps(function)
    def process(filter_: Any, shareable: Any, fl_ctx: Any) -> Any:
        place("receiving")
        return function(filter_, shareable, fl_ctx)

    return process


PLACES: dict[str, list[tuple[str, str, Callable[[Any], Any]]]] = {
    "flare_sparse.federation.loop": [("Federation", "run", _before("before"))],
    "flare_sparse.endpoints.server": [("ServerDesk", "ask", _asking)],
    "flare_sparse.endpoints.site": [("SiteDesk", "answer", _answering)],
    "flare_sparse.flare.filters": [("DecodeUpdate", "process", _receiving)],
    "flare_sparse.flare.aggregator": [("StagingAggregator", "aggregate", _before("aggregating"))],
    "flare_sparse.checkpoint.store": [("Store", "save", _before("saving"))],
    "nvflare.private.fed.client.client_runner": [("ClientRunner", "_try_send_result_once", _before("sending"))],
}


class _Wrapping(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and wraps what ``PLACES`` names once they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PLACES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for owner, function, wrap in PLACES[name]:
                kind = getattr(module, owner)
                setattr(kind, function, wrap(getattr(kind, function)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _die(*_: Any) -> None:
    os._exit(137)


if FAULTS.is_dir() and "FLARE_SPARSE_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Wrapping())
    if _who():
        signal.signal(signal.SIGUSR1, _die)
