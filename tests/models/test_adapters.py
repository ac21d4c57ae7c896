"""Adapters on linear layers and 3D convolutions of any frozen network, by peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from monai.networks.nets import SwinUNETR, ViT
from peft import PeftModel
from torch import nn

from flare_sparse.errors import ConfigError
from flare_sparse.models import build
from flare_sparse.models.adapters import AdapterConfig, adapt, adaptable
from flare_sparse.models.base import drawn
from flare_sparse.params import Layout
from flare_sparse.scores.ranks import Slots


def brain() -> nn.Module:
    with drawn(0):
        return build("brain_age_cnn_3mm", volume=(26, 32, 26), outputs=1)


def vit() -> nn.Module:
    with drawn(0):
        return ViT(
            in_channels=1,
            img_size=(16, 16, 16),
            patch_size=(8, 8, 8),
            hidden_size=24,
            mlp_dim=48,
            num_layers=2,
            num_heads=2,
            classification=True,
            num_classes=2,
        )


def swin() -> nn.Module:
    with drawn(0):
        return SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))


def train_a_little(network: nn.Module) -> None:
    """B is no longer zero."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))


def output(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    network.eval()
    with torch.no_grad():
        found = network(x)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize(
    ("make", "modules", "shape"),
    [(brain, 6, (26, 32, 26)), (vit, 9, (16, 16, 16)), (swin, 47, (64, 64, 64))],
    ids=["brain_age_cnn_3mm", "ViT", "SwinUNETR"],
)
def test_05_an_adapted_network_starts_as_its_base_bit_for_bit(
    make: object, modules: int, shape: tuple[int, ...]
) -> None:
    assert callable(make)
    x = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(2))
    before = output(make(), x)
    adapted = adapt(make(), AdapterConfig(rank=2))
    slots = Slots(Layout.from_module(adapted))
    assert slots.modules == modules
    assert slots.rest.count == 0
    assert torch.equal(output(adapted, x), before)
    train_a_little(adapted)
    assert not torch.allclose(output(adapted, x), before)


def test_09_the_adapter_of_a_convolution_is_its_kernel_as_a_matrix() -> None:
    """W (o, i, k, k, k) is viewed as (o, i * k^3): W + s * B A, with stride and padding (ALGORITHMS 3.7)."""
    with drawn(1):
        network = nn.Sequential(nn.Conv3d(3, 5, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(40, 1))
    adapted = adapt(network, AdapterConfig(rank=4, alpha=16))
    train_a_little(adapted)
    layout = Layout.from_module(adapted)
    (adapter,) = Slots(layout).adapters
    named = dict(adapted.named_parameters())
    vector = layout.flatten(named)
    assert (adapter.width("B"), adapter.width("A")) == (5, 3 * 27)
    merged = 16 / 4 * adapter.matrix(vector, "B") @ adapter.matrix(vector, "A")
    kernel = named["base_model.model.0.base_layer.weight"] + merged.view(5, 3, 3, 3, 3)
    x = torch.randn(2, 3, 4, 4, 4, generator=torch.Generator().manual_seed(2))
    bias = named["base_model.model.0.base_layer.bias"]
    expected = nn.functional.conv3d(x, kernel, bias, stride=2, padding=1)
    assert torch.allclose(adapted.base_model.model[0](x), expected, atol=1e-5)


@pytest.mark.parametrize("head", ["frozen", "trained"])
@pytest.mark.parametrize("make", [brain, vit], ids=["brain_age_cnn_3mm", "ViT"])
def test_what_peft_saves_peft_opens_with_equal_outputs(make: object, head: str, tmp_path: Path) -> None:
    assert callable(make)
    adapted = adapt(make(), AdapterConfig.model_validate({"rank": 3, "head": head}))
    train_a_little(adapted)
    adapted.save_pretrained(str(tmp_path))
    opened = PeftModel.from_pretrained(make(), str(tmp_path))
    side = 16 if make is vit else 26
    x = torch.randn(2, 1, side, 32 if make is brain else side, side, generator=torch.Generator().manual_seed(2))
    assert torch.equal(output(opened, x), output(adapted, x))


def test_a_head_that_trains_is_the_rest_of_the_layout() -> None:
    layout = Layout.from_module(adapt(brain(), AdapterConfig(rank=2, head="trained")))
    slots = Slots(layout)
    rest = [entry.name for entry in layout.tensors if "lora_" not in entry.name]
    assert rest == [
        "base_model.model.7.modules_to_save.default.weight",
        "base_model.model.7.modules_to_save.default.bias",
    ]
    assert slots.rest.count == 1153


def test_the_base_does_not_depend_on_the_runs_seed_and_the_adapters_do() -> None:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(adapt(brain(), AdapterConfig(rank=2)))
    one, two = (Layout.from_module(network) for network in made)
    assert one.fingerprint == two.fingerprint
    a, b = (layout.flatten(dict(network.named_parameters())) for layout, network in zip((one, two), made, strict=True))
    assert not torch.equal(a, b)


def test_targets_are_ends_of_names() -> None:
    slots = Slots(Layout.from_module(adapt(vit(), AdapterConfig(rank=2, targets=("qkv", "mlp.linear1")))))
    assert [adapter.module.rpartition("model.")[2] for adapter in slots.adapters] == [
        "blocks.0.mlp.linear1",
        "blocks.0.attn.qkv",
        "blocks.1.mlp.linear1",
        "blocks.1.attn.qkv",
    ]
    with pytest.raises(ConfigError, match=r"task\.adapter\.targets.*'qvk'.*'qkv'"):
        adapt(vit(), AdapterConfig(targets=("qvk",)))


def test_grouped_convolutions_are_left_alone_and_nothing_to_adapt_is_refused() -> None:
    network = nn.Sequential(nn.Conv3d(4, 4, 3, groups=4), nn.Conv3d(4, 4, 1), nn.Flatten(), nn.Linear(4, 1))
    assert adaptable(network) == ["1", "3"]
    for bare in (nn.Sequential(nn.Linear(2, 1)), nn.ReLU()):
        with pytest.raises(ConfigError, match="to adapt"):
            adapt(bare, AdapterConfig())
