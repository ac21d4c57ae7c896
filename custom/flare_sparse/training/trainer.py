"""What computes at a site: the interface that methods ask, and the base of what changes one part of it.

A *source* trains by itself: the loop of a task, a script of the user, the noise of a dry run. A *wrapper* changes one
thing about the trainer inside it. :mod:`flare_sparse.training.compose` puts them together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.exchange import Patch
from ..core.mask import Mask
from ..core.params import Layout
from ..privacy.dp.mechanism import SiteMechanism
from ..privacy.dp.scripts import ScriptBudget
from ..tasks.task import Examples, Task
from .config import TrainingConfig
from .live import LiveEntries
from .sample_usage import SampleUsage


class GradientSource(Protocol):
    """Computes the gradients of a training in place of the loop."""

    def iterate_lots(self) -> Iterator[Any]:
        """Yield what each step is computed from."""

    def compute_gradient(self, group: list[Any], step: int, live: LiveEntries, out: Tensor | None, /) -> Tensor:
        """Return the gradient ``(live.count,)`` of a step.

        Args:
            group: what the step is computed from, in a list of one.
            step: number of the step, 1-based.
            live: the trainable parameters.
            out: the gradient of the step before, which is overwritten; None: a new tensor is allocated.
        """


@dataclass(frozen=True, eq=False)
class Training:
    """One local training. A method asks for it; the last three fields are the wrappers'.

    Attributes:
        start: ``(P,)`` initial weights; unchanged when the training is over.
        trainable: entries that may change, buffers included.
        config: epochs, optimiser, learning rate.
        round: 1-based; with the run's seed and the site's name it seeds the order of examples, their augmentation and
            dropout.
        steps: number of minibatches; None for ``config.epochs`` passes.
        proximal_strength: factor of the method's proximal term, added to that of ``config``.
        tolerance: squared L2 norm of a step's gradient, proximal term included, at which training ends before that
            step; None: it takes all steps.
        step_scale: ``(P,)`` factors of the optimiser's steps, as if each entry had its own learning rate; None: 1.
        stream: label of a second training in the same round, such as a trial, with its own order and dropout.
        patch: the patch that gives ``start`` over zeros; None: unknown.
        source: computes the gradient of each step; None: the loop does, from minibatches.
        after_step: called after each step of the optimiser.
        within: returns the context in which the network computes.
    """

    start: Tensor
    trainable: Mask
    config: TrainingConfig
    round: int
    steps: int | None = None
    proximal_strength: float = 0.0
    tolerance: float | None = None
    step_scale: Tensor | None = None
    stream: str = ""
    patch: Patch | None = None
    source: GradientSource | None = None
    after_step: Callable[[], None] = lambda: None
    within: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def labels(self) -> tuple[object, ...]:
        """Labels of this training's random numbers, beside the site's name."""
        return (self.round, self.stream) if self.stream else (self.round,)


class Trainer(ABC):
    """Trains and evaluates at a site. What a trainer leaves out, it cannot do: the call says so.

    Args:
        layout: layout of the model.

    Attributes:
        layout: layout of the model.
        memory: tensors that the site keeps between rounds, for its method and of its own; saved in its checkpoints.
        task: what is trained, where the package knows it.
        examples: the site's examples, where the package reads them.
        num_test_examples, num_validation_examples: numbers of the other examples.
        mechanism: differential privacy of the training; None: the job does not ask for it.
        notices: codes of what the server should know about the site's updates (endpoints/events.py).
    """

    task: Task
    examples: Examples
    num_test_examples = num_validation_examples = 0
    mechanism: SiteMechanism | ScriptBudget | None = None
    notices: tuple[str, ...] = ()

    def __init__(self, layout: Layout):
        self.layout = layout
        self.memory: dict[str, Tensor] = {}

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """n_k: number of training examples."""

    @property
    def device(self) -> torch.device:
        """Where the site computes, and where what it trains lies."""
        return torch.device("cpu")

    @abstractmethod
    def train(self, training: Training) -> Tensor:
        """Train and return the values ``(training.trainable.count,)`` of the trainable entries; no other changes."""

    @abstractmethod
    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics of ``weights`` ``(P,)`` that may leave the site; empty without examples.

        Args:
            weights: the model.
            memory: what the site kept when it had this model.
        """

    def evaluate_subgroups(self, layout: Layout, weights: Tensor) -> dict[str, float]:
        """Return the metrics of a whole network by subgroup of the test subjects; empty where none are asked for.

        Args:
            layout: layout of the network.
            weights: ``(layout.size,)``.
        """
        return {}

    @property
    def can_train(self) -> bool:
        """Whether the site has training examples; one without them only evaluates."""
        return self.num_examples > 0

    @property
    def usage(self) -> SampleUsage:
        """Training data read since the last :meth:`reset_usage`."""
        return SampleUsage()

    def reset_usage(self) -> None:  # noqa: B027
        """Start counting the training data of a new update."""

    def evaluate_validation(self, weights: Tensor) -> dict[str, float]:
        """Return the task's metrics of ``weights`` on the site's validation examples; empty without any.

        They are exact, also where metrics leave with noise or not at all: a choice by them must stay at the site.
        """
        return {}

    def complete(self, weights: Tensor, memory: Mapping[str, Tensor]) -> tuple[Layout, Tensor]:
        """Return layout and vector of the whole network, from ``weights`` and what stays here; as :meth:`evaluate`."""
        return self.layout, weights

    def compute_gradients(
        self, weights: Tensor, batch_size: int, batches: int | None, t: int, *, batch_statistics: bool = True
    ) -> Iterator[tuple[Tensor, float]]:
        """Yield gradients ``(P,)`` of the loss at ``weights`` on random minibatches, with their weights in a mean.

        They are zero for buffers, and lie where the site computes, so that a sum of them is copied once. A minibatch
        weighs its number of examples, in units of the largest one: 1 except for the last of a pass. Dropout is off
        (docs/algorithms.md, section 1.9).

        Args:
            weights: ``(P,)``.
            batch_size: examples per minibatch.
            batches: number of minibatches; None for one pass over the training examples.
            t: label of the stream of random minibatches.
            batch_statistics: normalise by the statistics of the minibatch, because running statistics mean nothing
                before training; False: by the running statistics of ``weights``.
        """
        raise self._refuse("gradients")

    def compute_private_gradient(
        self, weights: Tensor, entries: Mask, config: TrainingConfig, lots: int | None
    ) -> Tensor:
        """Return a noisy mean gradient ``(P,)`` over some entries, zero elsewhere, for which subjects are charged.

        Args:
            weights: ``(P,)``.
            entries: parameters whose gradient is computed; the gradient of a subject is clipped over these.
            config: its ``batch_size`` and ``accumulate`` are the expected number of subjects in a lot.
            lots: number of lots; None: as many as one pass has.

        Raises:
            BudgetSpent: it would exceed a budget.
            ConfigError: the job does not ask for differential privacy.
        """
        raise ConfigError("a private gradient needs differential privacy and training examples")

    def step_in_stages(self, start: Tensor, stages: Sequence[Mask], config: TrainingConfig) -> Tensor:
        """Take one plain gradient step per stage, all on one random batch; return the weights ``(P,)``.

        In MetaGater, stage II computes with the gates of stage I's step but with the same backbone
        (docs/algorithms.md, section 6.6). Dropout is off, and buffers keep their values.

        Args:
            start: initial weights; not modified.
            stages: entries that each step changes.
            config: its ``lr``, ``batch_size`` and ``clip_norm`` are used.
        """
        raise self._refuse("steps in stages")

    def observe_units(self, weights: Tensor, nodes: Collection[str], callback: Callable[[str, Tensor], None]) -> None:
        """Run all training examples through the network in eval mode and pass the results of some nodes to a callback.

        Args:
            weights: ``(P,)``.
            nodes: names in the network's traced graph.
            callback: called with the name and the result of each node, batch by batch.

        Raises:
            Untraceable: the control flow of the network's code depends on its data.
        """
        raise self._refuse("activations of units")

    def collect_inputs(self, weights: Tensor, kind: type[nn.Module], limit: int | None = None) -> dict[str, Tensor]:
        """Return the inputs ``(n, features)`` of each layer of a kind, by the layer's name, in eval mode.

        Layers whose inputs are not two-dimensional, such as those of sequences, are skipped.

        Args:
            weights: ``(P,)``.
            kind: class of the layers.
            limit: maximum number of training examples to read, which enter no update and are not added to
                :attr:`usage`; None: all, which are.
        """
        raise self._refuse("inputs of layers")

    def narrow(self, live: Mask) -> Trainer:
        """Return a trainer of the smaller network of the ``live`` entries, which are not all.

        Raises:
            Untraceable: the network's channels cannot be traced.
            SelectionError: ``live`` removes entries other than those of complete units.
        """
        raise self._refuse("smaller networks")

    def _refuse(self, ability: str) -> ConfigError:
        return ConfigError(
            f"the method needs {ability} at each site, which {type(self).__name__} does not compute; choose another "
            "method"
        )


if TYPE_CHECKING:
    _Delegating = Trainer
else:
    # Not a Trainer to Python, which would find that class's defaults before it asked for __getattr__.
    _Delegating = object


class Wrapper(_Delegating):
    """Changes one part of the trainer inside it; everything else is what that trainer does."""

    def __init__(self, inner: Trainer):
        self._inner = inner

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    @property
    def num_examples(self) -> int:
        return self._inner.num_examples

    def train(self, training: Training) -> Tensor:
        return self._inner.train(training)

    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        return self._inner.evaluate(weights, memory)
