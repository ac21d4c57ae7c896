"""What a hostile site's FLARE client would send in place of its answers: a filter behind the package's own.

It stands for a site that runs other code than ours; here it travels with the job and does nothing at honest sites.
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


def said(message: Any, examples: Any = 32, metrics: Any = None, **data: Any) -> Shareable:
    """A message of ours, with anything in it and beside it."""
    content = {"message": message, **data}
    return DXO(DataKind.APP_DEFINED, data=content, meta={"examples": examples, "metrics": metrics or {}}).to_shareable()


def garbage(message: np.ndarray) -> Shareable:
    return said(np.random.default_rng(1).integers(0, 256, message.size).astype(np.uint8))


def forged(message: np.ndarray, value: float, count: int = 1) -> np.ndarray:
    """The first values changed and the checksums put right, as a forger would."""
    from flare_sparse.wire.envelope import read_header, write_header

    message = message.copy()
    header = read_header(message)
    message[header.values_start : header.values_start + 4 * count] = np.full(count, value, "<f4").view(np.uint8)
    write_header(header, message)
    return message


def refusal(text: str) -> Shareable:
    reply = make_reply(text)
    reply.set_header("flare_sparse_code", text)
    return reply


ATTACKS: list[tuple[str, Any]] = [
    ("E_VERSION", garbage),
    ("E_KIND", lambda message: DXO(DataKind.WEIGHTS, data={"0.weight": np.ones((2, 2))}).to_shareable()),
    ("E_FINITE", lambda message: said(forged(message, np.nan))),
    ("E_DTYPE", lambda message: said(message.reshape(2, -1))),
    ("E_DTYPE", lambda message: said(message.astype(np.float64))),
    ("E_WEIGHT", lambda message: said(message, 1e30)),
    ("E_WEIGHT", lambda message: said(message, "thirty-two")),
    ("E_METRICS", lambda message: said(message, metrics={"mse": 0.0, "test_examples": 0})),
    ("E_KIND", lambda message: said(message.tobytes())),
    ("E_KIND", lambda message: Shareable({"flare_sparse.reply": "anything"})),
    ("E_SITE", lambda message: refusal("subject CANARY-4711 is ill")),
    (ReturnCode.EXECUTION_EXCEPTION, lambda message: make_reply(ReturnCode.EXECUTION_EXCEPTION)),
    ("E_LEN", lambda message: said(message[:-4])),
]
"""One a round, with the code that the server has for it."""


class Hostile(Filter):
    """At one site, an attack a round; it names itself another site in all of them.

    Args:
        site: the hostile one.
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
    """At one site, 777 in place of what the site's own filters let through.

    Args:
        site: the site that the job means.
    """

    def __init__(self, site: str):
        super().__init__()
        self.site = site

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if fl_ctx.get_identity_name() != self.site:
            return shareable
        dxo = from_shareable(shareable)
        dxo.data["message"] = forged(dxo.data["message"], 777.0, 4)
        return dxo.to_shareable()
