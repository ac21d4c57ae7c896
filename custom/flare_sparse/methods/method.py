"""What a method is: settings, a state that is a value, and four verbs.

A toy method, whole (the sites vote, the server counts):

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from flare_sparse.exchange import Patch, Request, Update
    >>> @dataclass(frozen=True)
    ... class Votes:
    ...     round: int
    ...     total: torch.Tensor
    >>> class Ballot(Method[Votes]):
    ...     name = "ballot"
    ...     def init(self, weights, sites):
    ...         return Votes(1, torch.zeros_like(weights))
    ...     def ask(self, state, sites):
    ...         if state.round > self.config.rounds:
    ...             return None
    ...         return broadcast(sites, Request("vote", state.round, self.model(state), self.full_mask, "delta"))
    ...     def answer(self, request, site):
    ...         return Update(Patch.of(torch.ones(site.layout.size), request.trainable), "delta", site.examples)
    ...     def learn(self, state, updates):
    ...         return Votes(state.round + 1, state.total + sum(u.patch.values for u in updates))
    ...     def model(self, state):
    ...         return Patch.of(state.total, self.full_mask)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..aggregation.robust import AggregationRule
from ..capabilities import Capabilities, local_capabilities
from ..errors import ConfigError
from ..exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update
from ..mask import Mask
from ..params import Layout
from ..seeds import make_generator
from ..training import Site, TrainingConfig

MaskPreset = Literal["conv_linear_weights", "all_but_norm", "all_trainable"]
S = TypeVar("S")


class MethodConfig(BaseModel):
    """Settings that every method has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rounds: int = Field(10, ge=1, description="T: rounds of training")
    participation: float = Field(1.0, gt=0, le=1, description="share of the sites that is asked in a round, at random")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="how a site trains in a round")

    @property
    def min_sites_needed(self) -> int:
        """Contributions without which a round makes no sense for the method as it is set."""
        return 1

    @property
    def encryption_blocker(self) -> str:
        """Why the server half must read weights; empty where the next model is the mean by examples of the weights that
        the sites answer with, all on the entries asked for, and nothing else is ever made of them.
        """
        return "its server half reads what the sites send"


class AveragingConfig(MethodConfig):
    """Settings of methods whose new model is an average of the sites'."""

    aggregation: AggregationRule = Field(
        default_factory=AggregationRule, description="how the sites' answers become one model"
    )

    @property
    def min_sites_needed(self) -> int:
        return self.aggregation.min_sites_needed

    @property
    def aggregation_blocker(self) -> str:
        """What of ``aggregation`` needs single answers; empty when nothing does."""
        rule = self.aggregation.rule
        return f"aggregation.rule {rule} compares the sites' values" if self.aggregation.needs_single_updates else ""


class Method(ABC, Generic[S]):
    """Server half (``init``, ``ask``, ``learn``, ``model``) and site half (``answer``) of one method.

    An instance holds settings only; what the server learns is in the state, a frozen dataclass of tensors, masks,
    ints and names that is passed in and out. A method runs without FLARE (``rehearsal.py``).
    """

    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    SiteConfig: ClassVar[type[BaseModel] | None] = None
    """Settings that a site may set for itself (``site.site_settings``), in its site file under the method's name."""

    def __init__(self, config: Any, layout: Layout, seed: int = 0):
        self.config, self.layout, self.seed = config, layout, seed

    @cached_property
    def full_mask(self) -> Mask:
        """All entries, buffers included."""
        return Mask.full(self.layout.size)

    @abstractmethod
    def init(self, weights: Tensor, sites: Sequence[str]) -> S:
        """The state before the first question; ``weights`` ``(P,)``, ``sites`` all that take part."""

    @abstractmethod
    def ask(self, state: S, sites: Sequence[str]) -> dict[str, Assignment] | None:
        """The next question for each site asked, out of those present; None when training is over.

        A broadcast is one Request object for all: it is encoded once. Kind and round name a question to sites that
        keep something (``site.memory``): the same two again are a further attempt, and what they kept is as before it.
        """

    @abstractmethod
    def answer(self, request: Request, site: Site) -> Update:
        """At a site: ``site.weights`` holds the vector that came with the request."""

    @abstractmethod
    def learn(self, state: S, updates: Sequence[Contribution]) -> S:
        """The state after a round; ``updates`` are validated, at least one, in site-name order."""

    @abstractmethod
    def model(self, state: S) -> Patch:
        """The global model: what is saved, and judged unless ``judge`` says otherwise."""

    def get_capabilities(self, site: Site) -> Capabilities:
        """At a site, before it is first asked: what its own choices (``site.site_settings``) let it take part in."""
        return local_capabilities()

    def configured_for(self, able: Mapping[str, Capabilities]) -> Method[S]:
        """At the server: this method, for sites that can what they said; the job's settings are not gone beyond."""
        return self

    def ask_final(self, state: S, sites: Sequence[str]) -> dict[str, Assignment]:
        """The last question: how good is the result at each site?"""
        model = self.model(state)
        return broadcast(sites, Assignment(Request(EVALUATE, self.config.rounds + 1, model, model.mask)))

    @property
    def note(self) -> str:
        """What people should know of this method on this network before a run; empty when there is nothing."""
        return ""

    def adapt(self, site: Site, trainable: Mask) -> Tensor:
        """The model ``(P,)`` that a site, also a new one, makes for itself of the global one, ``site.weights``.

        Args:
            site: trains on its own examples.
            trainable: the live entries of the global model.

        Raises:
            ConfigError: the method has no such step.
        """
        raise ConfigError(
            f"method {self.name!r} does not adapt its model at a site; train with one that does, such as metagater"
        )

    def count_paper_scalars(self, sites: int) -> int | None:
        """Scalars that travel in a whole run as the paper counts them; None when it gives no rule of its own."""
        return None


def broadcast(sites: Sequence[str], assignment: Assignment) -> dict[str, Assignment]:
    """The same assignment for every site; one object, so that its message is encoded once."""
    return dict.fromkeys(sites, assignment)


def sample_sites(sites: Sequence[str], participation: float, seed: int, t: int) -> list[str]:
    """``max(1, round(participation * n))`` of the sites, drawn by (seed, round) alone: every method asks the same."""
    names = sorted(sites)
    wanted = max(1, round(participation * len(names)))
    if wanted >= len(names):
        return names
    drawn = torch.randperm(len(names), generator=make_generator(seed, "sample", t))[:wanted]
    return [names[i] for i in sorted(drawn.tolist())]
