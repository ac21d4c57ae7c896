"""Steps in stages equal one step per stage (docs/algorithms.md, section 6.6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toy import Embedded

from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task
from flare_sparse.training import LocalTask, Site, TrainingConfig, build_site
from flare_sparse.training.loop import TrainingDiverged


class Deep(Task):
    """Four linear layers, with dropout and, on demand, batch normalisation."""

    metric = Metric("mse", "", "min")

    def __init__(self, norm: bool = False):
        super().__init__()
        self.norm = norm

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(5) if self.norm else nn.Identity()
        return nn.Sequential(
            nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 5), norm, nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 1)
        )

    def load(self, data: SiteData, seed: int) -> Examples:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - 1).square().mean()

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mse": float(predictions.square().mean())}


def open_task(task: Task) -> tuple[LocalTask, torch.Tensor]:
    module = task.model()
    layout = Layout.from_module(module)
    x = torch.randn(10, 4)
    data = TensorDataset(x, x[:, :1])
    start = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))
    return LocalTask.open("site-1", task, Examples(data, data), layout, 1), start


def open_site(task: Task) -> tuple[Site, torch.Tensor]:
    local, start = open_task(task)
    return build_site(local), start


def step(batch_size: int = 100, clip_norm: float | None = None) -> TrainingConfig:
    return TrainingConfig(optimizer="sgd", lr=0.1, batch_size=batch_size, clip_norm=clip_norm)


def select_prefixes(site: Site, *prefixes: str) -> Mask:
    return Mask.from_tensors(site.layout, lambda spec: spec.name.startswith(prefixes) and spec.role != "buffer")


def step_one_by_one(site: Site, start: torch.Tensor, stages: list[Mask], rate: float) -> torch.Tensor:
    """Take one step per stage with the full gradient."""
    for stage in stages:
        gradient, _ = next(site.trainer.compute_gradients(start, 100, 1, 0))
        start = torch.where(stage.bits, start - rate * gradient, start)
    return start


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("stages", [("5.",), ("5.", "0.", "6."), ("0.", "5."), ("2.", "2.")])
def test_stages_equal_successive_steps(norm: bool, stages: tuple[str, ...]) -> None:
    site, start = open_site(Deep(norm))
    masks = [select_prefixes(site, prefix) for prefix in stages]
    stepped = site.trainer.step_in_stages(start, masks, step(100))
    assert torch.allclose(stepped, step_one_by_one(site, start, masks, 0.1), atol=1e-6)
    untouched = ~torch.stack([mask.bits for mask in masks]).any(0)
    assert torch.equal(stepped[untouched], start[untouched])


def test_divergence_after_the_first_stage_is_not_that_of_the_start() -> None:
    site, start = open_site(Deep())
    masks = [select_prefixes(site, prefix) for prefix in ("5.", "0.")]
    huge = step().model_copy(update={"lr": 1e38})
    for weights, is_first in ((start, False), (torch.full_like(start, 1e30), True)):
        with pytest.raises(TrainingDiverged) as caught:
            site.trainer.step_in_stages(weights, masks, huge)
        assert caught.value.is_first_step == is_first


def test_stage_may_change_part_of_a_tensor() -> None:
    site, start = open_site(Deep())
    part_of_entries = Mask(torch.rand(start.numel()) < 0.5)
    stepped = site.trainer.step_in_stages(start, [part_of_entries], step(100))
    assert torch.allclose(stepped, step_one_by_one(site, start, [part_of_entries], 0.1), atol=1e-6)
    assert torch.equal(stepped[~part_of_entries.bits], start[~part_of_entries.bits])


def test_sparse_gradient_of_an_embedding_steps_as_a_dense_one() -> None:
    stepped = []
    for sparse in (False, True):
        torch.manual_seed(1)
        site, start = open_site(Embedded(nn.Embedding, sparse))
        part_of_entries = Mask(torch.rand(start.numel()) < 0.5)
        stepped.append(site.trainer.step_in_stages(start, [part_of_entries], step(100)))
    torch.testing.assert_close(stepped[1], stepped[0])


def test_infinite_loss_of_a_stage_raises() -> None:
    site, start = open_site(Deep())
    with pytest.raises(TrainingDiverged, match="step 1"):
        site.trainer.step_in_stages(start * float("inf"), [Mask.full(start.numel())], step(100))


def test_same_seed_draws_the_same_batch() -> None:
    site, start = open_site(Deep())
    first, second = (site.trainer.step_in_stages(start, [Mask.full(start.numel())], step(3)) for _ in range(2))
    assert torch.equal(first, second)


def test_step_of_a_stage_is_clipped() -> None:
    site, start = open_site(Deep())
    mask = select_prefixes(site, "5.")
    moved = site.trainer.step_in_stages(start, [mask], step(clip_norm=0.01)) - start
    assert float(moved.norm()) == pytest.approx(0.1 * 0.01, rel=1e-4)
    free = site.trainer.step_in_stages(start, [mask], step(clip_norm=1e6))
    assert torch.equal(free, site.trainer.step_in_stages(start, [mask], step()))
