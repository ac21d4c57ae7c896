"""Models that an attacker trains: a run's own configuration, in this process, on other examples of the same sites.

The examples of a run as an attacker sees them: losses, predictions and gradients of its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from ...config.assemble import Assembly, open_site
from ...config.schema import RunConfig
from ...config.study import Study
from ...core.errors import DataError
from ...core.seeds import derive_seed
from ...tasks.task import Examples, SiteData, Task
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
        return assembly.build_network(assembly.complete(run_assembly(config, assembly, sites)[0].weights))

    def _open_site(self, assembly: Assembly, name: str, dataset: Dataset[Any]) -> Any:
        own = self.examples[name]
        # Test examples are not evaluated: the attacker needs the model alone.
        examples = Examples(dataset, Subset(own.test, []), validation=own.validation)
        task = copy(assembly.task)
        # An instance attribute: the site opens these examples as the run opened its own.
        task.load = lambda data, seed: examples  # type: ignore[method-assign]
        return open_site(replace(assembly, task=task), self.data[name])


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


MAX_ENTRIES = 512
"""Entries of the last layers' gradients that are features; more would outnumber any site's examples."""
LAST_LAYERS = 2
"""Layers whose gradients are features entry by entry, as in FedSparsify."""


@dataclass(frozen=True)
class AuditedExamples:
    """Training and test examples of all sites, in the order of the sites' names, training examples first.

    Attributes:
        dataset: the examples.
        is_member: ``(n,)`` bool: trained the model.
        sites: ``(n,)`` name of the site.
    """

    dataset: Dataset[Any]
    is_member: np.ndarray
    sites: np.ndarray

    @classmethod
    def from_sites(cls, examples: Mapping[str, Examples]) -> AuditedExamples:
        """Join the examples of sites; validation examples, which chose a round, are left out.

        Raises:
            DataError: there are no training or no test examples.
        """
        parts, members, sites = [], [], []
        for site, own in sorted(examples.items()):
            for dataset, count, is_member in ((own.train, own.n_train, True), (own.test, own.n_test, False)):
                if count:
                    parts.append(dataset)
                    members += [is_member] * count
                    sites += [site] * count
        if len(set(members)) < 2:
            raise DataError("an audit needs training and test examples; the sites of the run have one kind only")
        return cls(ConcatDataset(parts), np.array(members), np.array(sites))


def select_rows(examples: AuditedExamples, chosen: np.ndarray) -> dict[str, Dataset[Any]]:
    """Return the chosen examples ``(n,)`` bool of each site as data sets; sites without any are left out."""
    rows = {str(site): np.flatnonzero(chosen & (examples.sites == site)) for site in np.unique(examples.sites)}
    return {site: Subset(examples.dataset, own.tolist()) for site, own in rows.items() if len(own)}


def compute_losses(task: Task, model: nn.Module, dataset: Dataset[Any]) -> np.ndarray:
    """Return the loss of each example alone, ``(n,)``, with the model in eval mode."""
    model.eval()
    with torch.no_grad():
        losses = [float(task.loss(model, batch)) for batch in task.iterate_batches(dataset, 1)]
    return np.array(losses, dtype=np.float64)


def compute_prediction_features(task: Task, model: nn.Module, dataset: Dataset[Any]) -> np.ndarray:
    """Return predictions, targets and their differences ``(n, d)``."""
    predictions, targets = (
        values.detach().cpu().double().flatten(1).numpy() if values.dim() > 1 else values.double().numpy()[:, None]
        for values in task.measure_all(model, dataset)
    )
    width = min(predictions.shape[1], targets.shape[1])
    return np.concatenate([predictions, targets, predictions[:, :width] - targets[:, :width]], axis=1)


def compute_gradient_features(task: Task, model: nn.Module, dataset: Dataset[Any]) -> np.ndarray:
    """Return the features ``(n, d)`` of the white-box attack.

    Gupta et al. 2021 (arXiv:2105.02866), section 3.2: prediction, label, error, norms of the gradients of all tensors,
    and the gradients of the last layers entry by entry, up to :data:`MAX_ENTRIES`.
    """
    model.eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    last = select_last_parameters(model)
    rows = []
    for batch in task.iterate_batches(dataset, 1):
        loss = task.loss(model, batch)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        by_parameter = dict(zip(map(id, parameters), gradients, strict=True))
        norms = [0.0 if g is None else float(g.double().norm()) for g in gradients]
        entries = [_flatten(by_parameter[id(parameter)], parameter) for parameter in last]
        # Norms of examples differ by orders of magnitude.
        row = [np.array([float(loss.detach())]), np.log(np.array(norms) + 1e-12), torch.cat(entries).numpy()]
        rows.append(np.concatenate(row))
    return np.concatenate([compute_prediction_features(task, model, dataset), np.stack(rows)], axis=1)


def select_last_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of the last layers, from the last one backwards while they fit."""
    layers = [[p for p in part.parameters(recurse=False) if p.requires_grad] for part in model.modules()]
    chosen: list[nn.Parameter] = []
    for layer in [parameters for parameters in layers if parameters][: -LAST_LAYERS - 1 : -1]:
        if sum(parameter.numel() for parameter in [*chosen, *layer]) > MAX_ENTRIES and chosen:
            break
        chosen += layer
    return chosen


def _flatten(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    values = torch.zeros_like(parameter) if gradient is None else gradient
    return values.detach().to_dense().double().flatten()[:MAX_ENTRIES]
