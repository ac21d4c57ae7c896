"""Both ends of a FLARE job in one process: contexts, chains of filters and FLARE's serializer, but no messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ProcessType, ReservedKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.decomposers import numpy_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs
from torch import nn

from flare_sparse.core.params import Layout

numpy_decomposers.register()
Train = Callable[[FLModel, str], FLModel]


class End:
    """One process of a job: a context, and the filters of each chain and direction."""

    def __init__(self, name: str, root: Path, components: Mapping[str, Any] | None = None):
        self.name, self.folder = name, root / name
        (self.folder / "config").mkdir(parents=True, exist_ok=True)
        self.is_server = name == "server"
        workspace = SimpleNamespace(
            get_run_dir=lambda job: str(self.folder), get_app_config_dir=lambda job: str(self.folder / "config")
        )
        stickers = {FLContextKey.PROCESS_TYPE: ProcessType.SERVER_JOB if self.is_server else ProcessType.CLIENT_JOB}
        engine = SimpleNamespace(
            get_workspace=lambda: workspace, fire_event=lambda *_: None, get_component=(components or {}).get
        )
        self.manager = FLContextManager(engine, name, "job", {}, stickers)

    def apply(self, filters: Sequence[Filter], shareable: Shareable, chain: str, direction: str) -> Shareable:
        """Return a message behind filters."""
        for item in filters:
            item.set_prop(FilterContextKey.CHAIN_TYPE, chain)
            context = self.manager.new_context()
            context.set_prop(FLContextKey.FILTER_DIRECTION, direction, private=True, sticky=False)
            table = {f"{chain}_filters": {f"train{FilterKey.DELIMITER}{direction}": list(filters)}}
            context.set_prop(FLContextKey.RUNNER, SimpleNamespace(**table), private=True, sticky=False)
            peer = FLContext()
            peer.put(ReservedKey.IDENTITY_NAME, "server", private=False, sticky=False)
            context.set_peer_context(peer)
            shareable = item.process(shareable, context)
        return shareable

    def start_task(self, filters: Sequence[Filter], shareable: Shareable) -> None:
        """Fire the event that precedes the executor."""
        context = self.manager.new_context()
        context.set_prop(FLContextKey.TASK_DATA, shareable, private=True, sticky=False)
        for item in filters:
            item.handle_event(EventType.BEFORE_TASK_EXECUTION, context)


def build_task(arrays: Mapping[str, Any], round_: int = 0, meta: Mapping[str, Any] | None = None) -> Shareable:
    """Return a model as a task."""
    shareable = DXO(DataKind.WEIGHTS, data=dict(arrays), meta=dict(meta or {})).to_shareable()
    shareable.set_header(AppConstants.CURRENT_ROUND, round_)
    return shareable


def send_result(site: End, filters: Sequence[Filter], task: Shareable, result: DXO) -> DXO:
    """Return what leaves a site behind its result filters."""
    site.start_task(filters, task)
    chain = FilterChainType.TASK_RESULT_CHAIN
    return from_shareable(site.apply(filters, result.to_shareable(), chain, FilterKey.OUT))


class Job:
    """The rounds of FLARE's FedAvg with an aggregator of this package.

    Args:
        network: the network of the persistor; None: none.
        aggregator: aggregates the sites' updates.
        filters: builds the filters of a site's results, by its name.
        to_server: filters of results at the server.
    """

    def __init__(
        self,
        root: Path,
        arrays: Mapping[str, Any],
        network: nn.Module | None,
        aggregator: ModelAggregator,
        sites: Sequence[str],
        filters: Callable[[str], Sequence[Filter]] = lambda site: (),
        to_server: Sequence[Filter] = (),
    ):
        self.server = End("server", root, {"persistor": SimpleNamespace(model=network)})
        self.sites = {name: End(name, root) for name in sites}
        self.filters = {name: list(filters(name)) for name in sites}
        self.to_server, self.aggregator, self.rounds = to_server, aggregator, 0
        self.context = self.server.manager.new_context()
        self.model = FLModel(params=dict(arrays), params_type=ParamsType.FULL, meta={})
        self.sent: list[DXO] = []

    def run(self, rounds: int, train: Train, first: int = 0, order: Callable[[list[str]], list[str]] = list) -> FLModel:
        """Run rounds; the sites answer in the given order."""
        self._fire(EventType.START_RUN)
        # FLARE's FedAvg counts the rounds of its own job, a snapshot of ScatterAndGather those of all.
        left = rounds - first if self.aggregator.resume_from else rounds  # type: ignore[attr-defined]
        self.context.set_prop(AppConstants.NUM_ROUNDS, left, private=True, sticky=False)
        for round_ in range(first, rounds):
            self.context.set_prop(AppConstants.CURRENT_ROUND, round_, private=True, sticky=False)
            self._publish()
            self._fire(AppEventType.ROUND_STARTED)
            self.aggregator.reset_stats()
            for site in order(list(self.sites)):
                result = self.ask(site, round_, rounds, train)
                if result.params:
                    result.meta["client_name"] = site
                    try:
                        self.aggregator.accept_model(result)
                    except Exception:  # noqa: BLE001 - as FLARE's controller does
                        continue
            self.model = FLModelUtils.update_model(self.model, self.aggregator.aggregate_model())
        return self.model

    def ask(self, site: str, round_: int, rounds: int, train: Train) -> FLModel:
        """Return the result of one site as it arrives at the aggregator."""
        self.model.current_round, self.model.total_rounds = round_, rounds
        end, filters = self.sites[site], self.filters[site]
        task = fobs.loads(fobs.dumps(FLModelUtils.to_shareable(self.model)))
        end.start_task(filters, task)
        result = FLModelUtils.to_shareable(train(FLModelUtils.from_shareable(task), site))
        chain = FilterChainType.TASK_RESULT_CHAIN
        sent = end.apply(filters, result, chain, FilterKey.OUT)
        self.sent.append(from_shareable(sent))
        arrived = fobs.loads(fobs.dumps(sent))
        arrived.set_header(ServerCommandKey.FL_CLIENT, Client(site, "token"))
        return FLModelUtils.from_shareable(self.server.apply(self.to_server, arrived, chain, FilterKey.IN))

    def _fire(self, event: str) -> None:
        self.aggregator.handle_event(event, self.context)

    def _publish(self) -> None:
        learnable = make_model_learnable(self.model.params, self.model.meta)
        self.context.set_prop(AppConstants.GLOBAL_MODEL, learnable, private=True, sticky=True)


def to_numpy(vector: torch.Tensor, layout: Layout) -> dict[str, Any]:
    """Return a vector as numpy arrays by tensor name."""
    return {name: value.clone().numpy() for name, value in layout.unflatten(vector).items()}
