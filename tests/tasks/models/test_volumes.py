"""Networks for volumes: the papers' parameter counts and feature maps, and errors for small volumes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.params import MASKABLE, Layout
from flare_sparse.inputs.scaling import InputScaler, build_statistics_mask
from flare_sparse.tasks.models import build_model
from flare_sparse.tasks.models.brain_age import HemisphereMean


def maps(network: nn.Sequential, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the spatial shape after each part of the network that returns a volume."""
    x, spatial_shapes = torch.zeros(1, 1, *shape), []
    with torch.inference_mode():
        for part in network:
            x = part(x)
            spatial_shapes.append(tuple(x.shape[2:]))
    return [shape for shape in spatial_shapes if len(shape) == 3]


def maskable(network: nn.Module) -> int:
    """Return the number of convolution and linear weights."""
    roles = MASKABLE["conv_linear_weights"]
    return sum(entry.size for entry in Layout.from_module(network).tensors if entry.role in roles)


def test_brain_age_cnn_has_the_papers_number_of_parameters() -> None:
    layout = Layout.from_module(build_model("brain_age_cnn"))
    assert layout.size == 2_950_401
    assert sum(e.size for e in layout.tensors if e.role == "norm") == 1_600
    assert sum(e.size for e in layout.tensors if e.role in ("weight", "bias")) == 2_948_801


@pytest.mark.slow
def test_brain_age_cnn_has_the_papers_feature_maps() -> None:
    network = build_model("brain_age_cnn")
    assert isinstance(network, nn.Sequential)
    assert maps(network, (91, 109, 91)) == [
        (45, 54, 45),
        (22, 27, 22),
        (11, 13, 11),
        (5, 6, 5),
        (2, 3, 2),
        (2, 3, 2),
        (1, 1, 1),
        (1, 1, 1),
    ]


def test_brain_age_cnn_size_does_not_depend_on_the_volume() -> None:
    network = build_model("brain_age_cnn", volume=(32, 64, 32))
    assert Layout.from_module(network).size == 2_950_401
    assert network(torch.randn(2, 1, 32, 64, 32)).shape == (2, 1)


def test_brain_age_cnn_names_the_smallest_volume_for_its_normalisation() -> None:
    with pytest.raises(ConfigError, match=r"input 26x32x26 does not fit.* 0x1x0; the smallest that works is 32x32x64"):
        build_model("brain_age_cnn", volume=(26, 32, 26))


@pytest.mark.parametrize(
    ("volume", "weights", "last"),
    [((26, 32, 26), 293_936, (3, 4, 3)), ((52, 64, 52), 302_000, (6, 8, 6))],
)
def test_brain_age_cnn_3mm_has_the_stated_weights_and_feature_maps(
    volume: tuple[int, int, int], weights: int, last: tuple[int, ...]
) -> None:
    network = build_model("brain_age_cnn_3mm", volume=volume)
    assert isinstance(network, nn.Sequential)
    assert maskable(network) == weights
    assert maps(network, volume)[-1] == last
    assert network(torch.randn(2, 1, *volume)).shape == (2, 1)


def test_brain_age_cnn_3mm_distinguishes_positions() -> None:
    """A flattened map keeps positions, unlike a normalised map before a global mean."""
    torch.manual_seed(3)
    network = build_model("brain_age_cnn_3mm", volume=(16, 16, 16))
    x = torch.zeros(2, 1, 16, 16, 16)
    x[0, 0, :8], x[1, 0, 8:] = 1.0, 1.0
    with torch.inference_mode():
        left, right = network(x).flatten().tolist()
    assert abs(left - right) > 1e-3


def test_brain_age_cnn_3mm_names_the_smallest_volume() -> None:
    with pytest.raises(ConfigError, match=r"input 7x8x8 does not fit.* the smallest that works is 8x8x16"):
        build_model("brain_age_cnn_3mm", volume=(7, 8, 8))
    assert build_model("brain_age_cnn_3mm", volume=(8, 8, 16))(torch.randn(1, 1, 8, 8, 16)).shape == (1, 1)


def test_brain_age_cnn_starts_glorot_uniform_with_zero_bias() -> None:
    network = build_model("brain_age_cnn")
    first = next(part for part in network.modules() if isinstance(part, nn.Conv3d))
    bound = (6 / (27 * (1 + 32))) ** 0.5
    assert first.bias is not None
    assert torch.count_nonzero(first.bias) == 0
    assert 0.9 * bound < first.weight.abs().max().item() <= bound


def test_alexnet3d_has_the_papers_number_of_parameters() -> None:
    layout = Layout.from_module(build_model("alexnet3d"))
    assert layout.num_parameters == 2_570_241
    assert sum(e.size for e in layout.tensors if e.role in MASKABLE["conv_linear_weights"]) == 2_568_064
    assert sum(e.size for e in layout.tensors if e.role == "buffer") == 2 * 704


@pytest.mark.slow
def test_alexnet3d_has_the_papers_feature_maps() -> None:
    network = build_model("alexnet3d").eval()
    assert isinstance(network, nn.Sequential)
    assert maps(network, (121, 145, 121)) == [(19, 23, 19), (5, 7, 5), (5, 7, 5), (5, 7, 5), (1, 2, 1)]
    first, second = (next(network[block].children()) for block in range(2))
    with torch.inference_mode():
        assert first(torch.zeros(1, 1, 121, 145, 121)).shape[2:] == (59, 71, 59)
        assert second(torch.zeros(1, 64, 19, 23, 19)).shape[2:] == (17, 21, 17)


def test_alexnet3d_names_the_smallest_volume_and_it_works() -> None:
    with pytest.raises(ConfigError, match=r"input 52x64x80 does not fit.* the smallest that works is 69x69x80"):
        build_model("alexnet3d", volume=(52, 64, 80))
    network = build_model("alexnet3d", volume=(69, 69, 80))
    assert maskable(network) == 2_568_064 - 128 * 64
    assert network(torch.randn(2, 1, 69, 69, 80)).shape == (2, 1)


def test_voxel_mlp_has_the_stated_weights_and_statistics() -> None:
    network = build_model("voxel_mlp")
    tensors = Layout.from_module(network).tensors
    assert maskable(network) == 205_696
    assert sum(entry.size for entry in tensors if entry.role == "buffer") == 16_065
    linear = build_model("voxel_mlp", volume=(4, 3, 2), hidden=(), symmetric=False)
    assert maskable(linear) == 4 * 3 * 2
    assert linear(torch.randn(5, 1, 4, 3, 2)).shape == (5, 1)


@pytest.mark.parametrize("depth", [4, 5])
def test_symmetric_voxel_mlp_predicts_the_same_for_a_mirror_image(depth: int) -> None:
    volumes = torch.randn(3, 1, depth, 3, 2)
    network, lateral = (build_model("voxel_mlp", volume=(depth, 3, 2), symmetric=value) for value in (True, False))
    with torch.inference_mode():
        torch.testing.assert_close(network(volumes), network(volumes.flip(2)))
        assert not torch.allclose(lateral(volumes), lateral(volumes.flip(2)))


def test_hemisphere_mean_keeps_the_middle_plane() -> None:
    volumes = torch.tensor([1.0, 2.0, 7.0, 4.0, 5.0]).view(1, 1, 5, 1, 1)
    assert HemisphereMean()(volumes).flatten().tolist() == [3.0, 3.0, 7.0]


def test_voxel_mlp_standardises_each_voxel_by_its_statistics() -> None:
    network = build_model("voxel_mlp", volume=(2, 1, 1), hidden=(), symmetric=False)
    scaler = next(part for part in network.modules() if isinstance(part, InputScaler))
    inputs = torch.tensor([[10.0, 0.0], [30.0, 0.0]])
    scaler.statistics.copy_(scaler.compute_statistics(inputs))
    received: list[torch.Tensor] = []
    scaler.register_forward_hook(lambda module, given, result: received.append(result))
    with torch.inference_mode():
        network(torch.tensor([[10.0, 0.0], [40.0, 0.5]]).view(2, 1, 2, 1, 1))
    assert received[0].tolist() == [[-1.0, 0.0], [2.0, 0.5]]


def test_voxel_mlp_without_standardization_has_no_statistics_and_the_same_weights() -> None:
    plain, scaled = (build_model("voxel_mlp", volume=(4, 3, 2), standardize=value) for value in (False, True))
    layout = Layout.from_module(plain)
    assert not build_statistics_mask(layout).count
    assert maskable(plain) == maskable(scaled)
    volumes = torch.randn(5, 1, 4, 3, 2)
    with torch.inference_mode():
        # A scaler without statistics passes its inputs unchanged.
        scaled.load_state_dict({**scaled.state_dict(), **rename_layers(plain, scaled)})
        assert torch.equal(plain(volumes), scaled(volumes))


def rename_layers(plain: nn.Module, scaled: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a network under the names that they have in another with the same layers."""
    names = [name for name, _ in scaled.named_parameters()]
    return dict(zip(names, (parameter for _, parameter in plain.named_parameters()), strict=True))
