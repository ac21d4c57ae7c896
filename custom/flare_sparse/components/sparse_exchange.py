"""A filter for any FLARE job: models and updates travel as messages of this package, between FLARE's own components.

The same filter, with the same settings, is in each filter chain of a job: it encodes what leaves a process and decodes
what arrives. FLARE's order at a site is: the job's filters of the task, the executor, the site's own result filters,
the job's result filters. So the site's filters, the script and FLARE's aggregator have ordinary arrays.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ProcessType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from torch import Tensor

from ..core.checkpoint.writing import write_json
from ..core.params import Layout
from ..flare.payload import get_sender
from ..results.runs.progress import compare_with_dense, format_bytes
from ..rounds.streams import Model, ServerStream, SiteStream, StreamSettings
from ..wire.formats import ValueType
from .arrays import MODELS, ComponentError, check_plain, guess_layout, is_float, to_arrays, to_vector
from .filters import ModelFilter, check_last
from .uploads import build_settings

PACKET = "flare_sparse"
"""Only key in the data of a message of this filter."""
EXCHANGE_FILE = "sparse_exchange.jsonl"
"""Ledger of the job, in its folder at the server; in a swarm at each site that sends models or receives updates."""
SUMS_FILE = "sparse_exchange.json"
"""Sums of the ledger, beside it."""
RESIDUALS_FILE = "sparse_exchange.safetensors"
"""What a site's updates have left, in its folder of the job."""

_STREAM = "flare_sparse.stream"
_END = "flare_sparse.exchange_end"
_LOCK = threading.Lock()
_COUNTER = "num_batches_tracked"
ValueT = TypeVar("ValueT")


@dataclass(eq=False)
class SparseExchange(ModelFilter):
    """Encodes and decodes the models and updates of a job.

    Args:
        keep: share of the entries in a message, in (0, 1]. A model carries the largest entries of its difference to
            the model that its receiver holds, an update those of its difference to the model received.
        values: number format of the values.
        error_feedback: whether a site adds what it did not send to its next update.
        mask: patterns of array names, as in a shell; only arrays that match one travel. None: all arrays.
        content: ``"model"`` or ``"update"``; None: task data are models, task results are updates.

    Raises:
        ComponentError: a setting is invalid.
    """

    kinds = (*MODELS, DataKind.APP_DEFINED)
    is_strict = True

    keep: float = 1.0
    values: ValueType = "float32"
    error_feedback: bool = True
    mask: list[str] | None = None
    content: Literal["model", "update"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.content not in ("model", "update", None):
            raise ComponentError(self, f"content is {self.content!r}, expected 'model' or 'update'", "correct the job")
        self._settings = build_settings(self, StreamSettings)
        self._tasks: set[str] = set()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Log what leaves a site; at the end say what was saved, or warn that tasks came but no message was coded."""
        super().handle_event(event_type, fl_ctx)
        # FLARE fires this event for all tasks, those without filters among them.
        if event_type == EventType.BEFORE_TASK_DATA_FILTER:
            self._tasks.add(str(fl_ctx.get_prop(FLContextKey.TASK_NAME)))
        # One line for all filters of the process.
        elif event_type == EventType.END_RUN and fl_ctx.get_prop(_END) is None:
            fl_ctx.set_prop(_END, True, private=True, sticky=True)
            if _find_folder(fl_ctx).joinpath(EXCHANGE_FILE).is_file():
                self.log_info(fl_ctx, sum_exchange(_find_folder(fl_ctx)))
            elif self._tasks and fl_ctx.get_prop(_STREAM) is None:
                self.log_warning(
                    fl_ctx,
                    "sparse exchange: no message was coded; all models and updates travelled whole. The tasks were "
                    f"{', '.join(sorted(self._tasks))}; name those that carry models in `tasks` of the filters",
                )

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        """Return the message of a model or an update, or what a message carries; None for anything else."""
        is_sent = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.OUT
        is_task = self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN
        is_update = self.content == "update" if self.content else not is_task
        packet = dxo.data.get(PACKET) if dxo.data_kind == DataKind.APP_DEFINED else None
        if is_sent != (dxo.data_kind in MODELS) or (not is_sent and packet is None):
            return None
        if is_sent:
            check_last(self, fl_ctx)
        t = int(shareable.get_header(AppConstants.CURRENT_ROUND) or 0)
        with _LOCK:
            stream = _get_stream(fl_ctx)
            if is_sent and not is_update:
                return self._encode_model(dxo, stream, t, fl_ctx)
            if is_update and not is_sent:
                return self._decode_update(dxo, packet, stream, shareable, fl_ctx)
            if isinstance(stream, ServerStream):
                raise ComponentError(self, "the server sends models and receives updates", "leave out content")
            return self._encode_update(dxo, stream) if is_sent else self._decode_model(dxo, packet, stream, t)

    def _encode_model(self, dxo: DXO, stream: ServerStream | SiteStream, t: int, fl_ctx: FLContext) -> DXO:
        if dxo.data_kind != DataKind.WEIGHTS:
            raise ComponentError(self, "a task carries WEIGHT_DIFF", "send a model (WEIGHTS)")
        floats, others = _split(dxo.data)
        model, message = self._build_model(floats, t), None
        packet: dict[str, Any] = {"others": others}
        if isinstance(stream, ServerStream):
            site = str(fl_ctx.get_peer_context().get_identity_name())
            message, packet["counted"] = stream.encode(model, self._settings, site)
        else:
            # One message for several sites, which hold any models; the sender trains the model, too.
            site = fl_ctx.get_identity_name()
            stream.receive(model, stream.last)
        # A whole model travels as FLARE sends it: a site without its layout could not bound what a message allocates.
        packet |= {"model": floats} if message is None else {"message": message}
        size = sum(array.nbytes for array in floats.values()) if message is None else message.nbytes
        _record(fl_ctx, site, "down", t, size, model.layout)
        return _wrap(packet, dxo)

    def _decode_model(self, dxo: DXO, packet: Any, stream: SiteStream, t: int) -> DXO:
        others = self._read(packet, "others", dict)
        if "message" in packet:
            model = stream.decode(self._read(packet, "message", np.ndarray), t)
            floats = to_arrays(model.vector, model.layout, model.types)
        else:
            floats = self._read(packet, "model", dict)
            check_plain(DXO(DataKind.WEIGHTS, data=floats), self)
            model = self._build_model(floats, t)
        stream.receive(model, packet.get("counted", stream.last))
        return DXO(DataKind.WEIGHTS, data={**others, **floats}, meta=dict(dxo.meta))

    def _encode_update(self, dxo: DXO, stream: SiteStream) -> DXO:
        floats, others = _split(dxo.data)
        if stream.model is None:
            raise ComponentError(self, "the task brought no model", "name only tasks that carry one, such as train")
        layout, is_delta = stream.model.layout, dxo.data_kind == DataKind.WEIGHT_DIFF
        if unknown := sorted(set(floats) - {spec.name for spec in layout.tensors}):
            raise ComponentError(
                self, f"the result has {unknown[0]!r}, which the received model has not", "send others"
            )
        absent = [spec.name for spec in layout.tensors if spec.name not in floats]
        vector = to_vector(floats, layout, self, fills=True)
        message = stream.encode(vector, self._settings, is_delta=is_delta, missing=absent)
        return _wrap({"message": message, "missing": absent, "is_delta": is_delta, "others": others}, dxo)

    def _decode_update(
        self, dxo: DXO, packet: Any, stream: ServerStream | SiteStream, shareable: Shareable, fl_ctx: FLContext
    ) -> DXO:
        message, missing = self._read(packet, "message", np.ndarray), self._read(packet, "missing", list)
        others, is_delta = self._read(packet, "others", dict), self._read(packet, "is_delta", bool)
        # A site knows another one by what that writes; the server by its token.
        peer = fl_ctx.get_peer_context() if isinstance(stream, SiteStream) else None
        site = str(peer.get_identity_name()) if peer else get_sender(shareable) or "?"
        model, vector = stream.decode_update(message, site, is_delta=is_delta)
        _record(fl_ctx, site, "up", model.round, message.nbytes, model.layout)
        types = {name: like for name, like in model.types.items() if name not in missing}
        kind = DataKind.WEIGHT_DIFF if is_delta else DataKind.WEIGHTS
        return DXO(kind, data={**others, **to_arrays(vector, model.layout, types)}, meta=dict(dxo.meta))

    def _build_model(self, floats: Mapping[str, Any], t: int) -> Model:
        layout = guess_layout(floats)
        if not layout.size:
            raise ComponentError(self, "the message has no arrays of floats", "send weights")
        # Arrays without entries: what arrives has the types of the model.
        types = {n: a.new_empty(0) if isinstance(a, Tensor) else np.empty(0, a.dtype) for n, a in floats.items()}
        return Model.from_vector(layout, to_vector(floats, layout, self), t, types)

    def _read(self, packet: Any, key: str, kind: type[ValueT]) -> ValueT:
        """Return a part of a packet, which may be of anybody.

        Raises:
            ComponentError: it is of another type.
        """
        value = packet.get(key) if isinstance(packet, dict) else None
        if not isinstance(value, kind):
            found = f"{key} is of type {type(value).__name__}, expected {kind.__name__}"
            raise ComponentError(self, f"the message is malformed: {found}", "put it last where messages leave")
        return value


def _split(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of floats, and those that travel as they are."""
    # FLARE's mean of the counters is a float: with them, the layout would change after a round.
    floats = {name: array for name, array in arrays.items() if is_float(array) and not name.endswith(_COUNTER)}
    return floats, {name: array for name, array in arrays.items() if name not in floats}


def _wrap(packet: dict[str, Any], dxo: DXO) -> DXO:
    return DXO(DataKind.APP_DEFINED, data={PACKET: packet}, meta=dict(dxo.meta))


def _get_stream(fl_ctx: FLContext) -> ServerStream | SiteStream:
    """Return the end of this process, which all filters of the job share."""
    stream: ServerStream | SiteStream | None = fl_ctx.get_prop(_STREAM)
    if stream is None:
        run = hashlib.sha256(str(fl_ctx.get_job_id()).encode()).hexdigest()[:16]
        is_server = fl_ctx.get_process_type() == ProcessType.SERVER_JOB
        stream = ServerStream(run) if is_server else SiteStream(run, _find_folder(fl_ctx) / RESIDUALS_FILE)
        fl_ctx.set_prop(_STREAM, stream, private=True, sticky=True)
    return stream


def _record(fl_ctx: FLContext, site: str, direction: str, t: int, size: int, layout: Layout) -> None:
    """Add a line to the ledger."""
    line = {"site": site, "direction": direction, "round": t, "sent_bytes": size, "dense_bytes": 4 * layout.size}
    with (_find_folder(fl_ctx) / EXCHANGE_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def sum_exchange(folder: Path) -> str:
    """Write the sums of a ledger by site and direction into ``sparse_exchange.json``; return the total as text."""
    sites: dict[str, dict[str, Counter[str]]] = {}
    total = Counter[str]()
    for text in (folder / EXCHANGE_FILE).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        counts = Counter(messages=1, sent_bytes=line["sent_bytes"], dense_bytes=line["dense_bytes"])
        sites.setdefault(line["site"], {}).setdefault(line["direction"], Counter()).update(counts)
        total.update(counts)
    write_json(folder / SUMS_FILE, {**total, "sites": sites})
    saved = compare_with_dense(total["sent_bytes"], total["dense_bytes"])
    sizes = [format_bytes(total[name]) for name in ("sent_bytes", "dense_bytes")]
    return f"sparse exchange: {sizes[0]} in {total['messages']} messages instead of {sizes[1]}, {saved}"


def _find_folder(fl_ctx: FLContext) -> Path:
    """Return the job's folder of this process."""
    return Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
