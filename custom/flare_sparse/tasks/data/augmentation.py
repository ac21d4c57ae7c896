"""Augmentation of a minibatch of volumes or images: mirror images, shifts and changes of intensity."""

import torch
from pydantic import Field
from torch import Tensor

from ...core.settings import Settings


class Augmentation(Settings):
    """Random changes of a minibatch; every example has draws of its own. The defaults change nothing."""

    mirror: bool = False
    """mirror half of the inputs, left to right"""
    shift: int = Field(0, ge=0, le=16)
    """largest shift along each axis, in voxels or pixels of the input"""
    intensity: float = Field(0.0, ge=0, le=0.5)
    """largest relative change of the values' scale, and of their offset in units of 1"""

    def apply(
        self, inputs: Tensor, generator: torch.Generator, *, mirrored_axis: int, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return changed inputs, and label maps that are mirrored and shifted with them; the given ones stay.

        Labels of the left and of the right side stay as they are where a mirror image is taken.

        Args:
            inputs: ``(B, channels, ...)``, float unless ``intensity`` is 0.
            generator: source of the random numbers.
            mirrored_axis: the axis from left to right, counted after the channels.
            labels: label maps ``(B, ...)``; None: there are none.
        """
        size, axes = len(inputs), inputs.dim() - 2
        # All numbers are drawn before any is used, so that one kind of change does not alter another one's draws.
        mirrored = torch.rand(size, generator=generator) < 0.5
        shifts = torch.randint(-self.shift, self.shift + 1, (size, axes), generator=generator)
        scales, offsets = (torch.rand(2, size, generator=generator) * 2 - 1) * self.intensity
        inputs = self._move(inputs, mirrored, shifts, mirrored_axis)
        if self.intensity:
            shape = (-1, *[1] * (axes + 1))
            inputs = inputs * (1 + scales.view(shape)) + offsets.view(shape)
        return inputs, None if labels is None else self._move(labels[:, None], mirrored, shifts, mirrored_axis)[:, 0]

    def _move(self, volumes: Tensor, mirrored: Tensor, shifts: Tensor, mirrored_axis: int) -> Tensor:
        """Return volumes ``(B, channels, ...)`` mirrored and shifted."""
        if self.mirror:
            mirrored = mirrored.to(volumes.device).view(-1, *[1] * (volumes.dim() - 1))
            volumes = torch.where(mirrored, volumes.flip(2 + mirrored_axis), volumes)
        if self.shift:
            volumes = torch.stack(
                [_shift(example, steps) for example, steps in zip(volumes, shifts.tolist(), strict=True)]
            )
        return volumes


def _shift(example: Tensor, steps: list[int]) -> Tensor:
    """Return an example ``(channels, ...)`` moved by ``steps`` along its axes; values at the border are repeated."""
    for axis, step in enumerate(steps, start=1):
        last = example.shape[axis] - 1
        sources = torch.arange(last + 1, device=example.device) - step
        example = example.index_select(axis, sources.clamp(0, last))
    return example
