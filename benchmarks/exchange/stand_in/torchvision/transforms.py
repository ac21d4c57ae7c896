"""Three transforms of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class ToTensor:
    """Turns an image ``(h, w, 3)`` of bytes into float32 ``(3, h, w)`` between 0 and 1."""

    def __call__(self, image: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(image).transpose(2, 0, 1)).float() / 255


class Normalize:
    """Subtracts a mean from each channel, and divides by a standard deviation."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std


class Compose:
    """Applies transforms one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]):
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image
