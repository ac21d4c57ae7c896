"""Local training with differential privacy: gradients of single subjects, clipped and summed with noise.

The gradient of a record is computed from that record alone, by ``torch.func`` or one record at a time. Its bound holds
for every loss and network, as hooks on the layers of a minibatch would not: a loss over several subjects, such as
Cox's, would mix them unnoticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import default_collate

from ..compute.structure.nodes import choose_groups, mixes_examples
from ..core.errors import ConfigError
from ..core.mask import Mask
from ..core.params import Layout
from ..privacy.dp.accounting import SamplingPlan
from ..privacy.dp.mechanism import PrivateQuery, SiteMechanism, clip_rows
from ..tasks.task import Task
from .config import TrainingConfig
from .live import LiveEntries
from .local_task import LocalTask
from .loop import disable_dropout
from .trainer import Trainer, Training, Wrapper


def group_subjects(count: int, subjects: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of each subject's training examples, in the order of their first ones.

    Args:
        count: number of training examples.
        subjects: the subject of each; empty: every example is a subject of its own.

    >>> group_subjects(5, ("b", "a", "b", "c", "a")), group_subjects(2, ())
    (((0, 2), (1, 4), (3,)), ((0,), (1,)))
    """
    records: dict[str | int, list[int]] = {}
    keys: Sequence[str | int] = subjects or range(count)
    for index, subject in enumerate(keys):
        records.setdefault(subject, []).append(index)
    return tuple(map(tuple, records.values()))


_LOG = logging.getLogger(__name__)


class SilentTrainer(Wrapper):
    """Lets no metrics leave the site, and computes none."""

    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        return {}

    def evaluate_subgroups(self, layout: Layout, weights: Tensor) -> dict[str, float]:
        return {}


class RecordLoss(nn.Module):
    """The loss of a task as a module, so that all parameters below it can be replaced."""

    def __init__(self, network: nn.Module, task: Task):
        super().__init__()
        self.network, self._task = network, task

    def forward(self, batch: Any) -> Tensor:
        return self._task.loss(self.network, batch)


class PrivateTrainer(Wrapper):
    """Trains with differential privacy; nothing else may read the training examples.

    Args:
        inner: trains with the gradients that it is given.
        local: the task, the site's examples and the network.
        mechanism: sampling, noise and charge.
    """

    def __init__(self, inner: Trainer, local: LocalTask, mechanism: SiteMechanism):
        super().__init__(inner)
        self._local = local
        self.mechanism: SiteMechanism = mechanism
        examples = local.examples
        self._records = group_subjects(examples.n_train, examples.train_subjects)

    def train(self, training: Training) -> Tensor:
        labels = (self._local.name, *training.labels), training.proximal_strength
        private = self._open(training, labels)
        trained = self._inner.train(replace(training, source=private))
        # Before anything can leave: a crash after it repeats the training to the same bits, at no further charge.
        private.question.record(trained)
        return trained

    def compute_private_gradient(
        self, weights: Tensor, entries: Mask, config: TrainingConfig, lots: int | None
    ) -> Tensor:
        once, steps = config.model_copy(update={"epochs": 1}), None if lots is None else lots * config.accumulate
        training = Training(weights, entries, once, 0, steps, stream="gradient")
        private = self._open(training, (self._local.name, *training.labels))
        model = self._local.model
        with self._local.seed_torch("gradients", *training.labels):
            model.load(weights)
            model.set_training_mode()
            disable_dropout(model.module)
            live = model.find_live(entries)
            mean = private.compute_mean_gradient(live)
        gradient = torch.zeros(self.layout.size)
        gradient[slice(0, live.count) if live.index is None else live.index.cpu()] = mean
        return gradient

    def compute_gradients(
        self, weights: Tensor, batch_size: int, batches: int | None, t: int, *, batch_statistics: bool = True
    ) -> Iterator[tuple[Tensor, float]]:
        raise _build_refusal("scores of gradients")

    def step_in_stages(self, start: Tensor, stages: Sequence[Mask], config: TrainingConfig) -> Tensor:
        raise _build_refusal("steps in stages")

    def observe_units(self, weights: Tensor, nodes: Collection[str], callback: Callable[[str, Tensor], None]) -> None:
        raise _build_refusal("activations of units")

    def _open(self, training: Training, labels: tuple[object, ...]) -> PrivateTraining:
        """Return the private training of a request.

        Args:
            training: the training.
            labels: what decides the answer beside it.

        Raises:
            BudgetSpent: it would exceed a budget.
        """
        config = training.config
        plan = SamplingPlan.build(len(self._records), config.batch_size, config.epochs, 1, config.accumulate)
        if training.steps is not None:
            plan = replace(plan, steps=-(-training.steps // config.accumulate))
        local, examples = self._local, self._local.examples
        decisive = *labels, config, self._records, tuple(examples.train_ids)
        question = self.mechanism.open(training.start, training.trainable, plan, training.round, decisive)
        local.train_examples.count_sampling(plan.steps * plan.lot_size * examples.n_train // plan.subjects, plan.steps)
        generator = local.make_generator("augment", *training.labels)
        return PrivateTraining(question, local, self._records, config.batch_size, generator)


@dataclass
class PrivateTraining:
    """The training of one request: draws the subjects of each step and computes its noisy gradient.

    Attributes:
        question: sampling, noise and charge.
        local: the task, the site's examples and the network.
        records: positions of each subject's training examples.
        records_at_once: records whose gradients are in memory at the same time, and subjects whose gradients are.
        augmentation_generator: source of the augmentation.
    """

    question: PrivateQuery
    local: LocalTask
    records: Sequence[Sequence[int]]
    records_at_once: int
    augmentation_generator: torch.Generator

    def __post_init__(self) -> None:
        self._model, self._task = self.local.model, self.local.task
        self._loss, self._is_vectorized = RecordLoss(self._model.module, self._task), True

    def iterate_lots(self) -> Iterator[list[int]]:
        """Yield the subjects of each step; a list may be empty, and the step is noise alone then."""
        for step in range(1, self.question.plan.steps + 1):
            yield self.question.sample_subjects(step)

    def compute_gradient(self, group: list[list[int]], step: int, live: LiveEntries, out: Tensor | None) -> Tensor:
        """Return the noisy gradient of a step, whose ``group`` is a list of its subjects."""
        (subjects,) = group
        total = torch.zeros(live.count, dtype=torch.float64, device=self._model.device)
        for first in range(0, len(subjects), self.records_at_once):
            rows = self._compute_rows(subjects[first : first + self.records_at_once], live)
            total += clip_rows(rows, self.question.mechanism.config.clip)
        noisy = self.question.privatize(total, step)
        return noisy.float() if out is None else out.copy_(noisy)

    def compute_mean_gradient(self, live: LiveEntries) -> Tensor:
        """Return the mean ``(live.count,)`` of the noisy gradients of all lots, on the CPU, and charge for it."""
        mean = torch.zeros(live.count)
        for step, subjects in enumerate(self.iterate_lots(), start=1):
            mean += self.compute_gradient([subjects], step, live, None).cpu() / self.question.plan.steps
        self.question.record(mean)
        return mean

    @torch.no_grad()
    def _compute_rows(self, subjects: Sequence[int], live: LiveEntries) -> Tensor:
        """Return the gradient of each subject, the mean over its records, ``(subjects, live.count)``."""
        records = [
            (row, record, 1 / len(self.records[subject]))
            for row, subject in enumerate(subjects)
            for record in self.records[subject]
        ]
        rows = torch.zeros(len(subjects), live.count, device=self._model.device)
        for first in range(0, len(records), self.records_at_once):
            owners, indices, weights = zip(*records[first : first + self.records_at_once], strict=True)
            gradients = self._compute_record_gradients(self._load(indices), live)
            gradients.mul_(torch.tensor(weights, device=rows.device)[:, None])
            rows.index_add_(0, torch.tensor(owners, device=rows.device), gradients)
        return rows

    def _load(self, indices: Sequence[int]) -> list[Any]:
        """Return records as minibatches of one, so that augmentation cannot mix them."""
        items = self.local.train_examples.uncounted.__getitems__(list(indices))
        batches = (self._task.augment(self._task.collate([item]), self.augmentation_generator) for item in items)
        return [self._model.to_device(batch) for batch in batches]

    def _compute_record_gradients(self, records: Sequence[Any], live: LiveEntries) -> Tensor:
        """Return the gradient of each record, ``(records, live.count)``."""
        specs = [spec.name for spec in self._model.layout.tensors if spec.role != "buffer"]
        tensors = {
            f"network.{name}": (parameter.detach(), entries)
            for name, parameter, entries in zip(specs, self._model.parameters, live.parameters, strict=True)
            if entries.count
        }
        parameters = {name: parameter for name, (parameter, _) in tensors.items()}
        gradients = self._differentiate(parameters, records) if parameters else {}
        out = torch.zeros(len(records), live.count, device=self._model.device)
        for name, (_, entries) in tensors.items():
            flat = gradients[name].flatten(1)
            out[:, entries.entries] = flat if entries.index is None else flat.index_select(1, entries.index)
        return out

    def _differentiate(self, parameters: dict[str, Tensor], records: Sequence[Any]) -> dict[str, Tensor]:
        def compute_loss(values: dict[str, Tensor], batch: Any) -> Tensor:
            # Clones: what a pass writes into a buffer depends on the data and must reach neither another record nor
            # the update.
            buffers = {name: buffer.clone() for name, buffer in self._loss.named_buffers()}
            loss: Tensor = functional_call(self._loss, {**values, **buffers}, (batch,))
            return loss

        differentiate = grad(compute_loss)
        if self._is_vectorized:
            try:
                batch = default_collate(list(records))
                result: dict[str, Tensor] = vmap(differentiate, in_dims=(None, 0), randomness="different")(
                    parameters, batch
                )
                return result
            # Whatever torch.func cannot do with a task's code; a defect of the code shows again below.
            except Exception as error:  # noqa: BLE001
                _LOG.info("gradients are computed one record at a time: %s", type(error).__name__)
                self._is_vectorized = False
        single = [differentiate(parameters, record) for record in records]
        return {name: torch.stack([gradients[name].to_dense() for gradients in single]) for name in parameters}


def _build_refusal(action: str) -> ConfigError:
    return ConfigError(
        f"privacy: the method computes {action} from training examples, which no budget covers; choose fedavg, "
        "fedsparsify or neurosfl"
    )


def check_private_network(module: nn.Module) -> None:
    """Raise for layers in which one subject's values reach another's.

    Raises:
        ConfigError: a layer normalises by the minibatch, or keeps statistics of the data.
    """
    for name, part in module.named_modules():
        if mixes_examples(part):
            is_batch_norm = isinstance(part, nn.modules.batchnorm._BatchNorm)
            reason = "normalises by the whole minibatch" if is_batch_norm else "keeps running statistics of the data"
            raise ConfigError(
                f"privacy: layer {name!r} ({type(part).__name__}) {reason}, so no gradient belongs to one subject "
                "alone; set task.model.norm: group, or, in a task of your own, use group, layer or instance "
                "normalisation without running statistics, such as "
                f"nn.GroupNorm({choose_groups(part.num_features)}, {part.num_features})"
            )
