"""MONAI modules, imported only when a network is built from them.

Importing MONAI takes seconds and 300 MB, which a process that builds other networks does not need.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def build_convolution(*sizes: int, **settings: Any) -> nn.Sequential:
    """Build ``monai.networks.blocks.Convolution``: a convolution, then normalisation, dropout and activation."""
    from monai.networks.blocks import Convolution

    block: nn.Sequential = Convolution(*sizes, **settings)
    return block


def build_fully_connected(*sizes: Any, **settings: Any) -> nn.Sequential:
    """Build ``monai.networks.nets.FullyConnectedNet``."""
    from monai.networks.nets import FullyConnectedNet

    network: nn.Sequential = FullyConnectedNet(*sizes, **settings)
    return network
