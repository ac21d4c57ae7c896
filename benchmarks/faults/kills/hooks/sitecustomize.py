"""Stop a job's processes in a named phase of a named round; Python imports this module from PYTHONPATH by itself.

For fault injection only: it wraps a few functions as their modules are loaded. A process that reaches the phase in
``FAULTS/armed.json`` writes ``FAULTS/reached.json`` and waits until ``armed.json`` is removed. Every attempt of the
server is a line of ``FAULTS/asked.jsonl``. SIGUSR1 ends a process like the kernel's out-of-memory killer: at once, with
status 137. Modules in ``FLARE_SPARSE_UNUSED`` count as not installed, so that processes start faster.
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
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

FAULTS = Path(os.environ.get("FLARE_SPARSE_FAULTS", ""))
_current = {"round": 0}


def _get_participant() -> str:
    """Return this process's participant: the name of the startup kit in its command line."""
    # FLARE overwrites sys.argv with the command line of a training script.
    words = sys.orig_argv
    # The first -m is Python's own.
    kits = [kit for option, kit in pairwise(words) if option == "-m"][1:]
    return Path(kits[0]).name if kits else ""


def stop_if_armed(phase: str) -> None:
    """Wait as long as this phase, participant and round are armed."""
    armed = FAULTS / "armed.json"
    try:
        wanted = json.loads(armed.read_text())
    except (OSError, ValueError):
        return
    reached = {"phase": phase, "participant": _get_participant(), "round": _current["round"]}
    if wanted != reached:
        return
    part = FAULTS / "reached.part"
    part.write_text(json.dumps({**reached, "pid": os.getpid()}))
    part.replace(FAULTS / "reached.json")
    while armed.exists():
        time.sleep(0.02)


def _stop_before(phase: str) -> Callable[[Any], Any]:
    def wrap(function: Any) -> Any:
        @functools.wraps(function)
        def stopping(*arguments: Any, **named: Any) -> Any:
            stop_if_armed(phase)
            return function(*arguments, **named)

        return stopping

    return wrap


def _stop_in_training(function: Any) -> Any:
    @functools.wraps(function)
    def answer(endpoint: Any, request: Any) -> Any:
        _current["round"] = -1 if request.kind == "evaluate" else request.round
        stop_if_armed("training")
        return function(endpoint, request)

    return answer


def _log_attempts(function: Any) -> Any:
    @functools.wraps(function)
    def encode_requests(endpoint: Any, assignments: Any) -> Any:
        attempt = function(endpoint, assignments)
        _current["round"] = -1 if attempt.kind == "evaluate" else attempt.round
        line = {"pid": os.getpid(), "round": attempt.round, "kind": attempt.kind, "sites": sorted(assignments)}
        with (FAULTS / "asked.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return attempt

    return encode_requests


def _stop_after_sending(function: Any) -> Any:
    @functools.wraps(function)
    def send(*arguments: Any, **named: Any) -> Any:
        replies = function(*arguments, **named)
        stop_if_armed("aggregating")
        return replies

    return send


def _stop_before_asking(function: Any) -> Any:
    @functools.wraps(function)
    def ask(exchange: Any, step: Any, examples: Any) -> Any:
        stop_if_armed(step.name.lower())
        return function(exchange, step, examples)

    return ask


def _stop_before_answering(function: Any) -> Any:
    @functools.wraps(function)
    def answer(sums: Any, question: Any) -> Any:
        from flare_sparse.wire.steps import unpack_message

        stop_if_armed(unpack_message(question, "server")[0].name.lower())
        return function(sums, question)

    return answer


WRAPPERS: dict[str, list[tuple[str, str, Callable[[Any], Any]]]] = {
    "flare_sparse.rounds.federation.loop": [("Federation", "run", _stop_before("before"))],
    "flare_sparse.rounds.endpoints.server": [
        ("ServerEndpoint", "encode_requests", _log_attempts),
        ("ServerEndpoint", "decode", _stop_before("receiving")),
    ],
    "flare_sparse.privacy.secure_aggregation.stage": [
        ("SumExchange", "ask", _stop_before_asking),
        ("SiteSums", "answer", _stop_before_answering),
    ],
    "flare_sparse.rounds.endpoints.site": [("SiteEndpoint", "answer", _stop_in_training)],
    "flare_sparse.rounds.federation.rounds": [("RoundRunner", "_send", _stop_after_sending)],
    "flare_sparse.core.checkpoint.store": [("Store", "save", _stop_before("saving"))],
    "nvflare.private.fed.client.client_runner": [("ClientRunner", "_try_send_result_once", _stop_before("sending"))],
}


class _Wrapping(importlib.abc.MetaPathFinder):
    """Finds modules as Python does and wraps the functions in ``WRAPPERS`` once they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in WRAPPERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for owner, function, wrap in WRAPPERS[name]:
                kind = getattr(module, owner)
                setattr(kind, function, wrap(getattr(kind, function)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _start_faster(unused: str) -> None:
    """Let optional modules count as not installed, and leave out PyTorch's compiler, which no job here uses."""
    sys.modules.update({name: None for name in unused.split(",") if name})  # type: ignore[misc]
    # Every optimiser imports the compiler only to call these two, which do nothing without it.
    compiler = ModuleType("torch._dynamo")
    vars(compiler).update(graph_break=lambda *_, **__: None, disable=lambda function=None, *_, **__: function)
    sys.modules["torch._dynamo"] = compiler


def _die(*_: Any) -> None:
    os._exit(137)


if FAULTS.is_dir() and "FLARE_SPARSE_FAULTS" in os.environ:
    _start_faster(os.environ.get("FLARE_SPARSE_UNUSED", ""))
    sys.meta_path.insert(0, _Wrapping())
    if _get_participant():
        signal.signal(signal.SIGUSR1, _die)
