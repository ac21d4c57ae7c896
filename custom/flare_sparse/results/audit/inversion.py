"""Inversion: rebuild a site's inputs from one message of scores or of a gradient step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...core.errors import DataError
from ...tasks.task import Task

Message = Literal["update", "scores"]
TOTAL_VARIATION = 1e-3
"""Weight of the total variation of the rebuilt images (Geiping et al. 2020, section 4)."""
STEP = 0.1
"""Learning rate of the optimisation, in standard deviations of the inputs."""
WINDOW = 7
"""Side of the windows of SSIM."""


@dataclass(frozen=True)
class Reconstruction:
    """The rebuilt input that resembles one of the true ones most.

    Attributes:
        way: ``linear layer`` or ``optimisation``.
        psnr: peak signal-to-noise ratio in dB; infinite: equal.
        ssim: structural similarity; None: inputs are no images.
        guess_psnr: that of the mean of other examples, which needs no message.
        true: the true input.
        rebuilt: the rebuilt input.
    """

    way: str
    psnr: float
    ssim: float | None
    guess_psnr: float
    true: Tensor
    rebuilt: Tensor


def build_message(task: Task, model: nn.Module, batch: Any, message: Message) -> list[Tensor]:
    """Return what one step of plain SGD, divided by its learning rate, or the saliency reveals, by parameter.

    Args:
        task: its loss is used.
        model: the model that the server sent.
        batch: the minibatch.
        message: ``update``: gradients; ``scores``: ``abs(w * gradient)``.
    """
    parameters = list_parameters(model)
    gradients = torch.autograd.grad(task.loss(model.eval(), batch), parameters, allow_unused=True)
    values = [torch.zeros_like(p) if g is None else g.detach() for p, g in zip(parameters, gradients, strict=True)]
    return values if message == "update" else compute_saliency(parameters, values)


def list_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters, in the order of messages."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def read_linear_layer(model: nn.Module, message: Sequence[Tensor], kind: Message) -> Tensor | None:
    """Return the inputs ``(units, features)`` that the units of a first linear layer reveal; None without one.

    The change of a unit's weights, divided by that of its bias, is the input of an example that alone moved the unit
    (Geiping et al. 2020, proposition D.1). Scores show the absolute values: ``score / abs(w)`` is that of the gradient.
    """
    parameters = list_parameters(model)
    first = next((part for part in model.modules() if list(part.parameters(recurse=False))), None)
    if not isinstance(first, nn.Linear) or first.bias is None:
        return None
    position = {id(parameter): index for index, parameter in enumerate(parameters)}
    if id(first.weight) not in position or id(first.bias) not in position:
        return None
    weight, bias = message[position[id(first.weight)]], message[position[id(first.bias)]]
    if kind == "scores":
        weight, bias = weight / first.weight.detach().abs(), bias / first.bias.detach().abs()
    quotients = weight / bias[:, None]
    return quotients[torch.isfinite(quotients).all(1)]


def optimize_inputs(
    task: Task,
    model: nn.Module,
    message: Sequence[Tensor],
    kind: Message,
    batch: Any,
    start: Tensor,
    steps: int,
    scale: float = 1.0,
) -> Tensor:
    """Return inputs whose message points in the direction of the given one.

    Geiping et al. 2020 (arXiv:2003.14053), equation 4: one minus the cosine similarity plus total variation, by Adam on
    the signs of its gradient. The attacker knows the targets.

    Args:
        task: its loss is used.
        model: the model that the server sent.
        message: of :func:`build_message`.
        kind: what the message holds.
        batch: a minibatch whose first part is replaced.
        start: inputs to start from, of the shape of the minibatch's.
        steps: number of steps.
        scale: standard deviation of the inputs.
    """
    model.eval()
    parameters = list_parameters(model)
    inputs = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([inputs], lr=STEP * scale)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps * share // 8 for share in (3, 5, 7)], 0.1)
    best, least = start, math.inf
    for _ in range(steps):
        loss = task.loss(model, (inputs, *batch[1:]))
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        values = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        values = values if kind == "update" else compute_saliency(parameters, values)
        objective = 1 - _compute_cosine(values, message)
        if float(objective.detach()) < least:
            best, least = inputs.detach().clone(), float(objective.detach())
        objective = objective + TOTAL_VARIATION * _compute_variation(inputs)
        (direction,) = torch.autograd.grad(objective, [inputs])
        # Adam on signs: the scale of a gradient of gradients differs by orders of magnitude between networks.
        inputs.grad = direction.sign()
        optimizer.step()
        schedule.step()
    return best


def choose_reconstruction(way: str, rebuilt: Tensor, true: Tensor, mean: Tensor) -> Reconstruction:
    """Return the pair of a rebuilt and a true input of the highest PSNR.

    Args:
        way: how they were rebuilt.
        rebuilt: ``(m, ...)``.
        true: ``(B, ...)``.
        mean: mean of other examples.

    Raises:
        DataError: nothing was rebuilt.
    """
    if not len(rebuilt):
        raise DataError("no input could be rebuilt: no unit has a bias that moved")
    pairs = [(compute_psnr(one, other), i, j) for i, one in enumerate(rebuilt) for j, other in enumerate(true)]
    psnr, i, j = max(pairs)
    return Reconstruction(
        way, psnr, compute_ssim(rebuilt[i], true[j]), compute_psnr(mean, true[j]), true[j], rebuilt[i]
    )


def compute_psnr(image: Tensor, true: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB, of the range of the true image."""
    error = float((image - true).double().square().mean())
    peak = float((true.max() - true.min()).double()) or 1.0
    return math.inf if error == 0 else 10 * math.log10(peak**2 / error)


def compute_ssim(image: Tensor, true: Tensor) -> float | None:
    """Return the structural similarity of two images ``(channels, ...)``; None for inputs without two dimensions."""
    spatial = true.dim() - 1
    if spatial not in (2, 3) or min(true.shape[1:]) < WINDOW:
        return None
    from monai.metrics import SSIMMetric

    peak = float(true.max() - true.min()) or 1.0
    metric = SSIMMetric(spatial, data_range=peak, win_size=WINDOW)
    return float(metric(image[None].float(), true[None].float()))


def compute_saliency(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    return [(p.detach() * g).abs() for p, g in zip(parameters, gradients, strict=True)]


def _compute_cosine(values: Sequence[Tensor], message: Sequence[Tensor]) -> Tensor:
    products = torch.stack([(one * other).sum() for one, other in zip(values, message, strict=True)]).sum()
    norms = [torch.stack([part.square().sum() for part in parts]).sum().sqrt() for parts in (values, message)]
    return products / (norms[0] * norms[1]).clamp_min(1e-30)


def _compute_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbours; 0 for inputs without two dimensions."""
    if images.dim() < 4:
        return images.new_zeros(())
    return torch.stack([images.diff(dim=d).abs().mean() for d in range(2, images.dim())]).sum()
