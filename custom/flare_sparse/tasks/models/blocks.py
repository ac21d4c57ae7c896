"""Blocks with the structure and the names of MONAI's, so that the weights of one fit the other.

They are built from torch alone: importing MONAI takes seconds and 300 MB in each process.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


def build_convolution_block(
    convolution: nn.Module, norm: nn.Module | None = None, *, activate: bool = True
) -> nn.Sequential:
    """Build a convolution, a normalisation and ReLU, as ``monai.networks.blocks.Convolution`` does.

    Args:
        convolution: the convolution.
        norm: the normalisation of its output channels; None: none.
        activate: whether ReLU follows.
    """
    return _name(conv=convolution, adn=_name(N=norm, A=nn.ReLU() if activate else None))


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
