"""Networks for images and tables: published parameter counts and output shapes."""

from __future__ import annotations

import pytest
import torch

from flare_sparse.compute.structure.graph import trace_network
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.tasks.models import build_model
from flare_sparse.tasks.models.resnet import Shortcut


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet32", 464_154), ("resnet44", 658_586), ("resnet56", 853_018), ("resnet110", 1_727_962)],
)
def test_cifar_resnets_have_the_known_size(name: str, parameters: int) -> None:
    """Option A shortcuts have no parameters: He et al.'s 0.46 M, 0.66 M, 0.85 M and 1.7 M (Table 6)."""
    assert Layout.from_module(build_model(name)).num_parameters == parameters


def test_resnet_accepts_grey_images_of_any_size() -> None:
    network = build_model("resnet32", image=(1, 28, 28), outputs=2)
    assert network(torch.randn(2, 1, 28, 28)).shape == (2, 2)


def test_shortcut_takes_every_second_pixel_and_adds_zero_channels() -> None:
    x = torch.arange(32.0).reshape(1, 2, 4, 4)
    out = Shortcut(stride=2, new_channels=3)(x)
    assert out.shape == (1, 5, 2, 2)
    assert out[0, 0].tolist() == [[0.0, 2.0], [8.0, 10.0]]
    assert torch.count_nonzero(out[0, 2:]) == 0


def test_mlp_has_the_computed_number_of_parameters() -> None:
    network = build_model("mlp", features=10, outputs=2, hidden=(8, 4))
    assert Layout.from_module(network).size == (10 * 8 + 8) + (8 * 4 + 4) + (4 * 2 + 2)
    assert network(torch.randn(3, 10)).shape == (3, 2)
    assert Layout.from_module(build_model("mlp", features=10, hidden=())).size == 11


def test_resnet_mlp_starts_near_the_linear_model_and_masks_its_hidden_layers_only() -> None:
    network = build_model("resnet_mlp", features=5, outputs=2, numbers=(True, True, False, False, False), width=8)
    layout = Layout.from_module(network)
    hidden = (2 * 8 + 3) * 8 + 2 * 8 * 8 + 8 * 2
    assert layout.size == (5 * 2 + 2) + hidden + 3 * 8 + 2
    assert Mask.from_preset(layout, "conv_linear_weights").count == hidden
    assert Mask.from_preset(layout, "all_trainable").count == layout.size - (5 * 2 + 2)
    x = torch.tensor([[0.0, 2.0, 0, 1, 0], [-9.0, 0.3, 1, 0, 0]])
    assert not network.path(x).any()
    assert 0 < network.eval()(x).abs().max() < 0.2
    encoded = network.hidden[0](x)
    assert encoded.shape == (2, 19)
    # Half of the bins end at the mean; beyond the last one, and before the first, nothing changes.
    assert encoded[0, :8].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert encoded[0, 8:16].tolist() == pytest.approx([*[1.0] * 7, (2 - 1.1503) / (3 - 1.1503)], abs=1e-3)
    assert encoded[1].tolist()[:8] == [0] * 8
    assert torch.equal(encoded[:, 16:], x[:, 2:])
    scores = torch.autograd.grad(network(x).sum(), list(network.hidden.parameters()))
    assert all(gradient.any() for gradient in scores)
    assert len(trace_network(network).layers) == 5


def test_image_cnn_has_the_computed_number_of_parameters() -> None:
    network = build_model("image_cnn", image=(1, 28, 28), outputs=2)
    assert Layout.from_module(network).size == (9 * 32 + 32) + (9 * 32 * 64 + 64) + (64 * 49 * 2 + 2)
    assert network(torch.randn(3, 1, 28, 28)).shape == (3, 2)


def test_image_cnn_names_the_smallest_image() -> None:
    with pytest.raises(ConfigError, match=r"input 3x28 does not fit.* the smallest that works is 4x28"):
        build_model("image_cnn", image=(1, 3, 28))


def test_metagater_networks_have_the_papers_sizes() -> None:
    """784-100-10; three convolutions of 32, 64 and 128 channels before 2048 inputs of the linear layer."""
    assert (
        Layout.from_module(build_model("image_mlp", image=(1, 28, 28), outputs=10)).size
        == 784 * 100 + 100 + 100 * 10 + 10
    )
    small = build_model("image_cnn", image=(3, 32, 32), outputs=10, channels=(32, 64, 128))
    assert small[-1].in_features == 2048
    six = build_model("image_cnn6", image=(3, 32, 32), outputs=10)
    assert six(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert six[-1].in_features == 2048
    assert sum(isinstance(part, torch.nn.Conv2d) for part in six.modules()) == 6
