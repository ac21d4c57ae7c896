"""Inputs of a run's network, from the data of its task."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..config.assemble import Assembly
from ..config.schema import RunConfig
from ..core.errors import ConfigError
from ..tasks.task import SiteData, load_examples
from .sites import prepare_site_data


def load_inputs(
    purpose: str, config: RunConfig, assembly: Assembly, run: Path, data: Path | None, count: int = 4
) -> Tensor:
    """Return inputs of test examples, of the given data or else of the first simulated site.

    Args:
        purpose: what they are needed for, the first word of an error.
        config: configuration of the run.
        assembly: the run.
        run: result folder.
        data: data to read; None: that of the run's first simulated site.
        count: largest number of examples.

    Raises:
        ConfigError: the network takes more than one tensor, or there is no data.
    """
    if data is None and config.simulator is None:
        raise ConfigError(f"{purpose}: the run has no simulator section and so no data; add --data DIR")
    if data is not None:
        site = SiteData("data", data.resolve())
    else:
        site = next(iter(prepare_site_data(config, assembly.task, run).values()))
    batch = next(assembly.task.iterate_batches(load_examples(assembly.task, site, config.seed).test, count))
    inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
    if not isinstance(inputs, Tensor):
        raise ConfigError(f"{purpose}: expected a network whose input is one tensor, found {type(inputs).__name__}")
    return inputs
