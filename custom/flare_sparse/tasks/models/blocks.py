"""Blocks with the structure and the names of MONAI's, so that the weights of one fit the other.

They are built from torch alone: importing MONAI takes seconds and 300 MB in each process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import nn


def build_convolution(
    dimensions: int,
    inputs: int,
    outputs: int,
    *,
    kernel: int = 3,
    stride: int = 1,
    padding: int | None = None,
    bias: bool = True,
    norm: Callable[[int], nn.Module] | None = None,
    activate: bool = True,
) -> nn.Sequential:
    """Build a convolution, a normalisation and ReLU, as ``monai.networks.blocks.Convolution`` does.

    Args:
        dimensions: of the image, 2 or 3.
        inputs: input channels.
        outputs: output channels.
        kernel: size of the kernel.
        stride: step between its positions.
        padding: zeros at each border; None: as many as keep the image's size.
        bias: whether the convolution has a bias.
        norm: builds the normalisation of so many channels; None: none.
        activate: whether ReLU follows.
    """
    build = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    padding = kernel // 2 if padding is None else padding
    convolution = build(inputs, outputs, kernel, stride, padding, bias=bias)
    after = {"N": norm(outputs) if norm else None, "A": nn.ReLU() if activate else None}
    return _name(conv=convolution, adn=_name(**after))


def build_fully_connected(inputs: int, outputs: int, hidden: Sequence[int], dropout: float) -> nn.Sequential:
    """Build linear layers with dropout and ReLU between them, as ``monai.networks.nets.FullyConnectedNet`` does.

    Args:
        inputs: numbers per example, which may have any shape.
        outputs: outputs of the last layer.
        hidden: units of each hidden layer.
        dropout: dropout rate after each hidden layer.
    """
    layers, size = {}, inputs
    for number, units in enumerate(hidden):
        after = _name(D=nn.Dropout(dropout) if dropout else None, A=nn.ReLU())
        layers[f"hidden_{number}"] = nn.Sequential(nn.Linear(size, units), after)
        size = units
    return _name(flatten=nn.Flatten(), **layers, output=nn.Linear(size, outputs))


def _name(**parts: nn.Module | None) -> nn.Sequential:
    """Return the parts in sequence under their names, without those that are None."""
    return nn.Sequential(OrderedDict((name, part) for name, part in parts.items() if part is not None))
