"""Every setting of a run, declared once: type, range, default and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..methods import METHODS, MethodConfig
from ..task import TaskConfig
from ..tasks import TASKS
from .choice import FLAT, Choice, choose_from


class Section(BaseModel):
    """Base of our own sections; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WireConfig(Section):
    values: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="number format of values on the wire; what a short format rounds off goes with the next"
    )
    encryption: Literal["none", "ckks"] = Field(
        "none", description="ckks: the server sums weights that it cannot read; keys come from the startup kits"
    )


class FederationConfig(Section):
    min_sites: int = Field(1, ge=1, description="fewest usable contributions that commit a round")
    min_weight: float = Field(
        0.0, ge=0, le=1, description="smallest share of the asked sites' examples that commits a round"
    )
    max_share: float = Field(
        1.0, gt=0, le=1, description="largest share of a round's weight that one site may have; a cut is in the record"
    )
    clip_norm: float | None = Field(
        None, gt=0, description="a site's change that is longer (L2) is shortened to this; a cut is in the record"
    )
    examples_tolerance: float = Field(
        0.1, ge=0, description="how far a site's number of examples may move from what it first said, as a share"
    )
    examples: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict,
        description="training examples of sites as agreed beforehand, {hospital-a: 412}; a larger claim is refused",
    )
    quarantine_after: int = Field(
        3, ge=0, description="rounds in a row without a usable answer after which a site rests for a while; 0: never"
    )
    task_timeout_s: float = Field(3600, gt=0, description="seconds a site has for one answer, training included")
    retries: int = Field(2, ge=0, description="times a failed round is asked again before the run stops")
    request_interval_s: float = Field(
        0.05,
        ge=0.01,
        le=5,
        description="shortest time between two requests of a site for work, which cost about 7 kB each; it grows to 5 % of "
        "what a question has been out, up to 5 s",
    )
    threads: int = Field(1, ge=1, description="torch threads of every process; another number ends in other bits")

    @model_validator(mode="after")
    def _asked_in_time(self) -> FederationConfig:
        if self.request_interval_s >= self.task_timeout_s:
            raise ValueError(
                f"request_interval_s {self.request_interval_s:g}: a question is gone after task_timeout_s "
                f"{self.task_timeout_s:g}, before a site asks for it"
            )
        return self

    @property
    def note(self) -> str:
        """What people should know before a run of how far one site's word goes."""
        if self.max_share < 1:
            return f"one site weighs at most {self.max_share:.0%} of a sum"
        return (
            "max_share is 1: a site that says it has 2^52 examples decides alone; where not all are trusted set it, such "
            "as 0.5, or examples"
        )


class NaturalPartition(Section):
    """The sites that the data names."""

    column: str = Field("site", description="column that names the site of an example")
    split: dict[str, int] = Field(default_factory=dict, description="cut a natural site at random: {IXI-HH: 4}")
    seed: int = Field(0, ge=0, description="of the random cut")


class IidPartition(Section):
    """Every site covers the whole population."""

    sizes: Literal["uniform", "skewed"] = Field("uniform", description="equal sizes, or a decreasing geometric row")
    seed: int = Field(0, ge=0, description="of the shuffle")


class AgePartition(Section):
    """Sorted by age and cut: every site holds its own range (FedSparsify's non-IID)."""

    column: str = Field("age", description="column to sort by")
    sizes: Literal["uniform", "skewed"] = Field("uniform", description="equal sizes, or a decreasing geometric row")


class DirichletPartition(Section):
    """Label proportions drawn per site."""

    column: str = Field("label", description="column of the classes")
    alpha: float = Field(0.5, gt=0, description="concentration; small: each site holds few classes")
    at_least: int = Field(5, ge=1, description="fewest examples of a site")
    seed: int = Field(0, ge=0, description="of the draw")


class FewClassesPartition(Section):
    """A few classes at every site, sites of different size (MetaGater)."""

    column: str = Field("label", description="column of the classes")
    classes: int = Field(2, ge=1, description="classes at a site")
    smallest: int = Field(30, ge=1, description="fewest examples of a site")
    largest: int = Field(100, ge=1, description="most examples of a site; sizes are log-uniform")
    seed: int = Field(0, ge=0, description="of the draw")


def partitions() -> dict[str, type[BaseModel]]:
    """Settings of every partitioner by kind."""
    return {
        "natural": NaturalPartition,
        "iid": IidPartition,
        "age": AgePartition,
        "dirichlet": DirichletPartition,
        "few_classes": FewClassesPartition,
    }


class PhantomConfig(Section):
    subjects: int = Field(40, ge=5, le=999, description="brains per site")
    seed: int = Field(0, ge=0, description="of the anatomy; the run's own seed does not change the data")


class SimulatorData(Section):
    """Where the simulator finds the data that a real site would have on its own disk: phantoms or a path."""

    phantom: PhantomConfig | None = Field(None, description="make brain phantoms")
    path: Path | None = Field(
        None, description="a data set to partition, or with {site} in it one folder or file for each site"
    )
    partition: Annotated[Choice[Section], choose_from(partitions), FLAT] | None = Field(
        None, description="how the data set at path is cut into sites"
    )

    @property
    def one_place_a_site(self) -> bool:
        return self.path is not None and "{site}" in str(self.path)

    @model_validator(mode="after")
    def _one_source(self) -> SimulatorData:
        if (self.phantom is None) == (self.path is None):
            raise ValueError(
                "give either phantom or path; to replace what the file says: --set 'simulator.data={path: DIR}'"
            )
        if self.partition is not None and (self.phantom is not None or self.one_place_a_site):
            raise ValueError("partition cuts one data set; leave it out with phantom and with {site} in path")
        if self.path is not None and not self.one_place_a_site and self.partition is None:
            raise ValueError("partition is missing; say how path is cut into sites, such as {kind: natural}")
        return self


class SimulatorConfig(Section):
    """Used by ``--env sim`` and ``check`` only; it never travels in a job."""

    sites: int | None = Field(None, ge=1, description="number of sites; with natural sites: the largest ones, or all")
    data: SimulatorData
    site_settings: dict[str, dict[str, dict[str, Any]]] = Field(
        default_factory=dict,
        description="what a site would say in its own site file, by site and method: {site-1: {scbf: {rate: 0.1}}}",
    )

    @model_validator(mode="after")
    def _counted(self) -> SimulatorConfig:
        partition = self.data.partition
        if self.sites is None and not (partition is not None and partition.name == "natural"):
            raise ValueError("sites is missing; only natural sites are counted by the data")
        return self


def methods() -> dict[str, type[BaseModel]]:
    """Settings of every method by name."""
    return {name: method.Config for name, method in METHODS.items()}


def tasks() -> dict[str, type[BaseModel]]:
    """Settings of every ready task by name."""
    return {name: task.Config for name, task in TASKS.items()}


class JobConfig(Section):
    """What travels in a job: nothing in it says where any data lies.

    A validation context ``{"task": {name: settings}}`` (likewise ``method``) replaces what may be chosen from.

    Attributes:
        method: a :class:`Choice` out of ``METHODS``.
        task: a :class:`Choice` out of ``TASKS``, or a user's own class.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", description="of the job; letters, digits, - and _")
    seed: int = Field(0, ge=0, lt=2**53, description="all randomness of a run derives from it")
    method: Annotated[Choice[MethodConfig], choose_from(methods), FLAT] = Field(
        description="what is exchanged and how it is combined: flare-sparse methods"
    )
    task: Annotated[Choice[TaskConfig], choose_from(tasks), FLAT] = Field(description="model, data, loss and metric")
    wire: WireConfig = Field(default_factory=WireConfig, description="the messages")
    federation: FederationConfig = Field(default_factory=FederationConfig, description="when a round counts")

    @model_validator(mode="after")
    def _enough_for_the_method(self) -> JobConfig:
        fewest = getattr(self.method.config, "min_sites_needed", 1)
        if self.federation.min_sites < fewest:
            raise ValueError(
                f"federation.min_sites is {self.federation.min_sites}; method {self.method.name} as it is set needs {fewest}"
            )
        return self

    @property
    def encrypted(self) -> bool:
        """Whether weights travel encrypted."""
        return self.wire.encryption != "none"

    @model_validator(mode="after")
    def _summed_unread(self) -> JobConfig:
        """Whatever the server must read to do as it is told is refused here, not found out in a round."""
        if not self.encrypted:
            return self
        reason = getattr(self.method.config, "encryption_blocker", "")
        for against, fix in (
            (reason and f"method {self.method.name}: {reason}", "neurosfl or fedavg sum with their defaults"),
            (self.wire.values != "float32" and f"wire.values is {self.wire.values}", "leave it at float32"),
            (
                self.federation.clip_norm is not None and "federation.clip_norm looks at single answers",
                "the site's own policy has clip_norm and max_norm",
            ),
            (
                self.federation.min_sites < 2 and "federation.min_sites is 1, and a sum of one is that site's model",
                "set it to 2 or more",
            ),
        ):
            if against:
                raise ValueError(
                    f"wire.encryption is ckks, with which the server reads no answer, but {against}; {fix}, or set "
                    "wire.encryption to none"
                )
        return self


class RunConfig(JobConfig):
    """A configuration file: a job, and what stands in for the sites' own data in the simulator."""

    simulator: SimulatorConfig | None = Field(None, description="sites and data of --env sim")

    @model_validator(mode="after")
    def _enough_sites(self) -> RunConfig:
        sites = self.simulator.sites if self.simulator else None
        if sites is not None and self.federation.min_sites > sites:
            raise ValueError(f"federation.min_sites is {self.federation.min_sites}, simulator.sites only {sites}")
        return self

    @property
    def job(self) -> JobConfig:
        """The part that travels."""
        return JobConfig(**{name: getattr(self, name) for name in JobConfig.model_fields})
