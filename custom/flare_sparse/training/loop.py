"""The training loop of all methods. Entries outside ``trainable`` keep their bits with every optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import FlareSparseError
from ..mask import Mask
from ..task import Task
from .flat import FlatModel
from .inputs import find_non_finite

Precision = Literal["float32", "bfloat16"]
"""Number format in which autocast computes the operations that allow it."""


class TrainingDiverged(FlareSparseError):
    """The loss is NaN or infinite; the site sends nothing."""

    code = "E_DIVERGED"


def train(
    model: FlatModel,
    task: Task,
    batches: Iterable[Any],
    start: Tensor,
    trainable: Mask,
    optimizer: torch.optim.Optimizer,
    *,
    proximal_strength: float = 0.0,
    clip_norm: float | None = None,
    step_scale: Tensor | None = None,
    step_personal: Callable[[], None] = lambda: None,
    precision: Precision = "float32",
    accumulate: int = 1,
) -> Tensor:
    """Train from ``start`` on ``batches`` (docs/algorithms.md, section 1.8).

    Args:
        model: the site's network.
        task: computes the loss.
        batches: minibatches in order.
        start: ``(P,)`` initial weights; not modified.
        trainable: entries that may change, buffers included.
        optimizer: a new optimiser of ``model.flat``.
        proximal_strength: factor ``mu`` of a proximal term ``mu / 2 * ||w - start||^2``.
        clip_norm: largest L2 norm of the masked gradient.
        step_scale: ``(P,)`` factors of the optimiser's steps, as if each entry had its own learning rate; None: 1.
        step_personal: takes a step of the tensors that stay at the site.
        precision: number format of the forward and backward passes.
        accumulate: minibatches of a step, which follows the mean of their gradients.

    Returns:
        ``(P,)`` trained weights.

    Raises:
        TrainingDiverged: the loss is NaN or infinite.
    """
    model.load(start)
    size = model.layout.trainable_size
    model.set_training_mode(trainable.bits[:size])
    origin = start[:size].to(model.device)
    unfrozen = trainable.bits[:size].to(model.device)
    frozen = None if bool(unfrozen.all()) else ~unfrozen
    scale = None if step_scale is None else step_scale[:size].to(model.device)
    for step, group in enumerate(_group(batches, accumulate), start=1):
        model.gradient.zero_()
        for batch in group:
            loss = _compute_loss(model, task, batch, step, precision)
            # Divided, and not the gradient: the tensors that stay at the site have gradients of their own.
            (loss / len(group) if len(group) > 1 else loss).backward()
        with torch.no_grad():
            if proximal_strength:
                model.gradient.add_(model.flat - origin, alpha=proximal_strength)
            # Masked before clipping, so that the norm is that of the entries that train.
            if frozen is not None:
                model.gradient.masked_fill_(frozen, 0)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([model.flat], clip_norm)
        before = None if scale is None else model.flat.detach().clone()
        optimizer.step()
        step_personal()
        # Every optimiser's step is proportional to its learning rate, and its state does not depend on the rate.
        if scale is not None and before is not None:
            torch.where(scale == 1, model.flat.data, torch.lerp(before, model.flat.data, scale), out=model.flat.data)
        # Momentum and weight decay move entries whose gradient is zero, so masking the gradient is not enough: frozen
        # entries are restored after every step. They keep their bits, and a patch over them stays exact.
        if frozen is not None:
            torch.where(unfrozen, model.flat.data, origin, out=model.flat.data)
    # Forward passes update the running statistics; those that are not trainable are reset once, at the end.
    trained = model.to_vector()
    buffers = trainable.bits[size:]
    trained[size:] = torch.where(buffers, trained[size:], start[size:])
    return trained


def _group(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of ``size`` successive minibatches; the last one may be shorter."""
    remaining = iter(batches)
    while group := list(islice(remaining, size)):
        yield group


def _compute_loss(model: FlatModel, task: Task, batch: Any, step: int, precision: Precision) -> Tensor:
    """Return the loss of a minibatch.

    Raises:
        TrainingDiverged: it is NaN or infinite.
    """
    # No scaling of the loss: bfloat16 has the exponents of float32, so that small gradients do not vanish.
    with torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        loss = task.loss(model.module, model.to_device(batch))
    if not torch.isfinite(loss):
        raise TrainingDiverged(explain_divergence(loss, batch, f"step {step}", "lower training.lr or set clip_norm"))
    return loss


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
