"""LoRA-A2 (Koo et al. 2025), Algorithms 1 and 2: factors train in turn; only the ranks that matter are sent.

"Towards Robust and Efficient Federated Low-Rank Adaptation with Heterogeneous Clients", ACL 2025, arXiv 2410.22815;
docs/algorithms.md, sections 4.1 to 4.7. A site trains and returns the ranks that its trial epoch moved most; the server
sees which those are and their deltas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, final

import torch
from pydantic import Field
from torch import Tensor

from ..core.exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..core.mask import Mask
from ..core.needs import Need, Needs
from ..core.seeds import make_generator
from ..training import Site, TrainingConfig
from .aggregation.weighted import weigh_by_examples, weighted_sum
from .method import ModelState, train_locally
from .scores.ranks import Factor, compute_slot_scores, select_slots
from .scores.snip import average_gradients
from .support.lora import RankedConfig, RankedMethod


class LoRAA2Config(RankedConfig):
    budget: Literal["slots", "scalars"] = "slots"
    """unit of r_k: r_k * N slots over the whole model (the paper), or as many scalars as r_k ranks of every module
    have, chosen by score per scalar"""
    score: Literal["contribution", "magnitude", "sensitivity", "random"] = "contribution"
    """score of a slot: ||dB_i A_i||; ||dB_i|| alone; sum of |weight * gradient| (Table 9); or chance"""
    b_lr_ratio: float = Field(5.0, gt=0)
    """eta_B / eta_A; training.lr is eta_A, also of a trained head"""
    schedule: Literal["alternate", "b_only"] = "alternate"
    """B in odd rounds and A in even ones, or always B (FFA-LoRA)"""

    def needs(self) -> Needs:
        reason = "a site scores its adapters by a trial with learning rates of its own"
        return super().needs() | {Need.PACKAGE_STEPS.because(reason)}


@dataclass(frozen=True)
class LoRAA2State(ModelState):
    """The model and the entries of its last change.

    Attributes:
        changed: the entries that the last round may have changed; sites that took part in it hold all others.
    """

    changed: Mask


@final
class LoRAA2(RankedMethod[LoRAA2Config, LoRAA2State]):
    """Sites train one factor in turn, in the slots with the highest scores; a trained head is sent in full."""

    name = "lora_a2"
    Config = LoRAA2Config
    update_content = "delta"

    def get_active_factor(self, t: int) -> Factor:
        """Return the factor that trains in round ``t``.

        B is first, since A has no gradient while B is zero (docs/algorithms.md, section 4.6, deviation 3).
        """
        return "B" if t % 2 or self.config.schedule == "b_only" else "A"

    def init(self, weights: Tensor, sites: Sequence[str]) -> LoRAA2State:
        return LoRAA2State(1, weights, Mask.full(self.layout.size))

    def build_assignment(self, kind: str, state: LoRAA2State) -> Assignment:
        """Return an assignment of the last change; a site without the previous model receives both factors."""
        active = self.get_active_factor(state.round)
        changed = Patch.from_vector(state.weights, state.changed, "previous" if state.round > 1 else "zeros")
        expected = UpdateSpec(
            self.update_content,
            accepts=partial(self._accepts, active),
            min_entries=partial(self.count_min_entries, active),
        )
        request = Request(kind, state.round, changed, self.select_exchanged(state.round))
        return Assignment(request, expected, full_model=self.model(state))

    def select_exchanged(self, t: int) -> Mask:
        """Return the entries that round ``t`` may change."""
        return self.slots.factors[self.get_active_factor(t)] | self.slots.other_entries

    def _accepts(self, active: Factor, site: str, mask: Mask) -> bool:
        """Return whether a mask has whole slots of the active factor, within the site's budget, and all of the rest."""
        slots = self.slots.find_slots(mask, active)
        if slots is None or not self.slots.other_entries <= mask:
            return False
        rank = min(self.config.get_rank(site), self.slots.rank)
        if self.config.budget == "slots":
            return int(slots.sum()) == rank * self.slots.num_modules
        widths = self.slots.get_slot_widths(active)
        return int(widths[slots].sum()) <= rank * int(widths.sum()) // self.slots.rank

    def count_min_entries(self, active: Factor, site: str) -> int:
        """Return the number of entries of the narrowest slots that fill a site's budget, and of the rest."""
        slots, widths = self.slots, self.slots.get_slot_widths(active)
        if self.config.budget == "scalars":
            return slots.other_entries.count
        narrowest = widths.sort().values[: min(self.config.get_rank(site), slots.rank) * slots.num_modules]
        return int(narrowest.sum()) + slots.other_entries.count

    def answer(self, request: Request, site: Site) -> Update:
        active = self.get_active_factor(request.round)
        training = self._get_training(active, request.round)
        # Entries outside all slots, such as a trained head's, train at every site.
        selected = self._select_slots(active, training, request, site) | self.slots.other_entries
        return train_locally(
            request, site, training, self.update_content, trainable=selected, step_scale=self._build_step_scale(active)
        )

    def _build_step_scale(self, active: Factor) -> Tensor | None:
        """Return the factors ``(P,)`` of steps of ``B`` that leave the other entries at eta_A; None: all are 1."""
        rest = self.slots.other_entries
        if active == "A" or self.config.b_lr_ratio == 1 or not rest.count:
            return None
        return torch.where(rest.bits, 1 / self.config.b_lr_ratio, 1.0)

    def _get_training(self, active: Factor, t: int) -> TrainingConfig:
        """Return the settings of round ``t`` with eta_A, or with eta_B = ratio * eta_A (LoRA+)."""
        training = self.config.get_training(t)
        return training.model_copy(update={"lr": training.lr * self.config.b_lr_ratio}) if active == "B" else training

    def _select_slots(self, active: Factor, training: TrainingConfig, request: Request, site: Site) -> Mask:
        """Return R_k, the slots that the site trains; a budget of all ranks needs no trial."""
        rank = self.get_site_rank(site)
        if rank >= self.slots.rank:
            return self.slots.factors[active]
        scores = self._score_slots(active, training, request, site)
        return select_slots(self.slots, scores, rank, active, per_scalar=self.config.budget == "scalars")

    def _score_slots(self, active: Factor, training: TrainingConfig, request: Request, site: Site) -> Tensor:
        """Return a score for every slot ``(N * r,)``, from a trial of one epoch whose result is discarded."""
        start, t = site.weights, request.round
        if self.config.score == "random":
            generator = make_generator(self.seed, "slots", site.name, t)
            return torch.rand(self.slots.num_modules * self.slots.rank, generator=generator)
        trial, scale = training.model_copy(update={"epochs": 1}), self._build_step_scale(active)
        trained = site.train(start, request.trainable, trial, t, stream="trial", step_scale=scale).cpu()
        delta = trained - start
        if self.config.score == "contribution":
            return compute_slot_scores(self.slots, delta, start, active)
        if self.config.score == "magnitude":
            return self.slots.compute_norms(delta, active)
        weights = start + delta
        gradients = site.trainer.compute_gradients(weights, training.batch_size, batches=None, t=t)
        sensitivity = (weights * average_gradients(gradients, self.layout.size).cpu()).abs()
        return self.slots.compute_sums(sensitivity, active)

    def learn(self, state: LoRAA2State, contributions: Sequence[Contribution]) -> LoRAA2State:
        """Return the state after ``B += sum_k w_k dB_k`` (Eq. 3).

        A slot that no site selected keeps its bits; a site that did not select a slot counts with a delta of zero.
        """
        exchanged = self.select_exchanged(state.round)
        weights = torch.where(
            exchanged.bits, state.weights + weighted_sum(contributions, weigh_by_examples), state.weights
        )
        return LoRAA2State(state.round + 1, weights, exchanged)
