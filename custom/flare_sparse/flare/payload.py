"""Convert between encoded messages, updates, DXOs and shareables.

Inside a site an update is an ordinary ``WEIGHTS`` or ``WEIGHT_DIFF`` DXO of named arrays, so that a hospital's own
filters act on real values. On the wire it is one uint8 array in an ``APP_DEFINED`` DXO: FLARE's serializer (FOBS) reads
NumPy arrays, strings and numbers at every end, whereas types of this package would have to be registered there.
"""

import logging
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode, ServerCommandKey
from nvflare.apis.shareable import Shareable, make_reply
from torch import Tensor

from ..core.errors import MissingBase, RejectedMessage
from ..core.exchange import Content, Patch, SiteEvent, Update
from ..core.params import Layout
from ..rounds.endpoints.events import pack_events

TASK = "exchange"
"""Name of the FLARE task of every request; the kind of the request is inside the message."""

HELLO = "hello"
"""Name of the FLARE task in which a site introduces itself; also the only key in its answer."""

SUM = "sum"
"""Name of the FLARE task of every step of a sum; also the only key in its data and in its answer."""

QUESTION = "question"
"""Name of the FLARE task of a question that trains nothing; also the only key in its data."""

EVENTS, COUNTED = "events", "counted"
"""Keys beside a message: a site's events with its update, and with a request the name of its last answer that counts.
"""

CODE_HEADER = "flare_sparse_code"
MISSING_BASE_HEADER = "flare_sparse_not_held"
UPDATE = "flare_sparse.update"
"""Key of the request and its update inside a site's process; they are never sent."""

_RETURN_CODES = {str(value) for name, value in vars(ReturnCode).items() if name.isupper()}
_KINDS: dict[Content, DataKind] = {
    "weights": DataKind.WEIGHTS,
    "delta": DataKind.WEIGHT_DIFF,
    "scores": DataKind.WEIGHT_DIFF,
    "metrics": DataKind.METRICS,
    "statistics": DataKind.WEIGHT_DIFF,
}


def message_to_shareable(message: np.ndarray, meta: dict[str, Any]) -> Shareable:
    """Wrap an encoded message and its unencoded metadata."""
    return DXO(DataKind.APP_DEFINED, data={"message": message}, meta=meta).to_shareable()


def update_to_shareable(message: np.ndarray, update: Update, events: Sequence[SiteEvent] = ()) -> Shareable:
    """Wrap an encoded update with its number of examples, its metrics and, if there are any, the site's events."""
    # Plain int and float: a NumPy scalar has more bits than its value needs, which could carry other data.
    metrics = {str(name): float(value) for name, value in update.metrics.items()}
    meta: dict[str, Any] = {"examples": operator.index(update.num_examples), "metrics": metrics}
    if events:
        meta[EVENTS] = pack_events(events)
    return message_to_shareable(message, meta)


def shareable_to_message(shareable: Shareable, site: str) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the encoded message and its unencoded metadata.

    Raises:
        RejectedMessage: the shareable contains no message of this package.
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
    """Return the site that sent a result; None when it did not come from a registered client.

    The server derives this name from the client's token. The name in the peer context is not used, because the sender
    writes it and could write any name.
    """
    client = shareable.get_header(ServerCommandKey.FL_CLIENT)
    return str(client.name) if isinstance(client, Client) else None


def wrap(key: str, value: Any) -> Shareable:
    """Wrap a hello, a question, or a message of a sum, of the server or of a site."""
    return DXO(DataKind.APP_DEFINED, data={key: value}).to_shareable()


def extract(key: str, shareable: Shareable) -> Any:
    """Return the unchecked value that :func:`wrap` has wrapped; None when the shareable is something else.

    It never raises, whatever the sender sent: FLARE ends a task for all sites when a callback on one result raises.
    """
    try:
        dxo = from_shareable(shareable)
        has_value = isinstance(dxo.data, dict) and list(dxo.data) == [key] and not dxo.meta
        return dxo.data[key] if has_value and dxo.data_kind == DataKind.APP_DEFINED else None
    except Exception:  # noqa: BLE001 - see above
        return None


def extract_sum_reply(result: Shareable) -> Any:
    """Return the unchecked reply of a site to a step of a sum: a message, or a reason code. It never raises."""
    if result.get_return_code() != ReturnCode.OK:
        return get_refusal_code(result)
    message = extract(SUM, result)
    return "E_KIND" if message is None else message


def is_statistics(result: Shareable) -> bool:
    """Return whether a result holds statistics, of this package or of FLARE's own workflow. It never raises."""
    try:
        return bool(from_shareable(result).data_kind == DataKind.STATISTICS)
    except Exception:  # noqa: BLE001 - as in extract
        return False


def build_refusal(code: str, return_code: str) -> Shareable:
    """Return a reply without values: an error code of this package and a return code of FLARE, nothing else."""
    reply = make_reply(return_code)
    reply.set_header(CODE_HEADER, code)
    return reply


def strip_to_codes(result: Shareable, code: str, *, missing_base: bool = False) -> None:
    """Remove everything from a result, in place, but a return code of FLARE and an error code of this package."""
    return_code = result.get_return_code()
    # A return code that is not FLARE's own could carry text of a job's filter.
    failures = _RETURN_CODES - {str(ReturnCode.OK)}
    result.clear()
    result.set_return_code(return_code if return_code in failures else ReturnCode.TASK_RESULT_FILTER_ERROR)
    result.set_header(CODE_HEADER, code)
    result.set_header(MISSING_BASE_HEADER, missing_base)


def extract_code(reply: Shareable) -> str | None:
    """Return the error code in an error reply; None without a well-formed code."""
    code = reply.get_header(CODE_HEADER)
    return code if isinstance(code, str) and re.fullmatch("[EW]_[A-Z_]{1,22}", code) else None


def get_refusal_code(reply: Shareable) -> str:
    """Return the reason code of a site's refusal: the package's error code, else FLARE's return code, else ``E_SITE``.

    Any other text is dropped: a hostile or careless site could put names of subjects there.
    """
    return_code = reply.get_return_code()
    is_known = isinstance(return_code, str) and return_code in _RETURN_CODES
    return extract_code(reply) or (return_code if is_known else "E_SITE")


def read_refusal(reply: Shareable, site: str) -> MissingBase | str:
    """Return the reply of a refusal, built from codes only: text of a site must not enter the server's records."""
    if reply.get_header(MISSING_BASE_HEADER) is True:
        return MissingBase("E_NOT_HELD", "base", "the base of the message", "nothing", site)
    return get_refusal_code(reply)


def update_to_dxo(update: Update, layout: Layout) -> DXO:
    """Return an update as a DXO that FLARE's filters can process: named float32 arrays, zero outside the patch."""
    if update.content == "metrics":
        return DXO(DataKind.METRICS, data=dict(update.metrics), meta={"content": update.content})
    meta = {"content": update.content, "examples": update.num_examples}
    return DXO(_KINDS[update.content], data=NamedArrays(update.patch, layout), meta=meta)


def dxo_to_update(dxo: DXO, update: Update, layout: Layout) -> Update:
    """Return the update with the values of the DXO, which the site's filters may have changed.

    Args:
        dxo: DXO after the filters, which may have changed arrays in place or replaced them.
        update: the update before the filters.
        layout: layout of the model.

    Raises:
        RejectedMessage: a filter removed or reshaped a tensor, or changed the kind of the DXO.
    """
    if dxo.data_kind != _KINDS[update.content]:
        raise RejectedMessage("E_KIND", "data_kind", _KINDS[update.content].value, str(dxo.data_kind))
    if update.content == "metrics":
        return replace(update, metrics={n: v for n, v in dxo.data.items() if n in update.metrics})
    data = dxo.data
    if isinstance(data, NamedArrays) and data.is_unread:
        return update
    vector = data.build() if isinstance(data, NamedArrays) else torch.zeros(layout.size)
    for name, view in to_named_arrays(vector, layout).items():
        array = data.get(name)
        if not isinstance(array, np.ndarray) or array.shape != view.shape:
            actual = "nothing" if array is None else f"{type(array).__name__} {getattr(array, 'shape', '')}"
            raise RejectedMessage("E_SHAPE", name, f"array {view.shape}", actual)
        # Equal address, shape and strides: the filter replaced no array, so the vector is already up to date.
        if array.__array_interface__ != view.__array_interface__:
            view[...] = array
    return replace(update, patch=Patch.from_vector(vector, update.patch.mask))


# Before the first filter, FLARE walks through all that a result holds, in search of references to data that it has not
# downloaded yet (nvflare.apis.utils.task_utils.apply_filters). It passes over placeholders of loggers; without that
# base class the walk would build the arrays in every round.
class NamedArrays(dict[str, np.ndarray], logging.PlaceHolder):
    """Float32 arrays by tensor name, zero outside a patch.

    A site without filters of its own needs no array, and building them takes a pass over the whole vector. Any access
    to the dictionary builds all arrays first. Code that bypasses the methods, as C code can, finds an empty dictionary,
    which :func:`dxo_to_update` rejects.

    Args:
        patch: the values.
        layout: layout of the model.
    """

    def __init__(self, patch: Patch, layout: Layout):
        dict.__init__(self)
        self._patch, self._layout = patch, layout
        self._vector: Tensor | None = None

    @property
    def is_unread(self) -> bool:
        """Whether the arrays have never been read or written."""
        return self._vector is None and not dict.__len__(self)

    def build(self) -> Tensor:
        """Build the arrays, unless they are there; return their memory ``(P,)``, until a filter replaces one.

        Raises:
            RejectedMessage: code that bypasses the methods has written into the dictionary.
        """
        if self._vector is None:
            if dict.__len__(self):
                raise RejectedMessage("E_SHAPE", "arrays", "arrays written by the dictionary's methods", "others")
            self._vector = self._patch.to_vector()
            dict.update(self, to_named_arrays(self._vector, self._layout))
        return self._vector

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is an ordinary dictionary.
        return dict, (dict(self.items()),)


def _read_first(name: str) -> Callable[..., Any]:
    """Return a method of ``dict`` that builds the arrays before it runs."""
    method = getattr(dict, name)

    def read(self: NamedArrays, *args: Any, **kwargs: Any) -> Any:
        # No assertion reads them: Python's -O would let a privacy filter see no arrays, and pass them on unfiltered.
        self.build()
        return method(self, *args, **kwargs)

    return read


_METHODS = (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
)
for _name in _METHODS:
    setattr(NamedArrays, _name, _read_first(_name))


def to_named_arrays(vector: Tensor, layout: Layout) -> dict[str, np.ndarray]:
    """Return views of a vector ``(P,)`` by tensor name."""
    return {name: tensor.numpy() for name, tensor in layout.unflatten(vector).items()}
