"""The simulator's sites: every configuration ends as folders and identifiers that the sites could have given."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flare_sparse.cli.sites import simulated_sites
from flare_sparse.config import RunConfig, build_task
from flare_sparse.config.schema import partitions
from flare_sparse.data import bids
from flare_sparse.data.partition import PARTITIONERS
from flare_sparse.errors import ConfigError
from flare_sparse.task import Cohort, Examples, Metric, SiteData, Task
from flare_sparse.tasks import TASKS


class Indexed(Task):
    """Twelve examples of two hospitals; nothing is ever loaded."""

    metric = Metric("mae", "years", "min")

    def cohort(self, path: Path) -> Cohort:
        ids = tuple(f"sub-{i:02d}" for i in range(12))
        site = np.array(["Zürich"] * 8 + ["Bern"] * 4)
        return Cohort(ids, {"site": site, "age": np.arange(12.0)[::-1], "label": np.arange(12) % 2})

    def model(self) -> nn.Module:
        raise NotImplementedError

    def load(self, data: SiteData, seed: int) -> Examples:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "indexed", Indexed)


def sites_of(folder: Path, **simulator: Any) -> dict[str, SiteData]:
    data = {"name": "n", "method": {"name": "fedavg"}, "task": {"name": "indexed"}, "simulator": simulator}
    config = RunConfig.model_validate(data)
    return simulated_sites(config, build_task(config), folder)


def ids(sites: dict[str, SiteData]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(int(i[4:]) for i in data.subset or ()) for name, data in sites.items()}


def test_natural_sites_keep_their_names_as_far_as_the_framework_takes_them(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, data={"path": str(tmp_path), "partition": {"kind": "natural"}})
    assert ids(sites) == {"Bern": (8, 9, 10, 11), "Z-rich": (0, 1, 2, 3, 4, 5, 6, 7)}
    assert {data.path for data in sites.values()} == {tmp_path}


def test_fewer_natural_sites_are_the_largest(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, sites=1, data={"path": str(tmp_path), "partition": {"kind": "natural"}})
    assert list(sites) == ["Z-rich"]


def test_a_natural_site_is_cut_further(tmp_path: Path) -> None:
    partition = {"kind": "natural", "split": {"Zürich": 2}}
    found = ids(sites_of(tmp_path, data={"path": str(tmp_path), "partition": partition}))
    assert {name: len(members) for name, members in found.items()} == {"Bern": 4, "Z-rich-1": 4, "Z-rich-2": 4}


def test_ranges_of_age(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, sites=3, data={"path": str(tmp_path), "partition": {"kind": "age"}})
    assert ids(sites) == {"site-1": (8, 9, 10, 11), "site-2": (4, 5, 6, 7), "site-3": (0, 1, 2, 3)}


@pytest.mark.parametrize("partition", [{"kind": "iid"}, {"kind": "dirichlet", "at_least": 2, "alpha": 0.1}])
def test_random_cuts_are_disjoint_and_complete(tmp_path: Path, partition: dict[str, Any]) -> None:
    found = ids(sites_of(tmp_path, sites=4, data={"path": str(tmp_path), "partition": partition}))
    assert sorted(i for members in found.values() for i in members) == list(range(12))
    assert list(found) == ["site-1", "site-2", "site-3", "site-4"]


def test_one_place_a_site(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, sites=2, data={"path": str(tmp_path / "{site}.npz")})
    assert [(s.path, s.subset) for s in sites.values()] == [
        (tmp_path / "site-1.npz", None),
        (tmp_path / "site-2.npz", None),
    ]


class Brains(Indexed):
    def cohort(self, path: Path) -> Cohort:
        return bids.cohort(path)


def test_phantoms_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "indexed", Brains)
    wanted = {"sites": 2, "data": {"phantom": {"subjects": 5, "seed": 3}}}
    sites = sites_of(tmp_path, **wanted)
    (volume, *_) = sorted(sites["site-1"].path.glob("sub-*/anat/*.nii.gz"))
    written = volume.stat().st_mtime_ns
    assert {name: len(site.subset or ()) for name, site in sites.items()} == {"site-1": 5, "site-2": 5}
    assert sites_of(tmp_path, **wanted) == sites
    assert volume.stat().st_mtime_ns == written


def test_a_job_without_a_simulator_section_is_refused(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"name": "n", "method": {"name": "fedavg"}, "task": {"name": "indexed"}})
    with pytest.raises(ConfigError, match="simulator: missing"):
        simulated_sites(config, build_task(config), tmp_path)


@pytest.mark.parametrize("kind", sorted(PARTITIONERS))
def test_settings_of_a_partition_are_those_of_its_function(kind: str) -> None:
    parameters = inspect.signature(PARTITIONERS[kind]).parameters
    settings = partitions()[kind].model_fields
    assert set(settings) == set(parameters) - {"cohort", "sites"}
    plain = {name: parameters[name].default for name in settings if name != "split"}
    assert plain == {name: settings[name].default for name in plain}


def test_every_partitioner_can_be_chosen() -> None:
    assert set(partitions()) == set(PARTITIONERS)
