"""Every check that needs a GPU, most important first, in steps that go on where an earlier call ended.

    python benchmarks/gpu/run.py --data DATA --out runs/gpu [--minutes 8] [--steps memory brain_t1] [--seeds 3]

``DATA`` has the folders ``brain_t1`` and ``hippocampus`` (CONTRIBUTING.md). A step prints its figure as soon as it has
one and writes a line to ``OUT/steps.jsonl``; a step whose line is there is skipped. No step starts after ``--minutes``.
``--small`` shrinks networks, repeats and rounds, and with ``--device cpu`` it tests the script itself. FLARE is not
needed: every federation runs in this process, through the real wire.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "custom"))

from flare_sparse.config.assemble import assemble, build_initial_model, open_site  # noqa: E402
from flare_sparse.config.loading import load_config  # noqa: E402
from flare_sparse.config.sites import prepare_site_data  # noqa: E402
from flare_sparse.core.mask import Mask  # noqa: E402
from flare_sparse.methods.registry import METHODS  # noqa: E402
from flare_sparse.rounds.local.run import run_locally  # noqa: E402
from flare_sparse.tasks.models import build_model  # noqa: E402
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
        is_small: whether every step is as short as it can be.
    """

    device: torch.device
    data: Path
    is_small: bool

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device has computed what it was given."""
        if self.has_gpu:
            torch.cuda.synchronize(self.device)

    def measure_peak(self, work: Callable[[], Any]) -> float:
        """Return the most memory in MB that a GPU held while it did some work; 0 without a GPU."""
        if not self.has_gpu:
            work()
            return 0.0
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
    machine.wait()
    began = time.perf_counter()
    for _ in range(10):
        left @ right
    machine.wait()
    rate = 10 * 2 * size**3 / (time.perf_counter() - began) / 1e12
    name = torch.cuda.get_device_name(machine.device) if machine.has_gpu else platform.processor()
    return {"name": name, "torch": torch.__version__, "cuda": torch.version.cuda, "bfloat16_tflops": rate}


def build_small_network() -> nn.Module:
    """Return a network with a convolution, normalisation and linear layers, that every method can train."""
    return nn.Sequential(
        nn.Conv3d(1, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(64, 16),
        nn.ReLU(), nn.Linear(16, 1),
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
    """Return whether two runs of a seed end with the same bits, with and without ``deterministic``, and its time."""
    figures: dict[str, Any] = {}
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
        steps, repeats = (2, 1) if machine.is_small else (20, 5)
        load = Workload(machine, network, "bfloat16", steps)
        variants: dict[str, Callable[[], Any]] = {"torch": load.train_plainly}
        variants |= {f"{sparsity:.0%} off": load.build_training(sparsity) for sparsity in (0.0, 0.9, 0.99)}
        variants["90% off, channels last"] = load.build_training(0.9, channels_last=True)
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for repeat in range(repeats + 1):
            for name, train in variants.items():
                began = time.perf_counter()
                train()
                # The first repeat pays for memory and for the choice of algorithms.
                if repeat:
                    seconds[name].append((time.perf_counter() - began) / steps)
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


def time_removal(machine: Machine) -> dict[str, Any]:
    """Return the time of a forward and backward pass of a network with a share of its channels, against its FLOPs."""
    from torch.utils.flop_counter import FlopCounterMode

    figures: dict[str, Any] = {}
    shape, repeats = ((16, 16, 16), 2) if machine.is_small else ((91, 109, 91), 20)
    for share in (1.0, 0.5, 0.25, 0.125):
        channels = [max(1, int(share * width)) for width in (32, 64, 128, 256)]
        layers: list[nn.Module] = []
        for before, after in zip([1, *channels], channels, strict=False):
            layers += [nn.Conv3d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)]
        network = nn.Sequential(*layers).to(machine.device)
        batch = torch.randn(4, 1, *shape, device=machine.device)
        with FlopCounterMode(display=False) as counter:
            network(batch).sum().backward()
        machine.wait()
        began = time.perf_counter()
        for _ in range(repeats):
            network(batch).sum().backward()
        machine.wait()
        seconds = (time.perf_counter() - began) / repeats
        figures[f"{share:g}"] = {"gflops": counter.get_total_flops() / 1e9, "ms": 1e3 * seconds}
    return figures


CNN = "task.model={name: brain_age_cnn_3mm}"
SETTINGS = "rounds: 30, training: {epochs: 2, batch_size: 8, optimizer: adamw, lr: 0.001, schedule: {kind: cosine}}"
BRAIN_ARMS = {
    "FedAvg": f"{{name: fedavg, {SETTINGS}}}",
    "NeuroSFL 90 %": f"{{name: neurosfl, sparsity: 0.9, {SETTINGS}}}",
    "FedSparsify 90 %": f"{{name: fedsparsify, sparsity: 0.9, {SETTINGS}}}",
    "random mask 90 %": f"{{name: neurosfl, sparsity: 0.9, scores: random, {SETTINGS}}}",
    "FedSparsify 99 %": f"{{name: fedsparsify, sparsity: 0.99, {SETTINGS}}}",
    "NeuroSFL 95 %": f"{{name: neurosfl, sparsity: 0.95, {SETTINGS}}}",
    "NeuroSFL 50 %": f"{{name: neurosfl, sparsity: 0.5, {SETTINGS}}}",
    "NeuroSFL 80 %": f"{{name: neurosfl, sparsity: 0.8, {SETTINGS}}}",
    "FedSparsify 95 %": f"{{name: fedsparsify, sparsity: 0.95, {SETTINGS}}}",
    "local only": f"{{name: local_only, {SETTINGS}}}",
}
"""Methods of the brain-age table, at 3 mm by FedSparsify's network for such volumes."""
HIPPOCAMPUS_ARMS = ("fedavg_hippocampus", "neurosfl_hippocampus", "fedsparsify_hippocampus")


def run_configuration(config: str, data: str, overrides: list[str]) -> Callable[[Machine], dict[str, Any]]:
    """Return a step that runs a configuration at all its sites and returns metrics, bytes and seconds."""

    def run(machine: Machine) -> dict[str, Any]:
        more = ["method.rounds=1", "method.training.epochs=1"] if machine.is_small else []
        settings = [
            *overrides,
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
        by_site = {name: metrics for name, metrics in outcome.evaluation.sites.items() if metrics}
        weights = {name: metrics["test_examples"] for name, metrics in by_site.items()}
        metric = assembly.task.metric.name
        mean = sum(weights[name] * by_site[name][metric] for name in by_site) / sum(weights.values())
        return {
            metric: mean,
            "sites": {name: metrics[metric] for name, metrics in by_site.items()},
            "megabytes": sum(line.payload_bytes for line in ledger.lines) / 1e6,
            "load_s": loaded - began,
            "run_s": time.perf_counter() - loaded,
        }

    return run


def list_steps(seeds: int, folds: int) -> Iterator[Step]:
    """Yield the steps, most important first; those of a table a seed and fold at a time, so that it fills evenly."""
    yield Step("device", describe_device)
    yield Step("agreement", compare_with_cpu)
    yield Step("same_bits", compare_bits)
    yield from (Step(f"step_time {name}", time_steps(network)) for name, network in NETWORKS.items())
    yield from (Step(f"memory {name}", measure_memory(network)) for name, network in NETWORKS.items())
    yield Step("removal", time_removal)
    for seed in range(1, seeds + 1):
        for fold in range(1, folds + 1):
            common = [f"seed={seed}", f"task.split={{folds: {folds}, fold: {fold}}}"]
            for arm, method in BRAIN_ARMS.items():
                settings = [*common, CNN, f"method={method}"]
                name = f"brain_t1 {arm}, seed {seed}, fold {fold}"
                yield Step(name, run_configuration("neurosfl_brain_t1", "brain_t1", settings))
            for config in HIPPOCAMPUS_ARMS:
                name = f"hippocampus {config}, seed {seed}, fold {fold}"
                yield Step(name, run_configuration(config, "hippocampus", common))


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
    parser.add_argument("--data", type=Path, required=True, help="folder with brain_t1 and hippocampus")
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
    steps = list(list_steps(options.seeds, options.folds))
    groups = {step.name.split()[0] for step in steps}
    if unknown := set(options.steps) - groups:
        parser.error(f"--steps: no group {', '.join(sorted(unknown))}; choose among {', '.join(sorted(groups))}")
    machine = Machine(torch.device(options.device), options.data, options.small)
    options.out.mkdir(parents=True, exist_ok=True)
    file, began, failed = options.out / STEPS_FILE, time.monotonic(), 0
    finished = read_finished(file)
    for step in steps:
        if step.name in finished or (options.steps and step.name.split()[0] not in options.steps):
            continue
        if time.monotonic() - began > 60 * options.minutes:
            print(f"{options.minutes:g} minutes are over; the same command goes on with {step.name!r}")
            break
        failed += not run_step(step, machine, file)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
