"""What the site half of a method works with: one site's model, examples and memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..errors import ConfigError
from ..mask import Mask
from ..params import Layout
from ..seeds import derive_seed, make_generator, seed_torch
from ..structure.compact import remove_channels
from ..structure.observing import ObservedNetwork
from ..structure.removal import narrow_network
from ..task import Examples, Task, iterate_minibatches
from .config import TrainingConfig
from .flat import FlatModel
from .gate_sparsity import compute_channel_sparsity, observe_gates
from .loop import disable_dropout, train
from .sample_usage import CountingDataset, SampleUsage
from .stages import step_in_stages

OBSERVED_BATCH = 16
"""Examples at a time where units are looked at."""


class Site:
    """One site: trains, measures gradients and judges models on its own examples.

    Attributes:
        name: as the framework knows it.
        layout: of the model.
        weights: ``(P,)`` the vector that the server last sent, complete.
        memory: what a method keeps at the site between rounds; lost when the site restarts.
        site_settings: what the site's own site file sets of the method's settings; None: the job's settings hold.
    """

    site_settings: Any = None

    def __init__(
        self,
        name: str,
        task: Task,
        examples: Examples,
        layout: Layout,
        seed: int,
        device: str = "cpu",
        network: nn.Module | None = None,
    ):
        self.name, self.task, self.layout, self.seed = name, task, layout, seed
        self.weights = torch.zeros(layout.size)
        self.memory: dict[str, Tensor] = {}
        self._examples, self._drawn = examples, CountingDataset(examples.train)
        self._smaller: tuple[Mask, Site] | None = None
        self._unclosed: tuple[Any, Site, Mask] | None = None
        with seed_torch(0):
            self._model = FlatModel(network or task.model(), layout, device)

    @property
    def num_examples(self) -> int:
        """n_k: number of training examples."""
        return self._examples.n_train

    @property
    def num_test_examples(self) -> int:
        """Number of examples that models are judged on."""
        return self._examples.n_test

    @property
    def usage(self) -> SampleUsage:
        """What of the training examples was read since the last :meth:`reset_usage`."""
        return self._drawn.usage

    def reset_usage(self) -> None:
        """A new answer begins: nothing stands behind it yet."""
        self._drawn.reset()

    def train(
        self,
        start: Tensor,
        trainable: Mask,
        config: TrainingConfig,
        t: int,
        *,
        steps: int | None = None,
        pull: float = 0.0,
        stream: str = "",
    ) -> Tensor:
        """Train from ``start`` ``(P,)`` in round ``t``; see :func:`flare_sparse.training.loop.train`.

        Args:
            start: weights to begin with.
            trainable: entries that may change.
            config: epochs, optimiser, learning rate.
            t: round, 1-based; with the run's seed and the site's name it decides order and dropout.
            steps: number of minibatches; None: ``config.epochs`` passes.
            pull: proximal strength.
            stream: names another order and dropout in the same round, for training that is only a trial.
        """
        labels = (self.name, t, stream) if stream else (self.name, t)
        order = make_generator(self.seed, "order", *labels)
        with seed_torch(derive_seed(self.seed, "train", *labels)):
            return train(
                self._model,
                self.task,
                self._batches(config, order, steps),
                start,
                trainable,
                config.build_optimizer(self._model.flat, t),
                pull=pull,
                clip_norm=config.clip_norm,
            )

    def step_in_stages(self, start: Tensor, stages: Sequence[Mask], config: TrainingConfig) -> Tensor:
        """One plain gradient step a stage, ``(P,)``, all on one random batch; see :mod:`flare_sparse.training.stages`.

        Args:
            start: weights to begin with.
            stages: entries of each step.
            config: ``lr``, ``batch_size`` and ``clip_norm`` are used.
        """
        order = make_generator(self.seed, "stages", self.name)
        batch = next(iter(self._batches(config, order, 1)))
        with seed_torch(derive_seed(self.seed, "stages", self.name)):
            return step_in_stages(self._model, self.task, batch, start, stages, config.lr, config.clip_norm)

    def compute_gradients(self, weights: Tensor, batch_size: int, batches: int | None, t: int) -> Iterator[Tensor]:
        """Gradients ``(P,)`` of the loss at ``weights`` on random minibatches, zero for buffers.

        Dropout is off; batch normalisation uses batch statistics and leaves its running statistics alone
        (ALGORITHMS 4.4 #6: at the start they are meaningless).

        Args:
            weights: ``(P,)``.
            batch_size: examples per minibatch.
            batches: how many; None: one pass over all training examples.
            t: names the stream of random minibatches.
        """
        order = make_generator(self.seed, "gradients", self.name, t)
        config = TrainingConfig(batch_size=batch_size)
        with seed_torch(derive_seed(self.seed, "gradients", self.name, t)):
            for batch in self._batches(config, order, batches):
                self._model.load(weights)
                self._model.set_training_mode()
                disable_dropout(self._model.module)
                self._model.backward(self.task.loss(self._model.module, self._model.to_device(batch)))
                gradient = torch.zeros(self.layout.size)
                gradient[: self.layout.trainable_size] = self._model.gradient.cpu()
                yield gradient

    def narrow(self, live: Mask) -> Site:
        """This site with the smaller network that has just the ``live`` entries; itself when these are all.

        Its ``weights`` are those of the live entries now. The network is made once for each structure.

        Raises:
            Untraceable: the network's connections cannot be followed.
            SelectionError: ``live`` removes something else than whole units.
        """
        if live.is_full:
            return self
        if self._smaller is None or self._smaller[0] != live:
            self._smaller = live, self._with(narrow_network(self._model.module, live))
        self._smaller[1].weights = live.take(self.weights)
        return self._smaller[1]

    def remove_channels(self, closed: Mapping[str, Tensor]) -> tuple[Site, Mask]:
        """This site with a network without channels that no input opens, and the entries which that network has.

        The smaller site's ``weights`` are those of these entries. The site itself, and all entries, where nothing is
        closed or the network cannot be cut. The network is made once for each set of closed channels.

        Args:
            closed: bool ``(channels,)`` by name of the gated layer.
        """
        network, everything = self._model.module, Mask.full(self.layout.size)
        if not isinstance(network, nn.Sequential) or not any(bool(channels.any()) for channels in closed.values()):
            return self, everything
        key = tuple((layer, *channels.tolist()) for layer, channels in sorted(closed.items()))
        if self._unclosed is None or self._unclosed[0] != key:
            try:
                smaller, live = remove_channels(network, closed)
            except ConfigError:  # a whole layer is closed, or its reader is unknown: slower, and the same
                return self, everything
            self._unclosed = key, self._with(smaller), live
        _, site, live = self._unclosed
        site.weights = live.take(self.weights)
        return site, live

    def _with(self, network: nn.Module) -> Site:
        """This site with another network."""
        device = str(self._model.device)
        site = Site(self.name, self.task, self._examples, Layout.from_module(network), self.seed, device, network)
        site.site_settings, site._drawn = self.site_settings, self._drawn
        return site

    def observe_units(self, weights: Tensor, nodes: Collection[str], see: Callable[[str, Tensor], None]) -> None:
        """Run all training examples through the network in evaluation mode and look at some of its units.

        Args:
            weights: ``(P,)``.
            nodes: names in the network's traced graph.
            see: called with the name and the result of each, batch by batch.

        Raises:
            Untraceable: the network's code depends on its data.
        """
        self._model.load(weights)
        self._model.module.eval()
        watched = ObservedNetwork(self._model.module, nodes, see)
        with torch.no_grad():
            for batch in DataLoader(self._drawn, batch_size=OBSERVED_BATCH):
                self.task.predict(watched, self._model.to_device(batch))

    def evaluate(self, weights: Tensor) -> dict[str, float]:
        """The task's metrics of ``weights`` on the site's test examples, with ``test_examples``; empty without any.

        Of a network with channel gates also ``compute_channel_sparsity``, the share of gates that are closed.
        """
        if not self._examples.n_test:
            return {}
        self._model.load(weights)
        with observe_gates(self._model.module) as seen:
            figures = self.task.evaluate(self._model.module, self._examples.test)
        closed = compute_channel_sparsity(seen)
        gates = {} if closed is None else {"channel_sparsity": closed}
        return {**figures, **gates, "test_examples": float(self._examples.n_test)}

    def _batches(self, config: TrainingConfig, order: torch.Generator, steps: int | None) -> Iterator[Any]:
        """So many minibatches, or the passes of ``config``; none is read that is not wanted."""
        if not self.num_examples:
            return iter(())
        passes = repeat(None) if steps is not None else repeat(None, config.epochs)
        batches = chain.from_iterable(iterate_minibatches(self._drawn, config.batch_size, order) for _ in passes)
        return islice(batches, steps)
