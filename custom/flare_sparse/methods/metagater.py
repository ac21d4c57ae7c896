"""MetaGater (Lin et al. 2021, arXiv:2011.12511), Algorithm 1: meta-learn backbone and gates, adapt in one step.

The sites send differences to the model they were sent, of gates (phi) and backbone (theta). A channel whose gate group
the Group Lasso has made zero is closed for every input: by default neither group nor filter travels again. The server
learns every site's difference; of a target site it learns metrics only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ..aggregation.weighted import weigh_equally, weighted_sum
from ..exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask
from ..training import Site
from .method import Method, broadcast
from .support.adaptation import AdaptationConfig, ask_to_adapt, report_adaptation, take_one_step
from .support.gates import Gates
from .support.group_lasso import group_lasso
from .support.schedules import Steps, accelerated

Prox = Callable[[Tensor, float], Tensor]


class Config(AdaptationConfig):
    local_steps: int = Field(1, ge=1, description="gradient steps on a site's regularised problem in a round")
    proximity: float = Field(0.2, gt=0, description="lambda: weight of the distance to the meta-model")
    local_proximity: float | None = Field(None, ge=0, description="lambda in the sites' problem; null: as proximity")
    step: float = Field(1.0, gt=0, description="beta_t, the server's step; eta_t = beta_t / alpha_t")
    acceleration: bool = Field(True, description="off: alpha_t = 1; step 1 / lambda is then FedProx, less is Reptile")
    momentum_cap: float = Field(1.0, ge=0, le=1, description="largest momentum of the acceleration; 1: as in the paper")
    restart_every: int | None = Field(None, ge=1, description="rounds after which the acceleration starts anew")
    lasso: float = Field(1e-4, ge=0, description="mu: weight of the Group Lasso on the gates' output channels")
    scale_prox: bool = Field(True, description="the threshold of phi_t grows with eta_t, as in the paper; off: beta_t")
    closed: Literal["for_good", "may_reopen"] = Field(
        "for_good",
        description="a zero group stays zero and saves its message, or travels and may grow again (the paper)",
    )
    output: Literal["pr", "pr_next", "ag"] = Field(
        "pr", description="the result: the model last sent (the paper), the one that would be sent next, or w_T^ag"
    )

    def steps(self, t: int) -> Steps:
        """alpha_t, beta_t and eta_t."""
        return accelerated(
            t,
            beta=self.step,
            acceleration=self.acceleration,
            momentum_cap=self.momentum_cap,
            restart_every=self.restart_every,
        )

    def restarts(self, t: int) -> bool:
        """Whether the acceleration starts anew after round ``t``."""
        return self.acceleration and self.restart_every is not None and t % self.restart_every == 0


@dataclass(frozen=True)
class State:
    """``w`` and ``ag`` are w_{t-1} and w_{t-1}^ag, ``sent`` is w_{t-1}^pr, all ``(P,)``; ``round`` is t."""

    round: int
    w: Tensor
    ag: Tensor
    sent: Tensor


def predict(w: Tensor, ag: Tensor, alpha: float) -> Tensor:
    """w_t^pr = alpha_t w_{t-1} + (1 - alpha_t) w_{t-1}^ag (line 4)."""
    return w if alpha == 1 else alpha * w + (1 - alpha) * ag


def advance(w: Tensor, pr: Tensor, g: Tensor, steps: Steps, prox: Prox, *, scale: bool) -> tuple[Tensor, Tensor]:
    """w_t and w_t^ag (lines 10 to 13): proximal steps along ``g`` from w_{t-1}, of length eta_t, and from w_t^pr, beta_t.

    Args:
        w: ``(P,)`` w_{t-1}.
        pr: ``(P,)`` w_t^pr.
        g: ``(P,)`` gradient of the sites' envelopes.
        steps: of this round.
        prox: of ``step * H`` for a given step.
        scale: False: both shrink with beta_t.
    """
    return prox(w - steps.eta * g, steps.eta if scale else steps.beta), prox(pr - steps.beta * g, steps.beta)


class MetaGater(Method[State]):
    """Sites solve a proximal problem in a few steps; the server takes accelerated proximal steps on their answers."""

    name = "metagater"
    Config = Config

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights, weights, weights)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        model = self.model(state)
        request = Assignment(Request("train", state.round, model, model.mask), UpdateSpec("delta", mask=model.mask))
        return broadcast(self.config.asked(sites, self.seed, state.round), request)

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind == "adapt":
            return report_adaptation(site, self.adapt(site, request.trainable))
        pull = self.config.proximity if self.config.local_proximity is None else self.config.local_proximity
        solved = site.train(
            site.weights,
            request.trainable,
            self.config.training,
            request.round,
            steps=self.config.local_steps,
            pull=pull,
        )
        return Update(Patch.from_vector(solved - site.weights, request.trainable), "delta", site.num_examples)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        """Lines 10 to 13, with ``g = lambda * mean_i(w_t^pr - w~_t^i)``; running statistics are plain means."""
        steps, pr = self.config.steps(state.round), self._pr(state)
        change = weighted_sum(updates, weigh_equally)
        g = -self.config.proximity * change
        moved = advance(state.w, pr, g, steps, self.prox, scale=self.config.scale_prox)
        w, ag = (torch.where(self._buffers.bits, pr + change, x) for x in moved)
        return State(state.round + 1, ag if self.config.restarts(state.round) else w, ag, pr)

    def prox(self, v: Tensor, step: float) -> Tensor:
        """Prox of ``step * H``, H the Group Lasso of weight ``lasso`` on the gates' groups."""
        return group_lasso(v, self._gates.groups, step * self.config.lasso)

    def adapt(self, site: Site, trainable: Mask) -> Tensor:
        """Section 3.3: stage I, one step of the gates; stage II, one step of the backbone behind the new gates.

        Channels that are closed for good have no part in either; both run on the network without them.
        """
        gates = self._gates.phi & trainable
        here, live = site.remove_channels(self._gates.channels_off(trainable))
        stages = [Mask(live.take(stage.bits)) for stage in (gates, trainable - self._gates.phi)]
        return live.put(take_one_step(here, here.weights, stages, self.config), site.weights.clone())

    def model(self, state: State) -> Patch:
        """w_t^pr, which round t sends out; after the last round what ``output`` says."""
        over = state.round > self.config.rounds
        vector = {"pr": state.sent, "ag": state.ag}.get(self.config.output) if over else None
        vector = self._pr(state) if vector is None else vector
        if self.config.closed == "may_reopen":
            return Patch.from_vector(vector, self.full_mask)
        return Patch.from_vector(vector, self.full_mask - self._gates.closed(vector))

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        return ask_to_adapt(self.model(state), sites, self.config)

    def count_paper_scalars(self, sites: int) -> int | None:
        """2 (|theta| + |phi|) a round and site; the paper reports no traffic."""
        names = [f"site-{number}" for number in range(sites)]
        asked = len(self.config.asked(names, self.seed, 1))
        rounds: int = self.config.rounds
        return 2 * rounds * asked * self.layout.trainable_size

    def _pr(self, state: State) -> Tensor:
        return predict(state.w, state.ag, self.config.steps(state.round).alpha)

    @cached_property
    def _gates(self) -> Gates:
        return Gates.from_layout(self.layout)

    @cached_property
    def _buffers(self) -> Mask:
        return Mask.from_tensors(self.layout, lambda entry: entry.role == "buffer")
