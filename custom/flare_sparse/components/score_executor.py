"""Answers a task with SNIP's scores of the received model, beside the executor that trains."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLMetaKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from torch import Tensor, nn

from ..client import compute_scores
from ..core.errors import get_failure_code
from ..core.params import Layout
from ..flare.egress import install_recorder
from .arrays import ComponentError, check_plain, to_arrays, to_vector


class ScoredData(Protocol):
    """A user's class that gives a site's data and the loss. FLARE builds it, so the site's allow-list decides."""

    def batches(self, site: str) -> Iterable[Any]:
        """Return the minibatches of the site of this name."""

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a minibatch, a scalar."""


class ScoreExecutor(Executor):
    """Returns ``|w * dL/dw|`` of each entry, never a gradient (NeuroSFL, Eq. 4; docs/algorithms.md, section 5.4).

    Args:
        model: the network.
        data: an object with the methods of :class:`ScoredData`.
        threads: threads of torch: float sums depend on their number.
    """

    def __init__(self, model: nn.Module, data: ScoredData, threads: int = 1):
        super().__init__()
        missing = [name for name in ("batches", "loss") if not callable(getattr(data, name, None))]
        if not isinstance(model, nn.Module) or missing:
            found = f"data of type {type(data).__name__} has no {missing[0]}()" if missing else (
                f"model is of type {type(model).__name__}"
            )  # fmt: skip
            raise ComponentError(
                self, found, "give a network, and an object with batches(site) and loss(network, batch)"
            )
        self.model, self.data, self.threads = model, data, threads

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Log what leaves a site."""
        if event_type == EventType.START_RUN and fl_ctx.get_process_type() == ProcessType.CLIENT_JOB:
            install_recorder(fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the scores as a WEIGHT_DIFF, which FLARE subtracts nothing from."""
        try:
            dxo = from_shareable(shareable)
            if dxo.data_kind != DataKind.WEIGHTS or not dxo.data:
                raise ComponentError(self, f"the task carries {dxo.data_kind}, expected WEIGHTS", "send a model")
            check_plain(dxo, self)
            scores, steps = self._score(dxo.data, fl_ctx.get_identity_name())
        except Exception as error:  # noqa: BLE001 - a RuntimeError of an executor ends the job for all sites
            text = str(error) if isinstance(error, ComponentError) else type(error).__name__
            self.log_error(fl_ctx, f"{get_failure_code(error)}: no scores of this site: {text}")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        meta = {FLMetaKey.NUM_STEPS_CURRENT_ROUND: steps}
        return DXO(DataKind.WEIGHT_DIFF, data=scores, meta=meta).to_shareable()

    def _score(self, arrays: dict[str, Any], site: str) -> tuple[dict[str, Any], int]:
        """Return the scores as arrays of the types of the model's, and the number of minibatches."""
        torch.set_num_threads(self.threads)
        layout = Layout.from_module(self.model)
        tensors = layout.unflatten(to_vector(arrays, layout, self))
        self.model.load_state_dict({**self.model.state_dict(), **tensors})
        batches = list(self.data.batches(site))
        scores = layout.flatten(compute_scores(self.model, batches, self.data.loss))
        # Entries without a score, such as integer buffers, are left out: their values are the site's own.
        scored = {name: array for name, array in arrays.items() if name in tensors}
        return to_arrays(scores, layout, scored), len(batches)
