"""Models that an attacker trains: a run's own configuration, in this process, on other examples of the same sites."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from ...config.assemble import Assembly, open_site
from ...config.schema import RunConfig
from ...config.study import Study
from ...core.seeds import derive_seed
from ...tasks.task import Examples, SiteData
from ..runs.local import run_assembly
from ..runs.record import CONFIG

NO_CLAIMS: dict[str, int] = {}
"""Agreed numbers of examples of a model that is trained on other examples."""


@dataclass(frozen=True)
class Retraining:
    """What it takes to train a run's configuration again.

    Attributes:
        run: result folder.
        config: configuration of the run.
        data: location of the examples of each site.
        examples: the sites' examples in the run.
    """

    run: Path
    config: RunConfig
    data: Mapping[str, SiteData]
    examples: Mapping[str, Examples]

    def train(self, datasets: Mapping[str, Dataset[Any]], seed: int) -> nn.Module:
        """Return the network that the sites train on these examples, with another seed, in eval mode.

        Raises:
            RoundFailed: too few sites can train.
        """
        federation = self.config.federation.model_copy(update={"examples": NO_CLAIMS})
        config = self.config.model_copy(update={"seed": seed, "federation": federation})
        assembly = Study(config, self.run / CONFIG).assembly
        sites = {name: self._open_site(assembly, name, dataset) for name, dataset in datasets.items()}
        weights = run_assembly(config, assembly, sites)[0].weights
        return assembly.build_network(assembly.complete(weights))

    def _open_site(self, assembly: Assembly, name: str, dataset: Dataset[Any]) -> Any:
        own = self.examples[name]
        # Test examples are not evaluated: the attacker needs the model alone.
        examples = Examples(dataset, Subset(own.test, []), validation=own.validation)
        task = copy(assembly.task)
        # An instance attribute: the site opens these examples as the run opened its own.
        task.load = lambda data, seed: examples  # type: ignore[method-assign]
        return open_site(replace(assembly, task=task), self.data[name])


def join_examples(examples: Mapping[str, Examples]) -> dict[str, Dataset[Any]]:
    """Return training and test examples of each site as one data set, in the order of ``AuditedExamples``."""
    return {site: ConcatDataset([own.train, own.test]) for site, own in sorted(examples.items())}


def draw_reference_rows(sites: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Return which examples train a reference model, ``(n,)`` bool: half of each site's.

    Models 2 i - 1 and 2 i train on complementary halves, so that with an even number every example is in half of them.

    Args:
        sites: ``(n,)`` site of each example.
        number: number of the reference model, from 1.
        seed: seed of the run.
    """
    generator = np.random.default_rng(derive_seed(seed, "audit reference", (number + 1) // 2))
    chosen = np.zeros(len(sites), dtype=bool)
    for site in np.unique(sites):
        rows = np.flatnonzero(sites == site)
        chosen[generator.permutation(rows)[: len(rows) // 2]] = True
    return chosen if number % 2 else ~chosen


def select_rows(joined: Mapping[str, Dataset[Any]], sites: np.ndarray, chosen: np.ndarray) -> dict[str, Dataset[Any]]:
    """Return the chosen examples of each site as data sets; sites without any are left out."""
    selected: dict[str, Dataset[Any]] = {}
    for site, dataset in joined.items():
        rows = np.flatnonzero(chosen[sites == site])
        if len(rows):
            selected[site] = Subset(dataset, rows.tolist())
    return selected


class Canaries(Dataset[Any]):
    """Examples with the targets of other examples, which a model can only know by heart.

    Args:
        dataset: examples whose first part is the input; the others, such as target and weight, belong together.
        rows: the examples that become canaries.
        seed: seed of the permutation of their targets.

    Raises:
        TypeError: an example is not a tuple of at least two parts.
    """

    def __init__(self, dataset: Dataset[Any], rows: Sequence[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(rows), generator=generator).tolist()
        # A cycle through a random order: no canary keeps its own target.
        shifted = {order[i]: order[(i + 1) % len(order)] for i in range(len(order))}
        self._examples = []
        for position, row in enumerate(rows):
            example, other = dataset[row], dataset[rows[shifted[position]]]
            if not isinstance(example, (tuple, list)) or len(example) < 2:
                raise TypeError(f"an example is {type(example).__name__}")
            self._examples.append((example[0], *other[1:]))

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        return self._examples[index]
