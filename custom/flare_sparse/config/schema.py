"""Schema of the configuration: every setting with its type, range, default and description."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..core.errors import ConfigError
from ..core.settings import Settings
from ..methods.method import MethodConfig
from ..methods.registry import METHODS
from ..privacy.dp.config import PrivacyConfig
from ..privacy.secure_aggregation.rings import MAX_BOUND
from ..privacy.secure_aggregation.stage import SumRules
from ..rounds.federation.rules import RoundRules
from ..tasks.data.partition import PARTITIONS
from ..tasks.registry import TASKS
from ..tasks.task import Task, TaskConfig
from ..wire.formats import FORMATS, ValueType, load_format
from ..wire.stage import PLAIN_STAGE, Stage
from .choice import Choice, ChoiceSerializer, build_choice_validator, build_error
from .needs import find_conflicts

_SCRIPT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*\.py")


class Section(Settings):
    """Base of the package's own sections; an unknown field is an error."""


class WireConfig(Section):
    """Format of the messages."""

    values: ValueType = Field("float32", examples=list(FORMATS))
    """number format of values in messages; the rounding residual of a short format is added to the next message; int8,
    int4, int2 and int1 (signs) round the difference to what the receiver holds; _zstd is lossless compression"""
    aggregation: Literal["plain", "masked"] = "plain"
    """masked: the server reads the sum of the sites' values and no value of a single site; sites sign their keys with
    the certificates of their startup kits"""
    bound: float = Field(64.0, gt=2.0**-20, le=MAX_BOUND)
    """masked: largest change of a parameter in a round; an update with a larger one is refused (E_RANGE); the sum is
    exact to 2^-20 of it or better"""
    initial_model: Literal["sent", "built"] = "sent"
    """built: each site builds the initial model from the job's seed, and the first request has the statistics of inputs
    alone, with formats of 8 bits and fewer compressed and to 24 bits; a site whose model has another digest than the
    server's receives all of it"""

    @field_validator("values")
    @classmethod
    def _load_format(cls, name: str) -> str:
        try:
            return load_format(name)
        except ConfigError as error:
            raise ValueError(str(error)) from error


MIN_COMMITS = 2
"""Commits that are always kept: the older one is there if the newer one is damaged or discarded."""


class FederationConfig(RoundRules):
    """Rules that decide when a round is committed, and how the sites compute and are waited for."""

    task_timeout_s: float = Field(3600, gt=0)
    """seconds that a site has to reply to a request, training included"""
    kept_commits: int = Field(MIN_COMMITS, ge=MIN_COMMITS)
    """newest commits whose checkpoints server and sites keep; a withdrawal retrains from the last one before the data
    took part"""
    checkpoint_days: int | None = Field(None, ge=0)
    """days that a result folder keeps checkpoints; 0: none after the run; null: until they are removed"""
    request_interval_s: float = Field(0.05, ge=0.01, le=5)
    """shortest time in seconds between two polls of a site for work (about 7 kB each); it grows to 5 % of the time
    since the request was issued, up to 5 s"""
    gpus: int = Field(0, ge=0, le=64)
    """GPUs that a site's FLARE must have free before the job starts there (num_of_gpus of the job's resource_spec, for
    sites with FLARE's GPUResourceManager); 0: the job asks for none"""
    threads: int = Field(1, ge=1, le=1024)
    """torch threads of every process; a different number changes the result's last bits, except with
    method.training.compute: sparse, where it counts the threads of the sparse kernels and torch has one"""

    @model_validator(mode="after")
    def _check_times(self) -> FederationConfig:
        round_s = self.round_s
        # A longer bound would have no effect: the sites' requests would have expired.
        if round_s is not None and round_s > self.task_timeout_s:
            raise ValueError(
                f"round_minutes {self.round_minutes:g}: a request expires after task_timeout_s "
                f"{self.task_timeout_s:g} already; raise task_timeout_s to {round_s:g} or more, or lower round_minutes"
            )
        name, shortest = ("task_timeout_s", self.task_timeout_s) if round_s is None else ("round_minutes", round_s)
        if self.request_interval_s >= shortest:
            raise ValueError(
                f"request_interval_s {self.request_interval_s:g}: a request expires after {name} "
                f"({shortest:g} s), before a site polls for it"
            )
        return self

    @property
    def note(self) -> str:
        """A note for the user on how much one site can influence a round."""
        if self.max_share < 1:
            return f"one site has at most {self.max_share:.0%} of a round's weight"
        return (
            "a site weighs as many examples as it says it has; unless all sites are trusted, limit it with max_share "
            "(such as 0.5), or agree on the numbers in federation.examples"
        )


class PhantomConfig(Section):
    """Brain phantoms as the data of simulated sites."""

    subjects: int = Field(40, ge=5, le=999)
    """brains per site"""
    seed: int = Field(0, ge=0)
    """seed of the anatomy; independent of the run's seed"""
    labels: bool = False
    """with a map of each brain's tissues, for task segmentation"""


class SimulatorData(Section):
    """Data of simulated sites, which real sites have on their own disks: phantoms or a path."""

    phantom: PhantomConfig | None = None
    """generate brain phantoms"""
    path: Path | None = None
    """one data set to partition; or, with {site} in the path, one folder or file per site"""
    partition: Annotated[Choice[Settings], build_choice_validator(lambda: PARTITIONS), ChoiceSerializer] | None = None
    """how the data set at path is partitioned into sites"""

    @property
    def has_path_per_site(self) -> bool:
        """Whether every site has its own folder or file."""
        return self.path is not None and "{site}" in str(self.path)

    @model_validator(mode="after")
    def _check_source(self) -> SimulatorData:
        if (self.phantom is None) == (self.path is None):
            raise ValueError(
                "give either phantom or path; to replace the file's setting: --set 'simulator.data={path: DIR}'"
            )
        if self.partition is not None and (self.phantom is not None or self.has_path_per_site):
            raise ValueError("partition applies to one data set; omit it with phantom and with {site} in path")
        if self.path is not None and not self.has_path_per_site and self.partition is None:
            raise ValueError("partition is missing; set how path is partitioned into sites, such as {kind: natural}")
        return self


class SimulatorConfig(Section):
    """Simulated sites; used by ``--env sim``, ``--env local`` and ``check`` only, and never sent with a job."""

    sites: int | None = Field(None, ge=1)
    """number of sites; of natural sites, keep this many, the largest (null: all)"""
    data: SimulatorData
    site_settings: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """settings that a real site has in its site file, by site and method: {site-1: {scbf: {rate: 0.1}}}"""

    @model_validator(mode="after")
    def _check_sites(self) -> SimulatorConfig:
        partition = self.data.partition
        if self.sites is None and not (partition is not None and partition.name == "natural"):
            raise ValueError("sites is missing; only a natural partition takes the number of sites from the data")
        return self


def build_task(config: JobConfig) -> Task:
    """Build the task of a job.

    Raises:
        ConfigError: the job has a training script, whose network must be imported first.
    """
    if config.task.key == "script":
        raise ConfigError(f"task.script: {config.task.name}: the network of a script is built by load_task")
    task: Task = config.task.entry(config.task.config)
    return task


class JobConfig(Section):
    """The part of a configuration that is sent with a job; it contains no location of data.

    A validation context ``{"task": {name: class}}`` (likewise ``method``) replaces the registry of the section.

    Attributes:
        method: a :class:`Choice` from ``METHODS``, or a user method.
        task: a :class:`Choice` from ``TASKS``, a user task, or a training script.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """name of the job: letters, digits, - and _"""
    seed: int = Field(0, ge=0, lt=2**53)
    """seed of all randomness of a run"""
    method: Annotated[Choice[MethodConfig], build_choice_validator(lambda: METHODS), ChoiceSerializer]
    """what is exchanged and how it is aggregated; see flare-sparse settings"""
    task: Annotated[Choice[TaskConfig], build_choice_validator(lambda: TASKS), ChoiceSerializer]
    """model, data, loss and metric"""
    wire: WireConfig = Field(default_factory=WireConfig)
    """format of the messages"""
    federation: FederationConfig = Field(default_factory=FederationConfig)
    """quorum, limits, timeouts and retries of the rounds"""
    privacy: PrivacyConfig | None = None
    """differential privacy of every site's training, {epsilon: 3}; null: none"""
    permit: str | None = Field(None, min_length=1, max_length=200)
    """number of the ethics vote or data permit under which the job runs; a site's policy may demand one"""

    @property
    def torch_threads(self) -> int:
        """Number of torch's threads in every process.

        With ``training.compute: sparse`` it is 1, because torch's bits depend on it; ``federation.threads`` then counts
        the threads of the sparse kernels, whose bits do not.
        """
        return 1 if self.method.config.training.compute == "sparse" else self.federation.threads

    @model_validator(mode="after")
    def _check_needs(self) -> JobConfig:
        """Refuse a method, a task or settings that need what another setting takes away."""
        if conflicts := find_conflicts(self):
            raise build_error(*conflicts)
        return self

    @model_validator(mode="after")
    def _check_patience(self) -> JobConfig:
        stopping, every = self.federation.early_stopping, self.method.config.evaluate_every
        if stopping is not None and stopping.patience < every:
            raise ValueError(
                f"federation.early_stopping.patience {stopping.patience} counts rounds; method.evaluate_every is "
                f"{every}, so the run would end before it knows another model; raise patience to {every} or more"
            )
        return self

    @model_validator(mode="after")
    def _check_script_name(self) -> JobConfig:
        if self.task.key == "script" and (not _SCRIPT_NAME.fullmatch(self.task.name) or ".." in self.task.name):
            raise ValueError(
                f"task.script is {self.task.name!r}; expected a file such as client.py, in the folder of the "
                "configuration or below it"
            )
        return self

    @property
    def stage(self) -> Stage:
        """What the values of updates pass on their way to the server."""
        is_plain = self.wire.aggregation == "plain"
        return PLAIN_STAGE if is_plain else SumRules(self.wire.bound, self.federation.min_sites)

    @property
    def builds_initial(self) -> bool:
        """Whether each site builds the initial model from the seed."""
        return self.wire.initial_model == "built"


Packaging = Literal["installed", "byoc"]
Service = Literal["tensorboard", "mlflow", "wandb"]


class DeploymentConfig(Section):
    """How a job gets to FLARE, and where the figures of its rounds go; no result depends on it."""

    packaging: Packaging = "installed"
    """installed: every site has installed the package and allows its classes; byoc: its source travels with the job,
    which a site can refuse"""
    track: Service | None = None
    """service that the server sends the figures of every round to; its environment has address and key, without which
    they are files in the result folder; needs the extra track"""


class RunConfig(JobConfig):
    """A configuration file: a job, its simulated sites, and its deployment."""

    simulator: SimulatorConfig | None = None
    """sites and data of --env sim and --env local"""
    deployment: DeploymentConfig = Field(default_factory=DeploymentConfig)
    """how the job gets to FLARE"""

    @model_validator(mode="after")
    def _check_quorum(self) -> RunConfig:
        sites = self.simulator.sites if self.simulator else None
        if sites is not None and self.federation.min_sites > sites:
            raise ValueError(f"federation.min_sites is {self.federation.min_sites}, but simulator.sites only {sites}")
        return self

    @property
    def job(self) -> JobConfig:
        """The part that is sent with a job."""
        return JobConfig(**{name: getattr(self, name) for name in JobConfig.model_fields})
