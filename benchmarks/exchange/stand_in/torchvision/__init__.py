"""What FLARE's examples use of torchvision, which has no build for torch without CUDA: CIFAR-10 and three transforms.

The benchmark puts this folder on the path of the scripts, which import ``torchvision`` as they are.
"""

from . import datasets, transforms

__all__ = ["datasets", "transforms"]
