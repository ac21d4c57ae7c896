"""LoRA-A2 (Koo et al. 2025), Algorithms 1 and 2: adapters whose factors train in turn, only the ranks that matter sent.

"Towards Robust and Efficient Federated Low-Rank Adaptation with Heterogeneous Clients", ACL 2025, arXiv 2410.22815. A
site trains and sends the ranks that its trial epoch moved most; the server learns which those are and how they changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ..aggregation.weighted import weigh_by_examples, weighted_sum
from ..exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask
from ..scores.ranks import Factor, choose_slots, compute_contribution
from ..training import Site, TrainingConfig
from .method import broadcast, sample_sites
from .support.lora import RankedConfig, RankedMethod


class Config(RankedConfig):
    budget: Literal["slots", "scalars"] = Field(
        "slots",
        description="what r_k buys: r_k * N slots over the whole model (the paper), or as many scalars as r_k ranks of "
        "every module have, chosen by score per scalar",
    )
    score: Literal["contribution", "magnitude", "sensitivity"] = Field(
        "contribution",
        description="of a slot: ||dB_i A_i||; ||dB_i|| alone; or the sum of |weight * gradient| (Table 9)",
    )
    trial: Literal["epochs", "gradient"] = Field(
        "epochs", description="what the change is: that of trial_epochs, or one full-batch gradient"
    )
    trial_epochs: int = Field(1, ge=1, description="epochs that only choose the ranks; they are taken back")
    b_lr_ratio: float = Field(5.0, gt=0, description="eta_B / eta_A; training.lr is eta_A")
    schedule: Literal["alternate", "b_only"] = Field(
        "alternate", description="B in odd rounds and A in even ones, or always B (FFA-LoRA)"
    )


@dataclass(frozen=True)
class State:
    """``changed``: the entries that the last commit may have moved; the sites hold all others."""

    round: int
    weights: Tensor
    changed: Mask


class LoRAA2(RankedMethod[State]):
    """Alternating freeze and adaptive rank selection; what is neither factor (a head that trains) travels dense."""

    name = "lora_a2"
    Config = Config

    def active(self, t: int) -> Factor:
        """B first: while B is zero the gradient of A is (ALGORITHMS 3.4 #4)."""
        return "B" if t % 2 or self.config.schedule == "b_only" else "A"

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights, self.full_mask)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        asked = sample_sites(sites, self.config.participation, self.seed, state.round)
        return broadcast(asked, self._request("train", state))

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        return broadcast(sites, self._request(EVALUATE, state))

    def _request(self, kind: str, state: State) -> Assignment:
        """Down travels what the last round changed; a newcomer gets both factors."""
        active = self.active(state.round)
        changed = Patch.from_vector(state.weights, state.changed, over="previous" if state.round > 1 else "zeros")
        return Assignment(
            Request(kind, state.round, changed, self._travelling(active)),
            UpdateSpec("delta", accepts=partial(self._allowed, active), min_entries=partial(self._fewest, active)),
            full_model=self.model(state),
        )

    def _travelling(self, active: Factor) -> Mask:
        return self.slots.factors[active] | self.slots.rest

    def _allowed(self, active: Factor, site: str, on: Mask) -> bool:
        """An answer is made of whole slots of the active factor, within the site's budget, and all of the rest."""
        chosen = self.slots.find_slots(on, active)
        if chosen is None or not self.slots.rest <= on:
            return False
        rank: int = min(self.config.rank_of(site), self.slots.rank)
        if self.config.budget == "slots":
            return int(chosen.sum()) == rank * self.slots.modules
        widths = self.slots.widths(active)
        return int(widths[chosen].sum()) <= rank * int(widths.sum()) // self.slots.rank

    def _fewest(self, active: Factor, site: str) -> int:
        """Entries of the narrowest slots that a budget of ranks may go to, and of the rest."""
        slots, widths = self.slots, self.slots.widths(active)
        if self.config.budget == "scalars":
            return slots.rest.count
        narrowest = widths.sort().values[: min(self.config.rank_of(site), slots.rank) * slots.modules]
        return int(narrowest.sum()) + slots.rest.count

    def answer(self, request: Request, site: Site) -> Update:
        active, start = self.active(request.round), site.weights
        training = self._training(active)
        chosen = self._chosen(active, training, request, site) | self.slots.rest
        trained = site.train(start, chosen, training, request.round)
        return Update(Patch.from_vector(trained - start, chosen), "delta", site.num_examples)

    def _training(self, active: Factor) -> TrainingConfig:
        """eta_A, or eta_B = ratio * eta_A (LoRA+)."""
        training: TrainingConfig = self.config.training
        return training.model_copy(update={"lr": training.lr * self.config.b_lr_ratio}) if active == "B" else training

    def _chosen(self, active: Factor, training: TrainingConfig, request: Request, site: Site) -> Mask:
        """R_k; a budget of all ranks needs no trial."""
        rank = self.get_site_rank(site)
        if rank >= self.slots.rank:
            return self.slots.factors[active]
        scores = self._scores(active, training, request, site)
        return choose_slots(self.slots, scores, rank, active, per_scalar=self.config.budget == "scalars")

    def _scores(self, active: Factor, training: TrainingConfig, request: Request, site: Site) -> Tensor:
        """Of every slot ``(N * r,)``, from a trial whose result is thrown away."""
        start, t = site.weights, request.round
        if self.config.trial == "gradient":
            change = _gradient(site, start, training, t)
        else:
            epochs = training.model_copy(update={"epochs": self.config.trial_epochs})
            change = site.train(start, request.trainable, epochs, t, stream="trial") - start
        if self.config.score == "contribution":
            return compute_contribution(self.slots, change, start, active)
        if self.config.score == "magnitude":
            return self.slots.compute_norms(change, active)
        weights = start + change if self.config.trial == "epochs" else start
        return self.slots.compute_sums((weights * _gradient(site, weights, training, t)).abs(), active)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        """``B += sum_k w_k dB_k`` (Eq. 3); a slot that nobody chose keeps its bits, who did not choose one counts as 0."""
        travelling = self._travelling(self.active(state.round))
        weights = torch.where(travelling.bits, state.weights + weighted_sum(updates, weigh_by_examples), state.weights)
        return State(state.round + 1, weights, travelling)

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)


def _gradient(site: Site, weights: Tensor, training: TrainingConfig, t: int) -> Tensor:
    """``(P,)``: mean gradient over one pass of the site's examples."""
    total, count = torch.zeros_like(weights), 0
    for gradient in site.compute_gradients(weights, training.batch_size, None, t):
        total += gradient
        count += 1
    return total / max(count, 1)
