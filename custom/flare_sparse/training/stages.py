"""Successive gradient steps on one batch, each on its own tensors (docs/algorithms.md, section 6.6)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.mask import Mask
from ..tasks.task import Task
from .flat import FlatModel
from .loop import TrainingDiverged, disable_dropout, explain_divergence


def step_in_stages(
    model: FlatModel,
    task: Task,
    batch: Any,
    start: Tensor,
    stages: Sequence[Mask],
    learning_rate: float,
    clip_norm: float | None = None,
) -> Tensor:
    """Take one step ``w <- w - learning_rate * grad L(w)`` per stage, on that stage's entries only; dropout is off.

    The result equals that of one training step per stage on this batch. In MetaGater, stage II computes with the gates
    of stage I's step but with the same backbone.

    Args:
        model: the site's network.
        task: computes the loss.
        batch: minibatch of all stages.
        start: ``(P,)`` initial weights; not modified.
        stages: disjoint masks of parameters.
        learning_rate: step size of all stages.
        clip_norm: largest L2 norm of a stage's gradient.

    Returns:
        ``(P,)`` weights after the last stage.

    Raises:
        TrainingDiverged: the loss is NaN or infinite.
    """
    # A copy, because the steps change the loaded vector.
    model.load(start.clone())
    model.set_training_mode()
    disable_dropout(model.module)
    batch = model.to_device(batch)
    size = model.layout.num_parameters
    specs = zip(model.layout.tensors, model.layout.offsets, strict=False)
    positions = {spec.name: slice(offset, offset + spec.size) for spec, offset in specs}
    parameters_by_name = {name: p for name, p in model.module.named_parameters() if name in positions}
    for number, stage in enumerate(stages, start=1):
        stage_names = [name for name in parameters_by_name if bool(stage.bits[positions[name]].any())]
        loss = task.loss(model.module, batch)
        if not torch.isfinite(loss):
            remedy = "lower the learning rate of the step"
            text = explain_divergence(loss, batch, f"stage {number}", remedy)
            raise TrainingDiverged(text, is_first_step=number == 1)
        parameters = [parameters_by_name[name] for name in stage_names]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        masked: list[tuple[Tensor, Tensor]] = []
        for name, parameter, gradient in zip(stage_names, parameters, gradients, strict=True):
            if gradient is not None:
                bits = stage.bits[positions[name]].view(parameter.shape).to(model.device)
                masked.append((parameter, torch.where(bits, gradient.to_dense(), 0.0)))
        scale = 1.0 if clip_norm is None else _compute_clip_scale(masked, clip_norm)
        for tensor, gradient in masked:
            tensor.data.add_(gradient, alpha=-learning_rate * scale)
    weights = model.to_vector()
    weights[size:] = start[size:]
    return weights


def _compute_clip_scale(gradients: Sequence[tuple[Tensor, Tensor]], limit: float) -> float:
    """Return the factor, at most 1, that shortens a gradient to the L2 norm ``limit``."""
    norm = math.sqrt(sum(float(gradient.square().sum(dtype=torch.float64)) for _, gradient in gradients))
    return min(1.0, limit / max(norm, 1e-12))
