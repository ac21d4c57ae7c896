"""What a site writes at the end of a job."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from nvflare.apis.event_type import EventType
from toy import Toy, ToyBench

from flare_sparse.config.assemble import assemble
from flare_sparse.config.loading import load_config, serialize_job
from flare_sparse.core.errors import ConfigError, PolicyRefusal
from flare_sparse.flare import session as session_module
from flare_sparse.flare.session import MODELS_FOLDER, SITE_MODELS_VARIABLE, SiteSession
from flare_sparse.flare.workspace import JOB_FILE
from flare_sparse.results.runs.model_files import list_site_models
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.training import compute

RUN = "a" * 16


def end_job(kit: Path, personal: Any = (), **settings: Any) -> None:
    """End a job at a site that has evaluated a model."""
    bench = ToyBench(Toy(), personal=personal)
    site = bench.site(1)
    site.evaluate(bench.weights)
    session = SiteSession()
    session._endpoint = SiteEndpoint(site, bench.method("fedavg", **settings), RUN, "float32")
    engine = SimpleNamespace(get_workspace=lambda: SimpleNamespace(get_root_dir=lambda: str(kit)))
    session.handle_event(EventType.END_RUN, SimpleNamespace(get_engine=lambda: engine))  # type: ignore[arg-type]


def test_site_that_keeps_tensors_saves_its_network_in_its_startup_kit(tmp_path: Path) -> None:
    end_job(tmp_path, "norms")
    assert list(list_site_models(tmp_path / MODELS_FOLDER / RUN)) == ["site-1"]


def test_site_saves_its_fine_tuned_model_in_its_startup_kit(tmp_path: Path) -> None:
    end_job(tmp_path, finetune={"epochs": 1})
    assert list(list_site_models(tmp_path / MODELS_FOLDER / RUN)) == ["site-1"]


def test_site_of_a_common_model_saves_nothing(tmp_path: Path) -> None:
    end_job(tmp_path, ())
    assert not any(tmp_path.iterdir())


def test_simulated_site_saves_its_network_beside_those_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SITE_MODELS_VARIABLE, str(tmp_path / "models"))
    end_job(tmp_path / "kit", "norms")
    assert list(list_site_models(tmp_path / "models")) == ["site-1"]
    assert not (tmp_path / "kit").exists()


@pytest.mark.parametrize("records", [True, False])
def test_job_whose_server_keeps_updates_reads_no_data_where_the_policy_forbids_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    (tmp_path / "flare_sparse_policy.yaml").write_text("record_updates: false\n")
    audit = SimpleNamespace(record_updates=records)
    job = SimpleNamespace(audit=audit, permit=None, builds_initial=False)
    bench = ToyBench()
    monkeypatch.setattr(session_module, "_assemble", lambda fl_ctx: (job, SimpleNamespace(weights=bench.weights)))

    def load(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(session_module, "replace", load)
    workspace = SimpleNamespace(get_site_config_dir=lambda: str(tmp_path))
    engine = SimpleNamespace(get_workspace=lambda: workspace)
    fl_ctx: Any = SimpleNamespace(get_engine=lambda: engine, get_identity_name=lambda: "site-1")
    error, text = (PolicyRefusal, "record_updates") if records else (AssertionError, "data was read")
    with pytest.raises(error, match=text):
        SiteSession().get_endpoint(fl_ctx)


def test_site_builds_the_initial_model_of_its_own_copy_of_the_job(tmp_path: Path) -> None:
    job = load_config(Path(__file__).parents[2] / "app_configs" / "dp_morphometry_age.yaml")
    (tmp_path / JOB_FILE).write_text(yaml.safe_dump(serialize_job(job)))
    workspace = SimpleNamespace(get_app_config_dir=lambda job: str(tmp_path), get_site_config_dir=lambda: str(tmp_path))
    engine = SimpleNamespace(get_workspace=lambda: workspace, get_component=lambda name: None)
    fl_ctx: Any = SimpleNamespace(get_engine=lambda: engine, get_job_id=lambda: "job")
    assert torch.equal(SiteSession().build_initial_weights(fl_ctx), assemble(job).weights)


def test_site_without_the_kernels_of_its_job_fails_before_it_reads_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "find_spec", lambda name: None)
    bench = ToyBench()
    method = bench.method("fedavg", training={"compute": "sparse"})
    assembly: Any = SimpleNamespace(method=method, task=bench.task, privacy=None)
    context: Any = None
    with pytest.raises(ConfigError, match=r"compute: sparse is not possible: .*flare-sparse\[fast\]"):
        SiteSession()._open_site(assembly, "site-1", tmp_path / "no-data", context)


def test_training_counts_where_the_record_of_its_layers_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    workspace = SimpleNamespace(get_run_dir=lambda job: str(folder))
    fl_ctx: Any = SimpleNamespace(
        get_engine=lambda: SimpleNamespace(get_workspace=lambda: workspace), get_job_id=lambda: "job"
    )
    warnings: list[str] = []
    session = SiteSession()
    session.log_warning = lambda fl_ctx, text: warnings.append(text)  # type: ignore[method-assign, assignment]
    bench = ToyBench()
    site = bench.site(1)
    site.trainer.layer_compute["0"] = "sparse"
    session._endpoint = SiteEndpoint(site, bench.method("fedavg"), RUN, "float32")
    folder.write_text("a file where the folder should be")
    session.record_layer_compute(fl_ctx)
    assert warnings == ["layer_compute.json is not written: Not a directory"]
    folder.unlink()
    folder.mkdir()
    session.record_layer_compute(fl_ctx)
    assert json.loads((folder / "layer_compute.json").read_text()) == {"site-1": {"0": "sparse"}}
