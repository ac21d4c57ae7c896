"""Successive gradient steps on one batch, each on its own tensors; layers before the changed ones run only once.

See docs/algorithms.md, section 6.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..mask import Mask
from ..task import Task
from .flat import FlatModel
from .loop import TrainingDiverged, disable_dropout


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
    of stage I's step but with the same backbone, so all modules that run before the first gate return what they
    returned before.

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
    model.load(start)
    model.set_training_mode()
    disable_dropout(model.module)
    batch = model.to_device(batch)
    size = model.layout.trainable_size
    specs = zip(model.layout.tensors, model.layout.offsets, strict=False)
    positions = {spec.name: slice(offset, offset + spec.size) for spec, offset in specs}
    parameters_by_name = {name: p for name, p in model.module.named_parameters() if name in positions}
    tape = Tape(model.module)
    for number, stage in enumerate(stages, start=1):
        stage_names = [name for name in parameters_by_name if bool(stage.bits[positions[name]].any())]
        with tape.replay():
            loss = task.loss(model.module, batch)
        if not torch.isfinite(loss):
            raise TrainingDiverged(f"the loss is {loss.item()} in stage {number}; lower the learning rate of the step")
        parameters = [parameters_by_name[name] for name in stage_names]
        # The next stage reuses parts of this graph.
        gradients = torch.autograd.grad(loss, parameters, retain_graph=number < len(stages), allow_unused=True)
        masked: list[tuple[Tensor, Tensor]] = []
        for name, parameter, gradient in zip(stage_names, parameters, gradients, strict=True):
            if gradient is not None:
                bits = stage.bits[positions[name]].view(parameter.shape).to(model.device)
                masked.append((parameter, torch.where(bits, gradient, 0.0)))
        scale = 1.0 if clip_norm is None else _compute_clip_scale(masked, clip_norm)
        for tensor, gradient in masked:
            # Through .data, because autograd forbids in-place changes of tensors that its graph still needs.
            tensor.data.add_(gradient, alpha=-learning_rate * scale)
        tape.invalidate({name.rpartition(".")[0] for name in stage_names})
    weights = model.to_vector()
    weights[size:] = start[size:]
    return weights


def _compute_clip_scale(gradients: Sequence[tuple[Tensor, Tensor]], limit: float) -> float:
    """Return the factor, at most 1, that shortens a gradient to the L2 norm ``limit``."""
    norm = math.sqrt(sum(float(gradient.square().sum(dtype=torch.float64)) for _, gradient in gradients))
    return min(1.0, limit / max(norm, 1e-12))


class Tape:
    """Record of the outputs of a network's leaf modules, in the order in which they ran.

    On replay, modules that ran before the first changed one return the recorded result, with its autograd graph,
    instead of computing it again. Nothing is reused in a network with buffers: every pass would update the statistics.
    """

    def __init__(self, network: nn.Module):
        self._leaves = {name: part for name, part in network.named_modules() if not any(part.children())}
        self._is_reusable = not any(True for _ in network.buffers())
        self._recorded: list[tuple[str, Any]] = []

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Within the context, a pass of the network reuses recorded results and records the others."""
        previous, self._recorded = self._recorded, []
        for name, leaf in self._leaves.items():
            leaf.forward = self._wrap_forward(name, leaf.forward, previous)
        try:
            yield
        finally:
            # The wrapper is an instance attribute; without it the class's own method is found again.
            for leaf in self._leaves.values():
                del leaf.forward

    def _wrap_forward(
        self, name: str, compute: Callable[..., Any], previous: list[tuple[str, Any]]
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            index = len(self._recorded)
            is_known = index < len(previous) and previous[index][0] == name
            self._recorded.append((name, previous[index][1] if is_known else compute(*args, **kwargs)))
            return self._recorded[-1][1]

        return forward

    def invalidate(self, changed: set[str]) -> None:
        """Drop the results of the changed modules and of all modules that ran after the first of them."""
        first = next((i for i, (name, _) in enumerate(self._recorded) if name in changed), len(self._recorded))
        # A changed parameter outside the leaf modules may be read anywhere: nothing can be reused.
        can_reuse = self._is_reusable and changed <= self._leaves.keys()
        self._recorded = self._recorded[: first if can_reuse else 0]
