"""Dice and the 95 % Hausdorff distance of one case, defined for every case so that their means are comparable."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


def name_metrics(classes: Sequence[str], *, hd95: bool) -> list[str]:
    """Return the names of the values of :func:`measure_case`.

    >>> name_metrics(["anterior", "posterior"], hd95=True)
    ['dice', 'dice_anterior', 'dice_posterior', 'hd95', 'hd95_anterior', 'hd95_posterior']
    """
    return [
        name for kind in (["dice", "hd95"] if hd95 else ["dice"]) for name in [kind, *(f"{kind}_{c}" for c in classes)]
    ]


def measure_case(predicted: Tensor, labels: Tensor, classes: int, spacing: Sequence[float], *, hd95: bool) -> Tensor:
    """Return the metrics of one case, float64: Dice, their mean over classes first, then HD95 in mm likewise.

    Where a class is neither present nor predicted, Dice is 1 and HD95 is 0. Where it is only one of both, Dice is 0 and
    HD95 is the diagonal of the volume, the largest distance that two of its voxels can have (the convention of BraTS,
    Bakas et al. 2018, with a diagonal of 373 mm).

    Args:
        predicted: classes ``(d, h, w)``, 0 for background.
        labels: true classes, likewise.
        classes: number of classes.
        spacing: size of a voxel in mm per axis.
        hd95: whether to compute HD95.
    """
    from monai.metrics import compute_dice, compute_hausdorff_distance

    diagonal = float(sum((side * length) ** 2 for side, length in zip(spacing, labels.shape, strict=True)) ** 0.5)
    dice, distances = [], []
    for number in range(1, classes + 1):
        guess, truth = ((part == number)[None, None] for part in (predicted.cpu(), labels.cpu()))
        dice.append(float(compute_dice(guess.float(), truth.float(), include_background=True, ignore_empty=False)))
        if hd95 and bool(guess.any()) and bool(truth.any()):
            # MONAI 1.6 passes an argument to itself that it has deprecated.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                distance = compute_hausdorff_distance(guess, truth, True, percentile=95, spacing=list(spacing))
            distances.append(float(distance))
        else:
            distances.append(0.0 if guess.any() == truth.any() else diagonal)
    kinds = [dice, distances] if hd95 else [dice]
    return torch.tensor([value for kind in kinds for value in [sum(kind) / classes, *kind]], dtype=torch.float64)
