"""Where bytes, DXOs and Shareables meet: converters for weights, differences, scores and masks.

Inside a site an update is an ordinary ``WEIGHTS`` or ``WEIGHT_DIFF`` DXO of named arrays, so that a hospital's own
filters act on real values; on the wire it is one uint8 array in an ``APP_DEFINED`` DXO that FLARE always decodes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode, ServerCommandKey
from nvflare.apis.shareable import Shareable, make_reply

from ..errors import RejectedMessage
from ..exchange import Content, Patch, Update
from ..mask import Mask
from ..params import Layout

TASK = "exchange"
"""The FLARE task of every round; what is asked is inside the message."""

HELLO = "hello"
"""The FLARE task in which a site says what it can take part in; also the one name in its answer."""

CODE_HEADER = "flare_sparse_code"
NOT_HELD_HEADER = "flare_sparse_not_held"
REQUEST, UPDATE, REPLY = "flare_sparse.request", "flare_sparse.update", "flare_sparse.reply"
"""Keys under which decoded objects wait in a Shareable; they never travel."""

_RETURN_CODES = {str(value) for name, value in vars(ReturnCode).items() if name.isupper()}
_KINDS: dict[Content, DataKind] = {
    "weights": DataKind.WEIGHTS,
    "delta": DataKind.WEIGHT_DIFF,
    "scores": DataKind.WEIGHT_DIFF,
    "metrics": DataKind.METRICS,
}


def message_to_shareable(message: np.ndarray, meta: dict[str, Any]) -> Shareable:
    """One encoded message and the few numbers beside it."""
    return DXO(DataKind.APP_DEFINED, data={"message": message}, meta=meta).to_shareable()


def answer_to_shareable(message: np.ndarray, update: Update) -> Shareable:
    """An encoded answer with the numbers that go beside it: examples and metrics."""
    metrics = {str(name): float(value) for name, value in update.metrics.items()}
    return message_to_shareable(message, {"examples": operator.index(update.num_examples), "metrics": metrics})


def shareable_to_message(shareable: Shareable, site: str) -> tuple[np.ndarray, dict[str, Any]]:
    """The message and the numbers beside it.

    Raises:
        RejectedMessage: this is not one of our messages.
    """
    try:
        dxo = from_shareable(shareable)
    except ValueError as error:
        raise RejectedMessage("E_KIND", "content", "an encoded message", "no DXO", site) from error
    message = dxo.data.get("message") if isinstance(dxo.data, dict) else None
    if dxo.data_kind != DataKind.APP_DEFINED or not isinstance(message, np.ndarray) or not isinstance(dxo.meta, dict):
        raise RejectedMessage("E_KIND", "content", "an encoded message", str(dxo.data_kind), site)
    if message.dtype != np.uint8 or message.ndim != 1:
        raise RejectedMessage("E_DTYPE", "message", "uint8 (n,)", f"{message.dtype} {message.shape}", site)
    return message, dict(dxo.meta)


def get_sender(shareable: Shareable) -> str | None:
    """Who sent a result, as the server knows it by the connection's token; None when it came another way.

    The peer context names the sender, too, but it is the sender who wrote that.
    """
    client = shareable.get_header(ServerCommandKey.FL_CLIENT)
    return str(client.name) if isinstance(client, Client) else None


def hello_to_shareable(said: Mapping[str, Any]) -> Shareable:
    """What a site says of itself, and nothing beside it."""
    return DXO(DataKind.APP_DEFINED, data={HELLO: dict(said)}).to_shareable()


def extract_hello(shareable: Shareable) -> Any:
    """What a site says of itself, as it came; None when this is no hello. Never raises, whatever a peer sent: FLARE
    gives up a task for all sites when what looks at a result raises.
    """
    try:
        dxo = from_shareable(shareable)
        alone = isinstance(dxo.data, dict) and list(dxo.data) == [HELLO] and not dxo.meta
        return dxo.data[HELLO] if alone and dxo.data_kind == DataKind.APP_DEFINED else None
    except Exception:  # noqa: BLE001 - see above
        return None


def make_refusal(code: str, failed: str) -> Shareable:
    """A reply that says only why there is no answer: our code, and one of FLARE's return codes."""
    reply = make_reply(failed)
    reply.set_header(CODE_HEADER, code)
    return reply


def extract_code(reply: Shareable) -> str | None:
    """The code of ours that an error reply carries; None when what stands there is none."""
    code = reply.get_header(CODE_HEADER)
    return code if isinstance(code, str) and re.fullmatch("[EW]_[A-Z_]{1,22}", code) else None


def get_refusal_code(reply: Shareable) -> str:
    """Why a site did not answer: our code, else FLARE's; any other text of a site's is not ours to repeat."""
    said = reply.get_return_code()
    return extract_code(reply) or (said if isinstance(said, str) and said in _RETURN_CODES else "E_SITE")


def to_named_arrays(vector: torch.Tensor, layout: Layout) -> dict[str, np.ndarray]:
    """Views of a vector ``(P,)`` by tensor name."""
    return {name: tensor.numpy() for name, tensor in layout.unflatten(vector).items()}


def mask_to_dxo(mask: Mask, layout: Layout) -> DXO:
    """A mask as named bool arrays, for components that want to look at it."""
    return DXO(DataKind.APP_DEFINED, data=to_named_arrays(mask.bits, layout), meta={"content": "mask"})


def update_to_dxo(update: Update, layout: Layout, vector: torch.Tensor) -> DXO:
    """An update as a DXO that stock filters understand: named float32 arrays, zero where nothing is sent.

    Args:
        update: what the site answers.
        layout: of the model.
        vector: ``(P,)`` overwritten; the DXO's arrays are views of it.
    """
    if update.content == "metrics":
        return DXO(DataKind.METRICS, data=dict(update.metrics), meta={"content": update.content})
    meta = {"content": update.content, "examples": update.num_examples}
    update.patch.write_into(vector.zero_())
    return DXO(_KINDS[update.content], data=to_named_arrays(vector, layout), meta=meta)


def dxo_to_update(dxo: DXO, update: Update, vector: torch.Tensor, layout: Layout) -> Update:
    """The update with the values that a site's filters left in the DXO.

    Args:
        dxo: after the filters, which may have changed arrays in place or put others in their stead.
        update: before them.
        vector: what the arrays were views of; written to.
        layout: of the model.

    Raises:
        RejectedMessage: a filter removed or reshaped a tensor, or changed the kind; nothing is sent.
    """
    if dxo.data_kind != _KINDS[update.content]:
        raise RejectedMessage("E_KIND", "data_kind", _KINDS[update.content].value, str(dxo.data_kind))
    if update.content == "metrics":
        return replace(update, metrics={n: v for n, v in dxo.data.items() if n in update.metrics})
    for name, view in to_named_arrays(vector, layout).items():
        array = dxo.data.get(name)
        if not isinstance(array, np.ndarray) or array.shape != view.shape:
            found = "nothing" if array is None else f"{type(array).__name__} {getattr(array, 'shape', '')}"
            raise RejectedMessage("E_SHAPE", name, f"array {view.shape}", found)
        if array.__array_interface__ != view.__array_interface__:
            view[...] = array
    return replace(update, patch=Patch.from_vector(vector, update.patch.mask))
