"""MONAI's classifiers of volumes: their tensors are MONAI's, so published weights load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from monai.networks import nets
from monai.networks.nets.resnet import get_medicalnet_pretrained_resnet_args

from flare_sparse.compute.kernels.network import compile_network
from flare_sparse.core.errors import ConfigError
from flare_sparse.tasks.brain import BrainAge
from flare_sparse.tasks.models import build_model

VOLUME = (26, 32, 26)


@pytest.mark.parametrize("depth", [10, 18, 34, 50])
def test_resnet_with_64_channels_is_the_published_network(depth: int) -> None:
    has_bias, shortcut = get_medicalnet_pretrained_resnet_args(depth)
    with torch.device("meta"):
        network = build_model("resnet3d", volume=VOLUME, outputs=3, depth=depth, channels=64)
        published = getattr(nets, f"resnet{depth}")(
            n_input_channels=1, shortcut_type=shortcut, bias_downsample=has_bias, num_classes=3
        )
    shapes, expected = ({name: value.shape for name, value in n.state_dict().items()} for n in (network, published))
    assert shapes == expected
    assert {type(part) for part in network.modules()} == {type(part) for part in published.modules()}


def test_medicalnets_file_is_a_base_whose_last_layer_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    published = nets.resnet10(n_input_channels=1, bias_downsample=False, feed_forward=False)
    (tmp_path / "medicalnet").mkdir()
    state = {f"module.{name}": value for name, value in published.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "medicalnet" / "resnet_10_23dataset.pth")
    monkeypatch.setenv("FLARE_SPARSE_MODELS", str(tmp_path))
    task = BrainAge(
        {
            "downsample": 2,
            "model": {"name": "resnet3d", "channels": 64},
            "base": {"folder": "medicalnet", "file": "resnet_10_23dataset.pth", "new": ["fc.*"]},
        }
    )
    assert task.describe_base() == (
        "60 of 62 tensors are from medicalnet/resnet_10_23dataset.pth; new: fc.weight, fc.bias"
    )
    network = task.model().eval()
    volumes = torch.randn(2, 1, *VOLUME)
    with torch.inference_mode():
        features = published.eval()(volumes)
        torch.testing.assert_close(network(volumes), network.fc(features))  # type: ignore[operator]


def test_vit_has_the_tensors_and_logits_of_monais() -> None:
    torch.manual_seed(1)
    network = build_model("vit3d", volume=VOLUME, outputs=2).eval()
    theirs = nets.ViT(
        1, VOLUME, 8, hidden_size=96, mlp_dim=192, num_layers=4, num_heads=4, classification=True, num_classes=2,
        post_activation="x",
    ).eval()  # fmt: skip
    theirs.load_state_dict(network.state_dict())
    volumes = torch.randn(2, 1, *VOLUME)
    with torch.inference_mode():
        assert torch.equal(network(volumes), theirs(volumes)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet3d", "vit3d"])
def test_sparse_kernels_compute_the_same(name: str) -> None:
    torch.manual_seed(1)
    network = build_model(name, volume=VOLUME, outputs=2).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand_like(parameter) < 0.05)
    volumes = torch.randn(2, 1, *VOLUME)
    compiled = compile_network(network)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(volumes), network(volumes), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet3d", {"volume": (16, 16, 16)}, "input 16x16x16 does not fit.* the smallest that works is 16x16x17"),
        ("vit3d", {"volume": (26, 32, 7)}, "input 26x32x7 does not fit.* the smallest that works is 26x32x8"),
        ("vit3d", {"width": 50}, "width 50 is no multiple of heads, 4"),
        ("resnet3d", {"depth": 20}, "depth: Input should be 10, 18, 34 or 50, found 20"),
    ],
)
def test_small_volumes_and_wrong_sizes_are_explained(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(name, **settings)
