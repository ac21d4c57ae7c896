"""Dense and sparse computation of local training."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from other_device import require_compiler
from pydantic import ValidationError
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset, default_collate

from flare_sparse.compute.kernels import network as kernels
from flare_sparse.compute.kernels.preparation import prepare_loops
from flare_sparse.compute.kernels.threads import limit_kernel_threads
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, Site, Trainer, Training, TrainingConfig, build_site
from flare_sparse.training import compute as compute_module
from flare_sparse.training.compute import SparseComputeTrainer, can_use_kernels
from flare_sparse.training.flat import FlatModel
from flare_sparse.training.personal import PERSONAL, select_personal


class VolumeTask:
    """Regression on random volumes by a small network of the layers that the kernels compute, and a linear one."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(1, 6, 3, padding=1), nn.InstanceNorm3d(6, affine=True), nn.MaxPool3d(2), nn.ReLU(),
            nn.Conv3d(6, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 27, 1),
        )  # fmt: skip

    def collate(self, examples: list[torch.Tensor]) -> list[torch.Tensor]:
        batch: list[torch.Tensor] = default_collate(examples)
        return batch

    def augment(self, batch: list[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
        return batch

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        volumes, ages = batch
        return nn.functional.mse_loss(model(volumes).squeeze(1), ages)


@pytest.fixture
def site() -> Site:
    torch.manual_seed(0)
    task = VolumeTask()
    data = TensorDataset(torch.randn(8, 1, 6, 6, 6), torch.randn(8))
    layout = Layout.from_module(task.model())
    return build_site(LocalTask.open("site-1", task, Examples(data, data), layout, seed=3))  # type: ignore[arg-type]


def list_sparse_layers(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the layers of each training that the kernels computed, as the log names them."""
    return [text.partition(": ")[2] for text in caplog.messages if text.startswith("sparse kernels computed")]


def draw_masked_model(layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of 30 % of the entries, and weights that are 0 elsewhere."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.rand(layout.size, generator=generator) < 0.3
    return bits, torch.randn(layout.size, generator=generator) * 0.2 * bits


def test_sparse_training_ends_near_dense_training_and_keeps_entries_off(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernels.is_sparse_faster, "__code__", (lambda work: True).__code__)
    bits, start = draw_masked_model(site.layout)
    trained = {
        compute: site.train(
            start, Mask(bits), TrainingConfig(epochs=3, optimizer="sgd", lr=1e-2, batch_size=4, compute=compute), 1
        )
        for compute in ("dense", "sparse", "auto")
    }
    assert torch.equal(trained["sparse"], trained["auto"])
    assert not torch.equal(trained["sparse"], trained["dense"]), "the kernels add in another order"
    assert float((trained["sparse"] - trained["dense"]).abs().max()) < 1e-4
    assert float((trained["dense"] - start).abs().max()) > 1e-2
    assert torch.equal(trained["sparse"][~bits], start[~bits])
    assert list_sparse_layers(caplog)[-1] == "0, 4"


@pytest.mark.slow
def test_compiled_network_trains_as_the_dense_one_and_never_by_kernels(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    require_compiler()
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernels.is_sparse_faster, "__code__", (lambda work: True).__code__)
    bits, start = draw_masked_model(site.layout)
    config = TrainingConfig(epochs=3, optimizer="sgd", lr=1e-2, batch_size=4, compute="dense")
    dense = site.train(start, Mask(bits), config, 1)
    compiled = TrainingConfig.model_validate(config.model_dump() | {"compute": "auto", "compile": True})
    task, examples = VolumeTask(), site.trainer.examples
    hardware = compiled.select_hardware("cpu")
    local = LocalTask.open("site-1", task, examples, site.layout, 3, hardware)  # type: ignore[arg-type]
    torch.compiler.reset()
    counters.clear()
    trained = build_site(local).train(start, Mask(bits), compiled, 1)
    assert counters["stats"]["unique_graphs"] == 1
    assert float((trained - dense).abs().max()) < 1e-4
    assert torch.equal(trained[~bits], start[~bits])
    assert not list_sparse_layers(caplog)


def test_compiled_network_with_kernels_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"compute: sparse excludes .*compile"):
        TrainingConfig(compute="sparse", compile=True)


def test_frozen_weights_that_are_not_zero_are_computed(site: Site) -> None:
    start, bits = torch.zeros(site.layout.size), torch.zeros(site.layout.size, dtype=torch.bool)
    start[5], bits[7] = 2.0, True
    trainable = Mask(bits)
    recording = BlockRecorder(site.layout)
    sparse = SparseComputeTrainer(recording, recording.model)
    for patch in (None, Patch.from_vector(start, trainable)):
        sparse.train(Training(start, trainable, TrainingConfig(), 1, patch=patch))
    assert recording.live == [[5, 7], [7]]


class BlockRecorder(Trainer):
    """Does not train: it records the live weights of the first layer's block, if it has one."""

    num_examples = 8

    def __init__(self, layout: Layout):
        super().__init__(layout)
        self.model = FlatModel(VolumeTask().model(), layout)
        self.live: list[Any] = []

    def train(self, training: Training) -> torch.Tensor:
        with training.within():
            block = vars(self.model.module[0]).get("forward")
        self.live.append(block and block.live.flatten().nonzero().flatten().tolist())
        return training.trainable.take(training.start)

    def evaluate(self, weights: torch.Tensor, memory: Any) -> dict[str, float]:
        return {}


def test_missing_numba_means_dense_or_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_module, "find_spec", lambda name: None)
    cpu = torch.device("cpu")
    assert not can_use_kernels("auto", cpu)
    with pytest.raises(ConfigError, match=r"pip install 'flare-sparse\[fast\]'.*set it to auto or dense"):
        can_use_kernels("sparse", cpu)


def test_gpu_computes_densely() -> None:
    assert not can_use_kernels("auto", torch.device("cuda"))
    with pytest.raises(ConfigError, match="this site computes on cuda"):
        can_use_kernels("sparse", torch.device("cuda"))


def test_kernels_on_a_gpu_are_refused_in_the_configuration_with_both_remedies() -> None:
    with pytest.raises(ValidationError, match=r"compute: sparse excludes .* a GPU.* set compute to auto or dense"):
        TrainingConfig(compute="sparse", device="cuda")
    assert TrainingConfig(compute="auto", device="cuda").device == "cuda"
    assert TrainingConfig(compute="sparse", device="cpu").compute == "sparse"


@pytest.mark.parametrize(
    ("setting", "own", "count", "expected"),
    [
        ("auto", None, 0, "cpu"),
        ("auto", None, 1, "cuda"),
        ("auto", "cuda:1", 2, "cuda:1"),
        ("cpu", "cuda:1", 2, "cpu"),
        ("cuda:1", None, 2, "cuda:1"),
    ],
)
def test_site_computes_where_the_job_or_its_own_file_says(
    monkeypatch: pytest.MonkeyPatch, setting: str, own: str | None, count: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    assert TrainingConfig(device=setting).select_hardware(own).device == torch.device(expected)


@pytest.mark.parametrize(("setting", "own", "count"), [("cuda", None, 0), ("cuda:2", None, 2), ("auto", "cuda:1", 1)])
def test_gpu_that_is_not_there_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, setting: str, own: str | None, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(
        ConfigError, match=rf"device {own or setting}: torch .* finds {count or 'no'} GPU.* to cpu or a"
    ):
        TrainingConfig(device=setting).select_hardware(own)


@pytest.mark.parametrize("settings", [{"compute": "dense"}, {"precision": "bfloat16"}])
def test_dense_computation_installs_no_block(site: Site, settings: dict[str, Any]) -> None:
    recording = BlockRecorder(site.layout)
    sparse, start = SparseComputeTrainer(recording, recording.model), torch.zeros(site.layout.size)
    sparse.train(Training(start, Mask.full(site.layout.size), TrainingConfig(**settings), 1))
    assert recording.live == [None]


def test_choice_of_each_layer_is_logged_after_the_training(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernels.is_sparse_faster, "__code__", (lambda work: work.is_pooled).__code__)
    start = torch.randn(site.layout.size, generator=torch.Generator().manual_seed(1))
    config = TrainingConfig(batch_size=4, compute="dense")
    site.train(start, Mask.full(site.layout.size), config, 1)
    assert list_sparse_layers(caplog) == []
    site.train(start, Mask.full(site.layout.size), config.model_copy(update={"compute": "auto"}), 1)
    assert list_sparse_layers(caplog) == ["0"]


def test_personal_norm_between_sparse_layers_trains_as_with_dense_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with kernels computes the normalisation that follows it; here its scale and shift stay at the site."""
    monkeypatch.setattr(kernels.is_sparse_faster, "__code__", (lambda work: True).__code__)
    torch.manual_seed(0)
    task, data = VolumeTask(), TensorDataset(torch.randn(8, 1, 6, 6, 6), torch.randn(8))
    module = task.model()
    network = Layout.from_module(module)
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    kept = {name: tensors[name].detach().clone() for name in select_personal(network, "norms")}
    layout = network.drop(kept)
    bits = torch.rand(layout.size, generator=torch.Generator().manual_seed(1)) < 0.3
    start = layout.flatten({name: tensor.detach() for name, tensor in tensors.items()}) * bits
    results = {}
    for compute in ("dense", "sparse"):
        local = build_site(LocalTask.open("site-1", task, Examples(data, data), layout, 3), personal=kept)  # type: ignore[arg-type]
        config = TrainingConfig(epochs=3, optimizer="sgd", lr=1e-2, batch_size=4, compute=compute)
        local.train(start, Mask(bits), config, 1)
        results[compute] = local.memory[PERSONAL]
    torch.testing.assert_close(results["sparse"], results["dense"], atol=1e-4, rtol=1e-4)
    initial = torch.cat([tensor.flatten() for tensor in kept.values()])
    assert float((results["dense"] - initial).abs().max()) > 1e-3


def test_blocks_of_an_unchanged_mask_are_built_once_with_the_same_bits(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernels.is_sparse_faster, "__code__", (lambda work: True).__code__)
    # The first sparse block of a process prepares the loops, with blocks of its own.
    prepare_loops()
    built, build = [], kernels.build_blocks
    monkeypatch.setattr(kernels, "build_blocks", lambda *args: built.append(1) or build(*args))
    generator = torch.Generator().manual_seed(1)
    mask = Mask(torch.rand(site.layout.size, generator=generator) < 0.3)
    config = TrainingConfig(epochs=2, optimizer="sgd", lr=1e-2, batch_size=4, compute="sparse")
    site.weights = torch.randn(site.layout.size, generator=generator) * 0.2 * mask.bits
    fresh = site.train(site.weights, mask, config, 1)
    site.live_patch = Patch.from_vector(site.weights, mask)
    cached = [site.train(site.weights, mask, config, 1) for _ in range(2)]
    assert len(built) == 2
    assert all(torch.equal(trained, fresh) for trained in cached)
    site.train(site.weights, Mask(mask.bits & (torch.arange(mask.size) % 2 == 0)), config, 1)
    assert len(built) == 3


def test_sparse_training_ends_in_the_same_bits_with_any_number_of_kernel_threads(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernels.is_sparse_faster, "__code__", (lambda work: True).__code__)
    mask = Mask(torch.rand(site.layout.size, generator=torch.Generator().manual_seed(1)) < 0.3)
    start = torch.randn(site.layout.size, generator=torch.Generator().manual_seed(2)) * mask.bits
    config = TrainingConfig(epochs=3, optimizer="sgd", lr=1e-2, batch_size=4, compute="sparse")
    trained = []
    for count in (1, 2, 3):
        with limit_kernel_threads(count):
            trained.append(site.train(start, mask, config, 1))
    assert torch.equal(trained[0], trained[1])
    assert torch.equal(trained[0], trained[2])


def test_a_layer_that_computed_any_minibatch_sparsely_is_logged_as_sparse(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernels.is_sparse_faster, "__code__", (lambda work: work.samples > 2).__code__)
    mask = Mask(torch.rand(site.layout.size, generator=torch.Generator().manual_seed(1)) < 0.3)
    config = TrainingConfig(epochs=1, optimizer="sgd", lr=1e-2, batch_size=3, compute="sparse")
    site.train(torch.zeros(site.layout.size), mask, config, 1)
    # The linear layer is one sample of as many columns as there are examples.
    assert list_sparse_layers(caplog) == ["0, 4"]


def test_an_unknown_kind_of_computation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'spars' is none of auto, dense, sparse"):
        can_use_kernels("spars", torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.long
def test_commands_and_jobs_start_without_numba() -> None:
    code = "import sys; sys.modules['numba'] = None; import flare_sparse.cli, flare_sparse.flare.session"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
