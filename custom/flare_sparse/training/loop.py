"""The only training loop: entries outside ``trainable`` keep their value bit for bit, whatever the optimiser does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FlareSparseError
from ..mask import Mask
from ..task import Task
from .flat import FlatModel


class TrainingDiverged(FlareSparseError):
    """The loss is no longer a number; nothing is sent."""

    code = "E_DIVERGED"


def train(
    model: FlatModel,
    task: Task,
    batches: Iterable[Any],
    start: Tensor,
    trainable: Mask,
    optimizer: torch.optim.Optimizer,
    *,
    pull: float = 0.0,
    clip_norm: float | None = None,
) -> Tensor:
    """Train from ``start`` on ``batches``.

    The gradient is masked before the step and the frozen entries are restored after it (C5): momentum and weight
    decay move an entry whose gradient is zero.

    Args:
        model: the site's network; ``optimizer`` steps its ``flat``.
        task: gives the loss.
        batches: minibatches in order.
        start: ``(P,)`` weights to begin with; left as they are.
        trainable: which entries may change, buffers included.
        optimizer: new, made for ``model.flat``.
        pull: strength of a proximal term ``pull / 2 * ||w - start||^2``.
        clip_norm: largest L2 norm of the masked gradient.

    Returns:
        ``(P,)`` trained weights.

    Raises:
        TrainingDiverged: the loss is NaN or infinite.
    """
    model.load(start)
    size = model.layout.trainable_size
    model.set_training_mode(trainable.bits[:size])
    origin = start[:size].to(model.device)
    free = trainable.bits[:size].to(model.device)
    frozen = None if bool(free.all()) else ~free
    for step, batch in enumerate(batches, start=1):
        loss = task.loss(model.module, model.to_device(batch))
        if not torch.isfinite(loss):
            raise TrainingDiverged(f"the loss is {loss.item()} in step {step}; lower training.lr or set clip_norm")
        model.backward(loss)
        with torch.no_grad():
            if pull:
                model.gradient.add_(model.flat - origin, alpha=pull)
            if frozen is not None:
                model.gradient.masked_fill_(frozen, 0)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([model.flat], clip_norm)
        optimizer.step()
        if frozen is not None:
            torch.where(free, model.flat.data, origin, out=model.flat.data)
    trained = model.to_vector()
    buffers = trainable.bits[size:]
    trained[size:] = torch.where(buffers, trained[size:], start[size:])
    return trained


def disable_dropout(module: nn.Module) -> None:
    """Dropout of any kind stands still; everything else goes on training."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
