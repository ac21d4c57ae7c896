"""A site as the site part of a method uses it: the model, the examples and the memory of one site."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, cycle, islice, repeat
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from ..compute.structure.compact import remove_channels
from ..compute.structure.observing import ObservedNetwork
from ..compute.structure.removal import narrow_network
from ..compute.structure.scaling import StatisticsLayer
from ..core.errors import ConfigError
from ..core.exchange import Patch
from ..core.mask import Mask
from ..core.params import Layout
from ..core.seeds import derive_seed, make_generator, seed_torch
from ..privacy.dp.account import BudgetSpent
from ..privacy.dp.mechanism import SiteMechanism
from ..privacy.dp.metrics import MetricRelease
from ..tasks.task import TEST_EXAMPLES, VALIDATION, Examples, Task
from .batches import check_joins_last, iterate_pass, plan_batch_sizes
from .compute import use_compute
from .config import TrainingConfig
from .flat import FlatModel
from .gate_sparsity import compute_channel_sparsity, observe_gates
from .loop import disable_dropout, train
from .personal import PERSONAL, PersonalTensors
from .private import PrivateTraining, Subjects, open_private_training
from .sample_usage import CountingDataset, SampleUsage
from .stages import step_in_stages
from .subject_metrics import evaluate_subjects

_LOG = logging.getLogger(__name__)
OBSERVED_BATCH = 16
"""Batch size of passes that observe units."""


class Site:
    """One site: trains models, computes gradients and evaluates models on its own examples.

    Attributes:
        name: name of the site in FLARE.
        layout: layout of the model.
        weights: ``(P,)`` the vector of the server's last request, with the entries outside its patch filled in.
        live_patch: the patch that gives ``weights`` if it is written over zeros: its mask has every entry that may
            differ from 0. None: unknown. Whoever assigns ``weights`` replaces it.
        memory: tensors that the site keeps between rounds, for its method and of its own; saved in its checkpoints.
        evaluated: layout and vector of the whole network that was evaluated last; None: none.
        layer_compute: ``sparse`` or ``dense`` by layer, as the last training computed them; empty: all were dense.
        notices: codes of what the server should know about the site's updates (endpoints/events.py).
        site_settings: the method's settings from the site file; None if the job's settings apply.
        mechanism: differential privacy of the training; None: the job does not ask for it.
        sends_metrics: whether metrics are computed at all.
        metric_release: adds noise to metrics and charges test and validation subjects; None: metrics are exact.
    """

    site_settings: Any = None
    mechanism: SiteMechanism | None = None
    sends_metrics: bool = True
    metric_release: MetricRelease | None = None
    notices: tuple[str, ...] = ()
    live_patch: Patch | None = None

    def __init__(
        self,
        name: str,
        task: Task,
        examples: Examples,
        layout: Layout,
        seed: int,
        device: str = "cpu",
        network: nn.Module | None = None,
        personal: Mapping[str, Tensor] | None = None,
    ):
        self.name, self.task, self.layout, self.seed = name, task, layout, seed
        self.weights = torch.zeros(layout.size)
        self.memory: dict[str, Tensor] = {}
        self.layer_compute: dict[str, str] = {}
        self.evaluated: tuple[Layout, Tensor] | None = None
        self._received_personal: Tensor | None = None
        self._examples, self._train_examples = examples, CountingDataset(examples.train)
        # Building a smaller network takes longer than a small round, and its structure rarely changes: the latest one
        # is cached with its key, the live mask or the closed channels.
        self._narrow_site: tuple[Mask, Site] | None = None
        self._site_without_closed: tuple[Any, Site, Mask] | None = None
        self._joins_last: dict[int, bool] = {}
        # The weights drawn here are overwritten before use; seeding within a context leaves the global generator alone.
        with seed_torch(0):
            self._model = FlatModel(network or task.model(), layout, device)
        if personal:
            # Before any training: one that leaves a tensor out would make it look like a part of a frozen base model.
            self._network = Layout.from_module(self._model.module)
            self._model.personal = PersonalTensors(self._model.module, personal)
        # Frees the network's initial parameters, which no training starts from.
        self._model.load(self.weights)

    @property
    def examples(self) -> Examples:
        """The site's examples."""
        return self._examples

    @property
    def num_examples(self) -> int:
        """n_k: number of training examples."""
        return self._examples.n_train

    @cached_property
    def subjects(self) -> Subjects:
        """The training examples by subject."""
        return Subjects.group(self.num_examples, self._examples.train_ids, self._examples.train_subjects)

    @property
    def can_train(self) -> bool:
        """Whether the site has training examples; one without them only evaluates."""
        return self.num_examples > 0

    @property
    def num_test_examples(self) -> int:
        """Number of test examples."""
        return self._examples.n_test

    @property
    def num_validation_examples(self) -> int:
        """Number of validation examples."""
        return self._examples.n_validation

    @property
    def usage(self) -> SampleUsage:
        """Training data read since the last :meth:`reset_usage`."""
        return self._train_examples.usage

    def reset_usage(self) -> None:
        """Start counting the training data of a new update."""
        self._train_examples.reset()

    def receive(self, memory: Mapping[str, Tensor]) -> None:
        """Start to answer a request, whose model is in ``weights``, with the memory from which the answer starts."""
        # A copy: a method may replace entries of its memory, and a retry starts from the memory of the first attempt.
        self.memory = dict(memory)
        self._received_personal = self.memory.get(PERSONAL)

    def _select_personal(self, values: Tensor | None) -> PersonalTensors | None:
        """Return the tensors that stay here, which the next loading of a vector sets to these values."""
        personal = self._model.personal
        if personal is not None:
            personal.values = personal.initial if values is None else values
        return personal

    def train(self, start: Tensor, trainable: Mask, config: TrainingConfig, t: int, **options: Any) -> Tensor:
        """Return the trained weights ``(P,)``; arguments as of :meth:`train_entries`, whose values they contain."""
        values = self.train_entries(start, trainable, config, t, **options)
        return values if trainable.is_full else trainable.put(values, start.clone())

    def train_entries(
        self,
        start: Tensor,
        trainable: Mask,
        config: TrainingConfig,
        t: int,
        *,
        steps: int | None = None,
        proximal_strength: float = 0.0,
        step_scale: Tensor | None = None,
        stream: str = "",
    ) -> Tensor:
        """Train in round ``t`` and return the values ``(trainable.count,)`` of the trainable entries.

        Unlike :meth:`train`, it copies no entry that does not train; see :func:`flare_sparse.training.loop.train`.

        Args:
            start: ``(P,)`` initial weights; unchanged when the call returns.
            trainable: entries that may change.
            config: epochs, optimiser, learning rate.
            t: round, 1-based; with the run's seed and the site's name it seeds the order of examples, their
                augmentation and dropout.
            steps: number of minibatches; None for ``config.epochs`` passes.
            proximal_strength: factor of the method's proximal term, added to that of ``config``.
            step_scale: ``(P,)`` factors of the optimiser's steps; None: 1.
            stream: label of a second training in the same round, such as a trial, with its own order and dropout.
        """
        labels = (self.name, t, stream) if stream else (self.name, t)
        order = make_generator(self.seed, "order", *labels)
        # A stream of its own: augmentation changes neither the order of the examples nor dropout.
        changes = make_generator(self.seed, "augment", *labels)
        personal = self._select_personal(self.memory.get(PERSONAL))
        step = personal.build_step(partial(config.build_optimizer, t=t), config.clip_norm) if personal else _do_nothing
        # The sparse kernels compute in float32, and whole minibatches.
        kernels = config.compute if config.precision == "float32" and self.mechanism is None else "dense"
        patch = self.live_patch if start is self.weights else None
        support = None if patch is None else patch.mask
        compute = use_compute(kernels, self._model, start, trainable, support, self.layer_compute)
        private = self._open_private(start, trainable, config, t, steps, changes, (labels, proximal_strength))
        batches: Iterator[Any]
        if private is None:
            batches = (self.task.augment(batch, changes) for batch in self._iterate_batches(config, order, steps))
        else:
            batches = private.iterate_lots()
        with seed_torch(derive_seed(self.seed, "train", *labels)), compute:
            trained = train(
                self._model,
                self.task,
                batches,
                start,
                trainable,
                partial(config.build_optimizer, t=t),
                proximal_strength=proximal_strength + config.proximal,
                clip_norm=config.clip_norm,
                start_values=None if patch is None or support is not trainable else patch.values,
                step_scale=step_scale,
                step_personal=step,
                precision=config.precision,
                accumulate=config.accumulate if private is None else 1,
                compute_gradient=None if private is None else private.compute_gradient,
            )
        # Before anything can leave: a crash after it repeats the training to the same bits, at no further charge.
        if private is not None:
            private.record(trained)
        # A trial leaves no trace.
        if personal is not None and not stream:
            self.memory[PERSONAL] = personal.to_vector()
        return trained

    def _open_private(
        self,
        start: Tensor,
        trainable: Mask,
        config: TrainingConfig,
        t: int,
        steps: int | None,
        changes: torch.Generator,
        labels: tuple[object, ...],
    ) -> PrivateTraining | None:
        """Return the private training of a request; None without differential privacy."""
        if self.mechanism is None or not self.num_examples:
            return None
        return open_private_training(
            self.mechanism,
            self._model,
            self.task,
            self._train_examples,
            self.subjects,
            start,
            trainable,
            config,
            t,
            steps,
            changes,
            labels,
        )

    def step_in_stages(self, start: Tensor, stages: Sequence[Mask], config: TrainingConfig) -> Tensor:
        """Take one plain gradient step per stage, all on one random batch; return the weights ``(P,)``.

        See :func:`flare_sparse.training.stages.step_in_stages`.

        Args:
            start: initial weights.
            stages: entries that each step changes.
            config: its ``lr``, ``batch_size`` and ``clip_norm`` are used.
        """
        self._require_accounting("steps in stages")
        order = make_generator(self.seed, "stages", self.name)
        batch = next(iter(self._iterate_batches(config, order, 1)))
        with seed_torch(derive_seed(self.seed, "stages", self.name)):
            return step_in_stages(self._model, self.task, batch, start, stages, config.lr, config.clip_norm)

    def compute_gradients(
        self, weights: Tensor, batch_size: int, batches: int | None, t: int, *, batch_statistics: bool = True
    ) -> Iterator[Tensor]:
        """Yield gradients ``(P,)`` of the loss at ``weights`` on random minibatches; they are zero for buffers.

        Dropout is off (docs/algorithms.md, section 1.9).

        Args:
            weights: ``(P,)``.
            batch_size: examples per minibatch.
            batches: number of minibatches; None for one pass over the training examples.
            t: label of the stream of random minibatches.
            batch_statistics: normalise by the statistics of the minibatch, because running statistics mean nothing
                before training; False: by the running statistics of ``weights``.
        """
        self._require_accounting("scores of gradients")
        order = make_generator(self.seed, "gradients", self.name, t)
        config = TrainingConfig(batch_size=batch_size)
        self._select_personal(self.memory.get(PERSONAL))
        with seed_torch(derive_seed(self.seed, "gradients", self.name, t)):
            for batch in self._iterate_batches(config, order, batches):
                # Loaded for every minibatch: the forward pass before has updated the running statistics.
                self._model.load(weights)
                self._model.set_training_mode()
                if batch_statistics:
                    disable_dropout(self._model.module)
                else:
                    self._model.module.eval()
                loss = self.task.loss(self._model.module, self._model.to_device(batch))
                gradient = torch.zeros(self.layout.size)
                gradient[: self.layout.trainable_size] = self._model.compute_gradient(loss).cpu()
                yield gradient

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
        once, steps = config.model_copy(update={"epochs": 1}), None if lots is None else lots * config.accumulate
        labels = (self.name, 0, "gradient")
        changes = make_generator(self.seed, "augment", *labels)
        private = self._open_private(weights, entries, once, 0, steps, changes, labels)
        if private is None:
            raise ConfigError("a private gradient needs differential privacy and training examples")
        self._select_personal(self.memory.get(PERSONAL))
        with seed_torch(derive_seed(self.seed, "gradients", *labels)):
            self._model.load(weights)
            self._model.set_training_mode()
            disable_dropout(self._model.module)
            live = self._model.find_live(entries)
            mean = private.compute_mean_gradient(live)
        gradient = torch.zeros(self.layout.size)
        gradient[slice(0, live.count) if live.index is None else live.index.cpu()] = mean
        return gradient

    def iterate_batch_weights(self, batch_size: int) -> Iterator[float]:
        """Yield, without end, the weights of the minibatches of successive passes in a mean over examples.

        A minibatch weighs its number of examples, in units of the largest minibatch: 1 except for the last of a pass.
        """
        sizes = plan_batch_sizes(max(self.num_examples, 1), batch_size, joins_last=self.joins_last(batch_size))
        return cycle([size / min(batch_size, sizes[0]) for size in sizes])

    def joins_last(self, batch_size: int) -> bool:
        """Return whether a last minibatch of one example joins the one before it: the network cannot train on it.

        Raises:
            ConfigError, DataError: the network cannot train on any minibatch.
        """
        if batch_size not in self._joins_last:
            model, data = self._model, self._examples.train
            self._joins_last[batch_size] = bool(self.num_examples) and check_joins_last(
                model, self.task, data, batch_size, self.name
            )
        return self._joins_last[batch_size]

    def narrow(self, live: Mask) -> Site:
        """Return this site with the smaller network of the ``live`` entries; the site itself if all entries are live.

        The smaller site's ``weights`` are the live entries of this site's. The network is cached by ``live``.

        Raises:
            Untraceable: the network's channels cannot be traced.
            SelectionError: ``live`` removes entries other than those of complete units.
        """
        if live.is_full:
            return self
        if self._narrow_site is None or self._narrow_site[0] != live:
            self._narrow_site = live, self._replace_network(narrow_network(self._model.module, live))
        _, site = self._narrow_site
        site.weights = live.take(self.weights)
        return site

    def remove_channels(self, closed: Mapping[str, Tensor]) -> tuple[Site, Mask]:
        """Return this site with a network without closed channels, and the entries which that network has.

        The smaller site's ``weights`` are these entries of this site's. If no channel is closed or the network cannot
        be cut, returns the site itself and the full mask. The network is cached by the closed channels.

        Args:
            closed: bool ``(channels,)`` by name of the gated layer: channels that no input opens.
        """
        network, full_mask = self._model.module, Mask.full(self.layout.size)
        if not isinstance(network, nn.Sequential) or not any(bool(channels.any()) for channels in closed.values()):
            return self, full_mask
        key = tuple((layer, *channels.tolist()) for layer, channels in sorted(closed.items()))
        if self._site_without_closed is None or self._site_without_closed[0] != key:
            try:
                smaller, live = remove_channels(network, closed)
            # All channels of a layer are closed, or its reader is not supported. The full network computes the same
            # function, only more slowly.
            except ConfigError:
                return self, full_mask
            self._site_without_closed = key, self._replace_network(smaller), live
        _, site, live = self._site_without_closed
        site.weights = live.take(self.weights)
        return site, live

    def _require_accounting(self, action: str) -> None:
        """Raise if training examples would be read outside the mechanism of differential privacy.

        Raises:
            ConfigError: the job asks for differential privacy.
        """
        if self.mechanism is not None:
            raise ConfigError(
                f"privacy: the method computes {action} from training examples, which no budget covers; choose "
                "fedavg, fedsparsify or neurosfl"
            )

    def _replace_network(self, network: nn.Module) -> Site:
        """Return a site with another network that shares this site's examples, settings and usage count."""
        device = str(self._model.device)
        site = Site(self.name, self.task, self._examples, Layout.from_module(network), self.seed, device, network)
        site.site_settings, site._train_examples = self.site_settings, self._train_examples
        site.mechanism, site.metric_release = self.mechanism, self.metric_release
        site.layer_compute = self.layer_compute
        site.sends_metrics = self.sends_metrics
        return site

    def observe_units(self, weights: Tensor, nodes: Collection[str], callback: Callable[[str, Tensor], None]) -> None:
        """Run all training examples through the network in eval mode and pass the results of some nodes to a callback.

        Args:
            weights: ``(P,)``.
            nodes: names in the network's traced graph.
            callback: called with the name and the result of each node, batch by batch.

        Raises:
            Untraceable: the control flow of the network's code depends on its data.
        """
        self._require_accounting("activations of units")
        self._select_personal(self.memory.get(PERSONAL))
        self._model.load(weights)
        self._model.module.eval()
        observed = ObservedNetwork(self._model.module, nodes, callback)
        with torch.no_grad():
            for batch in self.task.iterate_batches(self._train_examples, OBSERVED_BATCH):
                self.task.predict(observed, self._model.to_device(batch))

    def collect_linear_inputs(self, weights: Tensor, limit: int) -> dict[str, Tensor]:
        """Return the inputs ``(n, features)`` of each linear layer, by the layer's name, in eval mode.

        Layers with inputs of another number of dimensions, such as sequences, are left out. Nothing is added to
        :attr:`usage`: the examples do not enter an update.

        Args:
            weights: ``(P,)``.
            limit: number of training examples that are read at most.
        """
        self._select_personal(self.memory.get(PERSONAL))
        self._model.load(weights)
        self._model.module.eval()
        inputs: dict[str, list[Tensor]] = {}
        hooks = [
            part.register_forward_pre_hook(partial(_append_input, inputs.setdefault(name, [])))
            for name, part in self._model.module.named_modules()
            if isinstance(part, nn.Linear)
        ]
        if not hooks:
            return {}
        examples = Subset(self._examples.train, range(min(limit, self.num_examples)))
        try:
            with torch.no_grad():
                for batch in self.task.iterate_batches(examples, OBSERVED_BATCH):
                    self.task.predict(self._model.module, self._model.to_device(batch))
        finally:
            for hook in hooks:
                hook.remove()
        return {name: torch.cat(parts) for name, parts in inputs.items() if parts and parts[0].dim() == 2}

    def compute_statistics(self) -> Tensor:
        """Return a vector ``(P,)`` with the statistics of the inputs of each scaler of the network, and zeros."""
        inputs: dict[str, list[Tensor]] = {}
        scalers = {name: part for name, part in self._model.module.named_modules() if isinstance(part, StatisticsLayer)}
        hooks = [
            part.register_forward_pre_hook(partial(_append_input, inputs.setdefault(name, [])))
            for name, part in scalers.items()
        ]
        self._model.module.eval()
        try:
            with torch.no_grad():
                for batch in self.task.iterate_batches(self._train_examples, OBSERVED_BATCH):
                    self.task.predict(self._model.module, self._model.to_device(batch))
        finally:
            for hook in hooks:
                hook.remove()
        vector = torch.zeros(self.layout.size)
        tensors = self.layout.unflatten(vector)
        for name, scaler in scalers.items():
            tensors[f"{name}.statistics".lstrip(".")].copy_(scaler.compute_statistics(torch.cat(inputs[name])))
        return vector

    def evaluate(self, weights: Tensor) -> dict[str, float]:
        """Return the task's metrics of ``weights`` on the site's test examples; empty without test examples.

        Adds ``test_examples``, their number, and for a network with channel gates ``channel_sparsity``, the share of
        closed gates. The metrics on validation examples are added with the prefix ``validation_``.
        """
        # The model of the request is evaluated as the site received it: with what the site kept before it trained.
        is_received = weights is self.weights
        personal = self._select_personal(self._received_personal if is_received else self.memory.get(PERSONAL))
        self.evaluated = self._complete(weights, personal)
        examples, metrics = self._examples, {}
        if not self.sends_metrics:
            return {}
        if examples.n_test or examples.n_validation:
            self._model.load(weights)
        if examples.n_test:
            metrics = {**self._evaluate_on("test", weights), TEST_EXAMPLES: float(examples.n_test)}
        if examples.n_validation:
            chosen_by = {**self._evaluate_on("validation", weights), "examples": float(examples.n_validation)}
            metrics |= {f"{VALIDATION}{name}": value for name, value in chosen_by.items()}
        return metrics

    def evaluate_validation(self, weights: Tensor) -> dict[str, float]:
        """Return the task's metrics of ``weights`` on the site's validation examples; empty without any.

        They are exact, also where metrics leave with noise or not at all: a choice by them must stay at the site.
        """
        if not self._examples.n_validation:
            return {}
        self._select_personal(self.memory.get(PERSONAL))
        self._model.load(weights)
        return self._measure("validation")[0]

    def _evaluate_on(self, part: Literal["test", "validation"], weights: Tensor) -> dict[str, float]:
        """Return the metrics of the loaded model ``weights`` on a part of the examples."""
        examples = self._examples
        dataset = examples.test if part == "test" else examples.validation
        assert dataset is not None, "there are examples"
        if (release := self.metric_release) is not None:
            is_test = part == "test"
            names = tuple(examples.test_ids if is_test else examples.validation_ids)
            owners = examples.test_subjects if is_test else examples.validation_subjects
            subjects = Subjects.group(examples.n_test if is_test else examples.n_validation, names, owners)
            values = evaluate_subjects(self.task, self._model.module, dataset, subjects.records, list(release.bounds))
            # Metrics are no reason to leave a round: without a budget for them, they stay here.
            try:
                return release.release(part, weights, names, values)
            except BudgetSpent as error:
                _LOG.warning("metrics stay at the site: %s", error)
                return {}
        metrics, sparsity = self._measure(part)
        return metrics if sparsity is None else {**metrics, "channel_sparsity": sparsity}

    def _measure(self, part: Literal["test", "validation"]) -> tuple[dict[str, float], float | None]:
        """Return the exact metrics of the loaded model on a part of the examples, and the share of closed gates."""
        dataset = self._examples.test if part == "test" else self._examples.validation
        assert dataset is not None, "there are examples"
        with observe_gates(self._model.module) as observed:
            metrics = self.task.evaluate(self._model.module, dataset)
        self._model.check_parameters()
        return metrics, compute_channel_sparsity(observed)

    def _complete(self, weights: Tensor, personal: PersonalTensors | None) -> tuple[Layout, Tensor]:
        """Return layout and vector of the whole network, from ``weights`` ``(P,)`` and what stays here."""
        if personal is None:
            return self.layout, weights
        tensors = {**self.layout.unflatten(weights), **personal.unflatten()}
        return self._network, self._network.flatten(tensors)

    def _iterate_batches(self, config: TrainingConfig, order: torch.Generator, steps: int | None) -> Iterator[Any]:
        """Yield ``steps`` minibatches, or ``config.epochs`` passes; lazily, so that unused examples do not count."""
        if not self.num_examples:
            return iter(())
        passes = repeat(None) if steps is not None else repeat(None, config.epochs)
        # Before the caller loads its weights: the check runs the network once.
        joins_last = self.joins_last(config.batch_size)
        batches = chain.from_iterable(
            iterate_pass(
                self._train_examples, config.batch_size, order, joins_last=joins_last, collate=self.task.collate
            )
            for _ in passes
        )
        return islice(batches, steps)


def _do_nothing() -> None:
    """Stand in for the step of tensors that stay at a site, where there are none."""


def _append_input(inputs: list[Tensor], module: nn.Module, arguments: tuple[Any, ...]) -> None:  # noqa: ARG001
    """Append the first argument of a layer's forward pass to a list."""
    inputs.append(arguments[0].detach().cpu())
