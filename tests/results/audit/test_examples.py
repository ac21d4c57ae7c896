"""Losses and gradient features of single examples equal those of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toy import Embedded, Plain

from flare_sparse.core.errors import DataError
from flare_sparse.results.audit.training import (
    MAX_ENTRIES,
    AuditedExamples,
    compute_gradient_features,
    compute_losses,
    select_last_parameters,
)
from flare_sparse.tasks.task import Examples


def build_dataset(count: int, seed: int = 0) -> TensorDataset:
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


def test_losses_are_those_of_each_example_alone() -> None:
    task, data = Plain(), build_dataset(5)
    torch.manual_seed(0)
    model = task.model()
    expected = (model(data.tensors[0]) - data.tensors[1]).square().squeeze(1)
    assert compute_losses(task, model, data) == pytest.approx(expected.detach().numpy(), rel=1e-5)


def test_features_are_prediction_target_error_loss_norms_and_the_last_gradients() -> None:
    task, data = Plain(), build_dataset(3)
    torch.manual_seed(0)
    model = task.model()
    features = compute_gradient_features(task, model, data)
    prediction, target = model(data.tensors[0][1:2]).item(), data.tensors[1][1].item()
    task.loss(model, data[1:2]).backward()
    gradients = [p.grad for p in model.parameters()]
    norms = [np.log(g.double().norm().item() + 1e-12) for g in gradients]
    last = torch.cat([g.flatten() for g in (gradients[2], gradients[3], gradients[0], gradients[1])])
    expected = [prediction, target, prediction - target, (prediction - target) ** 2, *norms, *last.tolist()]
    assert features[1] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_gradients_of_large_layers_are_cut() -> None:
    model = nn.Sequential(nn.Linear(1000, 2), nn.ReLU(), nn.Linear(2, 1))
    assert [tuple(p.shape) for p in select_last_parameters(model)] == [(1, 2), (1,)]
    task = Plain()
    task.model = lambda: nn.Linear(12, 1)  # type: ignore[method-assign]
    assert compute_gradient_features(task, task.model(), build_dataset(2)).shape[1] <= MAX_ENTRIES


def test_sparse_gradient_of_an_embedding_has_the_features_of_a_dense_one() -> None:
    features = []
    for sparse in (False, True):
        task = Embedded(nn.EmbeddingBag, sparse)
        torch.manual_seed(0)
        features.append(compute_gradient_features(task, task.model(), build_dataset(3)))
    assert features[1] == pytest.approx(features[0], rel=1e-5, abs=1e-7)


def test_training_examples_are_members_and_validation_examples_are_left_out() -> None:
    sites = {
        "b": Examples(build_dataset(3), build_dataset(2), validation=build_dataset(4)),
        "a": Examples(build_dataset(1), build_dataset(0)),
    }
    audited = AuditedExamples.from_sites(sites)
    assert audited.sites.tolist() == ["a", "b", "b", "b", "b", "b"]
    assert audited.is_member.tolist() == [True, True, True, True, False, False]
    with pytest.raises(DataError, match="training and test examples"):
        AuditedExamples.from_sites({"a": sites["a"]})
