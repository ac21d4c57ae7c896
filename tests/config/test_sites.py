"""The data of simulated sites: folders and identifiers for every kind of ``simulator`` section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from line import call
from torch import nn

from flare_sparse.config.schema import RunConfig, build_task
from flare_sparse.config.study import prepare_site_data
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.observer import Observer
from flare_sparse.results.runs.progress import Printer
from flare_sparse.tasks.data import bids
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Cohort, Examples, Metric, SiteData, Task


class Indexed(Task):
    """A task with an index of twelve examples of two hospitals and without data."""

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


def build_config(method: dict[str, Any] | None = None, /, **simulator: Any) -> RunConfig:
    data = {"name": "n", "method": method or {"name": "fedavg"}, "task": {"name": "indexed"}, "simulator": simulator}
    return RunConfig.model_validate(data)


def prepare_sites(folder: Path, **simulator: Any) -> dict[str, SiteData]:
    config = build_config(**simulator)
    return prepare_site_data(config, build_task(config), folder)


def read_ids(sites: dict[str, SiteData]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(int(i[4:]) for i in data.subset or ()) for name, data in sites.items()}


def test_natural_sites_keep_their_names_in_the_characters_that_flare_accepts(tmp_path: Path) -> None:
    sites = prepare_sites(tmp_path, data={"path": str(tmp_path), "partition": {"kind": "natural"}})
    assert read_ids(sites) == {"Bern": (8, 9, 10, 11), "Zurich": (0, 1, 2, 3, 4, 5, 6, 7)}
    assert {data.path for data in sites.values()} == {tmp_path}


def test_natural_sites_that_differ_in_spelling_are_sites_and_named(tmp_path: Path) -> None:
    rows = [f"p{i},{['007', '7', 'Bonn', 'bonn', 'Ulm'][i % 5]},{i},{i % 2}" for i in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["id,hospital,x,y", *rows]) + "\n")
    job = {
        "name": "n",
        "method": {"name": "fedavg"},
        "task": {"name": "table", "kind": "binary", "target": "y", "features": ["x"], "id": "id"},
        "simulator": {"data": {"path": "t.csv", "partition": {"kind": "natural", "column": "hospital"}}},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    output = call("check", tmp_path / "job.yaml").output
    assert "PASS sites: 007, 7, Bonn, Ulm, bonn" in output
    assert "WARN sites: " in output
    assert "names differ only in spelling are different sites: 007, 7; Bonn, bonn; if not, correct them" in output


def test_fewer_natural_sites_than_labels_keep_the_largest(tmp_path: Path) -> None:
    sites = prepare_sites(tmp_path, sites=1, data={"path": str(tmp_path), "partition": {"kind": "natural"}})
    assert list(sites) == ["Zurich"]


def test_natural_site_is_split_further(tmp_path: Path) -> None:
    partition = {"kind": "natural", "split": {"Zürich": 2}}
    ids_by_site = read_ids(prepare_sites(tmp_path, data={"path": str(tmp_path), "partition": partition}))
    assert {name: len(members) for name, members in ids_by_site.items()} == {"Bern": 4, "Zurich-1": 4, "Zurich-2": 4}


def test_age_partition_gives_each_site_a_range_of_ages(tmp_path: Path) -> None:
    sites = prepare_sites(tmp_path, sites=3, data={"path": str(tmp_path), "partition": {"kind": "age"}})
    assert read_ids(sites) == {"site-1": (8, 9, 10, 11), "site-2": (4, 5, 6, 7), "site-3": (0, 1, 2, 3)}


@pytest.mark.parametrize("partition", [{"kind": "iid"}, {"kind": "dirichlet", "min_examples": 2, "alpha": 0.1}])
def test_random_partitions_are_disjoint_and_complete(tmp_path: Path, partition: dict[str, Any]) -> None:
    ids_by_site = read_ids(prepare_sites(tmp_path, sites=4, data={"path": str(tmp_path), "partition": partition}))
    assert sorted(i for members in ids_by_site.values() for i in members) == list(range(12))
    assert list(ids_by_site) == ["site-1", "site-2", "site-3", "site-4"]


def test_path_with_site_gives_each_site_a_file_of_its_own(tmp_path: Path) -> None:
    sites = prepare_sites(tmp_path, sites=2, data={"path": str(tmp_path / "{site}.npz")})
    assert [(s.path, s.subset) for s in sites.values()] == [
        (tmp_path / "site-1.npz", None),
        (tmp_path / "site-2.npz", None),
    ]


@pytest.mark.parametrize(
    ("device", "notes"), [("auto", ["GPUs: site-1 on cuda:0, site-2 on cuda:1, site-3 on cuda:0"]), ("cpu", [])]
)
def test_simulated_sites_take_several_gpus_in_turn_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, notes: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    heard, observer = list[str](), Observer()
    monkeypatch.setattr(observer, "note", heard.append)
    method = {"name": "fedavg", "training": {"device": device}}
    config = build_config(method, sites=3, data={"path": str(tmp_path), "partition": {"kind": "iid"}})
    sites = prepare_site_data(config, build_task(config), tmp_path, observer)
    assert ([data.device for data in sites.values()], heard) == (["cuda:0", "cuda:1", "cuda:0"], notes)


class Brains(Indexed):
    def cohort(self, path: Path) -> Cohort:
        return bids.read_cohort(path)


@pytest.mark.slow
def test_phantoms_of_the_same_settings_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "indexed", Brains)
    simulator = {"sites": 2, "data": {"phantom": {"subjects": 5, "seed": 3}}}
    sites = prepare_sites(tmp_path, **simulator)
    (volume, *_) = sorted(sites["site-1"].path.glob("sub-*/anat/*.nii.gz"))
    written = volume.stat().st_mtime_ns
    assert {name: len(site.subset or ()) for name, site in sites.items()} == {"site-1": 5, "site-2": 5}
    assert prepare_sites(tmp_path, **simulator) == sites
    assert volume.stat().st_mtime_ns == written
    labelled = prepare_sites(tmp_path, sites=2, data={"phantom": {"subjects": 5, "seed": 3, "labels": True}})
    assert len(list(labelled["site-1"].path.glob("derivatives/*/sub-*/anat/*_dseg.nii.gz"))) == 10


def test_missing_simulator_section_is_refused(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"name": "n", "method": {"name": "fedavg"}, "task": {"name": "indexed"}})
    with pytest.raises(ConfigError, match="simulator: missing"):
        prepare_site_data(config, build_task(config), tmp_path)


def test_folder_without_examples_is_named_by_check_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Indexed, "cohort", lambda *_: Cohort(("B/1", "B/2"), {"site": np.array(["B", "B"])}))
    data = {"path": str(tmp_path / "brains"), "partition": {"kind": "natural"}}
    for name in ("A", "B", "derivatives"):
        (tmp_path / "brains" / name).mkdir(parents=True)
    text = f"{data['path']}: A: no examples found, so that this data is at no site of the run; mount or fill the folder"
    config = build_config(data=data)
    assert list(prepare_site_data(config, build_task(config), tmp_path, Printer())) == ["B"]
    assert f"warning: {text}" in capsys.readouterr().err
    config = {"name": "n", "method": {"name": "fedavg"}, "task": {"name": "indexed"}, "simulator": {"data": data}}
    (tmp_path / "n.yaml").write_text(yaml.safe_dump(config))
    # The task has no model.
    output = call("check", tmp_path / "n.yaml").output
    assert f"WARN sites: {text}" in output
    assert "PASS sites: B" in output
    assert output.splitlines()[-1].endswith("to look at: sites")
