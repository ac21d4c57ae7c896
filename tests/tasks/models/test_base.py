"""Base models: folders by name, never by path, and an error for weights of another network."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.seeds import seed_torch
from flare_sparse.tasks.models.base import Base, find_base_folder, load_base
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Task


def save_to(network: nn.Module, folder: Path) -> Path:
    Task.save(None, network, folder)  # type: ignore[arg-type]
    return folder


def test_base_folder_is_found_by_name_only(tmp_path: Path) -> None:
    (tmp_path / "brain").mkdir()
    environment = {"FLARE_SPARSE_MODELS": str(tmp_path)}
    assert find_base_folder("brain", environment) == tmp_path / "brain"
    with pytest.raises(ConfigError, match=r"'brian'.*Did you mean 'brain'"):
        find_base_folder("brian", environment)
    with pytest.raises(ConfigError, match=r"FLARE_SPARSE_MODELS, which is not set"):
        find_base_folder("brain", {})


@pytest.mark.parametrize("path", ["../brain", "/etc", "a/b", ".hidden", ""])
def test_base_name_cannot_be_a_path(path: str) -> None:
    with pytest.raises(ValueError, match="base"):
        TASKS["brain_age"]({"base": path})


def test_load_base_restores_weights_and_rejects_another_network(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    folder = save_to(network, tmp_path / "net")
    restored = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    load_base(restored, folder, Base(folder="net"))
    assert all(
        torch.equal(a, b) for a, b in zip(network.state_dict().values(), restored.state_dict().values(), strict=True)
    )
    with pytest.raises(ConfigError, match="6 of 6 tensors are not in"):
        load_base(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), folder, Base(folder="net"))
    assert load_base(nn.Sequential(nn.Linear(3, 4)), folder, Base(folder="net")).endswith("1.weight")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_base(restored, folder, Base(folder="net"))


class Encoder(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(1, 3, 3), nn.BatchNorm3d(3))
        self.out = nn.Linear(3, outputs)


@pytest.mark.parametrize(
    ("file", "wrap"),
    [
        ("model.safetensors", lambda state: state),
        ("models/model.pt", lambda state: state),
        ("model.pt", lambda state: {f"module.{name}": value for name, value in state.items()}),
        ("model.pt", lambda state: {n.removeprefix("body."): v for n, v in state.items() if n.startswith("body.")}),
        ("model.pt", lambda state: {f"module.{n[5:]}": v for n, v in state.items() if n.startswith("body.")}),
        (
            "model.pt",
            lambda state: {
                "epoch": 3,
                "network": {"state_dict": {f"net.{name}": value for name, value in state.items()}},
                "optimizer": {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"lr": 0.1}]},
            },
        ),
    ],
    ids=["safetensors", "bundle", "module", "encoder alone", "encoder alone in module", "checkpoint"],
)
def test_encoder_of_another_training_keeps_its_tensors_beside_a_new_head(
    file: str, wrap: Callable[[dict[str, torch.Tensor]], dict[str, Any]], tmp_path: Path
) -> None:
    source, network = Encoder(5), Encoder(2)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    state = wrap({name: value for name, value in source.state_dict().items() if value.is_floating_point()})
    (safetensors.torch.save_file if file.endswith("safetensors") else torch.save)(state, tmp_path / file)
    head = network.out.weight.clone()
    report = load_base(network, tmp_path, Base(folder="base", new=("out.*",)))
    found = network.body.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in source.body.state_dict().items())
    assert torch.equal(network.out.weight, head)
    assert report.startswith("6 of 8 tensors")
    with pytest.raises(ConfigError, match=r"2 of 8 tensors are not in .*: out.weight, out.bias"):
        load_base(network, tmp_path, Base(folder="base"))
    with pytest.raises(ConfigError, match=r"task.base.new: 'head.\*' matches no tensor"):
        load_base(network, tmp_path, Base(folder="base", new=("head.*",)))


def test_file_of_a_base_model_runs_no_code(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    torch.save({"state_dict": Harmful()}, tmp_path / "model.pt")
    with pytest.raises(ConfigError, match=r"cannot be read: .* Save the network's state_dict alone") as raised:
        load_base(Encoder(2), tmp_path, Base(folder="base"))
    assert "weights_only" not in str(raised.value)
    assert not (tmp_path / "harm").exists()


def test_file_without_usable_numbers_is_refused(tmp_path: Path) -> None:
    state = Encoder(2).state_dict()
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({name: value * torch.nan for name, value in state.items()}, file)
    with pytest.raises(ConfigError, match="has a value that is NaN or infinite"):
        load_base(Encoder(2), tmp_path, Base(folder="base"))
    safetensors.torch.save_file({name: value.to(torch.int8) for name, value in state.items()}, file)
    with pytest.raises(ConfigError, match="8 of 8 tensors are not in"):
        load_base(Encoder(2), tmp_path, Base(folder="base"))
    with pytest.raises(ConfigError, match=r"task\.base\.new: no tensor is left"):
        load_base(Encoder(2), tmp_path, Base(folder="base", new=("*",)))
    torch.save(state, tmp_path / "model.pt")
    whole = (tmp_path / "model.pt").read_bytes()
    for position in range(0, len(whole), len(whole) // 40):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        (tmp_path / "model.pt").write_bytes(damaged)
        with suppress(ConfigError):
            load_base(Encoder(2), tmp_path, Base(folder="base", file="model.pt"))


@pytest.mark.parametrize("file", ["../model.pt", "/model.pt", "models/../../model.pt", "model.py"])
def test_file_of_a_base_model_is_in_its_folder(file: str) -> None:
    with pytest.raises(ValueError, match="file"):
        Base(folder="base", file=file)


def test_seed_torch_restores_the_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seed_torch(1):
        torch.rand(7)
    assert torch.equal(torch.rand(3), expected)


def test_pre_trained_network_is_the_start_of_fine_tuning_and_the_base_of_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLARE_SPARSE_MODELS", str(tmp_path))
    torch.manual_seed(7)
    network = TASKS["brain_age"]().model()
    save_to(network, tmp_path / "ixi")
    x = torch.randn(1, 1, 26, 32, 26)
    whole, adapted = (TASKS["brain_age"]({"base": "ixi", **more}).model() for more in ({}, {"adapter": {"rank": 2}}))
    assert torch.equal(whole(x), network(x))
    assert torch.equal(adapted(x), network(x))
    assert all(parameter.requires_grad for parameter in whole.parameters())
