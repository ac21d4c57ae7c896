"""Pictures of the best, the median and the worst case of every site, where the data of the sites is on this machine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from ...config.assemble import Assembly
from ...core.checkpoint.writing import replace_atomically
from ...methods.method import describe_site_model
from ...tasks.task import Picture, SiteData, load_examples
from .models import list_run_models, read_run_model
from .predictions import RUN, Predictions

PICTURES_FILE = "pictures.npz"
"""File in the folder of evaluations with the pictures of some cases."""
RANKS = ("best", "median", "worst")


@dataclass(frozen=True)
class CasePicture:
    """The picture of one case.

    Attributes:
        site: name of the site.
        rank: ``best``, ``median`` or ``worst`` of the site's test cases, by the run's metric.
        value: the metric of this case.
        picture: image, labels and prediction.
    """

    site: str
    rank: str
    value: float
    picture: Picture


def compute_pictures(
    run: Path, assembly: Assembly, sites: Mapping[str, SiteData], predictions: Predictions
) -> list[CasePicture]:
    """Return pictures of the cases that the predictions rank best, median and worst at each site.

    Args:
        run: result folder.
        assembly: parts of the run.
        sites: data of the sites.
        predictions: what the task measured of every test case.

    Raises:
        ConfigError, DataError: as :func:`flare_sparse.results.runs.predictions.compute_predictions`.
    """
    task, own, pictures = assembly.task, list_run_models(run, assembly), []
    for site in sorted(set(predictions.sites.tolist())):
        rows = predictions.sites == site
        values = _measure_cases(assembly, predictions.values[RUN][rows], predictions.targets[rows])
        weights = read_run_model(
            run, assembly, site if describe_site_model(assembly.method.config) and site in own else "final"
        )
        model = assembly.build_network(weights)
        test = load_examples(task, sites[site], assembly.method.seed).test
        for rank, index in zip(RANKS, _select_ranks(values, higher_is_better=task.metric.mode == "max"), strict=True):
            batch = next(task.iterate_batches(Subset(test, [index]), 1))
            if (picture := task.illustrate(model, batch)) is None:
                return []
            pictures.append(CasePicture(site, rank, values[index], picture))
    return pictures


def _measure_cases(assembly: Assembly, rows: np.ndarray, targets: np.ndarray) -> list[float]:
    """Return the run's metric of each case."""
    pairs = zip(torch.from_numpy(rows), torch.from_numpy(targets), strict=True)
    return [assembly.task.metrics(row[None], target[None])[assembly.task.metric.name] for row, target in pairs]


def _select_ranks(values: list[float], *, higher_is_better: bool) -> tuple[int, int, int]:
    """Return the indices of the best, the median and the worst value; the first of equal ones.

    >>> _select_ranks([0.5, 0.9, 0.7], higher_is_better=True)
    (1, 2, 0)
    """
    order = sorted(range(len(values)), key=lambda index: -values[index] if higher_is_better else values[index])
    return order[0], order[len(order) // 2], order[-1]


def write_pictures(file: Path, pictures: list[CasePicture], identity: str) -> None:
    """Write pictures with the identity of the run's model."""
    arrays: dict[str, Any] = {"identity": np.array(identity)}
    for number, case in enumerate(pictures):
        arrays[f"{number}/site"], arrays[f"{number}/rank"] = np.array(case.site), np.array(case.rank)
        arrays[f"{number}/numbers"] = np.array([case.value, case.picture.aspect])
        arrays |= {f"{number}/{name}": getattr(case.picture, name) for name in ("image", "labels", "predicted")}
    file.parent.mkdir(exist_ok=True)
    with replace_atomically(file) as part, part.open("wb") as stream:
        np.savez_compressed(stream, **arrays)


def read_pictures(file: Path, identity: str) -> list[CasePicture] | None:
    """Read the pictures of a run; None if there are none, or those of another model."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return list(_unpack(arrays)) if str(arrays["identity"]) == identity else None
    except (OSError, ValueError, KeyError):
        return None


def _unpack(arrays: Any) -> Iterator[CasePicture]:
    for number in count():
        if f"{number}/site" not in arrays:
            return
        value, aspect = arrays[f"{number}/numbers"].tolist()
        image, labels, predicted = (arrays[f"{number}/{name}"] for name in ("image", "labels", "predicted"))
        picture = Picture(image, labels, predicted, aspect)
        yield CasePicture(str(arrays[f"{number}/site"]), str(arrays[f"{number}/rank"]), value, picture)
