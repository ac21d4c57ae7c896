"""Inputs of a run's network, from the data of its task."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..config.study import Study
from ..core.errors import ConfigError
from ..tasks.task import SiteData, load_examples
from .screen import Screen


def load_inputs(purpose: str, study: Study, data: Path | None, count: int = 4) -> Tensor:
    """Return inputs of test examples, of the given data or else of the first simulated site.

    Args:
        purpose: what they are needed for, the first word of an error.
        study: the run, from its result folder.
        data: data to read; None: that of the run's first simulated site.
        count: largest number of examples.

    Raises:
        ConfigError: the network takes more than one tensor, or there is no data.
    """
    if data is None and study.config.simulator is None:
        raise ConfigError(f"{purpose}: the run has no simulator section and so no data; add --data DIR")
    if data is not None:
        site = SiteData("data", data.resolve())
    else:
        site = next(iter(study.prepare_sites(study.folder, Screen()).values()))
    task = study.assembly.task
    batch = next(task.iterate_batches(load_examples(task, site, study.config.seed).test, count))
    inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
    if not isinstance(inputs, Tensor):
        raise ConfigError(f"{purpose}: expected a network whose input is one tensor, found {type(inputs).__name__}")
    return inputs
