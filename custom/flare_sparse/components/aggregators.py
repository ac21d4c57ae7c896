"""Aggregators of the methods, for the servers of any FLARE job: one class for each paper's server.

Each is a method's server half as an aggregator of FLARE's controllers.

The mathematics is that of :meth:`Method.learn`; sums run in float64, in the order of site names, so that the model has
the same bits for every order of arrival. A site whose update cannot be counted is left out of the round, by name, and
a round with fewer than ``min_sites`` updates ends the job with the last model intact.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal

import torch
from nvflare.apis.fl_constant import FLMetaKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.aggregators.weighted_aggregation_helper import (
    WeightedAggregationHelper,
    filter_aggregatable_metrics,
)
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from safetensors.torch import load, save
from torch import Tensor, nn

from ..core.checkpoint.packing import pack, unpack
from ..core.errors import RoundFailed, get_failure_code, list_first
from ..core.exchange import Content, Contribution, Patch
from ..core.mask import Mask
from ..core.params import Layout, separate_tensors
from ..flare.payload import get_sender
from ..methods.fedavg import FedAvg
from ..methods.fedsparsify import FedSparsify, FedSparsifyState
from ..methods.flexlora import FlexLoRA
from ..methods.lora_a2 import LoRAA2, LoRAA2State
from ..methods.metagater import MetaGater, MetaGaterState
from ..methods.method import Method, MethodConfig, ModelState, StateT
from ..methods.neurosfl import NeuroSFL, NeuroSFLState
from ..methods.scbf import SCBF
from ..methods.support.averaging import AveragedState
from ..methods.support.selective import Aggregation, SelectiveState
from .arrays import MASK, Arrays, ComponentError, guess_layout, pack_mask, read_mask, to_arrays, to_vector
from .uploads import build_settings


@dataclass(eq=False, kw_only=True)
class MethodAggregator(ModelAggregator, Generic[StateT]):
    """Aggregates updates as a method does; the network is that of the persistor.

    The mask of the next model, where the method has one, travels in its meta, where ``KeepMask`` and a script find it.
    After each round the method's state lies in the job's folder, in ``NAME.safetensors``. The fields that a subclass
    adds are settings of its method.

    Args:
        min_sites: quorum: fewest updates of a round.
        persistor_id: component that holds the network; without one, tensors are known by names and shapes alone.
        resume_from: file with the state of an earlier job, whose model the persistor loads; empty: a new run.
        settings: rarer settings of the method, by the names that a configuration has in ``method:``.

    Attributes:
        method_class, state_class: the method, and the type of its state.
        rarer: names that ``settings`` may have; what has no effect at the server is not among them.
    """

    min_sites: int = 1
    persistor_id: str = "persistor"
    resume_from: str = ""
    settings: dict[str, Any] | None = None

    method_class: ClassVar[type[Method[Any, Any]]]
    state_class: ClassVar[type[Any]]
    rarer: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__init__()
        if type(self.min_sites) is not int or self.min_sites < 1:
            raise ComponentError(self, f"min_sites is {self.min_sites!r}, expected a number from 1", "correct the job")
        if unknown := sorted(set(self.settings or {}) - set(self.rarer)):
            expected = list_first(self.rarer, 9) or "none"
            raise ComponentError(self, f"settings has {list_first(unknown)}, expected of {expected}", "correct the job")
        self.read_config(1)
        self._rounds: int | None = None
        self._method: Method[Any, StateT] | None = None
        self._state: StateT | None = None
        self._stored: bytes = b""
        self.reset_stats()

    @property
    def _always_serialize_args(self) -> set[str]:
        # FLARE exports no argument that equals its default; who reviews the job must see these.
        return {own.name for own in fields(self)} - {"persistor_id", "resume_from", "settings"}

    def read_config(self, rounds: int) -> Any:
        """Return the method's settings for a run of this many rounds.

        Raises:
            ComponentError: an argument is invalid.
        """
        config: type[MethodConfig] = self.method_class.Config
        return build_settings(self, config, rounds=rounds, **(self.settings or {}))

    def select_sent(self, method: Any, state: StateT, model: FLModel, present: Mask, site: str) -> Mask:
        """Return the entries of an update that count, of those that are ``present``; by default the live ones."""
        mask: Mask = method.model(state).mask
        return mask

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == AppEventType.ROUND_STARTED and self._rounds is None:
            # A job that goes on from another one names the rounds that are left.
            done = fl_ctx.get_prop(AppConstants.CURRENT_ROUND) if self.resume_from else 0
            self._rounds = (fl_ctx.get_prop(AppConstants.NUM_ROUNDS) or 0) + (done or 0) or None

    def start(self, fl_ctx: FLContext, rounds: int) -> None:
        """Prepare the aggregator before the first round, for a controller that uses it there."""
        self.fl_ctx, self._rounds = fl_ctx, rounds

    def accept_model(self, model: FLModel) -> None:
        """Add an update.

        Raises:
            ComponentError: it cannot be counted; FLARE then reports that it was not accepted.
        """
        if not self.offer_model(model):
            raise ComponentError(self, f"the update of {self._name_site(model)} was left out", "see the line before")

    def offer_model(self, model: FLModel) -> bool:
        """Add an update and return whether it counts; if not, the log names the site and the reason."""
        site = self._name_site(model)
        try:
            self._add(model, site)
        except Exception as error:  # noqa: BLE001 - an update may be anything, and the round goes on without it
            self._left_out[site] = str(error)
            self.error(f"{get_failure_code(error)}: the update of site {site} is left out of this round: {error}")
            return False
        return True

    @staticmethod
    def _name_site(model: FLModel) -> str:
        return str((model.meta or {}).get("client_name") or "?")

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Add an update of ScatterAndGather, which does not name the site."""
        self.fl_ctx = fl_ctx
        site = get_sender(shareable) or shareable.get_peer_prop(ReservedKey.IDENTITY_NAME, None)
        try:
            model = FLModelUtils.from_shareable(shareable, fl_ctx)
        except Exception as error:  # noqa: BLE001 - an update may be anything
            model = FLModel(params={}, meta={"problem": str(error)})
        model.meta = {**(model.meta or {}), "client_name": site}
        return self.offer_model(model)

    def _add(self, model: FLModel, site: str) -> None:
        before = self._read_global_model()
        method, state = self._init_state(before)
        layout, is_difference = method.layout, model.params_type == ParamsType.DIFF
        if not isinstance(model.params, Mapping) or not model.params:
            raise ComponentError(self, "the update is empty", "see the site's log for the reason")
        if site in self._contributions:
            raise ComponentError(self, "the site has sent an update before", "count one update of each site")
        # Tensors that a filter of the site removed (ExcludeVars) are not present, and count as the method says.
        present = Mask(layout.select(lambda spec: spec.name in model.params))
        start, mask = to_vector(before, layout, self), self.select_sent(method, state, model, present, site)
        if not mask <= present:
            names = ", ".join([spec.name for spec in layout.tensors if spec.name not in model.params][:3])
            raise ComponentError(
                self, f"the update lacks {names}", "leave out ExcludeVars, or choose SelectiveSum, which counts owners"
            )
        values = to_vector(model.params, layout, self, fills=True)
        content = self.get_content(state)
        values = mask.take(_complete(values, start, content, is_difference=is_difference))
        if not bool(torch.isfinite(values).all()):
            count = int((~torch.isfinite(values)).sum())
            raise ComponentError(
                self, f"{count} values are not finite", "lower the learning rate, check the site's data"
            )
        self.check_values(values, state)
        steps = read_steps(model.meta, self)
        self._contributions[site] = Contribution(site, Patch(values, mask), content, steps)
        self._metrics[site] = (model.metrics, steps)

    def get_content(self, state: StateT) -> Content:
        """Return what the values of an update are."""
        return self.method_class.update_content

    def check_values(self, values: Tensor, state: StateT) -> None:
        """Refuse values ``(n,)`` that are finite but impossible; by default none.

        Raises:
            ComponentError: they are.
        """

    def aggregate_model(self) -> FLModel:
        """Return the next model.

        Raises:
            RoundFailed: there are fewer updates than ``min_sites``; the last model stays.
        """
        contributions = [self._contributions[site] for site in sorted(self._contributions)]
        if len(contributions) < self.min_sites:
            left_out = "".join(f"; {site}: {reason}" for site, reason in sorted(self._left_out.items()))
            raise RoundFailed(
                f"{type(self).__name__}: {RoundFailed.code}: {len(contributions)} updates count, of "
                f"{list_first(sorted(self._contributions)) or 'no site'}, min_sites is {self.min_sites}{left_out}"
            )
        before = self._read_global_model()
        method, state = self._init_state(before)
        self._state = state = method.learn(state, contributions)
        self._save(state)
        model = method.model(state)
        params = to_arrays(model.to_vector(), method.layout, before)
        meta = {} if model.mask.is_full else {MASK: pack_mask(model.mask, method.layout)}
        return FLModel(params_type=ParamsType.FULL, params=params, metrics=self._average_metrics(), meta=meta)

    def describe(self) -> str:
        """Return how many entries of the model are live, as display text."""
        method, state = self._init_state(self._read_global_model())
        live = method.model(state).mask
        return f"{live.count:,} of {live.size:,} entries are live"

    def reset_stats(self) -> None:
        """Forget the updates of the last round."""
        self._contributions: dict[str, Contribution] = {}
        self._metrics: dict[str, tuple[Any, int]] = {}
        self._left_out: dict[str, str] = {}

    def get_persist_state(self, fl_ctx: FLContext) -> dict[str, Any]:
        """Return the state for a snapshot of ScatterAndGather."""
        return {} if self._state is None else {"state": write_state(self._state)}

    def restore(self, state_data: dict[str, Any], fl_ctx: FLContext) -> None:
        """Continue from a snapshot."""
        self._stored = state_data.get("state", b"")

    def _read_global_model(self) -> Arrays:
        learnable = self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)
        weights = None if learnable is None else learnable[ModelLearnableKey.WEIGHTS]
        if not weights:
            raise ComponentError(self, "the controller has no global model", "add a persistor with a model")
        return weights

    def _init_state(self, before: Arrays) -> tuple[Method[Any, StateT], StateT]:
        """Return the method and its state; the first call builds them from the global model."""
        if self._method is None or self._state is None:
            if self._rounds is None:
                raise ComponentError(self, "no round was started", "use FedAvg, ScatterAndGather or a subclass of them")
            layout = find_layout(self.fl_ctx, self.persistor_id, before)
            self._method = self.method_class(self.read_config(self._rounds), layout)
            stored = self._stored or (Path(self.resume_from).read_bytes() if self.resume_from else b"")
            if stored:
                self._state = read_state(stored, self.state_class)
            else:
                self._state = self._method.init(to_vector(before, layout, self), [])
        return self._method, self._state

    def _save(self, state: StateT) -> None:
        engine = self.fl_ctx.get_engine()
        folder = Path(engine.get_workspace().get_run_dir(self.fl_ctx.get_job_id()))
        file = folder / f"{type(self).__name__}.safetensors"
        new = file.with_suffix(".new")
        new.write_bytes(write_state(state))
        new.replace(file)

    def _average_metrics(self) -> dict[str, Any] | None:
        """Return the sites' mean metrics, by which FLARE selects models and stops; None unless all sites sent some."""
        helper = WeightedAggregationHelper()
        for site, (metrics, steps) in sorted(self._metrics.items()):
            if not metrics:
                return None
            helper.add(filter_aggregatable_metrics(metrics), steps, site, 0)
        return helper.get_result() or None


def _complete(values: Tensor, start: Tensor, content: Content, *, is_difference: bool) -> Tensor:
    """Return the values of an update as the method wants them: weights, a delta, or scores as they are."""
    if content == "scores":
        return values
    if content == "delta":
        return values if is_difference else values - start
    # In float64 the sum is exact: the method takes the difference to ``start`` again.
    return start.double() + values.double() if is_difference else values


def check_aggregator(controller: object, aggregator: object, kind: type) -> None:
    """Refuse an aggregator of another kind before the job runs.

    Raises:
        ComponentError: it is one.
    """
    if not isinstance(aggregator, kind):
        raise ComponentError(
            controller,
            f"aggregator is of type {type(aggregator).__name__}",
            f"give a {kind.__name__}, by path and args",
        )


def find_layout(fl_ctx: FLContext, persistor_id: str, arrays: Arrays) -> Layout:
    """Return the layout of the persistor's network; without a network, of the arrays alone."""
    persistor = fl_ctx.get_engine().get_component(persistor_id) if persistor_id else None
    network = getattr(persistor, "model", None)
    return Layout.from_module(network) if isinstance(network, nn.Module) else guess_layout(arrays)


def read_steps(meta: Mapping[str, Any] | None, component: object) -> int:
    """Return the number of steps that weighs a site, 1 where it sends none, as FLARE counts.

    Raises:
        ComponentError: it is no whole number from 1.
    """
    value = (meta or {}).get(FLMetaKey.NUM_STEPS_CURRENT_ROUND)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 1:
        raise ComponentError(
            component,
            f"{FLMetaKey.NUM_STEPS_CURRENT_ROUND} is {str(value)[:40]}, expected a number from 1",
            "send the number of steps, or none",
        )
    return int(value)


def write_state(state: Any) -> bytes:
    """Return a method's state as the bytes of a safetensors file."""
    tensors: dict[str, Tensor] = {}
    packed = json.dumps(pack(state, tensors))
    data: bytes = save(separate_tensors(tensors), metadata={"state": packed})
    return data


def read_state(data: bytes, kind: type[StateT]) -> StateT:
    """Return the state of :func:`write_state`.

    Raises:
        ComponentError: the bytes are those of another state.
    """
    try:
        # A safetensors file starts with the length of its header, which is JSON.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return unpack(json.loads(header["__metadata__"]["state"]), kind, load(data))
    except Exception as error:
        raise ComponentError(
            "resume_from",
            f"the file is no state of {kind.__module__} ({type(error).__name__})",
            "name NAME.safetensors",
        ) from error


class OrderedMean(MethodAggregator[AveragedState]):
    """The mean of the sites' models, weighted by their steps, with the same bits for every order of arrival."""

    method_class = FedAvg
    state_class = AveragedState


@dataclass(eq=False)
class RankMean(MethodAggregator[LoRAA2State]):
    """Adds ``sum_k w_k dB_k``; a slot that a site did not send counts with a delta of zero (docs/algorithms.md, 4.4).

    Args:
        schedule: as of ``RankUpload``, which the sites need.
    """

    schedule: Literal["alternate", "b_only"] = "alternate"

    method_class = LoRAA2
    state_class = LoRAA2State

    def select_sent(self, method: LoRAA2, state: LoRAA2State, model: FLModel, present: Mask, site: str) -> Mask:
        if MASK not in (model.meta or {}):
            raise ComponentError(self, "the update names no slots", "add RankUpload to the sites' task_result_filters")
        sent, exchanged = read_mask(model.meta[MASK], method.layout, self), method.select_exchanged(state.round)
        if not sent <= exchanged or method.slots.find_slots(sent, method.get_active_factor(state.round)) is None:
            raise ComponentError(self, "the update has other entries than whole slots of the active factor", "use one "
                                 "schedule in RankUpload and RankMean")  # fmt: skip
        return sent


@dataclass(eq=False)
class FlexLoRAMean(MethodAggregator[ModelState]):
    """Averages products of adapters; slot ``i`` of the result is the ``i``-th singular direction (section 4.9).

    Args:
        rank: r_k of a site, of whose adapters the first r_k slots count.
        ranks: r_k of single sites, by name.
    """

    rank: int = 8
    ranks: dict[str, int] = field(default_factory=dict)

    method_class = FlexLoRA
    state_class = ModelState

    def select_sent(self, method: FlexLoRA, state: ModelState, model: FLModel, present: Mask, site: str) -> Mask:
        return method.select_first_ranks(method.config.get_rank(site))


@dataclass(eq=False)
class SelectiveSum(MethodAggregator[SelectiveState]):
    """Adds the deltas that sites sent; running statistics are averaged (docs/algorithms.md, section 3.3).

    The entries that a site sent are those of the mask of ``ChannelUpload`` or ``RankUpload``. Without one they are the
    entries of a difference that are not zero, or all of the tensors that the update has (ExcludeVars).

    Args:
        aggregation: ``"sum"`` of all deltas (the papers); ``"mean"``: weighted by steps, what was not sent counts as
            zero; ``"count"``: weighted mean over the sites that sent an entry.
    """

    aggregation: Aggregation = "sum"

    method_class = SCBF
    state_class = SelectiveState

    def select_sent(self, method: SCBF, state: SelectiveState, model: FLModel, present: Mask, site: str) -> Mask:
        if MASK in (model.meta or {}):
            # A filter behind the selection (ExcludeVars) may have removed tensors.
            return read_mask(model.meta[MASK], method.layout, self) & present
        if model.params_type != ParamsType.DIFF:
            return present
        return Mask(to_vector(model.params, method.layout, self, fills=True) != 0)


@dataclass(eq=False)
class MetaStep(MethodAggregator[MetaGaterState]):
    """Takes Algorithm 1's lines 10 to 13; gate groups that the Group Lasso makes zero close for good (section 6).

    Args:
        proximity: lambda, also the weight of the sites' proximal term (FedProx's mu).
        lasso: mu, weight of the Group Lasso on the gates.
        settings: of the step and its acceleration, by the names in :attr:`rarer`; see docs/algorithms.md, section 6.
    """

    proximity: float = 0.2
    lasso: float = 1e-4

    method_class = MetaGater
    state_class = MetaGaterState
    rarer = ("step", "momentum_cap", "scale_prox", "closed_channels", "output")


@dataclass(eq=False)
class MagnitudePruning(MethodAggregator[FedSparsifyState]):
    """Averages the sites' models and switches the smallest entries off for good (docs/algorithms.md, section 2).

    Its mask travels with the model; ``KeepMask`` holds the sites to it.

    Args:
        sparsity: S_T, share of pruned entries after the last round of the controller.
        settings: of the schedule (Eq. 1) and of what is pruned, by the names in :attr:`rarer`; see section 2.5.
    """

    sparsity: float = 0.9

    method_class = FedSparsify
    state_class = FedSparsifyState
    rarer = ("initial_sparsity", "first_round", "prune_every", "exponent", "force_final", "prunable")


@dataclass(eq=False)
class ScoredMask(MethodAggregator[NeuroSFLState]):
    """Turns the first round's scores into a mask, and averages inside it from the second on (section 5 of the docs).

    ``NeuroSFLController`` asks for the scores. In a workflow of its own, FedAvg with ``task_name="score"`` and
    ``num_rounds=1``, it leaves the masked model to the workflow behind it.

    Args:
        sparsity: p, share of the maskable entries that is off.
        scores: ``"snip"``, ``"weighted_snip"`` (by the sites' numbers) or ``"shuffled_snip"``.
        settings: ``min_per_layer``, live entries that every maskable tensor keeps, and ``maskable``; see section 5.2.
    """

    sparsity: float = 0.9
    scores: Literal["snip", "weighted_snip", "shuffled_snip"] = "snip"

    method_class = NeuroSFL
    state_class = NeuroSFLState
    rarer = ("min_per_layer", "maskable")

    def select_sent(self, method: NeuroSFL, state: NeuroSFLState, model: FLModel, present: Mask, site: str) -> Mask:
        return Mask.full(present.size) if state.round == 0 else method.model(state).mask

    def get_content(self, state: NeuroSFLState) -> Content:
        return "scores" if state.round == 0 else "weights"

    def check_values(self, values: Tensor, state: NeuroSFLState) -> None:
        if state.round == 0 and bool((values < 0).any()):
            raise ComponentError(
                self,
                f"the scores have negative values, such as {float(values.min()):.3g}",
                "send what compute_scores returns with params_type=ParamsType.DIFF; otherwise FLARE subtracts the "
                "model from scores where params_transfer_type is DIFF",
            )
