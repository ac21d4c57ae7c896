"""Model files: written models are read back, and those of another network are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.results.runs.model_files import read_model, save_model

LAYOUT = Layout((TensorSpec("b", (3,)), TensorSpec("a", (2, 2))))


def test_saved_model_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    weights = torch.randn(LAYOUT.size)
    save_model(tmp_path / "model.safetensors", LAYOUT, weights)
    assert torch.equal(read_model(tmp_path / "model.safetensors", LAYOUT), weights)


def test_equal_models_make_equal_files(tmp_path: Path) -> None:
    """Safetensors orders the metadata by a hash that differs from one call to the next."""
    weights = torch.arange(LAYOUT.size).float()
    for number in range(20):
        save_model(tmp_path / f"{number}.safetensors", LAYOUT, weights)
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
    assert torch.equal(load_file(tmp_path / "0.safetensors")[LAYOUT.tensors[0].name].flatten()[:2], weights[:2])


def test_model_of_another_base_or_damaged_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_model(file, LAYOUT, torch.zeros(LAYOUT.size))
    with pytest.raises(ConfigError, match="the base model under the adapters"):
        read_model(file, Layout(LAYOUT.tensors, base_model_digest="0" * 64))
    file.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model(file, LAYOUT)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model(tmp_path / "none.safetensors", LAYOUT)
