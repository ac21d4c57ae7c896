"""Inversion: a server rebuilds a site's inputs from one message of scores or of a gradient step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from flare_sparse.config.assemble import Assembly
from flare_sparse.config.policy.isolation import MAX_EXAMPLES, withhold_isolated_units
from flare_sparse.config.policy.policy import Policy, raise_refusals
from flare_sparse.core.errors import DataError, PolicyRefusal
from flare_sparse.core.exchange import Content, Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.seeds import derive_seed, make_generator
from flare_sparse.privacy.dp.mechanism import LEAST_NOISE, clip_rows
from flare_sparse.tasks.task import Task
from flare_sparse.training import SampleUsage, Site

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


BATCH_SIZES = (1, 2, 4, 8)
"""Sizes of the minibatches whose messages are inverted."""
OTHERS = 64
"""Examples that the attacker knows the mean and the spread of."""


@dataclass(frozen=True)
class Inversion:
    """One inverted message.

    Attributes:
        message: what the message held.
        batch_size: number of examples that it was computed from.
        best: the best reconstruction; None: the policy refused the message, or nothing could be rebuilt.
        reason: why there is none.
    """

    message: Message
    batch_size: int
    best: Reconstruction | None
    reason: str = ""


class ServerAttacks:
    """Inverts the first message of a site: that of the initial model, which the server knows.

    Args:
        assembly: parts of the run.
        site: the attacked site.
        others: examples that did not train, whose mean is the attacker's first guess.
        policy: policy of the site; None: it has none.
        steps: steps of the optimisation; 0: the linear layer alone.
    """

    def __init__(self, assembly: Assembly, site: Site, others: Dataset[Any], policy: Policy | None, steps: int):
        self._assembly, self._site, self._policy, self._steps = assembly, site, policy, steps
        self._model = assembly.build_network(assembly.complete(assembly.weights))
        known = [others[i] for i in range(min(OTHERS, len(others)))]  # type: ignore[arg-type]
        if not known or not self._has_inputs(default_collate(known[:1])):
            raise DataError("inversion needs examples that are tuples whose first part is a tensor of numbers")
        self._others: Tensor = default_collate(known)[0].float()

    def invert_messages(
        self, on_progress: Callable[[str], None], sizes: Sequence[int] = BATCH_SIZES
    ) -> Iterator[Inversion]:
        """Yield the inversion of each message by each number of examples."""
        train = self._site.trainer.examples.train
        rows = np.random.default_rng(derive_seed(self._assembly.method.seed, "audit inversion")).permutation(
            self._site.num_examples
        )
        for message in ("update", "scores"):
            for size in sizes:
                if size > len(rows):
                    continue
                on_progress(f"server: inversion of {message} of {size} examples")
                inputs, *rest = default_collate([train[int(row)] for row in rows[:size]])
                batch = (inputs.float(), *rest)
                try:
                    yield Inversion(message, size, self._invert(message, batch))
                except (DataError, PolicyRefusal) as error:
                    yield Inversion(message, size, None, str(error))

    def _invert(self, message: Message, batch: Any) -> Reconstruction:
        model, task, true, others = self._model, self._assembly.task, batch[0], self._others
        received = self._apply_policy(message, self._build_message(message, batch), len(true))
        mean, found = others.mean(0), []
        linear = read_linear_layer(model, received, message)
        if linear is not None and linear.shape[1] == true[0].numel():
            linear = linear.reshape(len(linear), *true.shape[1:])
            # Scores show absolute values.
            shown = true.abs() if message == "scores" else true
            known = others.abs().mean(0) if message == "scores" else mean
            if len(linear):
                found.append(choose_reconstruction("linear layer", linear, shown, known))
        if self._steps:
            # The network's gradients are the same for all inputs equal to the mean: noise tells them apart.
            scale = float(others.std()) or 1.0
            noise = torch.randn(
                true.shape, generator=make_generator(self._assembly.method.seed, "audit start", len(true))
            )
            start = mean + 0.1 * scale * noise
            rebuilt = optimize_inputs(task, model, received, message, batch, start, self._steps, scale)
            found.append(choose_reconstruction("optimisation", rebuilt, true, mean))
        if not found:
            raise DataError("no input could be rebuilt from a first linear layer")
        return max(found, key=lambda one: one.psnr)

    def _build_message(self, message: Message, batch: Any) -> list[Tensor]:
        """Return the message; with differential privacy, it is computed from a step of clipped gradients and noise."""
        mechanism, task, model = self._site.trainer.mechanism, self._assembly.task, self._model
        if mechanism is None:
            return build_message(task, model, batch, message)
        count = len(batch[0])
        gradients = [build_message(task, model, [part[i : i + 1] for part in batch], "update") for i in range(count)]
        rows = torch.stack([torch.cat([value.flatten() for value in values]) for values in gradients])
        clip = mechanism.config.clip
        noise = torch.randn(rows.shape[1], generator=make_generator(self._assembly.method.seed, "audit noise", count))
        # Every example takes part: the attacker's best case, since a lot that is drawn at random hides some.
        noisy = ((clip_rows(rows, clip) + mechanism.noise_multiplier * clip * noise) / count).float()
        parts = noisy.split([value.numel() for value in gradients[0]])
        step = [part.view_as(value) for part, value in zip(parts, gradients[0], strict=True)]
        return step if message == "update" else compute_saliency(list_parameters(model), step)

    def _apply_policy(self, message: Message, values: list[Tensor], examples: int) -> list[Tensor]:
        """Return what the policy lets leave.

        Raises:
            PolicyRefusal: it refuses the message.
        """
        policy, layout = self._policy, self._assembly.network
        if policy is None:
            return values
        content: Content = "delta" if message == "update" else "scores"
        names = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        tensors = {spec.name: torch.zeros(spec.shape) for spec in layout.tensors}
        # A step of SGD moves against the gradient.
        sign = -1.0 if message == "update" else 1.0
        tensors |= {name: sign * value for name, value in zip(names, values, strict=True)}
        mask = Mask.full(layout.size)
        vector = policy.sanitize_values(content, Patch.from_vector(layout.flatten(tensors), mask), layout)
        # As at a site: what a change shows of the data decides nothing under a privacy budget.
        mechanism = self._site.trainer.mechanism
        is_bounded = mechanism is not None and mechanism.noise_multiplier >= LEAST_NOISE
        if policy.withhold_isolated and message == "update" and not is_bounded:
            inputs = self._site.trainer.collect_inputs(self._assembly.weights, nn.Linear, MAX_EXAMPLES)
            vector, _ = withhold_isolated_units(vector, mask, layout, inputs)
        raise_refusals(policy.find_refusals(content, SampleUsage(examples, 1), mask, vector, layout))
        sanitized = layout.unflatten(vector)
        return [sign * sanitized[name] for name in names]

    @staticmethod
    def _has_inputs(batch: Any) -> bool:
        is_tuple = isinstance(batch, (tuple, list)) and len(batch) > 1
        # Codes of 8 bits are inputs that the task makes floats of; other integers are indices of words.
        return (
            is_tuple
            and isinstance(batch[0], Tensor)
            and (batch[0].is_floating_point() or batch[0].dtype == torch.uint8)
        )
