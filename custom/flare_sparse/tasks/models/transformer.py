"""MONAI's ViT as a network of one output; a module of its own, because MONAI takes seconds to import."""

from monai.networks.nets.vit import ViT
from torch import Tensor


class VolumeTransformer(ViT):  # type: ignore[misc]  # MONAI's classes are not typed
    """MONAI's ViT without the states of its layers; a subclass, so that the names of its tensors stay MONAI's."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, 1, depth, height, width)`` to ``(B, outputs)``."""
        outputs: Tensor = super().forward(x)[0]
        return outputs
