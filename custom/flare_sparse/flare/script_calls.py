"""A script's calls of FLARE's in-process Client API: seeded, awaited, and one result for each received model."""

import random
import threading
from typing import Any

import numpy as np
import torch

MOST_RECEIVES = 100
"""Calls of ``receive`` that return one model, in a script whose loop does not call ``is_running``."""


class ScriptCalls:
    """Wraps ``receive``, ``send`` and ``is_running`` of the API of one script.

    - ``receive`` seeds the script's random numbers when it returns a new model. The first numbers after a request then
      depend on the run's seed, site and round alone, in any environment.
    - ``send`` hands over the result first and drops the received model last. A request that follows the result at once
      would put its model in between, and FLARE would drop that one: the script would wait for it without end.
      :meth:`prepare_request` prevents it.
    - Until ``send``, FLARE returns the same model again. A script may ask for it several times in one turn of its loop,
      as Lightning's callback does, and before the loop, for the number of rounds; one that begins the next turn would
      train on it without end.

    Args:
        api: FLARE's API; its three methods are replaced.
    """

    def __init__(self, api: Any):
        self._api_receive, self._api_send, self._api_is_running = api.receive, api.send, api.is_running
        api.receive, api.send, api.is_running = self._receive, self._send, self._is_running
        self._lock = threading.Lock()
        self._seed: int | None = None
        # The received model for which nothing has been sent yet.
        self._unsent: Any = None
        self._receives = 0
        # Calls of ``is_running``, which begins each turn of a loop, up to now and at the last ``receive``.
        self._turn = self._received_turn = 0

    def prepare_request(self, seed: int) -> None:
        """Wait until no ``send`` is being executed; seed the script when it receives the next model."""
        with self._lock:
            self._seed = seed

    def _receive(self, timeout: float | None = None) -> Any:
        model = self._api_receive(timeout)
        if model is None:
            return None
        is_new = model is not self._unsent
        if is_new:
            self._unsent, self._receives = model, 0
        self._receives += 1
        before, self._received_turn = self._received_turn, self._turn
        # Before the first turn a script builds its network, which draws numbers; its first round must not depend on it.
        is_first_turn = before == 0 and self._turn > 0
        if not is_new and not is_first_turn and (before != self._turn or self._receives > MOST_RECEIVES):
            raise RuntimeError(
                "the script called flare.receive() again without flare.send(); it must send one result for each model"
            )
        if (is_new or is_first_turn) and self._seed is not None:
            # In the script's own thread: while it starts, it may draw numbers at any time.
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)  # noqa: NPY002 - the generator that scripts and libraries draw from
            torch.manual_seed(self._seed)
        return model

    def _send(self, *args: Any, **kwargs: Any) -> None:
        with self._lock:
            self._api_send(*args, **kwargs)
            self._unsent = None

    def _is_running(self) -> bool:
        self._turn += 1
        return bool(self._api_is_running())
