"""A network whose parameters are views of one vector.

Masks, clipping and optimisers operate on a single tensor, and a vector is loaded without a copy.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.mask import Mask
from ..core.params import Layout, get_frozen_tensors
from ..core.reading import move_batch
from .config import CPU, Hardware
from .live import LiveEntries

_ALIGNMENT = 64
"""Bytes to which torch aligns its tensors."""


class FlatModel:
    """A module bound to vectors of a layout.

    Parameters and buffers outside the layout, those of a frozen base model, keep their values. The network must not
    write its parameters: on a CPU they are views of the loaded vector.

    Args:
        module: the network; it is modified and moved to the device.
        layout: its layout.
        hardware: where to compute.

    Attributes:
        module: the network; its parameters are views of ``flat``.
        flat: ``(layout.num_parameters,)`` parameters; on a CPU a view of the vector that was loaded last.
        parameters: the parameters of the layout, in its order.
        after_load: called after each vector is loaded, with which tensors outside the layout must be set.
    """

    flat: Tensor

    def __init__(self, module: nn.Module, layout: Layout, hardware: Hardware = CPU):
        self.layout, self.hardware, self.device = layout, hardware, hardware.device
        self.module = module.to(self.device)
        if hardware.is_compiled:
            _compile(self.module)
        self.after_load: Callable[[], None] = lambda: None
        named = dict(self.module.named_parameters())
        self._named = {spec.name: named[spec.name] for spec in layout.tensors if spec.role != "buffer"}
        self.parameters = list(self._named.values())
        self._buffers = dict(self.module.named_buffers())
        self._initial_integer_buffers = {
            name: b.clone() for name, b in self._buffers.items() if b is not None and not b.is_floating_point()
        }
        frozen = get_frozen_tensors(self.module)
        self._modules_with_frozen_buffers = [
            part
            for prefix, part in self.module.named_modules()
            if any(name in frozen for name, _ in part.named_buffers(prefix, recurse=False))
        ]
        self._loaded: list[tuple[int, int]] = []
        self._live: LiveEntries | None = None

    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        """Set parameters and float buffers from a vector ``(P,)``; reset integer buffers to their initial values.

        On a CPU the parameters become views of the vector, which a later step of an optimiser changes.
        """
        size, source = self.layout.num_parameters, vector.detach()
        # The last bits of a matrix product can depend on the alignment of its operands.
        if source.data_ptr() % _ALIGNMENT or not source.is_contiguous():
            source = source.clone(memory_format=torch.contiguous_format)
        self.flat = source[:size].to(self.device)
        pieces = self.flat.split([parameter.numel() for parameter in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.data = piece.view(parameter.shape)
        self._loaded = [(parameter._version, parameter.data_ptr()) for parameter in self.parameters]
        for name, value in self.layout.unflatten(source).items():
            if name not in self._named:
                self._buffers[name].copy_(value)
        # Integer buffers (num_batches_tracked) are not part of a vector. A counter left from an earlier round would
        # make the result depend on what this process has trained before, and a resumed run differ from the original.
        for name, initial in self._initial_integer_buffers.items():
            self._buffers[name].copy_(initial)
        # Reset them with every vector: what an evaluation or a trial did to them must not last.
        self.after_load()

    def check_parameters(self) -> None:
        """Raise if a pass of the network has written a parameter since the last :meth:`load`.

        Raises:
            ConfigError: it has; a write through ``weight.data`` in place goes unnoticed.
        """
        for (name, parameter), loaded in zip(self._named.items(), self._loaded, strict=True):
            if (parameter._version, parameter.data_ptr()) != loaded:
                raise ConfigError(
                    f"the network writes its parameter {name!r} in a pass; compute the changed weight in forward() "
                    "and leave the parameter as it is (docs/own-task.md)"
                )

    def find_live(self, trainable: Mask) -> LiveEntries:
        """Return the entries of a mask by parameter; those of the last mask are cached."""
        if self._live is None or self._live.mask is not trainable:
            self._live = LiveEntries.from_mask(trainable, self.layout, self.device)
        return self._live

    def set_training_mode(self, live: LiveEntries | None = None) -> None:
        """Put the module in training mode; modules with frozen buffers stay in eval mode, so that these do not drift.

        Args:
            live: the trainable entries: a tensor without one gets no gradient, which saves its backward pass. None, or
                no trainable parameter at all, computes all gradients.
        """
        # A loss that depends on no parameter requiring a gradient cannot be differentiated.
        all_gradients = live is None or not live.count
        for number, parameter in enumerate(self.parameters):
            parameter.requires_grad_(all_gradients or live.parameters[number].count > 0)  # type: ignore[union-attr]
        self.module.train()
        for part in self._modules_with_frozen_buffers:
            part.eval()

    @torch.no_grad()
    def collect_buffers(self) -> Tensor:
        """Copy the float buffers of the layout into a vector on their device."""
        buffers = [self._buffers[s.name].reshape(-1) for s in self.layout.tensors if s.role == "buffer"]
        return torch.cat(buffers) if buffers else torch.zeros(0, device=self.device)

    def compute_live_gradient(self, losses: Iterable[Tensor], live: LiveEntries, out: Tensor | None) -> Tensor:
        """Return the gradient ``(live.count,)`` of a sum of losses, for the trainable parameters only.

        Args:
            losses: scalars, each of which is differentiated before the next one is computed.
            live: the trainable parameters.
            out: the gradient of the step before, which is overwritten; None: a new tensor is allocated.
        """
        # Without a gradient to add to, autograd keeps the one that it has computed: no vector is cleared or added.
        for parameter in self.parameters:
            parameter.grad = None
        out = torch.empty(live.count, device=self.device) if out is None else out
        written: set[int] = set()

        def collect(number: int, parameter: Tensor) -> None:
            live.collect_gradient(number, parameter, out, is_first=number not in written)
            written.add(number)

        # Take each gradient as soon as autograd has it: those of all parameters are never in memory at once.
        with ExitStack() as hooks:
            for number, parameter in enumerate(self.parameters):
                if parameter.requires_grad:
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(partial(collect, number)))
            for loss in losses:
                loss.backward()
        for number in set(range(len(self.parameters))) - written:
            out[live.parameters[number].entries] = 0
        return out

    def to_device(self, batch: Any) -> Any:
        """Return the batch with its tensors on the model's device."""
        return move_batch(batch, self.device, channels_last=self.hardware.channels_last)


def _compile(network: nn.Module) -> None:
    """Let ``torch.compile`` compile the calls of a network; names of tensors and copies stay as they are."""

    def call(*inputs: Any, **options: Any) -> Any:
        return network._call_impl(*inputs, **options)

    # Module.compile() leaves a network of torch's own classes, such as nn.Sequential, as it is without a word: torch
    # compiles no frame of its own files. It does compile them when they are called from another file.
    network._compiled_call_impl = torch.compile(call)
