"""The trainer of a task: the plain loop over a site's examples.

Observation of channel gates. A gate is a submodule named ``gate`` that returns 0 or 1 per example and channel.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from ..cohorts.subgroups import measure_subgroups
from ..compute.structure.graph import ObservedNetwork
from ..core.mask import Mask
from ..core.params import Layout
from ..core.seeds import require_deterministic, seed_torch
from ..tasks.task import TEST_EXAMPLES, VALIDATION, is_metric_name
from .config import TrainingConfig
from .local_task import LocalTask, weigh_batches
from .loop import TrainingDiverged, disable_dropout, train
from .sample_usage import SampleUsage
from .trainer import Trainer, Training

OBSERVED_BATCH = 16
"""Batch size of passes that observe units."""


class TaskTrainer(Trainer):
    """Trains and evaluates the network of a task.

    Args:
        local: the task, the site's examples and the network.
    """

    def __init__(self, local: LocalTask):
        super().__init__(local.model.layout)
        self._local, self._model = local, local.model
        self.task, self.examples = local.task, local.examples
        self.num_test_examples, self.num_validation_examples = local.examples.n_test, local.examples.n_validation

    @property
    def num_examples(self) -> int:
        return self.examples.n_train

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def usage(self) -> SampleUsage:
        return self._local.train_examples.usage

    def reset_usage(self) -> None:
        self._local.train_examples.reset()

    def train(self, training: Training) -> Tensor:
        local, labels = self._local, training.labels
        if training.source is None:
            order = local.make_generator("order", *labels)
            # Draw from a stream of its own: augmentation changes neither the order of the examples nor dropout.
            augmentation_generator = local.make_generator("augment", *labels)
            plain = local.iterate_batches(training.config, order, training.steps)
            batches: Iterator[Any] = (self.task.augment(batch, augmentation_generator) for batch in plain)
        else:
            batches = training.source.iterate_lots()
        deterministic = require_deterministic(training.config.deterministic)
        with local.seed_torch("train", *labels), training.within(), deterministic:
            return train(self._model, self.task, batches, training)

    def compute_gradients(
        self, weights: Tensor, batch_size: int, batches: int | None, t: int, *, batch_statistics: bool = True
    ) -> Iterator[tuple[Tensor, float]]:
        local, model = self._local, self._model
        order, full = local.make_generator("gradients", t), Mask.full(self.layout.size)
        batch_weights = weigh_batches(self.num_examples, batch_size, joins_last=local.joins_last(batch_size))
        with local.seed_torch("gradients", t):
            for batch in local.iterate_batches(TrainingConfig(batch_size=batch_size), order, batches):
                # Loaded for every minibatch: the forward pass before has updated the running statistics.
                model.load(weights)
                model.set_training_mode()
                if batch_statistics:
                    disable_dropout(model.module)
                else:
                    model.module.eval()
                loss = self.task.loss(model.module, model.to_device(batch))
                gradient = torch.zeros(self.layout.size, device=model.device)
                gradient[: self.layout.num_parameters] = model.compute_live_gradient(
                    [loss], model.find_live(full), None
                )
                yield gradient, next(batch_weights)

    def step_in_stages(self, start: Tensor, stages: Sequence[Mask], config: TrainingConfig) -> Tensor:
        local, model, weights = self._local, self._model, start
        batch = next(local.iterate_batches(config, local.make_generator("stages"), 1))
        parameters = Mask.from_tensors(self.layout, lambda spec: spec.role != "buffer")

        def yield_without_dropout() -> Iterator[Any]:
            # The loop has put the network in training mode when it asks for the minibatch.
            disable_dropout(model.module)
            yield batch

        with local.seed_torch("stages"):
            for number, stage in enumerate(stages, start=1):
                entries = stage & parameters
                try:
                    values = train(model, self.task, yield_without_dropout(), Training(weights, entries, config, 1))
                except TrainingDiverged as error:
                    error.is_first_step = number == 1
                    raise
                weights = entries.put(values, weights.to(values.device, copy=True))
        return weights

    def observe_units(self, weights: Tensor, nodes: Collection[str], callback: Callable[[str, Tensor], None]) -> None:
        self._load_to_observe(weights)
        self._predict(self._local.train_examples, ObservedNetwork(self._model.module, nodes, callback))

    def collect_inputs(self, weights: Tensor, kind: type[nn.Module], limit: int | None = None) -> dict[str, Tensor]:
        own = self._local.train_examples
        examples = own if limit is None else Subset(self.examples.train, range(min(limit, self.num_examples)))
        inputs: dict[str, list[Tensor]] = {}
        self._load_to_observe(weights)
        with ExitStack() as hooks:
            for name, part in self._model.module.named_modules():
                if isinstance(part, kind):
                    append = partial(_append_input, inputs.setdefault(name, []))
                    hooks.enter_context(part.register_forward_pre_hook(append))
            if inputs:
                self._predict(examples, self._model.module)
        return {name: torch.cat(parts) for name, parts in inputs.items() if parts and parts[0].dim() == 2}

    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the task's metrics on the test examples, and those on the validation examples with their prefix.

        For a network with channel gates, ``channel_sparsity`` is the share of closed gates.
        """
        examples, metrics = self.examples, dict[str, float]()
        if examples.n_test or examples.n_validation:
            self._model.load(weights)
        if examples.n_test:
            metrics = {**self._measure_with_gates(examples.test), TEST_EXAMPLES: float(examples.n_test)}
        if examples.validation is not None and examples.n_validation:
            chosen_by = {**self._measure_with_gates(examples.validation), "examples": float(examples.n_validation)}
            metrics |= {f"{VALIDATION}{name}": value for name, value in chosen_by.items()}
        return metrics

    def evaluate_subgroups(self, layout: Layout, weights: Tensor) -> dict[str, float]:
        examples, task = self.examples, self.task
        if not examples.test_subgroups or not examples.n_test:
            return {}
        with seed_torch(0):
            network = task.model()
        nn.Module.load_state_dict(network, layout.unflatten(weights), strict=False)
        measured, targets = task.measure_all(network.eval(), examples.test)
        names = examples.test_subjects or examples.test_ids
        subjects = np.unique(np.array(names), return_inverse=True)[1]

        def measure(rows: np.ndarray) -> Mapping[str, float]:
            return task.metrics(measured[rows], targets[rows])

        found = measure_subgroups(measure, examples.test_subgroups, subjects, task.config.min_subgroup)
        # The server would refuse the whole update for one name with markup, or a long one.
        return {name: value for name, value in found.items() if is_metric_name(name)}

    def evaluate_validation(self, weights: Tensor) -> dict[str, float]:
        if self.examples.validation is None or not self.num_validation_examples:
            return {}
        self._model.load(weights)
        return self._measure(self.examples.validation)

    def _measure_with_gates(self, dataset: Dataset[Any]) -> dict[str, float]:
        gates: list[Tensor] = []
        with ExitStack() as hooks:
            for name, part in self._model.module.named_modules():
                if name.rpartition(".")[2] == "gate":
                    hook = part.register_forward_hook(lambda _, __, q: gates.append(q.detach().cpu().flatten()))
                    hooks.enter_context(hook)
            metrics = self._measure(dataset)
        # Report the share of closed gates over examples and gated layers (MetaGater, section 5).
        closed = {"channel_sparsity": float((torch.cat(gates) == 0).double().mean())} if gates else {}
        return {**metrics, **closed}

    def _measure(self, dataset: Dataset[Any]) -> dict[str, float]:
        """Return the exact metrics of the loaded model."""
        metrics = self.task.evaluate(self._model.module, dataset)
        self._model.check_parameters()
        return metrics

    def _load_to_observe(self, weights: Tensor) -> None:
        self._model.load(weights)
        self._model.module.eval()

    @torch.no_grad()
    def _predict(self, examples: Any, network: nn.Module) -> None:
        """Run examples through a network of the site's layers."""
        for batch in self.task.iterate_batches(examples, OBSERVED_BATCH):
            self.task.predict(network, self._model.to_device(batch))


def _append_input(inputs: list[Tensor], module: nn.Module, arguments: tuple[Any, ...]) -> None:  # noqa: ARG001
    """Append the first argument of a layer's forward pass to a list."""
    inputs.append(arguments[0].detach().cpu())
