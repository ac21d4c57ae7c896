"""Successive gradient steps on one batch, each on its own tensors; layers before the changed ones run only once.

See docs/algorithms.md, section 6.6.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
    # A copy, because the steps change the loaded vector.
    model.load(start.clone())
    model.set_training_mode()
    disable_dropout(model.module)
    batch = model.to_device(batch)
    size = model.layout.num_parameters
    specs = zip(model.layout.tensors, model.layout.offsets, strict=False)
    positions = {spec.name: slice(offset, offset + spec.size) for spec, offset in specs}
    parameters_by_name = {name: p for name, p in model.module.named_parameters() if name in positions}
    tape = Tape(model.module)
    for number, stage in enumerate(stages, start=1):
        stage_names = [name for name in parameters_by_name if bool(stage.bits[positions[name]].any())]
        with tape.replay():
            loss = task.loss(model.module, batch)
        if not torch.isfinite(loss):
            remedy = "lower the learning rate of the step"
            text = explain_divergence(loss, batch, f"stage {number}", remedy)
            raise TrainingDiverged(text, is_first_step=number == 1)
        parameters = [parameters_by_name[name] for name in stage_names]
        # The next stage reuses parts of this graph.
        gradients = torch.autograd.grad(loss, parameters, retain_graph=number < len(stages), allow_unused=True)
        masked: list[tuple[Tensor, Tensor]] = []
        for name, parameter, gradient in zip(stage_names, parameters, gradients, strict=True):
            if gradient is not None:
                bits = stage.bits[positions[name]].view(parameter.shape).to(model.device)
                masked.append((parameter, torch.where(bits, gradient.to_dense(), 0.0)))
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


class _WriteCounter(TorchDispatchMode):
    """Counts the operations that write to each storage, within its context.

    autograd's version counters do not see a change through ``.data``, which has a counter of its own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            named |= kwargs
            for argument in func._schema.arguments:
                if argument.is_write:
                    self._writes.update(_list_storages(named.get(argument.name)))
        return result

    def list_versions(self, value: Any) -> list[int] | None:
        """Return numbers that change with every write to the tensors in a value; None if one is of unknown type."""
        if isinstance(value, Tensor):
            return [value._version, *(self._writes[storage] for storage in _list_storages(value))]
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            parts = [self.list_versions(part) for part in value]
            return None if None in parts else [version for part in parts for version in part or ()]
        return [] if value is None or isinstance(value, (bool, int, float, str)) else None


def _list_storages(value: Any) -> list[int]:
    """Return the addresses of the storages of a tensor or of a list of tensors."""
    if isinstance(value, (list, tuple)):
        return [address for part in value for address in _list_storages(part)]
    return [value.untyped_storage().data_ptr()] if isinstance(value, Tensor) else []


@dataclass(frozen=True)
class _Entry:
    """One call of a module.

    Attributes:
        name: name of the module.
        result: what it returned.
        versions: versions of the result's tensors at that time; None: the result cannot be reused.
    """

    name: str
    result: Any
    versions: list[int] | None


class Tape:
    """Record of the outputs of a network's leaf modules, in the order in which they ran.

    On replay, modules that ran before the first changed one return the recorded result, with its autograd graph,
    instead of computing it again. Nothing is reused in a network with buffers: every pass would update the statistics.
    Nor is anything from the first module on whose arguments or result were changed in place.
    """

    def __init__(self, network: nn.Module):
        self._leaves = {name: part for name, part in network.named_modules() if not any(part.children())}
        self._is_reusable = not any(True for _ in network.buffers())
        self._recorded: list[_Entry] = []
        self._counter = _WriteCounter()

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Within the context, a pass of the network reuses recorded results and records the others."""
        # The network may have changed a result in place after its module returned it (``r = conv(h); r += h``). The
        # replay would change it a second time.
        is_reusable = [self._is_unchanged(entry) for entry in self._recorded]
        first = is_reusable.index(False) if False in is_reusable else len(is_reusable)
        previous, self._recorded = self._recorded[:first], []
        for name, leaf in self._leaves.items():
            leaf.forward = self._wrap_forward(name, leaf.forward, previous)
        try:
            with self._counter:
                yield
        finally:
            # The wrapper is an instance attribute; without it the class's own method is found again.
            for leaf in self._leaves.values():
                del leaf.forward

    def _wrap_forward(self, name: str, compute: Callable[..., Any], previous: list[_Entry]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            index = len(self._recorded)
            if index < len(previous) and previous[index].name == name:
                entry = previous[index]
            else:
                inputs = (args, kwargs)
                versions = self._counter.list_versions(inputs)
                result = compute(*args, **kwargs)
                # A skipped module would not change its arguments, which the network may read afterwards.
                is_pure = versions is not None and versions == self._counter.list_versions(inputs)
                entry = _Entry(name, result, self._counter.list_versions(result) if is_pure else None)
            self._recorded.append(entry)
            return entry.result

        return forward

    def _is_unchanged(self, entry: _Entry) -> bool:
        """Return whether no tensor of a result has been changed in place since it was recorded."""
        return entry.versions is not None and entry.versions == self._counter.list_versions(entry.result)

    def invalidate(self, changed: set[str]) -> None:
        """Drop the results of the changed modules and of all modules that ran after the first of them."""
        first = next((i for i, e in enumerate(self._recorded) if e.name in changed), len(self._recorded))
        # A changed parameter outside the leaf modules may be read anywhere: nothing can be reused.
        can_reuse = self._is_reusable and changed <= self._leaves.keys()
        self._recorded = self._recorded[: first if can_reuse else 0]
