"""What the channel gates of a network do, seen from outside. A gate is a submodule named ``gate`` that returns 0 or 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def observe_gates(network: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """While inside, every forward pass adds its gates ``(B, channels)`` to the list of their layer's name."""
    seen: dict[str, list[Tensor]] = {}
    hooks = []
    for name, part in network.named_modules():
        prefix, _, last = name.rpartition(".")
        if last == "gate":
            seen[prefix] = []
            hooks.append(part.register_forward_hook(lambda _, __, q, to=seen[prefix]: to.append(q.detach().cpu())))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def compute_channel_sparsity(seen: Mapping[str, list[Tensor]]) -> float | None:
    """Share of gates that are 0 over examples and gated layers (MetaGater section 5); None where there are none."""
    gates = [q.flatten() for layer in seen.values() for q in layer]
    return float((torch.cat(gates) == 0).double().mean()) if gates else None
