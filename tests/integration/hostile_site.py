"""Filters that send what a hostile site's FLARE client could send instead of its updates.

They stand for a site that runs other code. Here they travel with the job and do nothing at the other sites.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

VICTIM = "site-1"


def wrap_message(message: Any, examples: Any = 32, metrics: Any = None, **data: Any) -> Shareable:
    """Wrap any message with any numbers beside it, as the package wraps its own."""
    content = {"message": message, **data}
    return DXO(DataKind.APP_DEFINED, data=content, meta={"examples": examples, "metrics": metrics or {}}).to_shareable()


def send_garbage(message: np.ndarray) -> Shareable:
    return wrap_message(np.random.default_rng(1).integers(0, 256, message.size).astype(np.uint8))


def forge_values(message: np.ndarray, value: float, count: int = 1) -> np.ndarray:
    """Change the first values of a message and correct its checksums."""
    from flare_sparse.wire.envelope import read_header, write_header

    message = message.copy()
    header = read_header(message)
    message[header.values_start : header.values_start + 4 * count] = np.full(count, value, "<f4").view(np.uint8)
    write_header(header, message)
    return message


def send_refusal(text: str) -> Shareable:
    reply = make_reply(text)
    reply.set_header("flare_sparse_code", text)
    return reply


ATTACKS: list[tuple[str, Any]] = [
    ("E_VERSION", send_garbage),
    ("E_KIND", lambda message: DXO(DataKind.WEIGHTS, data={"0.weight": np.ones((2, 2))}).to_shareable()),
    ("E_FINITE", lambda message: wrap_message(forge_values(message, np.nan))),
    ("E_DTYPE", lambda message: wrap_message(message.reshape(2, -1))),
    ("E_DTYPE", lambda message: wrap_message(message.astype(np.float64))),
    ("E_WEIGHT", lambda message: wrap_message(message, 1e30)),
    ("E_WEIGHT", lambda message: wrap_message(message, "thirty-two")),
    ("E_METRICS", lambda message: wrap_message(message, metrics={"mse": 0.0, "test_examples": 0})),
    ("E_KIND", lambda message: wrap_message(message.tobytes())),
    ("E_KIND", lambda message: Shareable({"flare_sparse.reply": "anything"})),
    ("E_SITE", lambda message: send_refusal("subject CANARY-4711 is ill")),
    (ReturnCode.EXECUTION_EXCEPTION, lambda message: make_reply(ReturnCode.EXECUTION_EXCEPTION)),
    ("E_LEN", lambda message: wrap_message(message[:-4])),
]
"""One attack per round, with the code with which the server rejects it."""


class Hostile(Filter):
    """Sends one attack per round at one site, each under the name of another site.

    Args:
        site: name of the hostile site.
    """

    def __init__(self, site: str):
        super().__init__()
        self.site, self._round = site, 0

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if fl_ctx.get_identity_name() != self.site or self._round >= len(ATTACKS):
            return shareable
        fl_ctx.put(ReservedKey.IDENTITY_NAME, VICTIM, private=False, sticky=False)
        attack = ATTACKS[self._round][1]
        self._round += 1
        return attack(from_shareable(shareable).data["message"])


class Overwriter(Filter):
    """Writes 777 over the values of one site's messages, after the site's own filters.

    Args:
        site: name of the attacked site.
    """

    def __init__(self, site: str):
        super().__init__()
        self.site = site

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if fl_ctx.get_identity_name() != self.site:
            return shareable
        dxo = from_shareable(shareable)
        dxo.data["message"] = forge_values(dxo.data["message"], 777.0, 4)
        return dxo.to_shareable()
