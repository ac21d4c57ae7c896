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
from .config import JobConfig, build_method, build_task, job_to_dict
from .errors import ConfigError
from .federation import RoundRules
from .methods import Method
from .params import Layout
from .seeds import seed_torch
from .task import SiteData, Task
from .training import Site


@dataclass(frozen=True)
class Assembly:
    """The parts of one job; equal on both ends because they come from the same settings."""

    task: Task
    method: Method[Any]
    layout: Layout
    weights: Tensor
    run_id: str


def assemble(job: JobConfig, user_task: Task | None = None) -> Assembly:
    """Build a job's parts.

    Args:
        job: validated settings.
        user_task: the user's own task, already built; None: the registered task that the job names.

    Raises:
        ConfigError: the model cannot be built from the settings.
    """
    task = user_task or build_task(job)
    layout, weights = build_initial_model(task, job.seed)
    return Assembly(task, build_method(job, layout), layout, weights, compute_run_id(job_to_dict(job), layout))


def build_rules(job: JobConfig) -> RoundRules:
    """When a round of this job counts."""
    said = job.federation
    return RoundRules(
        min_sites=said.min_sites,
        min_weight=said.min_weight,
        retries=said.retries,
        max_share=said.max_share,
        clip_norm=said.clip_norm,
        examples_tolerance=said.examples_tolerance,
        quarantine_after=said.quarantine_after,
        examples=said.examples,
    )


def open_checkpoints(job: JobConfig, assembly: Assembly, root: Path, end: str) -> Store:
    """Where one end of a job keeps its checkpoints, below ``root``: ``"server"`` or the name of a site.

    The folder's name holds the run's, so that another job finds nothing there and starts afresh.
    """
    belongs = {"run": assembly.run_id, "layout": assembly.layout.fingerprint, "end": end, "job": job_to_dict(job)}
    return Store(root / f"{job.name}-{assembly.run_id}" / end, belongs)


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
    site.site_settings = choices
    return site


def _chosen(method: Method[Any], data: SiteData) -> BaseModel | None:
    """What the site sets for itself; None when it sets nothing."""
    own = data.methods.get(method.name)
    if not own:
        return None
    if method.SiteConfig is None:
        raise ConfigError(f"site {data.site}: methods.{method.name}: this method leaves no setting to a site")
    try:
        return method.SiteConfig.model_validate(own)
    except ValidationError as error:
        parts = [f"methods.{method.name}.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        allowed = ", ".join(method.SiteConfig.model_fields)
        raise ConfigError(f"site {data.site}: {'; '.join(parts)}. A site may set: {allowed}") from error


def build_initial_model(task: Task, seed: int) -> tuple[Layout, Tensor]:
    """The layout of the task's model and its initial vector ``(P,)``, drawn from the run's seed."""
    with seed_torch(seed):
        module = task.model()
    layout = Layout.from_module(module)
    return layout, layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))


def compute_run_id(config: Mapping[str, Any], layout: Layout) -> str:
    """16 hex digits that name a run: the same job on the same model has the same one."""
    text = json.dumps([config, layout.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
