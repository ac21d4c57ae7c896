"""DisPFL (Dai et al. 2022), Algorithm 1: personal sparse models, averaged with neighbours where their masks overlap.

"DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized Sparse Training", arXiv
2206.00187; docs/algorithms.md, section 5.8. The paper has no server. Here the server keeps every site's weights and
mask and sends each site the entrywise average of its neighbours, which is the same arithmetic. The server therefore
sees every personal model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from pydantic import Field
from torch import Tensor

from ..core.exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update
from ..core.mask import Mask
from ..core.needs import Need, Needs
from ..core.seeds import make_generator
from ..training import Site
from .method import TRAIN, MaskPreset, Method, MethodConfig
from .support.masks import compute_erk_densities, draw_random_mask, drop_and_regrow


class DisPFLConfig(MethodConfig):
    sparsity: float = Field(0.5, ge=0, lt=1)
    """share of a personal model's maskable entries that is off"""
    num_neighbours: int = Field(2, ge=1)
    """number of random sites whose models a site receives; all, where there are no more"""
    initial_drop_fraction: float = Field(0.5, ge=0, le=1)
    """alpha: share of a tensor's live entries that moves in round 1; falls to 0"""
    maskable: MaskPreset = "all_trainable"
    """which parameters a personal mask covers"""

    def needs(self) -> Needs:
        needs = super().needs() | {
            Need.OWN_MODEL.because("sparse with the site's own mask"),
            Need.PACKAGE_STEPS.because("a site regrows entries by the gradient of its trained model"),
        }
        if self.initial_drop_fraction > 0:
            reason = "the share of entries that every round drops and regrows falls to 0 over method.rounds"
            needs |= {Need.NUMBER_OF_ROUNDS.because(reason)}
        return needs

    def compute_drop_fraction(self, r: int) -> float:
        """Return the share of live entries that moves in the 0-based round ``r`` (cosine annealing)."""
        return self.initial_drop_fraction / 2 * (1 + math.cos(math.pi * r / self.rounds))


@dataclass(frozen=True)
class DisPFLState:
    """The personal models.

    Attributes:
        round: the next round, 1-based.
        owners: names of the ``K`` sites.
        weights: float32 ``(K, P)``, one row for each owner, zero outside its mask.
        masks: bool ``(K, P)``.
        trained: the owners that have contributed a trained model. The rows of the others are the start, and take no
            part in averages once there is a trained model.
    """

    round: int
    owners: tuple[str, ...]
    weights: Tensor
    masks: Tensor
    trained: tuple[str, ...] = ()

    def average(self, names: Sequence[str]) -> tuple[Tensor, Mask]:
        """Return the average ``(P,)`` of each entry over the named sites whose masks keep it, and the kept entries.

        Sites that have trained are averaged; if none of them has, all are.
        """
        trained = [name for name in names if name in self.trained]
        rows = [self.owners.index(name) for name in trained or names]
        num_holders = self.masks[rows].sum(0)
        average = self.weights[rows].double().sum(0) / num_holders.clamp_min(1)
        return average.float(), Mask(num_holders > 0)


@final
class DisPFL(Method[DisPFLConfig, DisPFLState]):
    """Each site trains inside its mask, drops its smallest weights and regrows as many entries elsewhere."""

    name = "dispfl"
    Config = DisPFLConfig

    def init(self, weights: Tensor, sites: Sequence[str]) -> DisPFLState:
        owners = tuple(sorted(sites))
        maskable = Mask.from_preset(self.layout, self.config.maskable)
        densities = compute_erk_densities(self.layout, maskable, 1 - self.config.sparsity)
        rows = []
        for name in owners:
            generator = make_generator(self.seed, "dispfl mask", name)
            rows.append((draw_random_mask(self.layout, maskable, densities, generator) | ~maskable).bits)
        masks = torch.stack(rows)
        return DisPFLState(1, owners, weights * masks, masks)

    def select_sites(self, state: DisPFLState, sites: Sequence[str]) -> list[str]:
        return super().select_sites(state, [name for name in sites if name in state.owners])

    def build_assignments(self, kind: str, state: DisPFLState, sites: Sequence[str]) -> dict[str, Assignment]:
        return {name: self._build_personal_assignment(state, name, sites) for name in sites}

    def _build_personal_assignment(self, state: DisPFLState, name: str, active: Sequence[str]) -> Assignment:
        """Return a site's mask and, inside it, the average over the neighbours that hold an entry."""
        average, _ = state.average(self._select_neighbours(state, name, active))
        mask = Mask(state.masks[state.owners.index(name)])
        return Assignment(Request(TRAIN, state.round, Patch.from_vector(average, mask), mask))

    def _select_neighbours(self, state: DisPFLState, name: str, active: Sequence[str]) -> list[str]:
        """Return the site itself and its neighbours of this round."""
        # A site without training examples answers every request but never trains: chosen as a neighbour, it would take
        # the place of one that has something to share.
        candidates = state.trained or state.owners
        others = sorted(other for other in candidates if other != name and other in active)
        generator = make_generator(self.seed, "dispfl neighbours", state.round, name)
        order = torch.randperm(len(others), generator=generator)[: self.config.num_neighbours]
        return sorted([name, *(others[i] for i in order.tolist())])

    def answer(self, request: Request, site: Site) -> Update:
        training = self.config.get_training(request.round)
        weights = site.train(site.start, request.trainable, training, request.round)
        mask = self._evolve_mask(request, site, weights)
        # An entry that has just regrown starts at zero.
        kept = (mask & request.trainable).bits.to(weights.device)
        patch = Patch.from_vector(weights * kept, mask)
        return Update(patch, self.update_content, site.num_examples, is_complete=True)

    def _evolve_mask(self, request: Request, site: Site, weights: Tensor) -> Mask:
        """Return the site's next mask."""
        maskable = Mask.from_preset(self.layout, self.config.maskable)
        growth = self._score_growth(request, site, weights)
        fraction = self.config.compute_drop_fraction(request.round - 1)
        return drop_and_regrow(self.layout, request.trainable, maskable, weights, growth, fraction)

    def _score_growth(self, request: Request, site: Site, weights: Tensor) -> Tensor:
        """Return scores ``(P,)`` for regrowing: the gradient's magnitude on one minibatch."""
        batch_size = self.config.training.batch_size
        gradients = site.trainer.compute_gradients(weights, batch_size, 1, request.round, batch_statistics=False)
        return next(gradients)[0].abs()

    def learn(self, state: DisPFLState, contributions: Sequence[Contribution]) -> DisPFLState:
        weights, masks = state.weights.clone(), state.masks.clone()
        for contribution in contributions:
            row = state.owners.index(contribution.site)
            masks[row] = contribution.patch.mask.bits
            weights[row] = contribution.patch.to_vector()
        trained = tuple(sorted({*state.trained, *(contribution.site for contribution in contributions)}))
        return DisPFLState(state.round + 1, state.owners, weights, masks, trained)

    def model(self, state: DisPFLState) -> Patch:
        """Return one model for all: for each entry, the average over the sites that hold it."""
        return Patch.from_vector(*state.average(state.owners))

    def ask_final(self, state: DisPFLState, sites: Sequence[str]) -> dict[str, Assignment]:
        """Return the request to evaluate each personal model; a site that never trained has that of all others."""
        assignments, shared = {}, self.model(state).to_vector()
        for name, weights, row in zip(state.owners, state.weights, state.masks, strict=True):
            if name in sites:
                model, mask = weights if name in state.trained else shared, Mask(row)
                assignments[name] = Assignment(Request(EVALUATE, state.round, Patch.from_vector(model, mask), mask))
        return assignments
