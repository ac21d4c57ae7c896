"""Count of the training examples and minibatches that an update was computed from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from toy import Toy

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.mask import Mask
from flare_sparse.rounds.local.dry_run import DryTrainer
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, SampleUsage, Site, TrainingConfig, build_site
from flare_sparse.training.local_task import iterate_pass
from flare_sparse.training.sample_usage import CountingDataset


class Sum(Toy):
    """One layer."""

    def model(self) -> nn.Module:
        return nn.Linear(6, 1)


LAYOUT, WEIGHTS = build_initial_model(Sum(), 1)
FULL = Mask.full(LAYOUT.size)


def data(count: int) -> TensorDataset:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :1])


def sites() -> list[Any]:
    """Return a site with 20 training examples, and a dry site that counts as if it had as many."""
    return [
        build_site(LocalTask.open("site-1", Sum(), Examples(data(20), data(4)), LAYOUT, 1)),
        Site("site-1", DryTrainer("site-1", LAYOUT, examples=20)),
    ]


@pytest.mark.parametrize("site", sites(), ids=["real", "dry"])
def test_usage_is_counted_until_it_is_reset(site: Any) -> None:
    config = TrainingConfig(batch_size=8, epochs=2)

    def usage_after(read: Any) -> SampleUsage:
        site.trainer.reset_usage()
        read()
        usage: SampleUsage = site.trainer.usage
        return usage

    assert usage_after(lambda: None) == SampleUsage(0, 0)
    assert usage_after(lambda: list(site.trainer.compute_gradients(WEIGHTS, 1, 1, 1))) == SampleUsage(1, 1)
    assert usage_after(lambda: list(site.trainer.compute_gradients(WEIGHTS, 8, 2, 1))) == SampleUsage(16, 2)
    assert usage_after(lambda: list(site.trainer.compute_gradients(WEIGHTS, 8, None, 1))) == SampleUsage(20, 3)
    assert usage_after(lambda: site.train(WEIGHTS, FULL, config, 1)) == SampleUsage(20, 6)
    assert usage_after(lambda: site.train(WEIGHTS, FULL, config, 1, steps=2)) == SampleUsage(16, 2)
    assert usage_after(lambda: site.trainer.step_in_stages(WEIGHTS, [FULL], config)) == SampleUsage(8, 1)
    assert usage_after(lambda: site.trainer.observe_units(WEIGHTS, [], lambda *seen: None)) == SampleUsage(20, 2)
    assert usage_after(lambda: site.evaluate(WEIGHTS)) == SampleUsage(0, 0)


def test_repeated_examples_count_once_and_smaller_networks_count_for_the_site() -> None:
    local = LocalTask.open("site-1", Sum(), Examples(data(20), data(4)), LAYOUT, 1)
    smaller = build_site(local.replace_network(nn.Linear(6, 1)))
    smaller.train(WEIGHTS, FULL, TrainingConfig(batch_size=8), 1, steps=7)
    assert build_site(local).trainer.usage == SampleUsage(20, 7)


class AtOnce(Dataset[Any]):
    """A dataset that reads a minibatch at once."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * index for index in indices]


def test_neither_counting_nor_workers_change_how_examples_are_read() -> None:
    def read(examples: Any, **options: Any) -> list[list[list[float]]]:
        draws = torch.Generator().manual_seed(3)
        return [batch[0].tolist() for batch in iterate_pass(examples, 4, draws, **options)]

    assert read(CountingDataset(AtOnce()), joins_last=False, collate=torch.tensor)
    for joins_last in (False, True):
        plain, counted, ahead = data(9), CountingDataset(data(9)), CountingDataset(data(9))
        rows = read(plain, joins_last=joins_last)
        assert read(counted, joins_last=joins_last) == read(ahead, joins_last=joins_last, workers=2) == rows
        assert counted.usage == ahead.usage == SampleUsage(9, 2 if joins_last else 3)


def test_examples_that_workers_read_ahead_do_not_count() -> None:
    site = build_site(LocalTask.open("site-1", Sum(), Examples(data(20), data(4)), LAYOUT, 1))
    trained = [
        site.train(WEIGHTS, FULL, TrainingConfig(batch_size=8, workers=workers), 1, steps=2) for workers in (0, 2)
    ]
    assert torch.equal(*trained)
    assert site.trainer.usage == SampleUsage(16, 4)
