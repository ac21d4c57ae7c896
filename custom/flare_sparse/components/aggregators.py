"""Aggregators of the methods, for the servers of any FLARE job: one class for each paper's server."""

from dataclasses import dataclass, field
from typing import Literal

from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from torch import Tensor

from ..core.exchange import Content
from ..core.mask import Mask
from ..methods.fedavg import FedAvg
from ..methods.fedsparsify import FedSparsify, FedSparsifyState
from ..methods.flexlora import FlexLoRA
from ..methods.lora_a2 import LoRAA2, LoRAA2State
from ..methods.metagater import MetaGater, MetaGaterState
from ..methods.method import ModelState
from ..methods.neurosfl import NeuroSFL, NeuroSFLState
from ..methods.scbf import SCBF
from ..methods.support.averaging import AveragedState
from ..methods.support.selective import Aggregation, SelectiveState
from .aggregator import MethodAggregator
from .arrays import MASK, ComponentError, read_mask, to_vector


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
    rarer = ("step", "momentum_cap", "closed_channels")


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
    rarer = ("initial_sparsity", "first_round", "prune_every", "exponent", "prunable")


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
