"""Inversion rebuilds single inputs exactly where it must, and says how well elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from scripts import load_script
from torch import nn
from toy import Plain

from flare_sparse.core.errors import DataError

attack = load_script("experiments/inversion_attack")


def build_case(batch: int) -> tuple[Plain, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    task = Plain()
    return task, task.model(), (torch.rand(batch, 12), torch.rand(batch, 1))


def test_update_of_one_example_reveals_it_exactly() -> None:
    task, model, batch = build_case(1)
    rows = attack.read_linear_layer(model, attack.build_message(task, model, batch, "update"), "update")
    assert rows is not None
    # Every unit that the example moved has it; a unit whose ReLU is off has no quotient.
    assert 1 <= len(rows) <= 10
    torch.testing.assert_close(rows, batch[0].expand_as(rows), rtol=1e-4, atol=1e-5)


def test_scores_of_one_example_reveal_its_absolute_values() -> None:
    task, model, (x, y) = build_case(1)
    batch = x - 0.5, y
    rows = attack.read_linear_layer(model, attack.build_message(task, model, batch, "scores"), "scores")
    assert rows is not None
    torch.testing.assert_close(rows, batch[0].abs().expand_as(rows), rtol=1e-4, atol=1e-5)


def test_units_that_all_examples_move_hide_them() -> None:
    task, _, batch = build_case(8)
    model = nn.Sequential(nn.Linear(12, 10), nn.Sigmoid(), nn.Linear(10, 1))
    rows = attack.read_linear_layer(model, attack.build_message(task, model, batch, "update"), "update")
    assert rows is not None
    best = attack.choose_reconstruction("linear layer", rows, batch[0], batch[0].mean(0))
    assert best.psnr < 20


def test_network_without_a_first_linear_layer_is_not_read() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 1))
    assert attack.read_linear_layer(model, [torch.zeros_like(p) for p in model.parameters()], "update") is None


class Smooth(Plain):
    """A small smooth network of images."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Sigmoid(),
            nn.Flatten(), nn.Linear(8 * 16, 4),
        )  # fmt: skip


@pytest.mark.slow
def test_optimisation_rebuilds_the_image_of_an_update() -> None:
    torch.manual_seed(1)
    task = Smooth()
    model = task.model()
    image = torch.zeros(1, 1, 8, 8)
    image[..., 2:6, 2:6] = 1.0
    batch = image, torch.randn(1, 4)
    message = attack.build_message(task, model, batch, "update")
    start = torch.zeros_like(image)
    rebuilt = attack.optimize_inputs(task, model, message, "update", batch, start, steps=200)
    assert attack.compute_psnr(rebuilt[0], image[0]) > attack.compute_psnr(start[0], image[0]) + 5


def test_pair_of_the_highest_psnr_is_chosen() -> None:
    true = torch.stack([torch.zeros(4), torch.tensor([0.0, 1, 2, 3])])
    rebuilt = torch.stack([torch.full((4,), 9.0), torch.tensor([0.0, 1, 2, 3.3])])
    best = attack.choose_reconstruction("optimisation", rebuilt, true, torch.full((4,), 1.5))
    assert (best.true.tolist(), best.rebuilt[3].item()) == ([0, 1, 2, 3], pytest.approx(3.3))
    # Peak 3, mean squared error 0.3 ** 2 / 4; of the mean: 1.25.
    assert best.psnr == pytest.approx(10 * math.log10(9 / (0.09 / 4)), rel=1e-5)
    assert best.guess_psnr == pytest.approx(10 * math.log10(9 / 1.25), rel=1e-5)
    assert best.ssim is None
    with pytest.raises(DataError, match="no input could be rebuilt"):
        attack.choose_reconstruction("linear layer", rebuilt[:0], true, true[0])


def test_psnr_and_ssim_of_equal_images() -> None:
    image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert attack.compute_psnr(image, image) == math.inf
    assert attack.compute_ssim(image, image) == pytest.approx(1.0)
    assert attack.compute_ssim(torch.zeros_like(image), image) < 0.1
