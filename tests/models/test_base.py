"""Bases: folders by name, never paths, and the same network or a clear refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flare_sparse.errors import ConfigError
from flare_sparse.models.base import base_folder, drawn, load_base
from flare_sparse.task import Task
from flare_sparse.tasks import TASKS


def saved(network: nn.Module, folder: Path) -> Path:
    Task.save(None, network, folder)  # type: ignore[arg-type]
    return folder


def test_a_folder_is_found_by_its_name_only(tmp_path: Path) -> None:
    (tmp_path / "brain").mkdir()
    place = {"FLARE_SPARSE_MODELS": str(tmp_path)}
    assert base_folder("brain", place) == tmp_path / "brain"
    with pytest.raises(ConfigError, match=r"'brian'.*Did you mean 'brain'"):
        base_folder("brian", place)
    with pytest.raises(ConfigError, match=r"FLARE_SPARSE_MODELS, which is not set"):
        base_folder("brain", {})


@pytest.mark.parametrize("path", ["../brain", "/etc", "a/b", ".hidden", ""])
def test_a_job_cannot_name_a_path(path: str) -> None:
    with pytest.raises(ValueError, match="base"):
        TASKS["brain_age"]({"base": path})


def test_weights_come_back_and_those_of_another_network_do_not(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    folder = saved(network, tmp_path / "net")
    again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    load_base(again, folder)
    assert all(
        torch.equal(a, b) for a, b in zip(network.state_dict().values(), again.state_dict().values(), strict=True)
    )
    with pytest.raises(ConfigError, match="another network"):
        load_base(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), folder)
    with pytest.raises(ConfigError, match="another network"):
        load_base(nn.Sequential(nn.Linear(3, 4)), folder)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_base(again, folder)


def test_what_is_drawn_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with drawn(1):
        torch.rand(7)
    assert torch.equal(torch.rand(3), expected)


def test_a_pre_trained_brain_net_is_the_start_of_fine_tuning_and_the_base_of_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLARE_SPARSE_MODELS", str(tmp_path))
    torch.manual_seed(7)
    network = TASKS["brain_age"]().model()
    saved(network, tmp_path / "ixi")
    x = torch.randn(1, 1, 26, 32, 26)
    whole, adapted = (TASKS["brain_age"]({"base": "ixi", **more}).model() for more in ({}, {"adapter": {"rank": 2}}))
    assert torch.equal(whole(x), network(x))
    assert torch.equal(adapted(x), network(x))
    assert all(parameter.requires_grad for parameter in whole.parameters())
