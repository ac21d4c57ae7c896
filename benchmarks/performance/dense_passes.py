"""Count of the operations that read or write a model's whole vector, by the line of the package that runs them.

    python benchmarks/performance/dense_passes.py [--millions 3] [--sparsity 0.9] [--values bfloat16] [--lines]

NeuroSFL over four sites in this process, in a round in which the mask does not change: passes at the server and at one
site, with what runs in each. Gathering or scattering a selection is no pass; views are none. Counted are the operations
of torch, and those of numpy on arrays of torch's tensors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from idle_task import SITES, IdleTask
from nvflare.apis.dxo import from_shareable
from nvflare.apis.utils.task_utils import contains_lazy_download_ref
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.exchange import Update
from flare_sparse.core.params import Layout
from flare_sparse.flare.payload import dxo_to_update, update_to_dxo
from flare_sparse.methods.neurosfl import NeuroSFL, NeuroSFLConfig
from flare_sparse.rounds.endpoints.request_log import RequestLog
from flare_sparse.rounds.endpoints.server import Attempt, ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.federation.loop import Federation
from flare_sparse.rounds.federation.records import RoundRecord
from flare_sparse.rounds.federation.roster import Connections
from flare_sparse.tasks.task import SiteData
from flare_sparse.training import LocalTask, TrainingConfig, build_site
from flare_sparse.wire.formats import FORMATS, ValueType
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.stage import Reply

RUN = "0" * 16

GATHERS = {"index_select", "scatter_", "scatter", "index_copy_", "index_copy", "gather", "take", "index", "index_put_"}
"""Operations that touch as many entries as their index has."""
FREE = {"empty", "empty_like", "empty_strided", "detach", "alias", "is_same_size", "_to_copy_meta", "lift_fresh"}


class PassCounter:
    """Counts operations on ``size`` entries within its context.

    Args:
        size: entries of the vector; an operation on at least half as many counts, whatever the type of the entries.

    Attributes:
        passes: number of passes by operation and line.
    """

    def __init__(self, size: int):
        self.size = size
        self.passes: Counter[str] = Counter()
        self._modes = (_DispatchMode(self), _NumpyMode(self))

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    @property
    def count(self) -> int:
        """Number of passes."""
        return self.passes.total()

    def record(self, operation: str, *operands: Any) -> None:
        """Record an operation if one of its operands is as large as the vector."""
        if any(_count_entries(operand) * 2 >= self.size for operand in operands):
            self.passes[f"{operation} at {_find_line()}"] += 1


def _count_entries(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return max(map(_count_entries, value), default=0)
    return value.numel() if isinstance(value, Tensor) else value.size if isinstance(value, np.ndarray) else 0


def _find_line() -> str:
    frame = sys._getframe(2)
    while frame is not None and "flare_sparse" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "outside"


class _DispatchMode(TorchDispatchMode):
    def __init__(self, counter: PassCounter):
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in GATHERS:
            indices = [part for part in (args[1:] + tuple((kwargs or {}).values())) if part is not args[0]]
            self._counter.record(name, *indices)
        elif name not in FREE and not func.is_view:
            self._counter.record(name, *args, *(kwargs or {}).values(), result)
        return result


class _NumpyMode(TorchFunctionMode):
    """Makes ``Tensor.numpy`` return arrays that count."""

    def __init__(self, counter: PassCounter):
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.numpy and result.ndim:
            result = result.view(_CountedArray)
            result.counter = self._counter
        return result


class _CountedArray(np.ndarray):
    counter: PassCounter | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.counter = getattr(other, "counter", None)

    def _record(self, operation: str, *operands: Any) -> None:
        if self.counter is not None:
            self.counter.record(operation, *operands)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        self._record(ufunc.__name__, *inputs)
        plain = {name: _uncount(value) for name, value in options.items()}
        return self._count_result(getattr(ufunc, method)(*map(_uncount, inputs), **plain))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._record(func.__name__, *(args[1:] if func is np.take else args))
        result = func(*map(_uncount, args), **{name: _uncount(value) for name, value in kwargs.items()})
        return self._count_result(result)

    def _count_result(self, result: Any) -> Any:
        """Return a result whose own operations count, too."""
        if not isinstance(result, np.ndarray) or not result.ndim:
            return result
        result = result.view(_CountedArray)
        result.counter = self.counter
        return result

    def __getitem__(self, index: Any) -> Any:
        # A bool index is read completely, a slice is a view.
        if isinstance(index, np.ndarray):
            self._record("getitem", index)
        return super().__getitem__(_uncount(index))

    def take(self, indices: Any, *args: Any, **kwargs: Any) -> Any:
        self._record("take", indices)
        return _uncount(self).take(_uncount(indices), *args, **kwargs)

    def tobytes(self, *args: Any, **kwargs: Any) -> bytes:
        self._record("tobytes", self)
        return super().tobytes(*args, **kwargs)

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        result = _uncount(self).astype(*args, **kwargs)
        if not np.shares_memory(result, _uncount(self)):
            self._record("astype", self)
        return self._count_result(result)

    @property
    def data(self) -> Any:
        self._record("data", self)
        return super().data


def _uncount(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_uncount, value))
    return value.view(np.ndarray) if isinstance(value, _CountedArray) else value


class Round:
    """Four sites in this process with checkpoints and records of their requests, as in a deployed run.

    Args:
        millions: parameters of the network, in millions.
        sparsity: share of them that is off.
        folder: for checkpoints and records.
        values: number format of the messages.

    Attributes:
        counters: passes of the third round: ``server``, and ``site`` for one of the sites.
    """

    def __init__(self, millions: int, sparsity: float, folder: Path, values: ValueType):
        self.task = IdleTask({"millions": millions})
        network = self.task.model()
        self.layout = Layout.from_module(network)
        self.weights = self.layout.flatten(dict(network.named_parameters()))
        training = TrainingConfig(optimizer="sgd", lr=1e-6)
        self.method = NeuroSFL(
            NeuroSFLConfig(rounds=4, sparsity=sparsity, scores="random", training=training), self.layout, 1
        )
        self.values = values
        self.server = ServerEndpoint(self.layout, RUN, values, Ledger())
        self.store = Store(folder / "server", {})
        self.sites = {name: self._build_site(name, folder) for name in SITES}
        self.counters = {end: PassCounter(self.layout.size) for end in ("server", "site")}
        self.is_counted = False

    def _build_site(self, name: str, folder: Path) -> SiteEndpoint:
        site = build_site(LocalTask.open(name, self.task, self.task.load(SiteData(name, folder), 1), self.layout, 1))
        requests = RequestLog(RUN, self.method.count_requests, attempts=1, file=folder / f"{name}.json")
        return SiteEndpoint(site, self.method, RUN, self.values, Store(folder / name, {}), requests=requests)

    def run(self) -> None:
        """Run four rounds."""
        federation = Federation(
            self.method,
            self.server,
            self.task.metric,
            Connections(lambda: list(SITES), self._transport),
            on_round=self._start_counting,
            store=self.store,
        )
        federation.run(self.weights)

    def _start_counting(self, record: RoundRecord) -> None:
        if record.round == 2:
            self.is_counted = True
            self.counters["server"].__enter__()
        elif self.is_counted:
            self.counters["server"].__exit__(None, None, None)
            self.is_counted = False

    def _transport(self, attempt: Attempt) -> dict[str, Reply]:
        if self.is_counted:
            self.counters["server"].__exit__(None, None, None)
        answers = {}
        for name, message in attempt.messages.items():
            with self.counters["site"] if self.is_counted and name == SITES[0] else nullcontext():
                answers[name] = self._answer(self.sites[name], message, attempt.counted.get(name))
        if self.is_counted:
            self.counters["server"].__enter__()
        return {
            name: self.server.decode(name, data, update.num_examples, update.metrics)
            for name, (update, data) in answers.items()
        }

    def _answer(self, endpoint: SiteEndpoint, message: Any, counted: str | None) -> tuple[Update, Any]:
        """Return an update and its message; as in FLARE, the update passes the site's filters as a DXO."""
        request = endpoint.receive(message, counted)
        update = endpoint.answer(request)
        shareable = update_to_dxo(update, self.layout).to_shareable()
        # FLARE's search before the first filter.
        contains_lazy_download_ref(shareable)
        update = dxo_to_update(from_shareable(shareable), update, self.layout)
        return update, endpoint.encode(request, update).data


def count_round(millions: int, sparsity: float, values: ValueType = "float32") -> dict[str, PassCounter]:
    """Return the passes of a round in which the mask does not change, at the ``server`` and at a ``site``."""
    with tempfile.TemporaryDirectory() as folder:
        measured = Round(millions, sparsity, Path(folder), values)
        measured.run()
    return measured.counters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=3)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--values", choices=list(FORMATS), default="float32", help="number format of the messages")
    parser.add_argument("--lines", action="store_true", help="also print the line of each pass")
    arguments = parser.parse_args()
    for end, counter in count_round(arguments.millions, arguments.sparsity, arguments.values).items():
        print(f"{end}: {counter.count} passes over {counter.size:,} entries")
        if arguments.lines:
            print(*(f"    {number} {line}" for line, number in sorted(counter.passes.items())), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
