"""Training touches the trainable entries only, with the bits of dense steps after which the others are restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset
from toy import Embedded, Plain, Toy

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.tasks.task import Examples, Task
from flare_sparse.training import LocalTask, Site, Training, TrainingConfig, build_site
from flare_sparse.training.flat import FlatModel
from flare_sparse.training.live import LiveEntries
from flare_sparse.training.loop import TrainingDiverged, train

CPU = torch.device("cpu")
SETTINGS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "lr": 0.1},
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam", "lr": 0.1, "weight_decay": 0.1},
    {"optimizer": "adamw", "lr": 0.1, "weight_decay": 0.1},
    {"optimizer": "sgd", "lr": 0.1, "clip_norm": 0.01},
]


def build_batches(count: int = 4) -> list[list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [[torch.randn(8, 12, generator=draw), torch.randn(8, 1, generator=draw)] for _ in range(count)]


def train_densely(
    task: Task,
    start: torch.Tensor,
    trainable: Mask,
    config: TrainingConfig,
    proximal: float,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return the trained parameters: dense steps, after each of which the frozen entries are restored."""
    network = task.model().train()
    layout = Layout.from_module(network)
    weights = nn.Parameter(start[: layout.num_parameters].clone())
    weights.grad = torch.zeros_like(weights)
    with torch.no_grad():
        for (name, parameter), offset in zip(network.named_parameters(), layout.offsets, strict=False):
            positions = slice(offset, offset + parameter.numel())
            parameter.data = weights.data[positions].view(parameter.shape)
            parameter.grad = weights.grad[positions].view(parameter.shape)
            assert name == layout.tensors[layout.offsets.index(offset)].name
    optimizer, bits = config.build_optimizer(weights, 1), trainable.bits[: weights.numel()]
    origin = start[: weights.numel()]
    for batch in build_batches():
        weights.grad.zero_()
        task.loss(network, batch).backward()
        if proximal:
            weights.grad.add_(weights.detach() - origin, alpha=proximal)
        weights.grad.masked_fill_(~bits, 0)
        if config.clip_norm is not None:
            # The last bits of a norm depend on the order of its sum, which is that of the trainable entries.
            live = nn.Parameter(weights.detach()[bits])
            live.grad = weights.grad[bits]
            torch.nn.utils.clip_grad_norm_([live], config.clip_norm)
            weights.grad[bits] = live.grad
        before = weights.detach().clone()
        optimizer.step()
        if scale is not None:
            lengths = scale[: weights.numel()]
            weights.data.copy_(torch.where(lengths == 1, weights.data, torch.lerp(before, weights.data, lengths)))
        weights.data.copy_(torch.where(bits, weights.data, origin))
    return weights.detach()


@pytest.mark.parametrize("chosen", SETTINGS, ids=["sgd", "momentum", "adam", "adamw", "clip"])
@pytest.mark.parametrize("share", [0.03, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("extra", ["plain", "proximal", "scaled"])
def test_step_has_the_bits_of_a_dense_step(chosen: dict[str, Any], share: float, extra: str) -> None:
    task, draw = Plain(), torch.Generator().manual_seed(2)
    layout, start = build_initial_model(task, 1)
    trainable = Mask(torch.rand(layout.size, generator=draw) < share)
    proximal, scale = 0.3 * (extra == "proximal"), None
    if extra == "scaled":
        scale = torch.rand(layout.size, generator=draw).clamp(max=0.5) * 2
    config = TrainingConfig(**chosen)
    expected = train_densely(task, start, trainable, config, proximal, scale)
    received = start.clone()
    training = Training(received, trainable, config, 1, proximal_strength=proximal, step_scale=scale)
    values = train(FlatModel(task.model(), layout), task, build_batches(), training)
    assert torch.equal(values.view(torch.int32), trainable.take(expected).view(torch.int32))
    assert torch.equal(received, start)
    assert not torch.equal(values, trainable.take(start))


def test_optimizer_state_has_the_size_of_the_trainable_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Toy()
    layout, start = build_initial_model(task, 1)
    trainable = Mask(torch.arange(layout.size) % 10 == 0)
    optimizers = []

    def build_optimizer(
        config: TrainingConfig, weights: nn.Parameter, t: int, sizes: list[int]
    ) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.Adam([weights]))
        return optimizers[0]

    monkeypatch.setattr(TrainingConfig, "build_optimizer", build_optimizer)
    model = FlatModel(task.model(), layout)
    train(model, task, build_batches(), Training(start, trainable, TrainingConfig(), 1))
    count = int(trainable.bits[: layout.num_parameters].sum())
    (state,) = optimizers[0].state.values()
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (count,)
    assert all(parameter.grad is None for parameter in model.parameters)


def open_site(task: Task) -> tuple[Site, torch.Tensor]:
    layout, start = build_initial_model(task, 1)
    x, y = (torch.cat(parts) for parts in zip(*build_batches(), strict=True))
    data = TensorDataset(x, y)
    return build_site(LocalTask.open("site-1", task, Examples(data, data), layout, 1)), start


def test_trained_entries_are_those_of_the_trained_weights() -> None:
    site, start = open_site(Toy())
    for bits in (torch.arange(start.numel()) % 3 == 0, torch.arange(start.numel()) < site.layout.num_parameters):
        trainable = Mask(bits)
        trained = site.train(start, trainable, TrainingConfig(lr=0.1), 1)
        assert torch.equal(site.train_entries(start, trainable, TrainingConfig(lr=0.1), 1), trainable.take(trained))
        assert torch.equal(trained[~bits], start[~bits])
        assert not torch.equal(trained, start)


def test_diverged_training_leaves_the_received_model_as_it_was() -> None:
    site, start = open_site(Plain())
    received = start.clone()
    with pytest.raises(TrainingDiverged):
        site.train(received, Mask(torch.arange(start.numel()) % 2 == 0), TrainingConfig(optimizer="sgd", lr=1e30), 1)
    assert torch.equal(received, start)


def test_vector_is_loaded_without_a_copy_if_it_is_aligned() -> None:
    layout, start = build_initial_model(Toy(), 1)
    model = FlatModel(Toy().model(), layout)
    model.load(start)
    assert model.flat.data_ptr() == model.parameters[0].data_ptr() == start.data_ptr()
    assert torch.equal(torch.cat([model.flat, model.collect_buffers()]), start)
    unaligned = torch.cat([torch.zeros(1), start])[1:]
    model.load(unaligned)
    assert model.flat.data_ptr() % 64 == 0
    assert torch.equal(torch.cat([model.flat, model.collect_buffers()]), start)


@settings(max_examples=count_cases(60), deadline=None)
@given(st.data())
def test_live_entries_are_the_indices_of_the_mask_by_tensor(data: st.DataObject) -> None:
    layout = Layout.from_module(Toy().model())
    density = data.draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    mask = Mask(torch.rand(layout.size, generator=generator) < density)
    live = LiveEntries.from_mask(mask, layout, CPU)
    positions = []
    for tensor, spec, offset in zip(live.parameters, layout.tensors, layout.offsets, strict=False):
        local = torch.arange(spec.size) if tensor.index is None else tensor.index.long()
        assert tensor.count == len(local)
        positions.append(local + offset)
    size = layout.num_parameters
    assert torch.equal(torch.cat([*positions, live.buffers + size]), mask.indices)
    assert live.count == int(mask.bits[:size].sum())
    assert (live.index is None) == (live.count == size)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_gradients_of_trainable_entries_are_collected_one_parameter_after_the_other(share: float) -> None:
    layout, network = Layout.from_module(Plain().model()), Plain().model()
    model, full = FlatModel(network, layout), Plain().model()
    full.load_state_dict(network.state_dict())
    mask = Mask(torch.rand(layout.size, generator=torch.Generator().manual_seed(3)) < share)
    held: list[int] = []
    for parameter in model.parameters:
        # Called before the hooks that collect: this one gradient is in memory, and no other.
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(other.grad is not None for other in model.parameters))
        )
    batches = [batch[0] for batch in build_batches(2)]
    # The last bias takes no part in the loss.
    losses = [functional_call(network, {"2.bias": torch.zeros(1)}, batch).square().sum() for batch in batches]
    found = model.compute_live_gradient(losses, LiveEntries.from_mask(mask, layout, CPU), None)
    for batch in batches:
        functional_call(full, {"2.bias": torch.zeros(1)}, batch).square().sum().backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in full.parameters()]
    assert torch.equal(found, mask.take(torch.cat([gradient.reshape(-1) for gradient in expected])))
    assert held == [1] * 6
    assert all(parameter.grad is None for parameter in model.parameters)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_sparse_gradients_of_an_embedding_train_as_dense_ones(kind: type[nn.Module], share: float) -> None:
    trained = []
    for sparse in (False, True):
        site, start = open_site(Embedded(kind, sparse))
        trainable = Mask(torch.rand(start.numel(), generator=torch.Generator().manual_seed(2)) < share)
        config = TrainingConfig(optimizer="sgd", lr=0.1, momentum=0.9, clip_norm=0.1, accumulate=2)
        trained.append(site.train(start, trainable, config, 1))
        assert not torch.equal(trained[-1], start)
    torch.testing.assert_close(trained[1], trained[0])


def test_negative_zero_of_a_gradient_becomes_zero_as_in_dense_training() -> None:
    network = nn.Linear(4, 1, bias=False)
    live = LiveEntries.from_mask(Mask(torch.tensor([True, False, True, False])), Layout.from_module(network), CPU)
    network.weight.grad, out = torch.full((1, 4), -0.0), torch.empty(2)
    live.collect_gradient(0, network.weight, out, is_first=True)
    assert not out.signbit().any()


class Bounded(nn.Linear):
    """A linear layer that bounds its weights in every pass.

    Args:
        idiom: how it does that.
    """

    def __init__(self, idiom: str):
        super().__init__(12, 1)
        self.idiom = idiom

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.idiom == "replaced":
            self.weight.data = self.weight.data.clamp(-1, 1)
        elif self.idiom == "in place":
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
        return nn.functional.linear(x, self.weight.clamp(-1, 1), self.bias)


@pytest.mark.parametrize("idiom", ["replaced", "in place", "computed"])
def test_network_that_writes_its_parameters_is_refused(idiom: str) -> None:
    class BoundedTask(Plain):
        def model(self) -> nn.Module:
            return Bounded(idiom)

    site, start = open_site(BoundedTask())
    if idiom == "computed":
        site.train(start, Mask.full(start.numel()), TrainingConfig(), 1)
        assert site.evaluate(start)["test_examples"] == 32
        return
    with pytest.raises(ConfigError, match=r"the network writes its parameter 'weight' in a pass"):
        site.train(start, Mask.full(start.numel()), TrainingConfig(), 1)
    with pytest.raises(ConfigError, match=r"compute the changed weight in forward\(\)"):
        site.evaluate(start)
