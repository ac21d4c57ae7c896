"""NeuroSFL (Thapaliya et al. 2024), Algorithm 1: one global SNIP mask at the start, then FedAvg inside it.

Front. Neuroinform. 18:1430987; docs/algorithms.md, sections 5.1 to 5.7. SNIP: Lee et al. 2019, "SNIP: Single-shot
Network Pruning based on Connection Sensitivity", arXiv 1810.02340.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, Self, final

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..core.errors import ConfigError
from ..core.exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..core.mask import Mask, floor_fraction, top_k, top_k_per_tensor
from ..core.needs import Need, Needs
from ..core.params import Layout
from ..core.seeds import make_generator
from ..training import Site
from ..wire.encodings import count_entries_within
from ..wire.number_format import NumberFormat
from .aggregation.weighted import Weights, weigh_by_examples, weigh_equally, weighted_sum
from .method import SCORE, TRAIN, MaskPreset, broadcast
from .scores.snip import compute_keep_counts, compute_saliency
from .support.averaging import AveragedState, AveragingConfig, AveragingMethod
from .support.masks import compute_erk_densities, draw_random_mask, find_zero_weights, shuffle_mask, unite_masks


class NeuroSFLConfig(AveragingConfig):
    sparsity: float = Field(0.9, ge=0, lt=1)
    """p: share of the maskable entries that is off for the whole run"""
    budget: float | None = Field(None, gt=0, le=1)
    """in place of sparsity: bytes of a message of a round, as a share of those of the dense model in float32; the
    scores (score_share) and the first mask come on top, once"""
    scores: Literal["snip", "iter_snip", "weighted_snip", "individual_snip", "shuffled_snip", "random"] = "snip"
    """snip: sum of the sites' |saliency|; weighted_snip: weighted by examples; iter_snip: several minibatches or steps;
    individual_snip: a mask of its own for every site; shuffled_snip: random places, with snip's number in each tensor;
    random: no data needed"""
    iter_snip: Literal["minibatch", "progressive"] = "minibatch"
    """average over minibatches, or prune in steps (De Jorge et al.)"""
    iterations: int = Field(10, ge=1)
    """minibatches or steps of iter_snip"""
    saliency_batches: int | None = Field(None, ge=1)
    """minibatches per saliency; null: all training examples, as in the paper's equations"""
    score_share: float = Field(1.0, gt=0, le=1)
    """share of the maskable entries whose scores a site sends: its largest, never fewer than stay live"""
    min_per_layer: int = Field(1, ge=0)
    """live entries that every maskable tensor keeps; 0 as in the paper"""
    random_layers: Literal["uniform", "erk"] = "uniform"
    """how a random mask spreads its entries over the tensors"""
    random_site: bool = False
    """individual_snip: the mask of one site, drawn at random, for all (the paper's section 5.1)"""
    maskable: MaskPreset = "conv_linear_weights"
    """which parameters may be masked"""

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        if self.budget is not None and "sparsity" in self.model_fields_set:
            raise ValueError("budget gives the sparsity; remove one of the two")
        if self.random_site and self.scores != "individual_snip":
            raise ValueError(f"random_site: true needs scores: individual_snip, not {self.scores}")
        if self.score_share < 1 and self.score_steps != 1:
            raise ValueError(f"score_share {self.score_share} needs one exchange of scores; choose scores: snip")
        # A step from the current model needs the delta of every entry; a site sends those of its own mask.
        if self.has_individual_masks and not self.server.is_average:
            raise ValueError(
                f"server.optimizer {self.server.optimizer} needs one mask for all sites, not {self.scores}"
            )
        return self

    def fit(self, layout: Layout, values: NumberFormat) -> Self:
        if self.budget is None:
            return self
        maskable = Mask.from_preset(layout, self.maskable).count
        parameters, allowed = layout.num_parameters, self.budget * 4 * layout.size
        fitting = count_entries_within(allowed, parameters, layout.size - parameters, values, is_selection_held=True)
        # The parameters outside every mask travel, too.
        count = fitting - (parameters - maskable)
        if count <= 0:
            raise ConfigError(
                f"method.budget is {self.budget:g}, {allowed:.0f} bytes a message of this model, which its header, "
                "its buffers and the parameters outside every mask exceed; raise it, or send fewer bits (wire.values)"
            )
        # The number of live entries is the floor of their share.
        return self.model_copy(update={"sparsity": max(0.0, 1 - (count + 0.5) / maskable)})

    @property
    def has_individual_masks(self) -> bool:
        """Whether every site trains inside its own mask."""
        return self.scores == "individual_snip" and not self.random_site

    def needs(self) -> Needs:
        # With privacy, the scores are computed from noisy gradients, and charged.
        needs = super().needs()
        if self.has_individual_masks:
            reason = f"scores: {self.scores} gives each site its own entries"
            needs |= {Need.OWN_ENTRIES.because(reason, "choose other scores")}
        elif self.random_site:
            reason = f"scores: {self.scores} takes the scores of single sites"
            needs |= {Need.SINGLE_SCORES.because(reason, "choose other scores")}
        if self.score_share < 1:
            needs |= {Need.OWN_ENTRIES.because("score_share: each site sends its largest scores", "leave it out")}
        return needs

    @property
    def score_steps(self) -> int:
        """Exchanges of scores before training starts."""
        if self.scores == "random":
            return 0
        return self.iterations if self.scores == "iter_snip" and self.iter_snip == "progressive" else 1

    @property
    def minibatches(self) -> int | None:
        """Minibatches per saliency; None: all training examples."""
        is_average = self.scores == "iter_snip" and self.iter_snip == "minibatch"
        return self.iterations if is_average else self.saliency_batches


@dataclass(frozen=True)
class NeuroSFLState(AveragedState):
    """The model and its masks; the round is 0 while scores are exchanged.

    Attributes:
        step: number of score exchanges so far.
        masks: one mask for all sites or, with individual masks, one for each of ``owners``.
        owners: names of the sites with their own mask.
    """

    step: int
    masks: tuple[Mask, ...]
    owners: tuple[str, ...]


@final
class NeuroSFL(AveragingMethod[NeuroSFLConfig, NeuroSFLState]):
    """Phase 1: every site scores the initial model, the server keeps the top; phase 2: FedAvg of the live entries."""

    name = "neurosfl"
    Config = NeuroSFLConfig
    round_kinds = frozenset({SCORE, TRAIN})
    prunes_for_good = True

    def __init__(self, config: NeuroSFLConfig, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        # numpy counts bools in place; a sum in torch converts them all to int64 first.
        sizes = [int(np.count_nonzero(tensor.numpy())) for tensor in layout.unflatten(self._maskable.bits).values()]
        minimum = sum(min(config.min_per_layer, size) for size in sizes)
        if config.scores != "random" and minimum > self._num_live:
            raise ConfigError(
                f"method.min_per_layer: {config.min_per_layer} needs {minimum} live entries of {sum(sizes)}, but "
                f"method.sparsity {config.sparsity} leaves {self._num_live}; lower one of the two"
            )

    @cached_property
    def _num_live(self) -> int:
        """Number of maskable entries that are live in every mask."""
        return floor_fraction(1 - self.config.sparsity, self._maskable.count)

    def init(self, weights: Tensor, sites: Sequence[str]) -> NeuroSFLState:
        state = NeuroSFLState(round=0, step=0, weights=weights, masks=(Mask.full(self.layout.size),), owners=())
        return self._start_training(state, [self.draw_mask()]) if self.config.scores == "random" else state

    def count_requests(self, kind: str, t: int) -> int:
        if kind == SCORE:
            return self.config.score_steps if t == 0 else 0
        return super().count_requests(kind, t)

    def count_score_lots(self, lots_in_pass: int) -> int:
        return self.config.score_steps * (self.config.minibatches or lots_in_pass)

    def bound_trainable(self, kind: str, t: int) -> tuple[int, int]:
        """Return the fewest and most entries of a mask: one number after the scores, a range while there are steps."""
        maskable = self._maskable.count
        others = self.layout.size - maskable
        if kind == SCORE:
            return others + (self._num_live if self.config.score_steps > 1 else maskable), self.layout.size
        # The densities of single tensors are rounded, so that a random mask may have some entries more or less.
        is_drawn = self.config.scores == "random" and self.config.random_layers == "erk"
        live = others + (self._random_mask_size if is_drawn else self._num_live)
        return live, live

    @cached_property
    def _random_mask_size(self) -> int:
        """Number of entries of the random mask."""
        return self.draw_mask().count

    def draw_mask(self) -> Mask:
        """Return the random mask of the run's seed, which reads no data."""
        maskable, density = self._maskable, 1 - self.config.sparsity
        generator = make_generator(self.seed, "random mask")
        if self.config.random_layers == "erk":
            densities = compute_erk_densities(self.layout, maskable, density)
            return draw_random_mask(self.layout, maskable, densities, generator)
        noise = torch.rand(self.layout.size, generator=generator)
        return top_k(noise, floor_fraction(density, maskable.count), maskable)

    def select_sites(self, state: NeuroSFLState, sites: Sequence[str]) -> list[str]:
        with_mask = [name for name in sites if name in state.owners] if state.owners else sites
        return super().select_sites(state, with_mask)

    def ask(self, state: NeuroSFLState, sites: Sequence[str]) -> dict[str, Assignment]:
        if state.round == 0:
            return broadcast(sites, self._build_score_assignment(state))
        return super().ask(state, sites)

    def _build_score_assignment(self, state: NeuroSFLState) -> Assignment:
        model = self.model(state)
        pool, count = self._maskable & model.mask, self._num_sent_scores
        expected = UpdateSpec("scores", mask=pool, min_value=0.0)
        if self.config.score_share < 1:
            expected = replace(
                expected,
                mask=None,
                accepts=lambda _, mask: mask <= pool and mask.count == count,
                min_entries=lambda _: count,
            )
        return Assignment(Request(SCORE, 0, model, model.mask), expected)

    @property
    def _num_sent_scores(self) -> int:
        """Number of scores that a site sends, where it does not send all."""
        return max(self._num_live, floor_fraction(self.config.score_share, self._maskable.count))

    def build_assignments(self, kind: str, state: NeuroSFLState, sites: Sequence[str]) -> dict[str, Assignment]:
        """Return the same model for all sites, or the global one under each site's own mask."""
        if not state.owners:
            return super().build_assignments(kind, state, sites)
        masks = {name: mask for name, mask in zip(state.owners, state.masks, strict=True) if name in sites}
        return {
            name: Assignment(
                Request(kind, state.round, Patch.from_vector(state.weights, mask), mask), UpdateSpec(mask=mask)
            )
            for name, mask in masks.items()
        }

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind != SCORE:
            return super().answer(request, site)
        scored, training, lots = self._maskable & request.trainable, self.config.training, self.config.minibatches
        factors = self.get_score_factors(site.weights)
        if site.trainer.mechanism is not None:
            # All lots have one mean, inside the absolute value: the mean of absolute noise is no zero. Subjects are
            # charged for it; what follows, such as the mask, is post-processing.
            gradient = site.trainer.compute_private_gradient(site.weights, scored, training, lots)
            scores = gradient.mul_(factors).abs_()
        else:
            gradients = site.trainer.compute_gradients(site.weights, training.batch_size, lots, request.round)
            scores = compute_saliency(gradients, factors)
        if self.config.score_share < 1:
            scored = self._select_live(scores.abs(), self._num_sent_scores, scored, site.weights)
        return Update(Patch.from_vector(scores, scored), "scores", site.num_examples)

    def get_score_factors(self, weights: Tensor) -> Tensor:
        """Return ``(P,)`` what gradients are multiplied by: the weights, and 1 in tensors that are zero.

        The saliency of a weight at zero is zero, whatever its gradient: such tensors are scored by |g|.
        """
        return weights.masked_fill(find_zero_weights(self.layout, weights, self.config.maskable).bits, 1.0)

    def learn(self, state: NeuroSFLState, contributions: Sequence[Contribution]) -> NeuroSFLState:
        if state.round == 0:
            return self._select_masks(state, contributions)
        return super().learn(state, contributions)

    def restrict(
        self, state: NeuroSFLState, stepped: NeuroSFLState, contributions: Sequence[Contribution]
    ) -> NeuroSFLState:
        if not state.owners:
            return stepped
        # An entry keeps its value in a round that all sites miss which hold it.
        missed = unite_masks(state.masks) - unite_masks(contribution.patch.mask for contribution in contributions)
        return replace(stepped, weights=torch.where(missed.bits, state.weights, stepped.weights))

    def _select_masks(self, state: NeuroSFLState, contributions: Sequence[Contribution]) -> NeuroSFLState:
        """Return the state with the masks of this step's scores: T_q(sum_k |s_k|), Eq. 7."""
        step = state.step + 1
        maskable = self._maskable
        counts = compute_keep_counts(maskable.count, self._num_live, self.config.score_steps)
        model, count = self.model(state), counts[step - 1]
        pool, weights = maskable & model.mask, model.to_vector()
        masks = [self._select_live(s.abs(), count, pool, weights) for s in self._collect_scores(contributions)]
        if step < self.config.score_steps:
            return replace(state, step=step, masks=tuple(mask | ~maskable for mask in masks))
        if self.config.scores == "shuffled_snip":
            masks = [shuffle_mask(self.layout, maskable, masks[0], make_generator(self.seed, "shuffled mask"))]
        owners = tuple(contribution.site for contribution in contributions) if self.config.has_individual_masks else ()
        return self._start_training(replace(state, step=step, owners=owners), masks)

    def _select_live(self, scores: Tensor, count: int, pool: Mask, weights: Tensor) -> Mask:
        """Return the ``count`` entries of ``pool`` with the largest scores (docs/algorithms.md, 5.7, deviation 10)."""
        select = partial(top_k_per_tensor, k=count, layout=self.layout, within=pool, at_least=self.config.min_per_layer)
        zero_start = find_zero_weights(self.layout, weights, self.config.maskable) & pool
        if not zero_start.count:
            return select(scores)
        # A weight behind one at zero has no gradient, and so no score: its magnitude decides.
        tensors = self.layout.unflatten(scores)
        no_scores = Mask(self.layout.select(lambda spec: not tensors[spec.name].any()))
        unscored = (no_scores & pool) - zero_start
        # Both kinds are ranked among themselves.
        magnitudes, bits = weights.abs().to(scores.device), unscored.bits.to(scores.device)
        return select(torch.where(bits, magnitudes, scores), apart=[zero_start, unscored])

    def _collect_scores(self, contributions: Sequence[Contribution]) -> list[Tensor]:
        """Return one score vector ``(P,)`` for each mask."""
        if self.config.has_individual_masks:
            return [contribution.patch.to_vector() for contribution in contributions]
        if self.config.random_site:
            generator = make_generator(self.seed, "random site")
            index = int(torch.randint(len(contributions), (1,), generator=generator))
            return [contributions[index].patch.to_vector()]
        return [weighted_sum(contributions, self.get_sum_weights(SCORE))]

    def get_sum_weights(self, kind: str) -> Weights:
        return weigh_equally if kind == SCORE and self.config.scores != "weighted_snip" else weigh_by_examples

    def _start_training(self, state: NeuroSFLState, masks: Sequence[Mask]) -> NeuroSFLState:
        """Return the state of round 1: theta <- theta_0 (.) m; entries that are not maskable stay live."""
        live = tuple(mask | ~self._maskable for mask in masks)
        return replace(state, round=1, weights=state.weights * unite_masks(live).bits, masks=live)

    @cached_property
    def _maskable(self) -> Mask:
        return Mask.from_preset(self.layout, self.config.maskable)

    def model(self, state: NeuroSFLState) -> Patch:
        return Patch.from_vector(state.weights, unite_masks(state.masks))
