"""The interface of a method: its configuration, its state, and the functions of its two halves, server and site.

A complete toy method, in which every site votes for every entry and the server counts the votes:

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from flare_sparse.core.exchange import Patch, Update
    >>> @dataclass(frozen=True)
    ... class Votes:
    ...     round: int
    ...     total: torch.Tensor
    >>> class Ballot(Method[MethodConfig, Votes]):
    ...     name = "ballot"
    ...     update_content = "delta"
    ...     def init(self, weights, sites):
    ...         return Votes(1, torch.zeros_like(weights))
    ...     def answer(self, request, site):
    ...         votes = Patch.from_vector(torch.ones(site.layout.size), request.trainable)
    ...         return Update(votes, self.update_content, site.num_examples)
    ...     def learn(self, state, contributions):
    ...         return Votes(state.round + 1, state.total + sum(c.patch.values for c in contributions))
    ...     def model(self, state):
    ...         return Patch.from_vector(state.total, Mask.full(self.layout.size))
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, cast

import torch
from pydantic import Field
from torch import Tensor

from ..core.errors import ConfigError
from ..core.exchange import EVALUATE, Assignment, Content, Contribution, Patch, Request, Update, UpdateSpec
from ..core.mask import Mask
from ..core.needs import Need, Needs, find_need
from ..core.params import Layout
from ..core.seeds import make_generator
from ..core.settings import Settings
from ..training import Site, TrainingConfig
from ..training.personal import Personal
from ..wire.capabilities import Capabilities
from ..wire.number_format import NumberFormat
from .aggregation.weighted import Weights, weigh_by_examples

TRAIN = "train"
"""The kind of the request of an ordinary round: train, and return what ``Method.update_content`` names."""
SCORE = "score"
"""The kind of the requests before round 1 of a method that scores the initial model."""
MaskPreset = Literal["conv_linear_weights", "all_but_norm", "all_trainable"]


class MethodConfig(Settings):
    """Settings that every method has."""

    rounds: int = Field(10, ge=1)
    """T: rounds of training"""
    participation: float = Field(1.0, gt=0, le=1)
    """share of the sites sampled for each round"""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """how a site trains in a round"""
    evaluate_every: int = Field(1, ge=1)
    """rounds between two models that the sites evaluate, counted from the initial one; the last model is always
    evaluated, with finetune the sites' own"""
    personal: Personal = ()
    """tensors that stay at each site and are its own; norms: normalisation layers with their running statistics
    (FedBN); head: the last layer (FedPer); intercept: its bias, for sites with another base rate; site: what describes
    the site's own data, such as mean and spread of its targets (task.target_scaling); or patterns of names, such as
    ['3.*']"""

    def get_training(self, t: int) -> TrainingConfig:
        """Return the settings of training in round ``t``, with the learning rate that the schedule gives it."""
        return self.training.resolve_schedule(t, self.rounds)

    def fit(self, layout: Layout, values: NumberFormat) -> Self:
        """Return the settings for a model of this layout whose values travel in this number format; by default these.

        Raises:
            ConfigError: the settings fit no message of this model.
        """
        return self

    def needs(self) -> Needs:
        """Return what these settings need of the other parts of a run.

        By default the server may compute anything with the updates of single sites, and a site may read its training
        examples at any time. A method that does with less says so, and more settings allow it.
        """
        return frozenset({Need.SINGLE_UPDATES.because(), Need.MORE_READS.because()})


class SiteSettings(Settings):
    """Settings that a site may choose for itself, in its site file."""

    def get_limits(self) -> dict[str, Any]:
        """Return what the server must know of them before the first request: fields of ``Capabilities``."""
        return {}


class HasRound(Protocol):
    """A state that knows the next round."""

    @property
    def round(self) -> int:
        """The next round, 1-based; 0 before training."""


ConfigT = TypeVar("ConfigT", bound=MethodConfig)
StateT = TypeVar("StateT", bound=HasRound)


@dataclass(frozen=True)
class ModelState:
    """State of a method whose server holds one model.

    Attributes:
        round: the next round, 1-based.
        weights: float32 ``(P,)``.
    """

    round: int
    weights: Tensor


class Method(ABC, Generic[ConfigT, StateT]):
    """A method: server half (``init``, ``ask``, ``learn``, ``model``) and site half (``answer``).

    An instance holds its settings only. All results of training are in the state, a frozen dataclass of tensors, masks,
    numbers and names that is passed in and returned. A method runs without FLARE.

    By default the server holds one dense model, and a round is one of FedAvg: the sampled sites receive the model,
    train the entries of its mask and return them; at the end all evaluate it. A subclass overrides what its paper
    changes.

    Attributes:
        config: the method's settings.
        layout: layout of the network.
        seed: seed of the run.
    """

    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    SiteConfig: ClassVar[type[SiteSettings] | None] = None
    """Settings that a site may choose in its own site file (``site.site_settings``), under the method's name."""
    update_content: ClassVar[Content] = "weights"
    """Content of an ordinary update."""
    round_kinds: ClassVar[frozenset[str]] = frozenset({TRAIN})
    """Kinds of the requests of rounds 0 to ``config.rounds``; a site answers no others."""
    score_kinds: ClassVar[frozenset[str]] = frozenset({SCORE})
    """Those of its kinds that ask for scores of a model, which no site evaluates then."""
    final_kinds: ClassVar[frozenset[str]] = frozenset()
    """Kinds of the requests after the last round, besides ``"evaluate"``."""
    idle_kinds: frozenset[str] = frozenset({EVALUATE})
    """Kinds of requests that train and score no entries."""
    trains_all_entries: ClassVar[bool] = False
    """Whether every request trains all entries; a site then refuses one for fewer."""
    prunes_for_good: ClassVar[bool] = False
    """Whether an entry that no longer trains never trains again; a site counts its return as a new start of the job."""

    def __new__(cls, config: Any = None, layout: Layout | None = None, *_: Any, **__: Any) -> Any:
        """Return a method; without a network's layout, the class with its settings: see :class:`ConfiguredMethod`."""
        # FLARE builds a job's components from its JSON, with a check of their classes, before there is a network.
        if config is None or layout is not None:
            return super().__new__(cls)
        return ConfiguredMethod(cls, cls.Config.model_validate(config))

    def __init__(self, config: ConfigT, layout: Layout, seed: int = 0):
        self.config, self.layout, self.seed = config, layout, seed

    def init(self, weights: Tensor, sites: Sequence[str]) -> StateT:
        """Return the state before the first request, by default a :class:`ModelState`.

        Args:
            weights: initial weights ``(P,)``.
            sites: all sites of the run.
        """
        return cast(StateT, ModelState(1, weights))

    @abstractmethod
    def learn(self, state: StateT, contributions: Sequence[Contribution]) -> StateT:
        """Return the state after a round; ``contributions`` are valid, at least one, in the order of site names."""

    def get_sum_weights(self, kind: str) -> Weights:
        """Return the weights with which ``learn`` sums the updates to the requests of a kind, by default by examples.

        They are proportional to numbers that each site has without the others.
        """
        return weigh_by_examples

    def model(self, state: StateT) -> Patch:
        """Return the global model, which is saved and, unless ``ask_final`` is overridden, evaluated.

        By default it is all of ``state.weights``.
        """
        return Patch.from_vector(cast(ModelState, state).weights, Mask.full(self.layout.size))

    def get_state_class(self, start: StateT) -> type[Any]:
        """Return the class of the states after the rounds, given the state before the first request."""
        return type(start)

    def finalize(self, state: StateT) -> StateT:
        """Return the state whose model is the result of the run, given that after its last round.

        Checkpoints hold the state before: a run that continues, or steps back, goes on from it.
        """
        return state

    def ask(self, state: StateT, sites: Sequence[str]) -> dict[str, Assignment]:
        """Return the next assignment of each sampled site, by site name.

        Kind and round identify a request: a site that keeps something between rounds (``site.memory``) takes the same
        two as a retry and starts from its memory before the first attempt.

        Args:
            state: the current state.
            sites: the sites that are connected.
        """
        return self.build_assignments(TRAIN, state, self.select_sites(state, sites))

    def select_sites(self, state: StateT, sites: Sequence[str]) -> list[str]:
        """Return the sites that take part in the round, a random sample of the connected ones."""
        return sample_sites(sites, self.config.participation, self.seed, state.round)

    def build_assignments(self, kind: str, state: StateT, sites: Sequence[str]) -> dict[str, Assignment]:
        """Return the assignments of some sites, by name; by default all receive the same one.

        A broadcast is one object for all sites, so that its message is encoded once.
        """
        return broadcast(sites, self.build_assignment(kind, state))

    def build_assignment(self, kind: str, state: StateT) -> Assignment:
        """Return the assignment of a broadcast. By default all entries of the model are trained and returned."""
        model = self.model(state)
        expected = UpdateSpec(self.update_content, mask=model.mask)
        return Assignment(Request(kind, state.round, model, model.mask), expected)

    def answer(self, request: Request, site: Site) -> Update:
        """Return a site's update; ``site.weights`` ``(P,)`` is the model of the request.

        By default the site trains the entries ``request.trainable`` and returns them.
        """
        return train_locally(request, site, self.config.get_training(request.round), self.update_content)

    @property
    def final_kind(self) -> str:
        """Kind of the last request; by default the sites evaluate the result."""
        return EVALUATE

    def ask_final(self, state: StateT, sites: Sequence[str]) -> dict[str, Assignment]:
        """Return the last assignment of each site; ``state.round`` is that after the last round."""
        return self.build_assignments(self.final_kind, state, sites)

    def configure_for(self, capabilities: Mapping[str, Capabilities]) -> Self:
        """Return the method restricted to the sites' capabilities; it never exceeds the job's settings."""
        return self

    def count_requests(self, kind: str, t: int) -> int:
        """Return how many different requests of a kind a site receives in round ``t``; 0: the method sends none.

        A site answers no other requests, however the server asks.
        """
        if kind in self.round_kinds:
            return int(0 <= t <= self.config.rounds)
        return int((kind == EVALUATE or kind in self.final_kinds) and t == self.config.rounds + 1)

    def bound_trainable(self, kind: str, t: int) -> tuple[int, int]:
        """Return the fewest and most entries that a request of round ``t`` asks a site to train or to score.

        A site answers no requests for fewer or more. By default the settings bound nothing.
        """
        return self.layout.size if self.trains_all_entries else 0, self.layout.size

    def sends_initial_model(self, kind: str, t: int) -> bool:
        """Return whether a request carries the initial model of the job, or a part of it, which a site can verify.

        Statistics of inputs are not a part of it.
        """
        return kind in self.round_kinds and t <= 1

    def count_score_lots(self, lots_in_pass: int) -> int:
        """Return the number of noisy gradients that a site computes before the first training with privacy.

        Args:
            lots_in_pass: expected number of lots of one pass over the site's subjects.
        """
        return 0

    @property
    def named_sites(self) -> tuple[str, ...]:
        """The sites that the settings name, which an estimate without data assumes to take part."""
        return ()

    def count_paper_scalars(self, sites: int) -> int | None:
        """Return the number of scalars that the paper would count for a whole run; None where it defines no count."""
        return None

    def measure(self, state: StateT) -> dict[str, float]:
        """Return figures of the server's last step for the record of its round, by name."""
        return {}

    def describe(self, state: StateT | None = None) -> str:
        """Return advice for the user, may be empty: before a run, or what a result lacks that ended in this state."""
        return ""

    def adapt(self, site: Site, trainable: Mask) -> Tensor:
        """Return the personal model ``(P,)`` that a site, which may be new, derives from the global ``site.weights``.

        By default the tensors that stay at a site are trained, and the others keep their values.

        Args:
            site: trains on its own examples.
            trainable: the live entries of the global model.

        Raises:
            ConfigError: the method has no adaptation step, and no tensor stays at the sites.
        """
        if self.config.personal:
            # At the rate of round 1: a schedule ends with a rate at which initial values would hardly change.
            return site.train(site.weights, Mask.empty(self.layout.size), self.config.training, 1)
        raise ConfigError(
            f"method {self.name!r} does not adapt its model at a site; train with one that does, such as metagater"
        )


@dataclass(frozen=True)
class ConfiguredMethod:
    """A class of methods and its settings, which FLARE builds from a job's JSON; no method before it has a layout."""

    method_class: type[Method[Any, Any]]
    config: MethodConfig


def train_locally(
    request: Request,
    site: Site,
    training: TrainingConfig,
    content: Content = "weights",
    *,
    trainable: Mask | None = None,
    **options: Any,
) -> Update:
    """Train at a site from ``site.weights`` and return the update.

    Args:
        request: names the round and the entries that may change.
        site: trains on its own examples.
        training: optimiser, learning rate, epochs.
        content: ``"weights"``, or ``"delta"``: trained minus received weights.
        trainable: the entries to train and return; None: ``request.trainable``.
        options: those of :meth:`Site.train_entries`, such as the number of ``steps``.
    """
    mask = request.trainable if trainable is None else trainable
    values = site.train_entries(site.weights, mask, training, request.round, **options)
    if content == "delta":
        values = values - mask.take(site.weights).to(values.device)
    return Update(Patch(values, mask), content, site.num_examples)


def ask_next(method: Method[Any, Any], state: HasRound, sites: Sequence[str]) -> dict[str, Assignment] | None:
    """Return the assignments of the next round, see :meth:`Method.ask`; None when training is over."""
    return None if state.round > method.config.rounds else method.ask(state, sites)


def get_site_limits(site: Site) -> dict[str, Any]:
    """Return the limits that a site has by its own settings (``site.site_settings``)."""
    return site.site_settings.get_limits() if isinstance(site.site_settings, SiteSettings) else {}


def is_evaluated(config: MethodConfig, t: int) -> bool:
    """Return whether the sites evaluate the model of round ``t``, which they receive in the round after it.

    >>> [t for t in range(6) if is_evaluated(MethodConfig(evaluate_every=2), t)]
    [0, 2, 4]
    """
    return t % config.evaluate_every == 0


def describe_site_model(config: MethodConfig) -> str:
    """Return what each site's own model is, which the final metrics are of; empty: they are of the run's model."""
    if own := find_need(config.needs(), Need.OWN_MODEL):
        return own.reason
    return "the run's model with the site's own tensors" if config.personal else ""


def has_common_model(config: MethodConfig) -> bool:
    """Return whether the result of training is one model, ``Method.model``."""
    return find_need(config.needs(), Need.NO_COMMON_MODEL) is None


def broadcast(sites: Sequence[str], assignment: Assignment) -> dict[str, Assignment]:
    """Return the same assignment for every site; one object, so that its message is encoded once."""
    return dict.fromkeys(sites, assignment)


def sample_sites(sites: Sequence[str], participation: float, seed: int, t: int) -> list[str]:
    """Return ``max(1, round(participation * n))`` of ``n`` sites.

    The sample depends on seed and round ``t`` alone, so every method samples the same sites.
    """
    names = sorted(sites)
    size = max(1, round(participation * len(names)))
    if size >= len(names):
        return names
    sample = torch.randperm(len(names), generator=make_generator(seed, "sample", t))[:size]
    return [names[i] for i in sorted(sample.tolist())]
