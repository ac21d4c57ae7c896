"""Minibatches of one example, which batch normalisation cannot train on, join the minibatch before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toy import Plain, Toy

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.errors import ConfigError, DataError
from flare_sparse.core.mask import Mask
from flare_sparse.methods.scores.snip import compute_saliency
from flare_sparse.tasks.task import Examples, Task
from flare_sparse.training import LocalTask, Site, TrainingConfig, build_site

SGD = {"optimizer": "sgd", "lr": 0.1}


class Recording(Toy):
    """Records the number of examples of every minibatch of a training pass."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.sizes.append(len(batch[0]))
        return loss


class Volumes(Recording):
    """Batch normalisation over eight positions of every example: one example suffices."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 3, 5), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(24, 1)
        )


def open_site(task: Task, examples: int) -> tuple[Site, torch.Tensor]:
    layout, weights = build_initial_model(task, 1)
    x = torch.randn(examples, 12, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :1])
    return build_site(LocalTask.open("site-1", task, Examples(data, data), layout, 1)), weights


@pytest.mark.parametrize(
    ("task", "examples", "sizes"),
    [(Recording(), 9, [4, 5]), (Recording(), 10, [4, 4, 2]), (Volumes(), 9, [4, 4, 1])],
    ids=["joined", "two left", "one suffices"],
)
def test_last_example_joins_the_minibatch_before_where_the_network_needs_it(
    task: Recording, examples: int, sizes: list[int]
) -> None:
    site, start = open_site(task, examples)
    site.train(start, Mask.full(start.numel()), TrainingConfig(batch_size=4, epochs=2, **SGD), 1)
    trained = task.sizes[-2 * len(sizes) :]
    task.sizes.clear()
    assert len(list(site.trainer.compute_gradients(start, 4, None, 1))) == len(sizes)
    assert trained == [*sizes, *sizes]
    assert task.sizes == sizes
    assert site.trainer.usage.examples == examples


def test_mean_gradient_weighs_a_joined_minibatch_by_its_examples() -> None:
    site, start = open_site(Recording(), 9)
    (small, one), (large, other) = site.trainer.compute_gradients(start, 4, None, 1)
    assert (one, other) == (1.0, 5 / 4)
    expected = (4 * (small * start).abs() + 5 * (large * start).abs()) / 9
    mean = compute_saliency(site.trainer.compute_gradients(start, 4, None, 1), start)
    torch.testing.assert_close(mean, expected)


def test_finding_out_leaves_the_training_its_bits() -> None:
    """The first training of a site tries one example; the second does not."""
    site, start = open_site(Toy(), 9)
    config, full = TrainingConfig(batch_size=4, **SGD), Mask.full(start.numel())
    assert torch.equal(site.train(start, full, config, 1), site.train(start, full, config, 1))


@pytest.mark.parametrize(("examples", "batch_size", "error"), [(1, 4, DataError), (8, 1, ConfigError)])
def test_training_that_batch_normalisation_rules_out_names_the_remedy(
    examples: int, batch_size: int, error: type[Exception]
) -> None:
    site, start = open_site(Toy(), examples)
    config = TrainingConfig(batch_size=batch_size)
    with pytest.raises(error, match="2"):
        site.train(start, Mask.full(start.numel()), config, 1)


def test_single_example_trains_a_network_without_batch_normalisation() -> None:
    site, start = open_site(Plain(), 1)
    assert not torch.equal(site.train(start, Mask.full(start.numel()), TrainingConfig(batch_size=1), 1), start)
