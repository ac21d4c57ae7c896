"""A filter for any FLARE job: models and updates travel as messages of this package, between FLARE's own components.

The same filter, with the same settings, is in each filter chain of a job: it encodes what leaves a process and decodes
what arrives. FLARE's order at a site is: the job's filters of the task, the executor, the site's own result filters,
the job's result filters. So the site's filters, the script and FLARE's aggregator have ordinary arrays.
"""

import json
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants

from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, RejectedMessage
from ..flare.payload import get_sender
from ..results.runs.progress import compare_with_dense, format_bytes
from ..rounds.streams.arrays import split_arrays
from ..rounds.streams.exchange import Exchange
from ..rounds.streams.packets import MODEL, find_groups
from ..rounds.streams.settings import StreamSettings
from ..wire.formats import ValueType
from ..wire.ledger import LedgerLine
from .filters import check_last, open_site

PACKET = "flare_sparse"
"""Only key in the data of a message of this filter."""
EXCHANGE_FILE = "sparse_exchange.jsonl"
"""Ledger of the job, in its folder of each end."""
SUMS_FILE = "sparse_exchange.json"
"""Sums of the ledger, in the job's folder of each end."""
MEMORY_FOLDER = "sparse_exchange"
"""Folder in the job's folder of a site: the model that it holds, and what it has not sent."""

_EXCHANGE = "flare_sparse.core.exchange"
_END = "flare_sparse.exchange_end"
_KINDS = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)
_CREATION = threading.Lock()


class SparseExchange(Filter):
    """Encodes and decodes the models and updates of a job.

    Args:
        keep: share of the entries in a message, in (0, 1]. A model carries the largest entries of its difference to
            the model that its receiver holds, an update those of its difference to the model received.
        values: number format of the values.
        error_feedback: whether a site adds what it did not send to its next update.
        mask: patterns of array names, as in a shell; only arrays that match one travel. None: all arrays.
        content: ``"model"`` or ``"update"``; None: task data are models, task results are updates.

    Raises:
        ConfigError: a setting is invalid.
    """

    def __init__(
        self,
        keep: float = 1.0,
        values: ValueType = "float32",
        error_feedback: bool = True,
        mask: list[str] | None = None,
        content: Literal["model", "update"] | None = None,
    ):
        super().__init__()
        # FLARE exports the arguments that are stored under their own names.
        self.keep, self.values, self.error_feedback = keep, values, error_feedback
        self.mask, self.content = mask, content
        if content not in ("model", "update", None):
            raise ConfigError(f"content: expected 'model', 'update' or null, found {content!r}")
        self._settings = StreamSettings(keep, values, error_feedback, None if mask is None else tuple(mask))
        self._tasks: set[str] = set()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Log what leaves a site; at the end say what was saved, or warn that tasks came but no message was coded."""
        if event_type == EventType.START_RUN and fl_ctx.get_process_type() == ProcessType.CLIENT_JOB:
            open_site(fl_ctx)
        # Fired for all tasks, those without filters among them.
        if event_type == EventType.BEFORE_TASK_DATA_FILTER:
            self._tasks.add(str(fl_ctx.get_prop(FLContextKey.TASK_NAME)))
        # One line for all filters of the process.
        elif event_type == EventType.END_RUN and fl_ctx.get_prop(_END) is None:
            fl_ctx.set_prop(_END, True, private=True, sticky=True)
            if _find_folder(fl_ctx).joinpath(EXCHANGE_FILE).is_file():
                self.log_info(fl_ctx, sum_exchange(_find_folder(fl_ctx)))
            elif self._tasks:
                self.log_warning(
                    fl_ctx,
                    "sparse exchange: no message was coded; all models and updates travelled whole. The tasks were "
                    f"{', '.join(sorted(self._tasks))}; name those that carry models in `tasks` of the filters",
                )

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Encode or decode a message in place; messages without arrays pass unchanged.

        Raises:
            ComponentError: another filter of models stands behind it.
            ConfigError: the message cannot be served, such as one with encrypted values.
            WireError: the message cannot be decoded. FLARE then reports an error instead of a result.
        """
        peer, exchange = _get_peer(shareable, fl_ctx), _get_exchange(fl_ctx)
        if shareable.get_return_code(ReturnCode.OK) != ReturnCode.OK:
            if peer is not None:
                exchange.forget(peer)
            return shareable
        try:
            dxo = from_shareable(shareable)
        except ValueError:
            return shareable
        is_update = (self.content or self._get_default_content()) == "update"
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.OUT:
            check_last(self, fl_ctx)
            encoded = self._encode(dxo, exchange, shareable, peer, is_update=is_update)
        else:
            encoded = _decode(dxo, exchange, peer or "?", is_update=is_update)
        # In place: FLARE sends the object that it gave to the filter from one client to another.
        return shareable if encoded is None else encoded.update_shareable(shareable)

    def _get_default_content(self) -> str:
        is_data = self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN
        return "model" if is_data else "update"

    def _encode(
        self, dxo: DXO, exchange: Exchange, shareable: Shareable, peer: str | None, *, is_update: bool
    ) -> DXO | None:
        """Return the message of a model or an update; None for anything else."""
        if dxo.data_kind == DataKind.COLLECTION:
            raise ConfigError("sparse exchange: a collection of models (COLLECTION) cannot be coded; use one model")
        if dxo.data_kind not in _KINDS or not dxo.data:
            return None
        processed = dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM)
        if processed is not None:
            raise ConfigError(
                f"sparse exchange: another filter has processed the values ({processed}), such as encryption or "
                "quantization; remove one of the two filters from the job"
            )
        arrays, others = split_arrays(dxo.data)
        if not arrays:
            raise ConfigError("sparse exchange: the message has no float arrays; expected weights or their difference")
        extras = find_groups(dxo.meta, arrays)
        groups = {MODEL: arrays, **extras}
        if is_update:
            packet = exchange.encode_update(groups, self._settings, is_delta=dxo.data_kind == DataKind.WEIGHT_DIFF)
        elif dxo.data_kind == DataKind.WEIGHTS:
            round_ = shareable.get_header(AppConstants.CURRENT_ROUND, 0)
            packet = exchange.encode_model(groups, int(round_ or 0), self._settings, peer)
        else:
            raise ConfigError("sparse exchange: a task carries WEIGHT_DIFF; expected a model (WEIGHTS)")
        meta = {key: _drop_items(value, extras.get(key, {})) for key, value in dxo.meta.items()}
        return DXO(DataKind.APP_DEFINED, data={PACKET: {**packet, "others": others}}, meta=meta)


def _decode(dxo: DXO, exchange: Exchange, sender: str, *, is_update: bool) -> DXO | None:
    """Return the model or the update of a message; None for a message of another kind."""
    if dxo.data_kind != DataKind.APP_DEFINED or not isinstance(dxo.data, dict) or list(dxo.data) != [PACKET]:
        return None
    packet = dxo.data[PACKET]
    groups, is_delta = (
        exchange.decode_update(packet, sender) if is_update else (exchange.decode_model(packet, sender), False)
    )
    others = packet.get("others")
    if not isinstance(others, dict):
        raise RejectedMessage("E_KIND", "others", "a mapping", type(others).__name__, sender)
    extras = {name: {**_get_items(dxo.meta, name), **group} for name, group in groups.items() if name != MODEL}
    kind = DataKind.WEIGHT_DIFF if is_delta else DataKind.WEIGHTS
    return DXO(kind, data={**others, **groups[MODEL]}, meta={**dxo.meta, **extras})


def _drop_items(value: Any, coded: dict[str, Any]) -> Any:
    """Return a value of the metadata without the arrays that travel as messages."""
    return {key: item for key, item in value.items() if key not in coded} if coded else value


def _get_items(meta: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arrays of a group that travelled in the metadata."""
    items = meta.get(name)
    return items if isinstance(items, dict) else {}


def _get_peer(shareable: Shareable, fl_ctx: FLContext) -> str | None:
    """Return the name of the other end; None for a message that a site sends to several others or to the server."""
    if (site := get_sender(shareable)) is not None:
        return site
    peer = fl_ctx.get_peer_context()
    is_sent = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.OUT
    if peer is None or (is_sent and fl_ctx.get_process_type() == ProcessType.CLIENT_JOB):
        return None
    return str(peer.get_identity_name())


def _get_exchange(fl_ctx: FLContext) -> Exchange:
    """Return the streams of this process, which all filters of the job share."""
    with _CREATION:
        exchange = fl_ctx.get_prop(_EXCHANGE)
        if exchange is None:
            exchange = _build_exchange(fl_ctx)
            fl_ctx.set_prop(_EXCHANGE, exchange, private=True, sticky=True)
        return exchange


def _build_exchange(fl_ctx: FLContext) -> Exchange:
    folder = _find_folder(fl_ctx)
    is_site = fl_ctx.get_process_type() != ProcessType.SERVER_JOB
    ledger = folder / EXCHANGE_FILE

    def record(line: LedgerLine) -> None:
        with ledger.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")

    memory = folder / MEMORY_FOLDER if is_site else None
    return Exchange(str(fl_ctx.get_job_id()), fl_ctx.get_identity_name(), record, memory)


def sum_exchange(folder: Path) -> str:
    """Write the sums of a ledger by site and direction into ``sparse_exchange.json``; return the total as text."""
    sites: dict[str, dict[str, Counter[str]]] = {}
    total = Counter[str]()
    for text in (folder / EXCHANGE_FILE).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        counts = Counter(messages=1, sent_bytes=line["payload_bytes"], dense_bytes=line["dense_bytes"])
        sites.setdefault(line["site"], {}).setdefault(line["direction"], Counter()).update(counts)
        total.update(counts)
    write_json(folder / SUMS_FILE, {**total, "sites": sites})
    saved = compare_with_dense(total["sent_bytes"], total["dense_bytes"])
    sizes = [format_bytes(total[name]) for name in ("sent_bytes", "dense_bytes")]
    return f"sparse exchange: {sizes[0]} in {total['messages']} messages instead of {sizes[1]}, {saved}"


def _find_folder(fl_ctx: FLContext) -> Path:
    """Return the job's folder of this process."""
    return Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))


def describe_filter(settings: dict[str, Any], tasks: list[str], content: str) -> dict[str, Any]:
    """Return the entry of a configuration file for messages between sites, which are sent and received as task data."""
    path = f"{SparseExchange.__module__}.{SparseExchange.__qualname__}"
    return {"tasks": tasks, "direction": "inout", "filters": [{"path": path, "args": {**settings, "content": content}}]}
