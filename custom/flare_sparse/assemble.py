"""From a job's settings to its parts: task, model, method, run id. The same function on the server and at every site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .config import JobConfig, build_method, build_task, job_dict
from .methods import Method
from .params import Layout
from .rehearsal import initial_weights
from .server import run_id
from .task import SiteData, Task
from .training import Site


@dataclass(frozen=True)
class Assembly:
    """The parts of one job; equal on both ends because they come from the same settings."""

    task: Task
    method: Method[Any]
    layout: Layout
    weights: Tensor
    run: str


def assemble(job: JobConfig, own_task: Task | None = None) -> Assembly:
    """Build a job's parts.

    Args:
        job: validated settings.
        own_task: the user's own task, already built; None: the registered task that the job names.

    Raises:
        ConfigError: the model cannot be built from the settings.
    """
    task = own_task or build_task(job)
    layout, weights = initial_weights(task, job.seed)
    return Assembly(task, build_method(job, layout), layout, weights, run_id(job_dict(job), layout))


def open_site(assembly: Assembly, data: SiteData) -> Site:
    """A site with its data loaded.

    Raises:
        DataError: the data is missing or unusable; the text names files and stays at the site.
    """
    config = assembly.method.config.training
    examples = assembly.task.load(data, assembly.method.seed)
    return Site(data.site, assembly.task, examples, assembly.layout, assembly.method.seed, str(config.torch_device))
