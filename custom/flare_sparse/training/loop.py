"""The training loop of all methods. Entries outside ``trainable`` keep their bits with every optimiser.

Values of a minibatch that are not finite: the most frequent cause of a loss that is NaN.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import FlareSparseError
from ..tasks.task import Task
from .config import Precision
from .flat import FlatModel
from .live import LiveEntries
from .trainer import Training


@dataclass(frozen=True)
class NonFinite:
    """Values of one tensor of a batch that are NaN or infinite.

    Attributes:
        tensor: path of the tensor, such as ``batch[0]``.
        rows: indices of the affected examples, in order.
        columns: indices of the affected columns of a tensor of shape (examples, columns); empty for other shapes.
        kind: ``"NaN"`` or ``"infinity"``.
        examples: number of examples in the tensor.
    """

    tensor: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    kind: str
    examples: int

    def __str__(self) -> str:
        columns = f", column {self.columns[0]}" if self.columns else ""
        return (
            f"{self.tensor} holds {self.kind} in {len(self.rows)} of {self.examples} examples (first: example "
            f"{self.rows[0]}{columns})"
        )


def find_non_finite(batch: Any) -> list[NonFinite]:
    """Return the tensors of a batch, its inputs and its targets, that contain NaN or infinite values."""
    parts = _iterate_tensors(batch, "batch")
    return [problem for path, tensor in parts if (problem := _inspect_tensor(path, tensor))]


def _iterate_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _iterate_tensors(part, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _iterate_tensors(part, f"{path}[{index}]")


def _inspect_tensor(path: str, tensor: Tensor) -> NonFinite | None:
    if not tensor.is_floating_point() or not tensor.dim() or bool((finite := torch.isfinite(tensor)).all()):
        return None
    per_example = ~finite.reshape(len(tensor), -1)
    rows = per_example.any(dim=1).nonzero().flatten().tolist()
    columns = per_example.any(dim=0).nonzero().flatten().tolist() if tensor.dim() == 2 else []
    kind = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
    return NonFinite(path, tuple(rows), tuple(columns), kind, len(tensor))


class TrainingDiverged(FlareSparseError):
    """The loss is NaN or infinite; the site sends nothing.

    Args:
        text: the step, the cause and the remedy.
        is_first_step: whether no step came before, so that the received model or the data is the cause.
    """

    code = "E_DIVERGED"

    def __init__(self, text: str, *, is_first_step: bool = False):
        super().__init__(text)
        self.is_first_step = is_first_step


def train(model: FlatModel, task: Task, batches: Iterable[Any], training: Training) -> Tensor:
    """Train on ``batches`` (docs/algorithms.md, section 1.8).

    Gradient, optimiser state and steps have the size of the trainable entries.

    Args:
        model: the site's network.
        task: computes the loss.
        batches: minibatches in order.
        training: what is trained; ``start`` is changed in place meanwhile, and restored.

    Returns:
        ``(trainable.count,)`` trained values of the trainable entries, on the model's device.

    Raises:
        TrainingDiverged: the loss is NaN or infinite.
        ConfigError: the network writes its own parameters.
    """
    start, trainable, config, source = training.start, training.trainable, training.config, training.source
    proximal_strength = training.proximal_strength + config.proximal
    live = model.find_live(trainable)
    model.load(start.clone() if live.index is None else start)
    model.set_training_mode(live)
    if live.index is None:
        weights = nn.Parameter(model.flat)
        origin = model.flat.clone() if proximal_strength else model.flat
    else:
        patch = training.patch
        if patch is not None and patch.mask is trainable:
            origin = patch.values[: live.count].to(model.device)
        else:
            origin = model.flat[live.index]
        weights = nn.Parameter(origin.clone())
    optimizer = config.build_optimizer(weights, training.round, [part.count for part in live.parameters])
    scale = None if training.step_scale is None else _select_parameters(training.step_scale, live, weights)
    # float16 has five bits of exponent: without a scale, small gradients vanish. bfloat16 has those of float32.
    scaler = torch.amp.GradScaler(model.device.type, enabled=config.precision == "float16")
    compute = (
        source.compute_gradient if source else partial(_compute_mean_gradient, model, task, config.precision, scaler)
    )
    step = 0
    try:
        for step, group in enumerate(_group(batches, 1 if source else config.accumulate), start=1):
            # Written before the next pass, not after the step: no pass reads the weights of the last step.
            if step > 1 and live.index is not None:
                model.flat.index_copy_(0, live.index, weights.detach())
            weights.grad = compute(group, step, live, weights.grad)
            scaler.unscale_(optimizer)
            with torch.no_grad():
                if proximal_strength:
                    weights.grad.add_(weights - origin, alpha=proximal_strength)
                if training.tolerance is not None and weights.grad.square().sum() <= training.tolerance:
                    break
                if config.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_([weights], config.clip_norm)
            before = None if scale is None else weights.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            training.after_step()
            # Every optimiser's step is proportional to its learning rate, and its state does not depend on the rate.
            if scale is not None and before is not None:
                torch.where(scale == 1, weights.data, torch.lerp(before, weights.data, scale), out=weights.data)
        model.check_parameters()
        # Forward passes update the running statistics; those that are not trainable are left out.
        buffers = model.collect_buffers()[live.buffers]
        trained = weights.detach()
        return torch.cat([trained, buffers]) if buffers.numel() else trained
    finally:
        # The network's parameters are views of the vector that the site holds, and a pass may write into their data.
        if step and live.index is not None:
            model.flat.index_copy_(0, live.index, origin)


def _select_parameters(vector: Tensor, live: LiveEntries, like: Tensor) -> Tensor:
    """Return the values of a vector ``(P,)`` at the trainable parameters."""
    moved = vector.to(like.device)
    return moved[: like.numel()] if live.index is None else moved[live.index]


def _group(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of ``size`` successive minibatches; the last one may be shorter."""
    remaining = iter(batches)
    while group := list(islice(remaining, size)):
        yield group


def _compute_mean_gradient(
    model: FlatModel,
    task: Task,
    precision: Precision,
    scaler: torch.amp.GradScaler,
    group: list[Any],
    step: int,
    live: LiveEntries,
    out: Tensor | None,
) -> Tensor:
    """Return the gradient ``(live.count,)`` of the mean loss over a step's minibatches; ``out`` is overwritten.

    With an enabled ``scaler`` it is that of the scaled loss.
    """
    losses = _compute_losses(model, task, group, step, precision)
    return model.compute_live_gradient(map(scaler.scale, losses), live, out)


def _compute_losses(
    model: FlatModel, task: Task, group: list[Any], step: int, precision: Precision
) -> Iterator[Tensor]:
    """Yield the loss of each minibatch of a step, divided by their number.

    Raises:
        TrainingDiverged: a loss is NaN or infinite.
    """
    for batch in group:
        with torch.autocast(model.device.type, getattr(torch, precision), enabled=precision != "float32"):
            loss = task.loss(model.module, model.to_device(batch))
        if not torch.isfinite(loss):
            remedy = "lower training.lr or set clip_norm"
            text = explain_divergence(loss, batch, f"step {step}", remedy)
            raise TrainingDiverged(text, is_first_step=step == 1)
        # Divided, and not the gradient: the tensors that stay at the site have gradients of their own.
        yield loss / len(group) if len(group) > 1 else loss


def explain_divergence(loss: Tensor, batch: Any, step: str, remedy: str) -> str:
    """Return the text of a loss that is not finite: the minibatch is the cause if it contains NaN.

    Args:
        loss: the loss, a scalar.
        batch: the minibatch that it was computed on.
        step: the step or stage, such as ``"step 3"``.
        remedy: what to change if the minibatch is sound.
    """
    text = f"the loss is {loss.item()} in {step}"
    if problems := find_non_finite(batch):
        return (
            f"{text}, because the data is not finite: {'; '.join(map(str, problems))} of this minibatch. Impute or "
            "remove these values in the task's load(); flare-sparse check CONFIG lists all of them"
        )
    return f"{text}; the minibatch is finite, so {remedy}"


def disable_dropout(module: nn.Module) -> None:
    """Put dropout layers in eval mode; leave every other module in training mode."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
