"""The training loop: frozen entries keep their bits with every optimiser (docs/algorithms.md, section 1.8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from monai.optimizers import Novograd
from pydantic import ValidationError
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task
from flare_sparse.training import LocalTask, Site, TrainingConfig, build_site
from flare_sparse.training.loop import TrainingDiverged


class Normed(Task):
    metric = Metric("mse", "", "min")

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def load(self, data: SiteData, seed: int) -> Examples:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mse": float((predictions - targets).square().mean())}


def site(task: Task | None = None) -> tuple[Site, torch.Tensor]:
    task = task or Normed()
    module = task.model()
    layout = Layout.from_module(module)
    data = TensorDataset(torch.randn(24, 4), torch.zeros(24, 1))
    start = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))
    return build_site(LocalTask.open("site-1", task, Examples(data, data), layout, 1)), start


SETTINGS = [
    {"optimizer": "sgd", "lr": 0.1},
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam", "lr": 0.1, "weight_decay": 0.1},
    {"optimizer": "adamw", "lr": 0.1, "weight_decay": 0.1},
    {"optimizer": "sgd", "lr": 0.1, "clip_norm": 0.01},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["sgd", "momentum", "adam", "adamw", "clip"])
def test_frozen_entries_keep_their_bits_after_every_step(settings: dict[str, Any]) -> None:
    local, start = site()
    trainable = Mask(torch.rand(start.numel()) < 0.5)
    for steps in range(1, 5):
        trained = local.train(start, trainable, TrainingConfig(batch_size=8, **settings), 1, steps=steps)
        frozen = ~trainable.bits
        assert torch.equal(trained[frozen], start[frozen])
        moved = trained[: local.layout.num_parameters] != start[: local.layout.num_parameters]
        assert moved[trainable.bits[: local.layout.num_parameters]].any()


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=["sgd", "momentum", "adam", "adamw", "clip"])
def test_values_of_the_request_start_a_training_of_the_same_bits(settings: dict[str, Any], steps: int) -> None:
    local, start = site()
    trainable = Mask(torch.rand(start.numel()) < 0.5)
    start[~trainable.bits] = 0
    config = TrainingConfig(batch_size=8, **settings)
    gathered = local.train_entries(start, trainable, config, 1, steps=steps)
    local.weights = start.clone()
    local.live_patch = Patch(trainable.take(start), trainable)
    assert torch.equal(local.train_entries(local.weights, trainable, config, 1, steps=steps), gathered)
    assert torch.equal(local.weights, start)
    assert torch.equal(local.live_patch.values, trainable.take(start))


class Clamping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


class ClampingTask(Normed):
    def model(self) -> nn.Module:
        return nn.Sequential(Clamping(4, 6), nn.Linear(6, 1))


@pytest.mark.parametrize("steps", [1, 2])
def test_vector_of_the_request_is_restored_where_a_pass_writes_parameters(steps: int) -> None:
    local, start = site(ClampingTask())
    before, trainable = start.clone(), Mask(torch.ones(start.numel()).index_fill(0, torch.tensor([30]), 0).bool())
    local.train_entries(start, trainable, TrainingConfig(batch_size=8), 1, steps=steps)
    assert torch.equal(start, before)


def test_running_statistics_change_only_if_trainable() -> None:
    local, start = site()
    full, size = Mask.full(start.numel()), local.layout.num_parameters
    trained = local.train(start, full, TrainingConfig(), 1)
    assert not torch.equal(trained[size:], start[size:])
    parameters = Mask(torch.arange(start.numel()) < size)
    assert torch.equal(local.train(start, parameters, TrainingConfig(), 1)[size:], start[size:])


def test_rounds_share_no_optimizer_state() -> None:
    """The same round twice gives the same bits, whatever was trained in between (docs/algorithms.md, section 1.8)."""
    local, start = site()
    config = TrainingConfig(optimizer="sgd", lr=0.1, momentum=0.9)
    first = local.train(start, Mask.full(start.numel()), config, 2)
    local.train(first, Mask.full(start.numel()), config, 3)
    assert torch.equal(local.train(start, Mask.full(start.numel()), config, 2), first)


def test_proximal_term_keeps_weights_near_the_start() -> None:
    local, start = site()
    config = TrainingConfig(optimizer="sgd", lr=0.01, epochs=5)
    size = local.layout.num_parameters
    far, near = (
        torch.linalg.vector_norm(
            (local.train(start, Mask.full(start.numel()), config, 1, proximal_strength=p) - start)[:size]
        )
        for p in (0.0, 20.0)
    )
    assert near < 0.5 * far


def test_computing_gradients_keeps_running_statistics() -> None:
    local, start = site()
    first, second = ([g for g, _ in local.trainer.compute_gradients(start, 8, 3, 0)] for _ in range(2))
    assert len(first) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not first[0][local.layout.num_parameters :].any()


def test_loss_that_is_not_finite_stops_training() -> None:
    local, start = site()
    start[:4] = 1e38
    with pytest.raises(TrainingDiverged, match=r"lower training\.lr"):
        local.train(start, Mask.full(start.numel()), TrainingConfig(optimizer="sgd", lr=1.0), 1)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (0, float("nan"), r"batch\[0\] holds NaN in 1 of 8 examples \(first: example \d, column 2\)"),
        (1, float("inf"), r"batch\[1\] holds infinity in 1 of 8 examples"),
    ],
)
def test_divergence_names_data_that_is_not_finite_instead_of_the_learning_rate(
    part: int, value: float, message: str
) -> None:
    class Fitting(Normed):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return (model(batch[0]) - batch[1]).square().mean()

    task, (local, start) = Fitting(), site()
    x, y = torch.randn(8, 4), torch.zeros(8, 1)
    (x, y)[part][3, 2 if part == 0 else 0] = value
    data = TensorDataset(x, y)
    broken = build_site(LocalTask.open("site-1", task, Examples(data, data), local.layout, 1))
    with pytest.raises(TrainingDiverged, match=f"in step 1, because the data is not finite: {message}") as caught:
        broken.train(start, Mask.full(start.numel()), TrainingConfig(batch_size=8), 1)
    assert "lr" not in str(caught.value)
    with pytest.raises(TrainingDiverged, match=f"in step 1, because the data is not finite: {message}"):
        broken.trainer.step_in_stages(start, [Mask.full(start.numel())], TrainingConfig(batch_size=8))


def test_learning_rate_decays_by_round() -> None:
    assert TrainingConfig(lr=0.1, lr_decay=0.5).compute_learning_rate(3) == pytest.approx(0.025)


class Adapted(Normed):
    """A network whose frozen body contains a counter and a table of integers."""

    def model(self) -> nn.Module:
        body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        body.requires_grad_(requires_grad=False)
        body.register_buffer("positions", torch.arange(3))
        return nn.Sequential(body, nn.Linear(6, 1))


def test_frozen_base_model_keeps_its_weights_statistics_and_integers() -> None:
    task = Adapted()
    module = task.model()
    layout = Layout.from_module(module)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 4, generator=draw), torch.zeros(16, 1))
    local_task = LocalTask.open("site-1", task, Examples(data, data), layout, 1)
    local, network = build_site(local_task), local_task.model.module
    before = {name: value.clone() for name, value in network.state_dict().items() if name.startswith("0.")}
    start = torch.ones(layout.size)
    trained = local.train(start, Mask.full(layout.size), TrainingConfig(lr=0.1), 1)
    next(local.trainer.compute_gradients(start, 4, 1, 1))
    after = network.state_dict()
    assert layout.size == 7
    assert not torch.equal(trained, start)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_trial_stream_has_its_own_order_and_keeps_the_main_one() -> None:
    local, start = site()
    full = Mask.full(start.numel())
    config = TrainingConfig(lr=0.1, batch_size=2)
    main, trial = local.train(start, full, config, 1), local.train(start, full, config, 1, stream="trial")
    assert not torch.equal(main, trial)
    assert torch.equal(main, local.train(start, full, config, 1))


def test_pull_of_the_settings_is_that_of_the_method() -> None:
    local, start = site()
    full = Mask.full(start.numel())
    config = TrainingConfig(optimizer="sgd", lr=0.01)
    expected = local.train(start, full, config, 1, proximal_strength=3.0)
    assert torch.equal(local.train(start, full, config.model_copy(update={"proximal": 3.0}), 1), expected)
    assert not torch.equal(local.train(start, full, config, 1), expected)


class Noisy(Normed):
    """Adds noise to the inputs and records it."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: list[torch.Tensor] = []

    def augment(self, batch: Any, generator: torch.Generator) -> Any:
        self.noise.append(torch.randn(batch[0].shape, generator=generator))
        return batch[0] + self.noise[-1], batch[1]


def test_augmentation_is_determined_by_seed_site_and_round() -> None:
    layout, data = site()[0].layout, TensorDataset(torch.randn(24, 4), torch.zeros(24, 1))
    start = torch.ones(layout.size)

    def draw_noise(name: str = "site-1", seed: int = 1, t: int = 1) -> torch.Tensor:
        task = Noisy()
        local = build_site(LocalTask.open(name, task, Examples(data, data), layout, seed))
        # What was trained before, and what torch's own generator did, must not matter.
        torch.rand(len(name))
        local.train(start, Mask.full(layout.size), TrainingConfig(batch_size=8), t)
        return torch.cat(task.noise)

    first = draw_noise()
    assert torch.equal(first, draw_noise())
    assert len(first.unique()) == first.numel() == 24 * 4
    for other in (draw_noise("site-2"), draw_noise(seed=2), draw_noise(t=2)):
        assert not torch.equal(first, other)


def test_augmentation_leaves_order_and_dropout_alone_and_is_of_training_only() -> None:
    class Unchanged(Noisy):
        def augment(self, batch: Any, generator: torch.Generator) -> Any:
            super().augment(batch, generator)
            return batch

    local, start = site()
    task = Unchanged()
    other = build_site(LocalTask.open("site-1", task, local.trainer.examples, local.layout, 1))
    full = Mask.full(start.numel())
    assert torch.equal(other.train(start, full, TrainingConfig(), 1), local.train(start, full, TrainingConfig(), 1))
    drawn = len(task.noise)
    next(other.trainer.compute_gradients(start, 8, 1, 0))
    other.evaluate(start)
    assert len(task.noise) == drawn == 3


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_trains_in_few_bits_and_keeps_weights_in_float32(precision: str) -> None:
    """On a CPU, where autocast rounds the same operations as on a GPU."""
    formats: list[torch.dtype] = []

    class Watched(Normed):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            outputs = model(batch[0])
            formats.append(outputs.dtype)
            return outputs.float().square().mean()

    layout, data = site()[0].layout, TensorDataset(torch.randn(24, 4), torch.zeros(24, 1))
    local, start = build_site(LocalTask.open("site-1", Watched(), Examples(data, data), layout, 1)), site()[1]
    full, sgd = Mask.full(layout.size), TrainingConfig(optimizer="sgd", lr=0.05)
    exact = local.train(start, full, sgd, 1)
    assert set(formats) == {torch.float32}
    formats.clear()
    mixed = local.train(start, full, sgd.model_copy(update={"precision": precision}), 1)
    assert set(formats) == {getattr(torch, precision)}
    assert mixed.dtype == torch.float32
    assert not torch.equal(mixed, exact)
    torch.testing.assert_close(mixed, exact, atol=0.02, rtol=0.02)


class Faint(Normed):
    """A loss whose gradients are below the smallest number of float16, 6e-8."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 1, bias=False)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return 1e-9 * model(batch[0]).float().sum()


def test_float16_scales_the_loss_so_that_small_gradients_do_not_vanish() -> None:
    data = TensorDataset(torch.ones(8, 4), torch.zeros(8, 1))
    layout, start = build_initial_model(Faint(), 1)
    local = build_site(LocalTask.open("site-1", Faint(), Examples(data, data), layout, 1))
    config = TrainingConfig(optimizer="sgd", lr=1e6, batch_size=8, precision="float16")
    # The gradient is 8e-9 at each weight; unscaled, float16 rounds it to 0.
    torch.testing.assert_close(
        start - local.train(start, Mask.full(4), config, 1), torch.full((4,), 8e-3), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:-1", "CPU", "mps"])
def test_device_of_another_name_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="device"):
        TrainingConfig(device=text)


def test_device_of_the_site_decides_where_the_job_leaves_it_open() -> None:
    assert TrainingConfig().select_hardware("cpu").device == torch.device("cpu")
    assert TrainingConfig(device="cpu").select_hardware("cuda:3").device == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device cuda:63: torch .* finds .* on this machine; set method.training"):
        TrainingConfig(device="cuda:63").select_hardware()


def test_deterministic_training_sets_the_rule_for_its_own_time_alone() -> None:
    seen: list[bool] = []

    class Asking(Normed):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return model(batch[0]).square().mean()

    layout, data = site()[0].layout, TensorDataset(torch.randn(24, 4), torch.zeros(24, 1))
    local, start = build_site(LocalTask.open("site-1", Asking(), Examples(data, data), layout, 1)), site()[1]
    for deterministic in (True, False):
        local.train(start, Mask.full(layout.size), TrainingConfig(batch_size=24, deterministic=deterministic), 1)
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()


def test_mixed_precision_and_sparse_kernels_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="compute: sparse excludes other precisions"):
        TrainingConfig(precision="bfloat16", compute="sparse")


class Smooth(Normed):
    """The same task without batch normalisation, by which the examples of a minibatch change each other's gradients."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def test_accumulated_minibatches_take_the_step_of_one_large_one() -> None:
    task = Smooth()
    layout = Layout.from_module(task.model())
    data = TensorDataset(torch.randn(24, 4), torch.zeros(24, 1))
    local, start = (
        build_site(LocalTask.open("site-1", task, Examples(data, data), layout, 1)),
        torch.linspace(-1, 1, layout.size),
    )
    full = Mask.full(layout.size)
    large = local.train(start, full, TrainingConfig(optimizer="sgd", lr=0.1, batch_size=8), 1)
    small = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=4, accumulate=2)
    torch.testing.assert_close(local.train(start, full, small, 1), large)
    assert not torch.allclose(local.train(start, full, small.model_copy(update={"accumulate": 1}), 1), large)


def test_last_step_follows_the_minibatches_that_remain() -> None:
    task, data = Smooth(), TensorDataset(torch.randn(12, 4), torch.zeros(12, 1))
    layout = Layout.from_module(task.model())
    local, start = (
        build_site(LocalTask.open("site-1", task, Examples(data, data), layout, 1)),
        torch.linspace(-1, 1, layout.size),
    )
    full, config = Mask.full(layout.size), TrainingConfig(optimizer="sgd", lr=0.1, batch_size=4, accumulate=2)
    # Two minibatches, then one: the first step equals that of two alone, and the second one moves the weights again.
    first = local.train(start, full, config, 1, steps=2)
    assert not torch.equal(local.train(start, full, config, 1), first)
    alone = local.train(start, full, config.model_copy(update={"accumulate": 1}), 1, steps=1)
    assert torch.equal(local.train(start, full, config, 1, steps=1), alone)


def test_novograd_in_a_vector_is_that_of_monai_on_each_tensor() -> None:
    shapes = [(3, 2), (4,), (0,)]
    tensors = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    vector = nn.Parameter(torch.cat([tensor.detach().flatten() for tensor in tensors]))
    config = TrainingConfig(optimizer="novograd", lr=0.1, weight_decay=0.2, amsgrad=True)
    expected = Novograd(tensors, lr=0.1, weight_decay=0.2, amsgrad=True)
    optimizer = config.build_optimizer(vector, 1, [6, 4, 0])
    for _ in range(3):
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape)
        vector.grad = torch.cat([tensor.grad.flatten() for tensor in tensors])
        optimizer.step()
        expected.step()
    assert torch.equal(vector, torch.cat([tensor.flatten() for tensor in tensors]))
