"""Sparse kernels against torch's dense layers in float64: outputs, gradients, buffers, bits by number of threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases
from torch import Tensor, nn

from flare_sparse.compute.kernels import cost
from flare_sparse.compute.kernels.chains import find_chains
from flare_sparse.compute.kernels.network import use_sparse_kernels
from flare_sparse.core.seeds import limit_threads
from flare_sparse.tasks.models.brain_age import brain_age_cnn_3mm

TOLERANCE = 2e-6
"""Largest error relative to the largest value: about 20 float32 roundings."""


def draw_live_weights(network: nn.Module, density: float, seed: int = 0) -> dict[str, Tensor]:
    """Set all but a random share of the weights to 0; return the live ones by name."""
    generator = torch.Generator().manual_seed(seed)
    live = {}
    for name, parameter in network.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            live[name] = torch.rand(parameter.shape, generator=generator) < density
            values = values * live[name]
        parameter.data.copy_(values)
    return live


def compute_sparsely(network: nn.Module, live: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of the kernels, and the gradients of a fixed linear function of it."""
    inputs = inputs.clone().requires_grad_()
    network.zero_grad(set_to_none=True)
    with use_sparse_kernels(network, live, lambda *_: True) as blocks:
        output = network(inputs)
        assert all(block.is_sparse for block in blocks)
    return output.detach(), differentiate(network, inputs, output)


def differentiate(network: nn.Module, inputs: Tensor, output: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(weights.to(output.dtype))
    assert inputs.grad is not None
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {"inputs": inputs.grad, **gradients}


def check_equal(network: nn.Module, inputs: Tensor, density: float = 0.3, seed: int = 0) -> None:
    """Check output, gradients and buffers against float64; twice, because the second pass writes padded outputs."""
    live = draw_live_weights(network, density, seed)
    reference = copy.deepcopy(network).double()
    for _ in range(2):
        output, gradients = compute_sparsely(network, live, inputs)
        exact_inputs = inputs.double().requires_grad_()
        reference.zero_grad(set_to_none=True)
        exact = reference(exact_inputs)
        expected = differentiate(reference, exact_inputs, exact)
        check_close(output, exact.detach(), "output")
        for name, gradient in gradients.items():
            check_close(gradient, expected[name] * live[name] if name in live else expected[name], name)
        for (name, buffer), exact_buffer in zip(network.named_buffers(), reference.buffers(), strict=True):
            check_close(buffer, exact_buffer, name)


def check_close(values: Tensor, exact: Tensor, name: str) -> None:
    assert values.shape == exact.shape
    error = float((values - exact).abs().max()) if values.numel() else 0.0
    assert error <= TOLERANCE * (1 + float(exact.abs().max()) if exact.numel() else 1), (name, error)


@pytest.mark.slow
@settings(max_examples=count_cases(60), deadline=None)
@given(
    st.tuples(*[st.integers(1, 3)] * 3),
    st.tuples(*[st.integers(1, 3)] * 3),
    st.tuples(*[st.integers(0, 2)] * 3),
    st.tuples(*[st.integers(1, 2)] * 3),
    st.tuples(*[st.integers(5, 8)] * 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.booleans(),
)
def test_convolution_equals_torch(
    kernel: Any, stride: Any, padding: Any, dilation: Any, shape: Any, inputs: int, outputs: int, samples: int,
    density: float, bias: bool,
) -> None:  # fmt: skip
    """Every kernel, stride, padding and dilation; layers without a live weight, and with all of them."""
    layer = nn.Conv3d(inputs, outputs, kernel, stride=stride, padding=padding, dilation=dilation, bias=bias)
    check_equal(nn.Sequential(layer), torch.randn(samples, inputs, *shape), density)


@pytest.mark.slow
@settings(max_examples=count_cases(30), deadline=None)
@given(
    st.sampled_from(["none", "instance", "batch"]),
    st.sampled_from([(1, 1, 1), (2, 2, 2), (3, 3, 3), (1, 2, 3)]),
    st.sampled_from([nn.ReLU(), nn.LeakyReLU(0.1), nn.Identity()]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_block_equals_torch(
    norm: str, window: Any, activation: nn.Module, pool_last: bool, training: bool, density: float
) -> None:
    """Normalisation, pooling and activation in both orders, read by a second block."""
    norms: dict[str, Callable[[int], nn.Module]] = {
        "none": lambda channels: nn.Identity(),
        "instance": lambda channels: nn.InstanceNorm3d(channels, affine=True),
        "batch": nn.BatchNorm3d,
    }
    tail = [nn.MaxPool3d(window), copy.deepcopy(activation)]
    network = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        norms[norm](4),
        *(tail[::-1] if pool_last else tail),
        nn.Conv3d(4, 3, 3, padding=(2, 1, 1)),
        norms[norm](3),
        nn.ReLU(),
    )
    network.train(training)
    check_equal(network, torch.randn(2, 2, 7, 6, 9), density)


def test_volume_of_several_slabs_equals_torch() -> None:
    network = nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.InstanceNorm3d(3, affine=True), nn.MaxPool3d(2))
    check_equal(network, torch.randn(1, 1, 21, 50, 47))


@pytest.mark.parametrize("norm", [nn.BatchNorm3d, nn.InstanceNorm3d])
def test_recorded_values_give_the_bits_of_values_computed_again(
    norm: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), norm(4, affine=True), nn.MaxPool3d(2), nn.ReLU())
    inputs, live = torch.randn(2, 3, 12, 40, 50), draw_live_weights(network, 0.5)
    results = []
    for products in (0, 10**6):
        monkeypatch.setattr(cost, "_PRODUCTS_OF_A_STORED_VALUE", products)
        output, gradients = compute_sparsely(network, live, inputs)
        results.append({"output": output, **gradients})
    recorded, computed = results
    assert all(torch.equal(recorded[name], computed[name]) for name in computed)


def test_statistics_far_from_zero_keep_their_digits() -> None:
    """A mean of 1000 with a deviation of 1: a plain sum of squares in float32 would lose the variance."""
    network = nn.Sequential(nn.Conv3d(1, 1, 1), nn.InstanceNorm3d(1))
    network[0].weight.data.fill_(1.0)
    inputs = torch.randn(1, 1, 8, 20, 20) + 1000
    with use_sparse_kernels(network, {"0.weight": torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)}, lambda *_: True):
        output = network(inputs).detach()
    exact = copy.deepcopy(network).double()(inputs.double()).detach()
    assert float((output - exact).abs().max()) < 2e-4


def test_noncontiguous_inputs_equal_torch() -> None:
    check_equal(nn.Sequential(nn.Conv3d(3, 2, 3)), torch.randn(2, 5, 6, 7, 3).permute(0, 4, 1, 2, 3))


def test_nan_reaches_the_output_through_pooling() -> None:
    network = nn.Sequential(nn.Conv3d(1, 1, 1, bias=False), nn.MaxPool3d(2), nn.ReLU())
    network[0].weight.data.fill_(1.0)
    for position in range(8):
        inputs = torch.zeros(1, 1, 2, 2, 2)
        inputs.view(-1)[position] = float("nan")
        with use_sparse_kernels(network, {"0.weight": torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)}, lambda *_: True):
            assert bool(network(inputs).isnan().all())


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    torch.manual_seed(0)
    network = brain_age_cnn_3mm()
    live = draw_live_weights(network, 0.1)
    inputs = torch.randn(3, 1, 26, 32, 26)
    results = []
    for threads in (1, 2, 3):
        with limit_threads(threads):
            results.append(compute_sparsely(network, live, inputs))
    for output, gradients in results[1:]:
        assert torch.equal(output, results[0][0])
        assert all(torch.equal(gradient, results[0][1][name]) for name, gradient in gradients.items())


def test_decision_is_made_anew_for_another_number_of_threads_of_torch() -> None:
    network, asked = nn.Sequential(nn.Conv3d(2, 3, 3)), []
    with use_sparse_kernels(network, draw_live_weights(network, 0.5), lambda work: asked.append(work.threads) or False):
        for threads in (1, 2, 2, 1):
            with limit_threads(threads):
                network(torch.randn(1, 2, 5, 5, 5))
    assert asked == [1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Input #0 requires gradient")
def test_gradients_pass_gradcheck() -> None:
    """Numerical derivatives in float32, whose step and tolerance are coarse."""
    network = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.InstanceNorm3d(3), nn.LeakyReLU(0.5))
    live = draw_live_weights(network, 0.4)
    inputs = torch.randn(1, 2, 4, 4, 4, requires_grad=True)
    with use_sparse_kernels(network, live, lambda *_: True):
        assert torch.autograd.gradcheck(network, (inputs,), eps=1e-2, atol=2e-2, rtol=2e-2, nondet_tol=0)


def test_chains_hold_the_layers_that_follow_a_convolution() -> None:
    chains = find_chains(brain_age_cnn_3mm())
    kinds = [[type(part).__name__ for part in chain.followers] for chain in chains]
    pooled = ["InstanceNorm3d", "MaxPool3d", "ReLU"]
    assert kinds == [pooled, pooled, pooled, *[["InstanceNorm3d", "ReLU"]] * 3]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv3d(2, 2, 3, groups=2),
        nn.Conv3d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv3d(2, 2, 3, padding="same"),
        nn.ConvTranspose3d(2, 2, 2),
        nn.Conv2d(2, 2, 3),
        nn.Linear(2, 2),
    ],
)
def test_other_layers_stay_dense(layer: nn.Module) -> None:
    assert find_chains(nn.Sequential(layer)) == []


def test_layer_below_the_break_even_is_computed_by_torch() -> None:
    network = nn.Sequential(nn.Conv3d(2, 4, 3), nn.InstanceNorm3d(4), nn.MaxPool3d(2), nn.ReLU())
    live = draw_live_weights(network, 1.0)
    inputs = torch.randn(1, 2, 8, 8, 8)
    expected = network(inputs)
    with use_sparse_kernels(network, live, lambda *_: False) as blocks:
        assert torch.equal(network(inputs), expected)
    assert [block.is_sparse for block in blocks] == [False]


def test_network_computes_as_before_after_the_context() -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU())
    live = draw_live_weights(network, 0.5)
    with pytest.raises(ValueError, match="stop"), use_sparse_kernels(network, live):
        raise ValueError("stop")
    assert all("forward" not in vars(part) for part in network.modules())
