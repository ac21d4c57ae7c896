"""MONAI's parts of networks, imported when a network is built: MONAI takes seconds and 300 MB, and a site's process that
builds another network does without.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def convolution(*sizes: int, **settings: Any) -> nn.Sequential:
    """``monai.networks.blocks.Convolution``: a convolution with normalisation, dropout and activation behind it."""
    from monai.networks.blocks import Convolution

    block: nn.Sequential = Convolution(*sizes, **settings)
    return block


def fully_connected(*sizes: Any, **settings: Any) -> nn.Sequential:
    """``monai.networks.nets.FullyConnectedNet``."""
    from monai.networks.nets import FullyConnectedNet

    network: nn.Sequential = FullyConnectedNet(*sizes, **settings)
    return network
