"""CIFAR-10 from an npz file with JPEG bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset


class CIFAR10(Dataset):
    """Images and labels of one part.

    Args:
        root: npz file with ``train_blob``, ``train_ends`` and ``train_labels``, and likewise ``test_``.
        train: the training part; False: the test part.
        download: ignored.
        transform: applied to every image.
    """

    def __init__(self, root: str, train: bool = True, download: bool = False, transform: Callable[..., Any] = np.array):
        part = "train" if train else "test"
        with np.load(root) as file:
            blob, ends = file[f"{part}_blob"].tobytes(), file[f"{part}_ends"].tolist()
            self.targets = file[f"{part}_labels"].astype(int).tolist()
        self.images = [
            np.asarray(Image.open(io.BytesIO(blob[start:end])).convert("RGB"))
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), self.targets[index]
