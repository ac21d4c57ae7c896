"""Variants of scripts' networks and of the wrappers around them: the right values, or one error in words.

Each network is trained (its tensors get random values), wrapped in each way, and sent as a script would send it.
Judged: each tensor of the layout has the value that the network has, under whatever name it came; else the error names
a tensor and what to send. Networks that cannot be trained are refused when the job is assembled, before any training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy import Toy

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.errors import ConfigError
from flare_sparse.methods.registry import METHODS
from flare_sparse.training.script_exchange import ScriptFailed
from flare_sparse.training.script_trainer import read_tensors


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.relu(self.a(x)))


class Named(nn.Module):
    """Parts whose names are those of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.model = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 1))


class Scaled(nn.Module):
    """A parameter and buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Given(Toy):
    """A task with the network of a script."""

    def __init__(self, build: Callable[[], nn.Module]):
        super().__init__()
        self.model = build  # type: ignore[method-assign]


def freeze(network: nn.Module) -> nn.Module:
    next(network.parameters()).requires_grad_(False)
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)),
    "one layer": lambda: nn.Linear(3, 1),
    "norm": lambda: nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.GroupNorm(1, 2)),
    "tied": Tied,
    "named as wrappers": Named,
    "own tensors": Scaled,
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 1)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1)),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 1)),
    "old weight norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 1)),
    "old spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1)),
    "recurrent": lambda: nn.LSTM(3, 2),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "embedding": lambda: nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1)),
    "frozen": lambda: freeze(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))),
    "one module twice": lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)), "no shape before the first batch"),
    "lazy norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d()), "no shape before the first batch"),
    "meta": (lambda: nn.Linear(3, 1, device="meta"), "meta device"),
    "partly meta": (lambda: nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1, device="meta")), "meta device"),
    "quantised": (lambda: quantize_dynamic(nn.Sequential(nn.Linear(3, 1)), {nn.Linear}), "quantised"),
    "half": (lambda: nn.Linear(3, 1).half(), "float32"),
    "double": (lambda: nn.Linear(3, 1).double(), "float32"),
    "complex": (lambda: nn.Linear(3, 1, dtype=torch.complex64), "float32"),
    "no parameters": (lambda: nn.Sequential(nn.ReLU()), "no parameter"),
}


def average(network: nn.Module, **options: Any) -> nn.Module:
    averaged = AveragedModel(network, **options)
    averaged.update_parameters(network)
    return averaged


def compile_network(network: nn.Module) -> Any:
    return torch.compile(network, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], Mapping[str, Any]]] = {
    "none": lambda net: net.state_dict(),
    "DataParallel": lambda net: nn.DataParallel(net).state_dict(),
    "compile": lambda net: compile_network(net).state_dict(),
    "DataParallel of compile": lambda net: nn.DataParallel(compile_network(net)).state_dict(),
    "compile of DataParallel": lambda net: compile_network(nn.DataParallel(net)).state_dict(),
    "SWA": lambda net: average(net).state_dict(),
    "EMA": lambda net: average(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True).state_dict(),
    "EMA of DataParallel": lambda net: average(nn.DataParallel(net)).state_dict(),
    "checkpointing": lambda net: {f"_checkpoint_wrapped_module.{k}": v for k, v in net.state_dict().items()},
    "checkpoint_wrapper": lambda net: checkpoint_wrapper(net).state_dict(),
    "Opacus": lambda net: {f"_module.{k}": v for k, v in net.state_dict().items()},
    "FSDP": lambda net: {f"_fsdp_wrapped_module.{k}": v for k, v in net.state_dict().items()},
    "Lightning": lambda net: {f"model.{k}": v for k, v in net.state_dict().items()},
    "Lightning of compile": lambda net: {f"model._orig_mod.{k}": v for k, v in net.state_dict().items()},
    "PEFT without adapters": lambda net: {f"base_model.model.{k}": v for k, v in net.state_dict().items()},
    "Lightning and a loss": lambda net: (
        {"loss.weight": torch.ones(2)} | {f"net.{k}": v for k, v in net.state_dict().items()}
    ),
    "arrays": lambda net: {k: v.numpy() for k, v in net.state_dict().items()},
    "lists": lambda net: {k: v.tolist() for k, v in net.state_dict().items()},
    "four prefixes": lambda net: {f"a.b.c.d.{k}": v for k, v in net.state_dict().items()},
    "renamed": lambda net: {f"{k}_": v for k, v in net.state_dict().items()},
    "no tensors": lambda net: dict.fromkeys(net.state_dict(), "weights"),
}
CANNOT = {"Lightning and a loss", "renamed", "no tensors"}
"""Ways to send that are refused for every network."""


def train_randomly(network: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.5)


def read(kind: str, wrapper: str) -> str:
    """Return why what a script sends is refused; empty if its tensors are those of its network."""
    network, trained = NETWORKS[kind](), NETWORKS[kind]()
    layout, _ = build_initial_model(Given(NETWORKS[kind]), 1)
    train_randomly(trained)
    own: dict[str, Tensor] = dict([*trained.named_parameters(), *trained.named_buffers()])
    sent = WRAPPERS[wrapper](trained)
    try:
        found = read_tensors(sent, network)
    except ScriptFailed as error:
        text = str(error)
        assert text.startswith("params")
        assert any(name in text for name in sent)
        assert "send" in text or "expected" in text
        return text
    # Buffers that the state dict does not have stay as they are.
    assert {spec.name for spec in layout.tensors} - found.keys() <= {"scratch"}
    for spec in layout.tensors:
        assert spec.name == "scratch" or torch.equal(found[spec.name], own[spec.name]), (wrapper, spec.name)
    return ""


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", NETWORKS)
def test_sent_tensors_are_those_of_the_network_or_refused_with_the_line_to_write(kind: str) -> None:
    """One test a network: each with 21 wrappers."""
    # torch copies no network with the older weight norm, so there is no average of it.
    wrappers = [name for name in WRAPPERS if kind != "old weight norm" or not name.startswith(("SWA", "EMA"))]
    assert {wrapper for wrapper in wrappers if read(kind, wrapper)} == CANNOT


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_network_that_cannot_train_is_refused_when_the_job_is_assembled(kind: str) -> None:
    build, reason = REFUSED[kind]
    with pytest.raises(ConfigError, match=reason):
        build_initial_model(Given(build), 1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["scbf", "scbfwp", "fawp", "dssgd", "neurosfl", "fedsparsify", "topk_ef", "dispfl"])
@pytest.mark.parametrize("kind", ["tied", "weight norm", "spectral norm", "old weight norm", "recurrent", "attention"])
def test_method_takes_a_network_or_says_before_training_why_not(kind: str, name: str) -> None:
    layout, weights = build_initial_model(Given(NETWORKS[kind]), 1)
    try:
        method = METHODS[name](METHODS[name].Config(), layout, 1)
        method.describe()
        method.init(weights, ["site-1"])
    except ConfigError as error:
        text = str(error)
    else:
        return
    assert len(text) > 30
