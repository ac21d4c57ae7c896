"""Selective upload: rounds in which a site reveals some entries of its trained model.

A site sends the new values of the revealed entries. The server, which knows what it sent, takes their deltas in
float64, so that none is lost to the rounding of a float32 difference (docs/algorithms.md, section 3.3).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from ...core.exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ...core.mask import Mask, floor_fraction, top_k
from ...core.needs import Need, Needs
from ...training import Site
from ..aggregation.weighted import apply_deltas, average_over_owners, weigh_by_examples, weigh_by_one
from ..method import ConfigT, Method, ModelState, is_evaluated
from .masks import unite_masks

Aggregation = Literal["sum", "mean", "count"]
Phase = Literal["train", "count", "counted"]

MOSTLY_CHANGED = 31 / 32
"""Share of changed entries above which naming them takes more bytes than sending all values."""


def list_selective_needs(aggregation: Aggregation) -> Needs:
    """Return what a method with selective upload needs of the other parts of a run."""
    needs = {Need.OWN_ENTRIES.because("each site reveals entries of its own choice"), Need.MORE_READS.because()}
    if aggregation == "sum":
        # The server subtracts its own model from each site's values: their sum has the rounding error of the download
        # once for each site.
        reason = "aggregation sum adds the rounding error of the download once for each site"
        needs.add(Need.EXACT_MODEL.because(reason, "set aggregation to mean"))
    return frozenset(needs)


WHOLE_UNITS = Need.WHOLE_MODEL.because("it selects and removes whole units, of which a part would stay at the sites")


@dataclass(frozen=True)
class SelectiveState(ModelState):
    """The model, the entries of its last change, and the progress of pruning.

    Attributes:
        live: entries of the units that have not been removed.
        changed: the entries that the last round changed; sites that took part in it hold all others.
        prunings: number of prunings so far.
        phase: what comes next: train, count zeros, or train a structure that was pruned after counting.
        held: ``(P,)`` the model of the sites, with a download rate below 1; None: they hold ``weights``.
    """

    live: Mask
    changed: Mask
    prunings: int = 0
    phase: Phase = "train"
    held: Tensor | None = None

    @property
    def model(self) -> Tensor:
        """``(P,)`` the model that the sites train and evaluate."""
        return self.weights if self.held is None else self.held


class SelectiveMethod(Method[ConfigT, SelectiveState]):
    """A method with sites that reveal a part of their delta."""

    prunes_for_good = True

    @abstractmethod
    def reveal(self, delta: Tensor, site: Site, t: int) -> Mask:
        """Return the entries of a site's delta ``(P,)`` whose new values it sends in round ``t``."""

    @abstractmethod
    def aggregate(self, state: SelectiveState, contributions: Sequence[Contribution]) -> Tensor:
        """Return the new weights ``(P,)``; they are used for the entries that at least one site revealed."""

    def accepts(self, live: Mask, site: str, mask: Mask) -> bool:
        """Return whether a site may send the entries ``mask``; no removed entry may come back."""
        return mask <= live

    def init(self, weights: Tensor, sites: Sequence[str]) -> SelectiveState:
        full = Mask.full(self.layout.size)
        return SelectiveState(1, weights, full, full, held=None if self.download_rate == 1 else weights)

    @property
    def download_rate(self) -> float:
        """Share of the parameters whose changes a site receives in a round."""
        return 1.0

    def finalize(self, state: SelectiveState) -> SelectiveState:
        if state.held is None:
            return state
        # The result is the server's model, of which the sites lack what did not fit into their downloads.
        return replace(state, held=None, changed=state.changed | Mask(state.weights != state.held))

    def build_assignment(self, kind: str, state: SelectiveState) -> Assignment:
        """Return the changed entries over the sites' previous model, or the full model where it takes fewer bytes."""
        model = self.model(state)
        # A site whose selection is empty has trained. Without its examples, the mean of the others would be too large.
        expected = UpdateSpec(accepts=partial(self.accepts, state.live), counts_empty=True)
        assignment = Assignment(Request(kind, state.round, model, state.live), expected, full_model=model)
        if not state.live.is_full or state.changed.count > MOSTLY_CHANGED * self.layout.size:
            return assignment
        changed = Patch.from_vector(state.model, state.changed, "previous")
        return replace(assignment, request=replace(assignment.request, model=changed))

    def answer(self, request: Request, site: Site) -> Update:
        """Train the network of the live units and return the revealed entries."""
        narrowed = site.narrow(request.trainable)
        start = narrowed.start
        training = self.config.get_training(request.round)
        trained = narrowed.train(start, Mask.full(narrowed.layout.size), training, request.round)
        revealed = self.reveal(trained - start, narrowed, request.round)
        mask = Mask.from_positions(request.trainable.indices[revealed.bits], self.layout.size)
        patch = Patch(revealed.take(trained), mask)
        metrics = narrowed.evaluate(narrowed.weights) if is_evaluated(self.config, request.round - 1) else {}
        return Update(patch, self.update_content, site.num_examples, metrics)

    def learn(self, state: SelectiveState, contributions: Sequence[Contribution]) -> SelectiveState:
        changed = unite_masks(contribution.patch.mask for contribution in contributions)
        # The sites trained from what they hold, so that their deltas are to it.
        base = replace(state, weights=state.model)
        weights = torch.where(changed.bits, self.aggregate(base, contributions), base.weights)
        if state.held is None:
            return replace(state, round=state.round + 1, weights=weights, changed=changed)
        weights = weights + (state.weights - state.held)
        sent = self._select_download(weights - state.held)
        held = torch.where(sent.bits, weights, state.held)
        return replace(state, round=state.round + 1, weights=weights, changed=sent, held=held)

    def _select_download(self, lacking: Tensor) -> Mask:
        """Return the entries to send of those that the sites lack ``(P,)``: the largest, and all running statistics."""
        count = floor_fraction(self.download_rate, self.parameters.count)
        largest = top_k(lacking.abs(), count, within=self.parameters)
        return (largest | ~self.parameters) & Mask(lacking != 0)

    def model(self, state: SelectiveState) -> Patch:
        return Patch.from_vector(state.model, state.live)

    @cached_property
    def parameters(self) -> Mask:
        """All entries but buffers."""
        return Mask.from_tensors(self.layout, lambda tensor: tensor.role != "buffer")


def aggregate_revealed(
    state: SelectiveState, contributions: Sequence[Contribution], rule: Aggregation, parameters: Mask
) -> Tensor:
    """Return the new weights ``(P,)`` from the values that sites revealed.

    Args:
        state: the state before the round.
        contributions: new values of the revealed entries.
        rule: ``"sum"`` adds all deltas; ``"mean"`` weights by examples, absent deltas being zero; ``"count"`` averages
            over the sites that revealed an entry.
        parameters: the other entries are running statistics.
    """
    previous = state.weights
    if rule == "mean":
        return apply_deltas(contributions, weigh_by_examples, previous)
    average = average_over_owners(contributions, weigh_by_examples, fallback=previous)
    if rule == "count":
        return average
    # Running statistics are averaged, never added: a sum of variances is the variance of nothing.
    return torch.where(parameters.bits, apply_deltas(contributions, weigh_by_one, previous), average)
