"""Adapters for linear layers and 3D convolutions of any frozen network (docs/algorithms.md, section 4)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from monai.networks.nets import SwinUNETR, ViT
from peft import PeftModel
from torch import nn

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.params import Layout
from flare_sparse.core.seeds import seed_torch
from flare_sparse.methods.scores.ranks import Slots
from flare_sparse.tasks.models import build_model
from flare_sparse.tasks.models.adapters import AdapterConfig, add_adapters, list_adaptable_modules
from flare_sparse.training.personal import select_personal


def brain() -> nn.Module:
    with seed_torch(0):
        return build_model("brain_age_cnn_3mm", volume=(26, 32, 26), outputs=1)


def vit() -> nn.Module:
    with seed_torch(0):
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
    with seed_torch(0):
        return SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))


def perturb_trainable(network: nn.Module) -> None:
    """Change all trainable parameters, so that B is no longer zero."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))


def output(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    network.eval()
    with torch.no_grad():
        result = network(x)
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "modules", "shape"),
    [(brain, 6, (26, 32, 26)), (vit, 9, (16, 16, 16)), (swin, 47, (64, 64, 64))],
    ids=["brain_age_cnn_3mm", "ViT", "SwinUNETR"],
)
def test_network_with_adapters_starts_as_its_base_model_bit_for_bit(
    make: object, modules: int, shape: tuple[int, ...]
) -> None:
    assert callable(make)
    x = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(2))
    before = output(make(), x)
    adapted = add_adapters(make(), AdapterConfig(rank=2))
    slots = Slots(Layout.from_module(adapted))
    assert slots.num_modules == modules
    assert slots.other_entries.count == 0
    assert torch.equal(output(adapted, x), before)
    perturb_trainable(adapted)
    assert not torch.allclose(output(adapted, x), before)


def test_adapter_of_a_convolution_adds_to_its_kernel_as_a_matrix() -> None:
    """W (o, i, k, k, k) is viewed as (o, i * k^3), so W + s * B A (docs/algorithms.md, section 4.5, invariant 9)."""
    with seed_torch(1):
        network = nn.Sequential(nn.Conv3d(3, 5, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(40, 1))
    adapted = add_adapters(network, AdapterConfig(rank=4, alpha=16))
    perturb_trainable(adapted)
    layout = Layout.from_module(adapted)
    (adapter,) = Slots(layout).adapters
    named = dict(adapted.named_parameters())
    vector = layout.flatten(named)
    assert (adapter.get_slot_width("B"), adapter.get_slot_width("A")) == (5, 3 * 27)
    merged = 16 / 4 * adapter.view_matrix(vector, "B") @ adapter.view_matrix(vector, "A")
    kernel = named["base_model.model.0.base_layer.weight"] + merged.view(5, 3, 3, 3, 3)
    x = torch.randn(2, 3, 4, 4, 4, generator=torch.Generator().manual_seed(2))
    bias = named["base_model.model.0.base_layer.bias"]
    expected = nn.functional.conv3d(x, kernel, bias, stride=2, padding=1)
    assert torch.allclose(adapted.base_model.model[0](x), expected, atol=1e-5)


@pytest.mark.parametrize("head", ["frozen", "trained"])
@pytest.mark.parametrize("make", [brain, vit], ids=["brain_age_cnn_3mm", "ViT"])
def test_peft_loads_saved_adapters_with_equal_outputs(make: object, head: str, tmp_path: Path) -> None:
    assert callable(make)
    adapted = add_adapters(make(), AdapterConfig.model_validate({"rank": 3, "head": head}))
    perturb_trainable(adapted)
    adapted.save_pretrained(str(tmp_path))
    opened = PeftModel.from_pretrained(make(), str(tmp_path))
    side = 16 if make is vit else 26
    x = torch.randn(2, 1, side, 32 if make is brain else side, side, generator=torch.Generator().manual_seed(2))
    assert torch.equal(output(opened, x), output(adapted, x))


def test_adapter_of_the_site_adds_to_the_shared_one_and_stays_there(tmp_path: Path) -> None:
    adapted = add_adapters(brain(), AdapterConfig(rank=3, site_rank=2, head="trained"))
    x = torch.randn(2, 1, 26, 32, 26, generator=torch.Generator().manual_seed(2))
    assert torch.equal(output(adapted, x), output(brain(), x))
    layout = Layout.from_module(adapted)
    own = select_personal(layout, "site")
    assert own == tuple(spec.name for spec in layout.tensors if ".site." in spec.name)
    assert len(own) == 12
    perturb_trainable(adapted)
    both = output(adapted, x)
    for name, parameter in adapted.named_parameters():
        if name in own:
            parameter.data.zero_()
    shared = output(adapted, x)
    assert not torch.allclose(both, shared)
    adapted.save_pretrained(str(tmp_path), selected_adapters=["default"])
    assert torch.equal(output(PeftModel.from_pretrained(brain(), str(tmp_path)), x), shared)


def test_trained_head_is_the_rest_of_the_layout() -> None:
    layout = Layout.from_module(add_adapters(brain(), AdapterConfig(rank=2, head="trained")))
    slots = Slots(layout)
    rest = [entry.name for entry in layout.tensors if "lora_" not in entry.name]
    assert rest == [
        "base_model.model.7.modules_to_save.default.weight",
        "base_model.model.7.modules_to_save.default.bias",
    ]
    assert slots.other_entries.count == 1153


def test_base_model_does_not_depend_on_the_run_seed_but_adapters_do() -> None:
    adapted_networks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        adapted_networks.append(add_adapters(brain(), AdapterConfig(rank=2)))
    one, two = (Layout.from_module(network) for network in adapted_networks)
    assert one.fingerprint == two.fingerprint
    a, b = (
        layout.flatten(dict(network.named_parameters()))
        for layout, network in zip((one, two), adapted_networks, strict=True)
    )
    assert not torch.equal(a, b)


def test_a_starts_as_peft_starts_it_or_normal_as_in_the_paper() -> None:
    torch.manual_seed(0)
    starts = {init: add_adapters(brain(), AdapterConfig(rank=4, init=init)) for init in ("kaiming", "gaussian")}
    a, b = (
        {
            init: torch.cat([w.flatten() for name, w in net.named_parameters() if part in name])
            for init, net in starts.items()
        }
        for part in ("lora_A", "lora_B")
    )
    assert a["gaussian"].std().item() == pytest.approx(1 / 4, rel=0.05)
    assert a["gaussian"].abs().max() > 3 / 4 > a["kaiming"].abs().max()
    assert not b["gaussian"].any()


def test_targets_match_the_ends_of_module_names() -> None:
    slots = Slots(Layout.from_module(add_adapters(vit(), AdapterConfig(rank=2, targets=("qkv", "mlp.linear1")))))
    assert [adapter.module.rpartition("model.")[2] for adapter in slots.adapters] == [
        "blocks.0.mlp.linear1",
        "blocks.0.attn.qkv",
        "blocks.1.mlp.linear1",
        "blocks.1.attn.qkv",
    ]
    with pytest.raises(ConfigError, match=r"task\.adapter\.targets.*'qvk'.*'qkv'"):
        add_adapters(vit(), AdapterConfig(targets=("qvk",)))


def test_grouped_convolutions_get_no_adapter_and_networks_without_targets_raise() -> None:
    network = nn.Sequential(nn.Conv3d(4, 4, 3, groups=4), nn.Conv3d(4, 4, 1), nn.Flatten(), nn.Linear(4, 1))
    assert list_adaptable_modules(network) == ["1", "3"]
    for bare in (nn.Sequential(nn.Linear(2, 1)), nn.ReLU()):
        with pytest.raises(ConfigError, match="to adapt"):
            add_adapters(bare, AdapterConfig())


def test_new_tensors_are_trained_beside_the_adapters() -> None:
    network = swin()
    new = [name for name, _ in network.named_parameters() if name.startswith(("out.", "decoder1."))]
    adapted = add_adapters(network, AdapterConfig(rank=2), new)
    whole = {name for name, value in adapted.named_parameters() if value.requires_grad and "lora_" not in name}
    assert len(whole) == len(new)
    assert all("modules_to_save.default" in name for name in whole)
    assert not any("decoder1" in name for name, _ in adapted.named_parameters() if "lora_" in name)
    # A position embedding belongs to the module of patches as a whole.
    network = vit()
    new = [name for name, _ in network.named_parameters() if name == "patch_embedding.position_embeddings"]
    with pytest.raises(ConfigError, match=r"task\.base\.new: cannot be trained .* without others: patch_emb"):
        add_adapters(network, AdapterConfig(rank=2), new)
