"""Observation of channel gates. A gate is a submodule named ``gate`` that returns 0 or 1 per example and channel."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def observe_gates(network: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the gates ``(B, channels)`` of every forward pass within the context, by name of the gated layer."""
    observed: dict[str, list[Tensor]] = {}
    hooks = []
    for name, part in network.named_modules():
        prefix, _, last = name.rpartition(".")
        if last == "gate":
            observed[prefix] = []
            hooks.append(part.register_forward_hook(lambda _, __, q, to=observed[prefix]: to.append(q.detach().cpu())))
    try:
        yield observed
    finally:
        for hook in hooks:
            hook.remove()


def compute_channel_sparsity(observed: Mapping[str, list[Tensor]]) -> float | None:
    """Return the share of closed gates over examples and gated layers (MetaGater, section 5); None without gates."""
    gates = [q.flatten() for layer in observed.values() for q in layer]
    return float((torch.cat(gates) == 0).double().mean()) if gates else None
