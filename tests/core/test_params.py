"""Layouts: the exchanged tensors of a network and its frozen base model."""

from __future__ import annotations

import torch
from torch import nn

from flare_sparse.core.params import Layout, get_frozen_tensors


def net(scale: float = 1.0) -> nn.Sequential:
    """A frozen body with running statistics under a trainable head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))
    body.requires_grad_(requires_grad=False)
    with torch.no_grad():
        body[0].weight.mul_(scale)
    return nn.Sequential(body, head)


def test_network_without_frozen_parameters_has_no_base_model() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    assert get_frozen_tensors(module) == {}
    assert Layout.from_module(module) == Layout(Layout.from_module(module).tensors)
    assert len(Layout.from_module(module).tensors) == 6


def test_layout_excludes_frozen_tensors_and_their_statistics() -> None:
    names = [spec.name for spec in Layout.from_module(net()).tensors]
    assert names == ["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias", "1.0.running_mean", "1.0.running_var"]
    assert {"0.0.weight", "0.1.running_mean", "0.1.running_var"} <= get_frozen_tensors(net()).keys()


def test_layouts_over_different_base_models_differ() -> None:
    ours, same, other = (Layout.from_module(net(scale)) for scale in (1.0, 1.0, 1.0000001))
    assert ours.fingerprint == same.fingerprint != other.fingerprint
    assert ours.tensors == other.tensors
    shifted = net()
    shifted[0][1].running_mean[0] += 1  # statistics are part of the base model
    assert Layout.from_module(shifted).fingerprint != ours.fingerprint
