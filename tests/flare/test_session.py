"""What a site writes at the end of a job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from nvflare.apis.event_type import EventType
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from toy import Toy, ToyBench

from flare_sparse.config.assemble import assemble
from flare_sparse.config.loading import load_config, parse_job, serialize_job
from flare_sparse.config.schema import JobConfig
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError, PolicyRefusal
from flare_sparse.flare import session as session_module
from flare_sparse.flare.executor import SparseExecutor
from flare_sparse.flare.job_settings import SITE_SECTIONS, show_settings
from flare_sparse.flare.payload import HELLO, SUM, TASK, extract, get_refusal_code
from flare_sparse.flare.session import (
    MODELS_FOLDER,
    SITE_MODELS_VARIABLE,
    SiteSession,
    UserPart,
    read_job,
)
from flare_sparse.flare.workspace import JOB_FILE
from flare_sparse.methods.fedavg import FedAvg
from flare_sparse.results.runs.model_files import find_site_models
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.training import compute
from flare_sparse.wire.capabilities import local_capabilities

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
    assert list(find_site_models(tmp_path / MODELS_FOLDER / RUN)) == ["site-1"]


def test_site_saves_its_fine_tuned_model_in_its_startup_kit(tmp_path: Path) -> None:
    end_job(tmp_path, finetune={"epochs": 1})
    assert list(find_site_models(tmp_path / MODELS_FOLDER / RUN)) == ["site-1"]


def test_site_of_a_common_model_saves_nothing(tmp_path: Path) -> None:
    end_job(tmp_path, ())
    assert not any(tmp_path.iterdir())


def test_simulated_site_saves_its_network_beside_those_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SITE_MODELS_VARIABLE, str(tmp_path / "models"))
    end_job(tmp_path / "kit", "norms")
    assert list(find_site_models(tmp_path / "models")) == ["site-1"]
    assert not (tmp_path / "kit").exists()


@pytest.mark.parametrize("permit", [None, "EA 12/2026"])
def test_job_without_the_permit_of_the_site_reads_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permit: str | None
) -> None:
    (tmp_path / "flare_sparse_policy.yaml").write_text("permit: EA 12/2026\n")
    job = SimpleNamespace(permit=permit, builds_initial=False)
    bench = ToyBench()
    monkeypatch.setattr(session_module, "_assemble", lambda fl_ctx: (job, SimpleNamespace(weights=bench.weights)))

    def load(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(session_module, "replace", load)
    workspace = SimpleNamespace(get_site_config_dir=lambda: str(tmp_path), get_root_dir=lambda: str(tmp_path))
    engine = SimpleNamespace(get_workspace=lambda: workspace)
    fl_ctx: Any = SimpleNamespace(
        get_engine=lambda: engine, get_identity_name=lambda: "site-1", get_job_id=lambda: "job"
    )
    error, text = (AssertionError, "data was read") if permit else (PolicyRefusal, "the job has none")
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


class Own(Toy):
    """A task of a user's."""


class Mine(FedAvg):
    name = "mine"


class Context:
    """FLARE's context of a participant of a job: with its settings, and the components that FLARE has built."""

    def __init__(self, folder: Path, job: JobConfig, **components: object):
        (folder / JOB_FILE).write_text(yaml.safe_dump(serialize_job(job)))
        workspace = SimpleNamespace(get_app_config_dir=lambda job: str(folder), get_run_dir=lambda job: str(folder))
        self._engine = SimpleNamespace(get_workspace=lambda: workspace, get_component=components.get)

    def get_engine(self) -> Any:
        return self._engine

    def get_job_id(self) -> str:
        return "job"


def build_own_job(task: str = f"{__name__}.Own", method: str = f"{__name__}.Mine") -> JobConfig:
    settings = {"name": "job", "method": {"class": method, "rounds": 3}, "task": {"class": task}}
    return parse_job(settings, Own, Mine)


def read_own_job(folder: Path, job: JobConfig, task: object = None, method: object = None) -> JobConfig:
    context: Any = Context(
        folder,
        job,
        task=UserPart(task or Own({})),
        # As FLARE builds it from JSON.
        method=UserPart(method or Mine(config={"rounds": 3})),  # type: ignore[call-arg]
    )
    return read_job(context)


def test_site_runs_the_classes_that_flare_has_built_with_the_settings_of_the_job(tmp_path: Path) -> None:
    job = read_own_job(tmp_path, build_own_job())
    assert (job.method.entry, job.task.entry, job.method.config.rounds) == (Mine, Own, 3)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"method": Mine(config={"rounds": 4})}, "component 'method': its settings are not those of method in"),  # type: ignore[call-arg]
        ({"method": FedAvg(config={"rounds": 3})}, "component 'method': it holds FedAvg, but flare_sparse.yaml names"),  # type: ignore[call-arg]
        ({"method": Own({})}, "component 'method': expected a subclass of flare_sparse.methods.Method, found Own"),
        ({"task": Own({"split": {"test": 0.4}})}, "component 'task': its settings are not those of task in"),
        ({"task": Toy({})}, "component 'task': it holds Toy, but flare_sparse.yaml names"),
    ],
)
def test_component_that_the_settings_of_the_job_do_not_name_is_refused(
    parts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_own_job(tmp_path, build_own_job(), **parts)


def test_method_of_this_package_with_a_component_of_a_class_is_refused(tmp_path: Path) -> None:
    job = load_config(Path(__file__).parents[2] / "app_configs" / "fedavg_brain_age.yaml").job
    context: Any = Context(tmp_path, job, method=UserPart(Mine(config={})))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="component 'method': its settings are not those of method"):
        read_job(context)


def test_executor_whose_arguments_do_not_show_what_runs_answers_with_its_versions_only(tmp_path: Path) -> None:
    job = load_config(Path(__file__).parents[2] / "app_configs" / "fedavg_brain_age.yaml").job
    shown = show_settings(job, SITE_SECTIONS)
    context: Any = Context(tmp_path, job)
    executor = SparseExecutor(**{**shown, "method": "neurosfl"})
    executor.log_error = lambda *line: None  # type: ignore[method-assign]
    executor.handle_event(EventType.START_RUN, context)
    assert extract(HELLO, executor.execute(HELLO, Shareable(), context, Signal())) == local_capabilities().to_message()
    for task in (TASK, SUM):
        assert get_refusal_code(executor.execute(task, Shareable(), context, Signal())) == "E_CONFIG"
    assert "shows 'neurosfl' for method" in (tmp_path / "site_error.txt").read_text()


def test_no_way_back_by_a_script_at_a_site_without_a_site_file(tmp_path: Path) -> None:
    (tmp_path / "flare_sparse_withdrawn.txt").write_text("sub-07\n")
    study = Study.load(Path(__file__).parents[2] / "app_configs" / "script_cifar10.yaml")
    assembly = assemble(study.config, study.load_task())
    folder = lambda *job: str(tmp_path)  # noqa: E731
    folders = dict.fromkeys(("get_app_custom_dir", "get_run_dir", "get_root_dir", "get_site_config_dir"), folder)
    fl_ctx: Any = SimpleNamespace(
        get_engine=lambda: SimpleNamespace(get_workspace=lambda: SimpleNamespace(**folders)),
        get_identity_name=lambda: "site-1",
        get_job_id=lambda: "job",
    )
    session = SiteSession()
    with pytest.raises(ConfigError, match="1 subjects have withdrawn, and a training script reads its data by itself"):
        session._open_site(assembly, "site-1", tmp_path, fl_ctx)
