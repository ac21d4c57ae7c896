"""Every check that needs a GPU, most important first, in steps that go on where an earlier call ended.

    python benchmarks/gpu/run.py --data DATA --out runs/gpu [--minutes 8] [--steps memory brain_t1] [--seeds 3]

``DATA`` has the folders ``brain_t1``, ``hippocampus`` and ``cifar10`` (CONTRIBUTING.md). A step prints its figure as
soon as it has one and writes a line to ``OUT/steps.jsonl``; a step whose line is there is skipped. No step starts after
``--minutes``. ``--small`` shrinks networks, data, repeats and rounds to one seed and fold, and with ``--device cpu`` it
tests the script itself.
FLARE is not needed: every federation runs in this process, through the real wire. The steps ``nnunet`` need nnU-Net.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "custom"))

from flare_sparse.api.memory import PeakMemory  # noqa: E402
from flare_sparse.compute.structure.graph import trace_network  # noqa: E402
from flare_sparse.compute.structure.removal import build_live_mask, find_removable_layers, narrow_network  # noqa: E402
from flare_sparse.config.assemble import assemble, build_initial_model, open_site  # noqa: E402
from flare_sparse.config.loading import load_config  # noqa: E402
from flare_sparse.config.study import prepare_site_data  # noqa: E402
from flare_sparse.core.mask import Mask  # noqa: E402
from flare_sparse.core.params import Layout  # noqa: E402
from flare_sparse.core.seeds import require_deterministic  # noqa: E402
from flare_sparse.methods.registry import METHODS  # noqa: E402
from flare_sparse.rounds.local.run import run_locally  # noqa: E402
from flare_sparse.tasks.models import build_model  # noqa: E402
from flare_sparse.tasks.models.registry import MODELS  # noqa: E402
from flare_sparse.tasks.models.shapes import Count, Image  # noqa: E402
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task  # noqa: E402
from flare_sparse.training import LocalTask, Site, build_site  # noqa: E402
from flare_sparse.training.config import Hardware, TrainingConfig  # noqa: E402

STEPS_FILE = "steps.jsonl"


@dataclass(frozen=True)
class Machine:
    """Where the steps run.

    Attributes:
        device: computes.
        data: folder of the cohorts.
        out: folder of the results.
        is_small: whether every step is as short as it can be.
        deadline: when the call ends, on the clock of ``time.monotonic``.
    """

    device: torch.device
    data: Path
    out: Path
    is_small: bool
    deadline: float

    @property
    def seconds_left(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device has computed what it was given."""
        if self.has_gpu:
            torch.cuda.synchronize(self.device)

    def read_clock(self) -> float:
        """Return seconds: of the wall, on a CPU those of its processor, which other work does not lengthen."""
        self.wait()
        return time.perf_counter() if self.has_gpu else time.process_time()

    def measure_peak(self, work: Callable[[], Any]) -> float:
        """Return the most memory in MB that a GPU held while it did some work; on a CPU, that of all storages."""
        if not self.has_gpu:
            with PeakMemory() as memory:
                work()
            return memory.peak / 1e6
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) / 1e6


@dataclass(frozen=True)
class Step:
    """One check.

    Attributes:
        name: its group and what it is about, such as ``step_time basic_unet``.
        run: returns its figures.
    """

    name: str
    run: Callable[[Machine], dict[str, Any]]


class Regression(Task):
    """The mean square of a network's outputs on random inputs.

    Args:
        build: returns the network.
    """

    metric = Metric("error", "", "min")

    def __init__(self, build: Callable[[], nn.Module]):
        super().__init__()
        self._build = build

    def model(self) -> nn.Module:
        return self._build()

    def load(self, data: SiteData, seed: int) -> Examples:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).float().square().mean()

    def predict(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch[0]).float().flatten(1).mean(1, keepdim=True), batch[1]

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        return {"error": float((predictions - targets).abs().mean())}


@dataclass(frozen=True)
class Network:
    """A network of a paper, at the size of its inputs there.

    Attributes:
        model: name in the registry.
        settings: arguments of its builder.
        shape: spatial size of an input.
        batch: examples of a minibatch.
    """

    model: str
    settings: dict[str, Any]
    shape: tuple[int, int, int]
    batch: int

    def shrink(self) -> Network:
        """Return the smallest network of the kind that its builder accepts."""
        small = {"alexnet3d": (69, 73, 69), "brain_age_cnn": (64, 64, 64)}.get(self.model, (32, 32, 32))
        key = "volume" if "volume" in self.settings else "patch"
        kept = {k: v for k, v in self.settings.items() if k not in ("channels", "width", "hidden", "layers", "heads")}
        if self.model == "vit3d":
            key = "volume"
        return replace(self, settings={**kept, key: small}, shape=small, batch=2)

    def build(self) -> nn.Module:
        return build_model(self.model, **self.settings)


NETWORKS = {
    "brain_age_cnn": Network("brain_age_cnn", {"volume": (91, 109, 91)}, (91, 109, 91), 4),
    "alexnet3d": Network("alexnet3d", {"volume": (121, 145, 121)}, (121, 145, 121), 4),
    "basic_unet": Network(
        "basic_unet", {"patch": (96, 96, 96), "channels": (32, 32, 64, 128, 256, 32)}, (96, 96, 96), 2
    ),
    "dyn_unet": Network("dyn_unet", {"patch": (96, 96, 96)}, (96, 96, 96), 2),
    "vit_b": Network(
        "vit3d",
        {"volume": (96, 96, 96), "patch": 16, "width": 768, "hidden": 3072, "layers": 12, "heads": 12},
        (96, 96, 96),
        2,
    ),
}


def describe_device(machine: Machine) -> dict[str, Any]:
    """Return what computes, and its rate for matrix products in bfloat16."""
    size = 256 if machine.is_small else 8192
    left, right = (torch.randn(size, size, device=machine.device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    began = machine.read_clock()
    for _ in range(10):
        left @ right
    rate = 10 * 2 * size**3 / (machine.read_clock() - began) / 1e12
    name = torch.cuda.get_device_name(machine.device) if machine.has_gpu else platform.processor()
    return {"name": name, "torch": torch.__version__, "cuda": torch.version.cuda, "bfloat16_tflops": rate}


def build_small_network() -> nn.Module:
    """Return a network that every method can train, of layers that torch has deterministic kernels of."""
    return nn.Sequential(
        nn.Conv3d(1, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, 3, stride=2), nn.Flatten(),
        nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1),
    )  # fmt: skip


def run_small(method: str, hardware: Hardware, **training: Any) -> Tensor:
    """Return the final weights of three rounds of a method at three sites of random volumes."""
    task = Regression(build_small_network)
    layout, weights = build_initial_model(task, 1)
    generator = torch.Generator().manual_seed(1)
    sites = {}
    for name in ("site-1", "site-2", "site-3"):
        data = TensorDataset(torch.randn(16, 1, 8, 8, 8, generator=generator), torch.zeros(16, 1))
        sites[name] = build_site(LocalTask.open(name, task, Examples(data, data), layout, 1, hardware))
    config = METHODS[method].Config.model_validate({"rounds": 3, "training": {"lr": 1e-3, **training}})
    outcome, _ = run_locally(METHODS[method](config, layout, 1), weights, sites, task.metric)
    return outcome.weights


def compare_with_cpu(machine: Machine) -> dict[str, Any]:
    """Return the largest difference between the final models of GPU and CPU, by method."""
    plain = ("fedavg", "neurosfl", "fedsparsify", "topk_ef", "dssgd", "scbf", "fawp", "scbfwp", "dispfl", "per_fedavg")
    gpu, cpu = Hardware(machine.device), Hardware(torch.device("cpu"))
    return {name: float((run_small(name, gpu) - run_small(name, cpu)).abs().max()) for name in plain}


def compare_bits(machine: Machine) -> dict[str, Any]:
    """Return whether two runs of a seed end with the same bits, with and without ``deterministic``, and its time.

    ``refused`` are layers whose backward pass torch refuses then.
    """
    figures: dict[str, Any] = {"refused": []}
    volume = torch.randn(1, 1, 8, 8, 8, device=machine.device)
    for layer in (nn.Conv3d(1, 1, 3), nn.MaxPool3d(2), nn.AvgPool3d(2), nn.AdaptiveAvgPool3d(1), nn.Upsample(4)):
        with require_deterministic(required=True):
            try:
                layer.to(machine.device)(volume.requires_grad_()).sum().backward()
            except RuntimeError:
                figures["refused"].append(type(layer).__name__)
    for deterministic in (False, True):
        began = time.perf_counter()
        runs = [run_small("neurosfl", Hardware(machine.device), deterministic=deterministic) for _ in range(2)]
        key = "deterministic" if deterministic else "default"
        figures[key] = bool(torch.equal(*runs))
        figures[f"{key}_s"] = (time.perf_counter() - began) / 2
    return figures


class Workload:
    """A network that trains on random minibatches, plainly and at a site.

    Args:
        machine: where.
        network: what.
        precision: number format of the passes.
        steps: minibatches of a training.
    """

    def __init__(self, machine: Machine, network: Network, precision: str, steps: int):
        network = network.shrink() if machine.is_small else network
        self.machine, self.precision = machine, precision
        generator = torch.Generator().manual_seed(1)
        volumes = torch.randn(steps * network.batch, 1, *network.shape, generator=generator)
        self.data = TensorDataset(volumes, torch.zeros(len(volumes), 1))
        self.task = Regression(network.build)
        self.batch_size = network.batch
        self.layout, self.start = build_initial_model(self.task, 1)
        self.noise = torch.rand(self.layout.size, generator=generator)

    def train_plainly(self) -> None:
        """Train one pass with a plain loop of torch, as a tutorial does."""
        network = self.task.model().to(self.machine.device)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
        for batch in DataLoader(self.data, batch_size=self.batch_size, pin_memory=self.machine.has_gpu):
            moved = [part.to(self.machine.device, non_blocking=True) for part in batch]
            optimizer.zero_grad()
            with torch.autocast(self.machine.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                loss = self.task.loss(network, moved)
            loss.item()
            loss.backward()
            optimizer.step()
        self.machine.wait()

    def build_training(self, sparsity: float, **settings: Any) -> Callable[[], Tensor]:
        """Return a function that trains one pass at a site, with a random mask of convolutions and linear layers."""
        maskable = Mask.from_preset(self.layout, "conv_linear_weights").bits
        mask = Mask(~maskable | (self.noise >= sparsity))
        vector = self.start.where(mask.bits, 0.0)
        config = TrainingConfig(
            batch_size=self.batch_size, optimizer="adam", lr=1e-4, precision=self.precision, compute="dense", **settings
        )
        hardware = Hardware(self.machine.device, config.channels_last)
        site = build_site(LocalTask.open("site-1", self.task, Examples(self.data, self.data), self.layout, 1, hardware))

        def train() -> Tensor:
            trained = site.train(vector, mask, config, 1)
            self.machine.wait()
            assert torch.equal(trained[~mask.bits], vector[~mask.bits]), "an entry outside the mask has changed"
            return trained

        return train


def time_steps(network: Network) -> Callable[[Machine], dict[str, Any]]:
    """Return a step that compares masked training with a plain loop of torch, each repeat one after the other."""

    def run(machine: Machine) -> dict[str, Any]:
        steps, repeats = (2, 3) if machine.is_small else (20, 5)
        load = Workload(machine, network, "bfloat16", steps)
        variants: dict[str, Callable[[], Any]] = {"torch": load.train_plainly}
        variants |= {f"{sparsity:.0%} off": load.build_training(sparsity) for sparsity in (0.0, 0.9, 0.99)}
        variants["90% off, channels last"] = load.build_training(0.9, channels_last=True)
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for repeat in range(repeats + 1):
            for name, train in variants.items():
                began = machine.read_clock()
                train()
                # The first repeat pays for memory and for the choice of algorithms.
                if repeat:
                    seconds[name].append((machine.read_clock() - began) / steps)
        plain = seconds.pop("torch")
        ratios = {name: median(a / b for a, b in zip(own, plain, strict=True)) for name, own in seconds.items()}
        return {"parameters": load.layout.num_parameters, "torch_ms": 1e3 * median(plain), "ratios": ratios}

    return run


def measure_memory(network: Network) -> Callable[[Machine], dict[str, Any]]:
    """Return a step that measures the most memory of training, dense in torch and masked at a site."""

    def run(machine: Machine) -> dict[str, Any]:
        load = Workload(machine, network, "bfloat16", 2)
        plain = machine.measure_peak(load.train_plainly)
        masked = {f"{sparsity:.0%} off": machine.measure_peak(load.build_training(sparsity)) for sparsity in (0.0, 0.9)}
        return {"torch_mb": plain, "masked_mb": masked}

    return run


def count_needs(network: Network) -> Callable[[Machine], dict[str, Any]]:
    """Return a step that counts FLOPs and memory of a step of training in float32, without computing it anywhere."""

    def run(machine: Machine) -> dict[str, Any]:
        chosen = network.shrink() if machine.is_small else network
        with torch.device("meta"):
            built, batch = chosen.build(), torch.randn(chosen.batch, 1, *chosen.shape)
            with FlopCounterMode(display=False) as counter, PeakMemory() as memory:
                built(batch).sum().backward()
        weights = 4e-6 * sum(parameter.numel() for parameter in built.parameters())
        # Weights, and Adam's two moments of each; the gradients are among what the passes allocate.
        megabytes = memory.peak / 1e6 + 3 * weights
        return {"batch": chosen.batch, "gflops": counter.get_total_flops() / 1e9, "mb": megabytes}

    return run


def time_removal(machine: Machine) -> dict[str, Any]:
    """Return the time of a forward and backward pass of a network without a share of its channels, and its FLOPs."""
    network = NETWORKS["brain_age_cnn"]
    network, repeats = (network.shrink(), 2) if machine.is_small else (network, 20)
    whole, figures = network.build(), dict[str, Any]()
    layers, layout = find_removable_layers(trace_network(whole)), Layout.from_module(whole)
    batch = torch.randn(network.batch, 1, *network.shape, device=machine.device)
    for share in (1.0, 0.5, 0.25, 0.125):
        kept = [torch.arange(layer.units) < max(1, int(share * layer.units)) for layer in layers]
        part = narrow_network(whole, build_live_mask(layout, layers, kept))
        for parameter in part.parameters():
            nn.init.normal_(parameter, std=0.01)
        part.to(machine.device)
        with FlopCounterMode(display=False) as counter:
            part(batch).sum().backward()
        began = machine.read_clock()
        for _ in range(repeats):
            part(batch).sum().backward()
        seconds = (machine.read_clock() - began) / repeats
        figures[f"{share:g}"] = {"gflops": counter.get_total_flops() / 1e9, "ms": 1e3 * seconds}
    return figures


SETTINGS = "rounds: 30, training: {epochs: 2, batch_size: 8, optimizer: adamw, lr: 0.001, schedule: {kind: cosine}}"
BRAIN_ARMS = {
    "FedAvg": f"{{name: fedavg, {SETTINGS}}}",
    "NeuroSFL 90 %": f"{{name: neurosfl, sparsity: 0.9, {SETTINGS}}}",
    "FedSparsify 90 %": f"{{name: fedsparsify, sparsity: 0.9, {SETTINGS}}}",
    "random mask 90 %": f"{{name: neurosfl, sparsity: 0.9, scores: random, {SETTINGS}}}",
    "pooled": f"{{name: fedavg, {SETTINGS}}}",
    "FedSparsify 99 %": f"{{name: fedsparsify, sparsity: 0.99, {SETTINGS}}}",
    "NeuroSFL 95 %": f"{{name: neurosfl, sparsity: 0.95, {SETTINGS}}}",
    "NeuroSFL 50 %": f"{{name: neurosfl, sparsity: 0.5, {SETTINGS}}}",
    "NeuroSFL 80 %": f"{{name: neurosfl, sparsity: 0.8, {SETTINGS}}}",
    "FedSparsify 95 %": f"{{name: fedsparsify, sparsity: 0.95, {SETTINGS}}}",
    "local only": f"{{name: local_only, {SETTINGS}}}",
}
"""Methods of the tables on brains; those of which a small part is run first."""
POOLED = ("simulator.sites=1", "simulator.data.partition={kind: iid, sizes: uniform, seed: 1}")
TEN_SITES = ("simulator.sites=10", "simulator.data.partition={kind: dirichlet, column: sex, alpha: 0.3}")
BRAIN_TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "brain_t1": ("brain_age", ()),
    "brain_t1_sex": ("sex_classification", ()),
    "brain_t1_dirichlet": ("sex_classification", TEN_SITES),
}
"""Task and settings of each table on brains."""
HIPPOCAMPUS_ARMS = ("fedavg_hippocampus", "neurosfl_hippocampus", "fedsparsify_hippocampus")
NNUNET_ROWS = ("pooled", "nnunet", "fedavg", "neurosfl", "topk_ef")
"""Rows of ``benchmarks/experiments/nnunet.py`` at full width, for 100 epochs of nnU-Net's own 250 steps."""
CIFAR = (
    "rounds: 500, participation: 0.1, training: {epochs: 5, batch_size: 16, optimizer: sgd, lr: 0.1, lr_decay: 0.998}"
)
CIFAR_ARMS = {
    "FedAvg": f"{{name: fedavg, {CIFAR}}}",
    "NeuroSFL 50 %": f"{{name: neurosfl, sparsity: 0.5, {CIFAR}}}",
}
"""SSFL's table, with ResNet-18."""
HUNDRED_SITES = ("simulator.sites=100", "simulator.data.partition={kind: dirichlet, column: label, alpha: 0.3}")
RATES = (10, 100, 1000)
"""Mbit/s of the link of a site, for the time of a run."""


def build_resnet18(*, image: Image = (3, 32, 32), outputs: Count = 10, width: float = 1.0) -> nn.Module:
    """Return MONAI's ResNet-18 for small images: a first convolution of 3x3 without a stride, and no first pooling."""
    from monai.networks.nets import resnet18

    first = {"conv1_t_size": 3, "conv1_t_stride": 1, "no_max_pool": True}
    axes = len(image) - 1
    return resnet18(spatial_dims=axes, n_input_channels=image[0], num_classes=outputs, widen_factor=width, **first)


MODELS["resnet18"] = build_resnet18


def describe_brain(task: str, *, is_small: bool) -> str:
    """Return the task of a table on brains, at 3 mm; FedSparsify's channels, with a pooling less than at 2 mm."""
    settings = "{name: brain_age_cnn_3mm, channels: [32, 64, 128, 256, 256], reduced: 64, pooled: 4}"
    model, downsample = ("{name: brain_age_cnn_3mm, pooled: 2}", 4) if is_small else (settings, 1)
    augmentation = "{mirror: true, shift: 2, intensity: 0.05}"
    more = f"downsample: {downsample}, normalization: brain_first, augmentation: {augmentation}"
    return f"task={{name: {task}, model: {model}, {more}}}"


def estimate_seconds(rounds: Sequence[Any], compute_s: float, sites: int) -> dict[str, list[float]]:
    """Return, by the rate of a site's link, the seconds until each round's model is evaluated.

    Sites compute and exchange side by side; a link carries a site's part of the bytes, one direction after the other.
    """
    sent = list(accumulate((record.bytes_down + record.bytes_up) / sites for record in rounds))
    share = compute_s / sites / max(len(rounds), 1)
    return {
        f"{rate} Mbit/s": [round(8 * size / rate / 1e6 + share * number, 2) for number, size in enumerate(sent, 1)]
        for rate in RATES
    }


def run_configuration(config: str, data: str, overrides: Sequence[str]) -> Callable[[Machine], dict[str, Any]]:
    """Return a step that runs a configuration at all its sites and returns metrics, bytes and seconds."""

    def run(machine: Machine) -> dict[str, Any]:
        more = ["method.rounds=1", "method.training.epochs=1"] if machine.is_small else []
        if machine.is_small and data.startswith("cifar10"):
            more += ["task.model={name: resnet18, width: 0.0625}", "method.participation=0.02"]
        settings = [
            *(
                describe_brain(part[5:], is_small=machine.is_small) if part[:5] == "TASK " else part
                for part in overrides
            ),
            *more,
            f"simulator.data.path={(machine.data / data).resolve()}",
            f"method.training.device={machine.device}",
        ]
        job = load_config(ROOT / "app_configs" / f"{config}.yaml", settings)
        assembly = assemble(job)
        began = time.perf_counter()
        sites: dict[str, Site | Exception] = {
            name: open_site(assembly, own) for name, own in prepare_site_data(job, assembly.task, Path()).items()
        }
        loaded = time.perf_counter()
        outcome, ledger = run_locally(assembly.method, assembly.weights, sites, assembly.task.metric)
        took = time.perf_counter() - loaded
        by_site = {name: metrics for name, metrics in outcome.evaluation.sites.items() if metrics}
        weights = {name: metrics["test_examples"] for name, metrics in by_site.items()}
        metric = assembly.task.metric.name
        mean = sum(weights[name] * by_site[name][metric] for name in by_site) / sum(weights.values())
        return {
            metric: mean,
            "sites": {name: metrics[metric] for name, metrics in by_site.items()},
            "megabytes": sum(line.payload_bytes for line in ledger.lines) / 1e6,
            "load_s": loaded - began,
            "run_s": took,
            "curve": [record.evaluation.overall.get(metric) for record in outcome.rounds],
            "link_s": estimate_seconds(outcome.rounds, took, len(sites)),
        }

    return run


def run_nnunet(row: str, seed: int) -> Callable[[Machine], dict[str, Any]]:
    """Return a step that goes on with a row of nnunet.py, which commits every round, until it is finished."""

    def run(machine: Machine) -> dict[str, Any]:
        size = ("1", "1", "4") if machine.is_small else ("100", "250", "32")
        script = [sys.executable, ROOT / "benchmarks" / "experiments" / "nnunet.py", machine.data / "hippocampus"]
        options = ["--runs", machine.out / "nnunet", "--rows", row, "--seeds", str(seed), "--precision", "bfloat16"]
        for name, value in zip(("--rounds", "--iterations", "--features"), size, strict=True):
            options += [name, value]
        subprocess.run([*script, *options], check=True, capture_output=True, text=True, timeout=machine.seconds_left)
        line = json.loads((machine.out / "nnunet" / f"{row}-seed{seed}" / "line.json").read_text())
        cases = [values[0] for site in line["sites"].values() for values in site.values()]
        return {"dice": sum(cases) / len(cases), "cases": len(cases), "megabytes": line["bytes"] / 1e6}

    return run


FEW = {"brain_t1/IXI-HH": 40, "brain_t1/NSK": 16, "hippocampus": 12}
"""Subjects of each data set with ``--small``."""
FEW_IMAGES = {"train": 600, "test": 200}
FIRST_ARMS = tuple(BRAIN_ARMS)[:3]


def is_in_small(name: str) -> bool:
    """Return whether ``--small`` has a step: one fold, all methods once, the first ones on the other brain tables."""
    if "fold" in name and not name.endswith("fold 1"):
        return False
    if name.startswith(("brain_t1_sex", "brain_t1_dirichlet")):
        return any(f" {arm}," in name for arm in FIRST_ARMS)
    return not name.startswith("nnunet") or name.split()[1].strip(",") in NNUNET_ROWS[:2]


def shrink_data(data: Path, out: Path) -> Path:
    """Return a folder with links to a few subjects of each data set, and a few images."""
    for name, count in FEW.items():
        folder, target = data / name, out / name
        if not folder.is_dir():
            continue
        with (folder / "participants.tsv").open(encoding="utf-8") as table:
            rows = list(csv.reader(table, delimiter="\t"))
        # Evenly, because the subjects are in the order of their scanners.
        kept = rows[1 :: max(1, len(rows) // count)][:count]
        target.mkdir(parents=True, exist_ok=True)
        with (target / "participants.tsv").open("w", encoding="utf-8", newline="") as table:
            csv.writer(table, delimiter="\t", lineterminator="\n").writerows([rows[0], *kept])
        for parent in (folder, *folder.glob("derivatives/*")):
            own = target / parent.relative_to(folder)
            own.mkdir(parents=True, exist_ok=True)
            for source in (parent / "dataset_description.json", *(parent / row[0] for row in kept)):
                if source.exists() and not (own / source.name).exists():
                    (own / source.name).symlink_to(source.resolve())
    file = out / "cifar10" / "cifar10_jpeg.npz"
    if not (data / "cifar10" / file.name).is_file():
        return out
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = np.load(data / "cifar10" / file.name)
    arrays = {"classes": whole["classes"]}
    for part, count in FEW_IMAGES.items():
        labels, ends, blob = (whole[f"{part}_{name}"] for name in ("labels", "ends", "blob"))
        rows = np.arange(0, len(labels), len(labels) // count)
        images = [blob[0 if row == 0 else ends[row - 1] : ends[row]] for row in rows]
        arrays |= {f"{part}_labels": labels[rows], f"{part}_blob": np.concatenate(images)}
        arrays[f"{part}_ends"] = np.cumsum([len(image) for image in images]).astype(ends.dtype)
    np.savez(file, **arrays)
    return out


def list_steps(seeds: int, folds: int) -> Iterator[Step]:
    """Yield the steps, most important first; those of a table a seed and fold at a time, so that it fills evenly."""
    yield Step("device", describe_device)
    yield Step("agreement", compare_with_cpu)
    yield Step("same_bits", compare_bits)
    yield from (Step(f"step_time {name}", time_steps(network)) for name, network in NETWORKS.items())
    yield from (Step(f"memory {name}", measure_memory(network)) for name, network in NETWORKS.items())
    yield Step("removal", time_removal)
    yield from (Step(f"needs {name}", count_needs(network)) for name, network in NETWORKS.items())
    for seed in range(1, seeds + 1):
        for fold in range(1, folds + 1):
            common = [f"seed={seed}", f"task.split={{folds: {folds}, fold: {fold}}}"]
            for table, (task, sites) in BRAIN_TABLES.items():
                for arm, method in BRAIN_ARMS.items():
                    where = POOLED if arm == "pooled" else sites
                    settings = [f"TASK {task}", *common, *where, f"method={method}"]
                    name = f"{table} {arm}, seed {seed}, fold {fold}"
                    yield Step(name, run_configuration("neurosfl_brain_t1", "brain_t1", settings))
            for config in HIPPOCAMPUS_ARMS:
                name = f"hippocampus {config}, seed {seed}, fold {fold}"
                yield Step(name, run_configuration(config, "hippocampus", common))
        for row in NNUNET_ROWS:
            yield Step(f"nnunet {row}, seed {seed}", run_nnunet(row, seed))
        for arm, method in CIFAR_ARMS.items():
            settings = [f"seed={seed}", f"method={method}", "task.model={name: resnet18}", *HUNDRED_SITES]
            name = f"cifar10 {arm}, seed {seed}"
            yield Step(name, run_configuration("fedavg_one_step_cifar10", "cifar10/cifar10_jpeg.npz", settings))


def read_finished(file: Path) -> set[str]:
    """Return the names of the steps that have a line."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {line["step"] for line in map(json.loads, lines) if "error" not in line}


def read_commit() -> str:
    """Return the commit of the working tree; empty outside a clone."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def run_step(step: Step, machine: Machine, file: Path) -> bool:
    """Run a step, print its figures, and append its line; return whether it succeeded."""
    began = time.perf_counter()
    try:
        figures = step.run(machine)
    # A step that fails must not take the time of the GPU from the others.
    except Exception as error:  # noqa: BLE001
        figures = {"error": f"{type(error).__name__}: {error}"}
    line = {"step": step.name, **figures, "seconds": round(time.perf_counter() - began, 2)}
    print(json.dumps(line), flush=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({**line, "device": str(machine.device), "commit": read_commit()}) + "\n")
    return "error" not in figures


def main() -> int:
    """Run the steps that have no line yet, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with brain_t1, hippocampus, cifar10")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of steps.jsonl (default runs/gpu)")
    parser.add_argument("--minutes", type=float, default=8, help="no step starts after this time (default 8)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default cuda)")
    parser.add_argument("--steps", nargs="+", default=[], help="groups of steps to run, such as memory (default all)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the tables (default 3)")
    parser.add_argument("--folds", type=int, default=5, help="folds of the tables (default 5)")
    parser.add_argument("--small", action="store_true", help="shrink every step, to test the script")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no GPU on this machine; nothing was run. To test the script: "
            "--device cpu --small"
        )
        return 1
    if options.folds < 2:
        parser.error(f"--folds: {options.folds}; expected 2 or more")
    steps = list(list_steps(1 if options.small else options.seeds, options.folds))
    if options.small:
        steps = [step for step in steps if is_in_small(step.name)]
    groups = {step.name.split()[0] for step in steps}
    if unknown := set(options.steps) - groups:
        parser.error(f"--steps: no group {', '.join(sorted(unknown))}; choose among {', '.join(sorted(groups))}")
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    data = shrink_data(options.data, options.out / "data") if options.small else options.data
    machine = Machine(torch.device(options.device), data, options.out, options.small, deadline)
    file, failed = options.out / STEPS_FILE, 0
    finished = read_finished(file)
    for step in steps:
        if step.name in finished or (options.steps and step.name.split()[0] not in options.steps):
            continue
        if time.monotonic() > deadline:
            print(f"{options.minutes:g} minutes are over; the same command goes on with {step.name!r}")
            break
        failed += not run_step(step, machine, file)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
