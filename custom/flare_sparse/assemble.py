"""From a job's settings to its parts: task, model, method, run id. The same function on the server and at every site."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from torch import Tensor

from .checkpoint.store import Store
from .config import JobConfig, build_method, build_task, job_dict
from .errors import ConfigError
from .federation import Rules
from .methods import Method
from .params import Layout
from .seeds import seeded
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


def rules(job: JobConfig) -> Rules:
    """When a round of this job counts."""
    said = job.federation
    return Rules(
        min_sites=said.min_sites,
        min_weight=said.min_weight,
        retries=said.retries,
        max_share=said.max_share,
        clip_norm=said.clip_norm,
        examples_tolerance=said.examples_tolerance,
        quarantine_after=said.quarantine_after,
        examples=said.examples,
    )


def checkpoints(job: JobConfig, assembly: Assembly, root: Path, end: str) -> Store:
    """Where one end of a job keeps its checkpoints, below ``root``: ``"server"`` or the name of a site.

    The folder's name holds the run's, so that another job finds nothing there and starts afresh.
    """
    belongs = {"run": assembly.run, "layout": assembly.layout.fingerprint, "end": end, "job": job_dict(job)}
    return Store(root / f"{job.name}-{assembly.run}" / end, belongs)


def open_site(assembly: Assembly, data: SiteData) -> Site:
    """A site with its data loaded.

    Raises:
        ConfigError: the site chooses a setting that this method does not leave to it, or out of its range.
        DataError: the data is missing or unusable; the text names files and stays at the site.
    """
    method = assembly.method
    choices = _chosen(method, data)
    examples = assembly.task.load(data, method.seed)
    device = str(method.config.training.torch_device)
    site = Site(data.site, assembly.task, examples, assembly.layout, method.seed, device)
    site.choices = choices
    return site


def _chosen(method: Method[Any], data: SiteData) -> BaseModel | None:
    """What the site sets for itself; None when it sets nothing."""
    own = data.methods.get(method.name)
    if not own:
        return None
    if method.Choices is None:
        raise ConfigError(f"site {data.site}: methods.{method.name}: this method leaves no setting to a site")
    try:
        return method.Choices.model_validate(own)
    except ValidationError as error:
        parts = [f"methods.{method.name}.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        allowed = ", ".join(method.Choices.model_fields)
        raise ConfigError(f"site {data.site}: {'; '.join(parts)}. A site may set: {allowed}") from error


def initial_weights(task: Task, seed: int) -> tuple[Layout, Tensor]:
    """The layout of the task's model and its initial vector ``(P,)``, drawn from the run's seed."""
    with seeded(seed):
        module = task.model()
    layout = Layout.of(module)
    return layout, layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))


def run_id(config: Mapping[str, Any], layout: Layout) -> str:
    """16 hex digits that name a run: the same job on the same model has the same one."""
    text = json.dumps([config, layout.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
