"""Several gradient steps on one batch, each of its own tensors: what an earlier step did not touch is computed once."""

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
    """``w <- w - learning_rate * grad L(w)`` once for each stage, on that stage's entries only; no dropout.

    The same as one training step for each stage on this batch. MetaGater's stage II sees other gates than stage I but
    the same backbone: layers that run before the first gate give what they gave, and so do the filters behind it.

    Args:
        model: the site's network.
        task: gives the loss.
        batch: of all stages.
        start: ``(P,)``; left as it is.
        stages: disjoint selections of parameters.
        learning_rate: of all stages.
        clip_norm: largest L2 norm of a stage's gradient.

    Returns:
        ``(P,)``.

    Raises:
        TrainingDiverged: the loss is NaN or infinite.
    """
    model.load(start)
    model.set_training_mode()
    disable_dropout(model.module)
    batch = model.to_device(batch)
    size = model.layout.trainable_size
    places = {e.name: slice(at, at + e.size) for e, at in zip(model.layout.tensors, model.layout.offsets, strict=False)}
    named = {name: p for name, p in model.module.named_parameters() if name in places}
    tape = Tape(model.module)
    for number, stage in enumerate(stages, start=1):
        chosen = [name for name in named if bool(stage.bits[places[name]].any())]
        with tape.replay():
            loss = task.loss(model.module, batch)
        if not torch.isfinite(loss):
            raise TrainingDiverged(f"the loss is {loss.item()} in stage {number}; lower the learning rate of the step")
        parameters = [named[name] for name in chosen]
        gradients = torch.autograd.grad(loss, parameters, retain_graph=number < len(stages), allow_unused=True)
        changes: list[tuple[Tensor, Tensor]] = []
        for name, parameter, gradient in zip(chosen, parameters, gradients, strict=True):
            if gradient is not None:
                free = stage.bits[places[name]].view(parameter.shape).to(model.device)
                changes.append((parameter, torch.where(free, gradient, 0.0)))
        scale = 1.0 if clip_norm is None else _clip(changes, clip_norm)
        for tensor, change in changes:
            tensor.data.add_(change, alpha=-learning_rate * scale)
        tape.invalidate({name.rpartition(".")[0] for name in chosen})
    stepped = model.to_vector()
    stepped[size:] = start[size:]
    return stepped


def _clip(changes: Sequence[tuple[Tensor, Tensor]], limit: float) -> float:
    """What a gradient must be multiplied by to be no longer than ``limit``."""
    total = math.sqrt(sum(float(change.square().sum(dtype=torch.float64)) for _, change in changes))
    return min(1.0, limit / max(total, 1e-12))


class Tape:
    """The leaf modules of a network in the order in which they run. Those that ran before the first one whose
    parameters have changed return what they returned before, with its graph.
    """

    def __init__(self, network: nn.Module):
        self._leaves = {name: part for name, part in network.named_modules() if not any(part.children())}
        self._reusable = not any(True for _ in network.buffers())  # a statistic is of every pass
        self._played: list[tuple[str, Any]] = []

    @contextmanager
    def replay(self) -> Iterator[None]:
        """A pass of the network inside takes from the tape what is on it, and records the rest."""
        kept, self._played = self._played, []
        for name, leaf in self._leaves.items():
            leaf.forward = self._player(name, leaf.forward, kept)
        try:
            yield
        finally:
            for leaf in self._leaves.values():
                del leaf.forward

    def _player(self, name: str, compute: Callable[..., Any], kept: list[tuple[str, Any]]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            at = len(self._played)
            known = at < len(kept) and kept[at][0] == name
            self._played.append((name, kept[at][1] if known else compute(*args, **kwargs)))
            return self._played[-1][1]

        return forward

    def invalidate(self, changed: set[str]) -> None:
        """Drop what these modules returned, and all that came after."""
        first = next((i for i, (name, _) in enumerate(self._played) if name in changed), len(self._played))
        whole = self._reusable and changed <= self._leaves.keys()
        self._played = self._played[: first if whole else 0]
