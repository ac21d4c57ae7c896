"""Base models: folders by name, never by path, and an error for weights of another network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flare_sparse.core.errors import ConfigError
from flare_sparse.tasks.models.base import find_base_folder, load_base, seed_initialization
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
    load_base(restored, folder)
    assert all(
        torch.equal(a, b) for a, b in zip(network.state_dict().values(), restored.state_dict().values(), strict=True)
    )
    with pytest.raises(ConfigError, match="another network"):
        load_base(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), folder)
    with pytest.raises(ConfigError, match="another network"):
        load_base(nn.Sequential(nn.Linear(3, 4)), folder)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_base(restored, folder)


def test_seed_initialization_restores_the_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seed_initialization(1):
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
