"""Exported job folders hold settings and the components' arguments, and code only with BYOC."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvflare.apis.fl_component import FLComponent
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.job_config.fed_job_config import FedJobConfig

from flare_sparse.config.loading import load_config, serialize_job
from flare_sparse.config.schema import DeploymentConfig, RunConfig
from flare_sparse.core.errors import ConfigError
from flare_sparse.flare import controller, executor, session, tracking
from flare_sparse.flare.job_settings import SITE_SECTIONS, _flatten, check_shown_settings, show_settings
from flare_sparse.flare.recipe import SparseRecipe, export_job
from flare_sparse.flare.site.setup import CLASSES, SERVER_CLASSES

CONFIGS = Path(__file__).parents[2] / "app_configs"

COMPONENTS = [
    controller.FederatedController("fedavg", "toy", {"method.rounds": 2}, task_check_period=0.123),
    session.SiteSession(),
    session.UserPart({"path": "my_tasks.MyTask", "args": {"config": {"width": 3}}}),
    executor.SparseExecutor("fedavg", "toy", {"method.rounds": 2}),
    executor.EncodeUpdate(),
    tracking.Tracker("mlflow", "brain_age", "p98", {"seed": "0"}),
]


@pytest.fixture
def config() -> RunConfig:
    return load_config(CONFIGS / "neurosfl_brain_age.yaml")


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda c: type(c).__name__)
def test_export_keeps_every_constructor_argument(component: object, tmp_path: Path) -> None:
    """FLARE exports only arguments that are stored in an attribute of the same name and silently drops the others."""
    exported = FedJobConfig("job", 1)
    exported.set_app_packages(["flare_sparse"])
    arguments = exported._get_args(component, str(tmp_path))
    parameters = inspect.signature(type(component)).parameters
    assert set(arguments) == {name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}


def test_list_of_components_is_complete() -> None:
    found = {
        name
        for module in (controller, executor, session, tracking)
        for name, thing in vars(module).items()
        if inspect.isclass(thing)
        and thing.__module__ == module.__name__
        and issubclass(thing, FLComponent)
        and not name.startswith("_")
    }
    assert found == {type(component).__name__ for component in COMPONENTS}


def test_installed_job_carries_settings_and_no_code(config: RunConfig, tmp_path: Path) -> None:
    app = export_job(config, tmp_path) / "app"
    files = sorted(str(path.relative_to(app)) for path in app.rglob("*") if path.is_file())
    assert files == ["config/config_fed_client.json", "config/config_fed_server.json", "config/flare_sparse.yaml"]
    assert yaml.safe_load((app / "config" / "flare_sparse.yaml").read_text()) == serialize_job(config)


def test_job_names_only_allowed_classes_and_some_of_flares_default_list(config: RunConfig, tmp_path: Path) -> None:
    app = export_job(config, tmp_path) / "app"
    text = "".join((app / "config" / f"config_fed_{side}.json").read_text() for side in ("server", "client"))
    paths = {line.split('"')[3] for line in text.splitlines() if '"path":' in line}
    ours = {path for path in paths if path.startswith("flare_sparse.")}
    # Only in jobs with a user task or method, of flare-sparse describe and of plan.
    parts = (".User", ".questions.", ".Tracker")
    rare = {path for path in CLASSES if any(part in path for part in parts)}
    assert ours == {*CLASSES} - rare
    assert paths - ours <= {*DEFAULT_CLASS_ALLOW_LIST}
    assert "simulator" not in text


def read_arguments(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of executor and controller in the JSON of a job."""
    config = folder / "app" / "config"
    client, server = (json.loads((config / f"config_fed_{side}.json").read_text()) for side in ("client", "server"))
    return client["executors"][0]["executor"]["args"], server["workflows"][0]["args"]


def test_json_of_every_job_in_the_repository_says_what_runs() -> None:
    """Executor and controller show method, task and every setting of what is computed, sent and committed."""
    shown = {job.name: read_arguments(job) for job in (CONFIGS.parent / "jobs").iterdir() if (job / "app").is_dir()}
    assert len({json.dumps(client) for client, _ in shown.values()}) == len(shown) >= 12
    for name, (client, server) in shown.items():
        content = yaml.safe_load((CONFIGS.parent / "jobs" / name / "app/config/flare_sparse.yaml").read_text())
        assert client["method"] == server["method"] == content["method"]["name"]
        assert client["settings"]["method.rounds"] == content["method"]["rounds"]
        assert client["settings"]["method.training.lr"] == content["method"]["training"]["lr"]
        assert client["settings"]["wire.values"] == content["wire"]["values"]
        federation = {path: value for path, value in server["settings"].items() if path.startswith("federation.")}
        assert {**client["settings"], **federation} == server["settings"]
        assert server["settings"]["federation.min_sites"] == content["federation"]["min_sites"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "fedavg"}, "shows 'fedavg' for method, but its flare_sparse.yaml, which runs, has 'neurosfl'"),
        ({"method.sparsity": 0.5}, "shows 0.5 for method.sparsity, but its flare_sparse.yaml, which runs, has 0.9"),
        (
            {"wire.values": None},
            "shows 'nothing' for wire.values, but its flare_sparse.yaml, which runs, has 'float32'",
        ),
        ({"privacy.epsilon": 1}, "shows 1 for privacy.epsilon, but its flare_sparse.yaml, which runs, has 'nothing'"),
    ],
)
def test_arguments_that_do_not_show_what_runs_are_refused(
    config: RunConfig, change: dict[str, Any], message: str
) -> None:
    shown = show_settings(config, SITE_SECTIONS)
    check_shown_settings(executor.SparseExecutor(**shown), config, SITE_SECTIONS)
    ((path, value),) = change.items()
    part = shown if path in shown else shown["settings"]
    part[path] = value
    if value is None:
        del part[path]
    with pytest.raises(ConfigError, match=f"SparseExecutor: the job's JSON {message}; export the job again"):
        check_shown_settings(executor.SparseExecutor(**shown), config, SITE_SECTIONS)


def test_setting_that_flare_would_take_for_a_component_is_shown_as_text() -> None:
    content = {"method": {"name": "fedavg", "steps": [{"path": "os.system"}], "path": "a", "empty": {}}}
    assert dict(_flatten("", content)) == {
        "method.name": "fedavg",
        "method.steps": '[{"path": "os.system"}]',
        "method.path": "a",
        "method.empty": {},
    }


def test_job_sends_figures_only_when_asked_and_only_from_the_server(config: RunConfig, tmp_path: Path) -> None:
    tracker = tracking.Tracker("mlflow", "brain_age", "p98", {"seed": "0"})
    texts = {}
    for name, recipe in {"with": SparseRecipe(config, tracker=tracker), "without": SparseRecipe(config)}.items():
        recipe.export(str(tmp_path / name))
        folder = tmp_path / name / config.name / "app" / "config"
        texts[name] = [(folder / f"config_fed_{side}.json").read_text() for side in ("server", "client")]
    (component,) = [part for part in json.loads(texts["with"][0])["components"] if part["id"] == tracking.TRACKER_ID]
    assert component["path"] in SERVER_CLASSES
    assert component["args"] == {
        "service": "mlflow",
        "experiment_name": "brain_age",
        "run_name": "p98",
        "run_tags": {"seed": "0"},
    }
    assert not any("mlflow" in text for text in [texts["with"][1], *texts["without"]])


@pytest.mark.slow
def test_byoc_job_carries_the_whole_package(config: RunConfig, tmp_path: Path) -> None:
    import flare_sparse

    source = Path(flare_sparse.__file__).parent
    carrying = config.model_copy(update={"deployment": DeploymentConfig(packaging="byoc")})
    custom = export_job(carrying, tmp_path) / "app" / "custom" / "flare_sparse"
    files = {path.relative_to(source) for path in source.rglob("*.py")}
    # A wheel also holds configurations to start from, with scripts of their own, which no job needs.
    expected = {str(file) for file in files if file.parts[0] != "app_configs"}
    assert {str(path.relative_to(custom)) for path in custom.rglob("*.py")} == expected
    assert not list(custom.rglob("__pycache__"))


def test_request_interval_is_nested_where_flare_reads_it(config: RunConfig, tmp_path: Path) -> None:
    app = export_job(config, tmp_path) / "app"
    server = json.loads((app / "config" / "config_fed_server.json").read_text())
    assert server["server"] == {"task_request_interval": 0.05}
