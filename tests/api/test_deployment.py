"""``--mlflow``: which URIs a job takes, and the names of its run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flare_sparse.api.deployment import Env, build_tracker, resolve_tracking_uri
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "app_configs" / "neurosfl_brain_age.yaml"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the search for MLflow finds: a package, until a test takes it out."""
    specs: dict[str, Any] = {"mlflow": SimpleNamespace()}
    monkeypatch.setattr(importlib.util, "find_spec", specs.get)
    return specs


@pytest.mark.parametrize(
    ("uri", "env", "expected"),
    [
        ("https://mlflow.our.org:5000", "prod", "https://mlflow.our.org:5000"),
        ("http://localhost:5000", "sim", "http://localhost:5000"),
        ("databricks://profile", "sim", "databricks://profile"),
        ("mlruns", "sim", "file://{here}/mlruns"),
        ("file:mlruns", "poc", "file://{here}/mlruns"),
        ("sqlite:///mlflow.db", "sim", "sqlite:///{here}/mlflow.db"),
        ("file:///srv/mlruns", "prod", "file:///srv/mlruns"),
    ],
)
@pytest.mark.usefixtures("mlflow")
def test_uri_means_the_same_in_every_working_folder(
    uri: str, env: Env, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_tracking_uri(uri, env) == expected.format(here=tmp_path)


@pytest.mark.parametrize(
    ("uri", "env", "message"),
    [
        ("mlruns", "local", "a local run has no FLARE server"),
        ("mlruns", "prod", "--mlflow mlruns: give the address of an MLflow server"),
        ("", "sim", "give the address of an MLflow server"),
        ("https://me:secret@mlflow.our.org", "prod", "MLFLOW_TRACKING_PASSWORD at the server"),
    ],
)
@pytest.mark.usefixtures("mlflow")
def test_uri_that_cannot_work_is_refused_with_the_remedy(uri: str, env: Env, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_tracking_uri(uri, env)
    assert "secret" not in str(caught.value)


def test_mlflow_is_needed_where_the_server_runs_on_this_machine(mlflow: dict[str, Any]) -> None:
    mlflow.clear()
    assert resolve_tracking_uri("https://mlflow.our.org", "prod") == "https://mlflow.our.org"
    with pytest.raises(ConfigError, match=r"pip install 'flare-sparse\[mlflow\]'"):
        resolve_tracking_uri("mlruns", "sim")


def test_run_is_named_after_its_folder_and_the_experiment_after_configuration_or_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    study = Study.load(CONFIG)
    tracker = build_tracker("http://mlflow", study, Path("runs/p98"))
    assert tracker is not None
    assert (tracker.experiment_name, tracker.run_name) == ("neurosfl_brain_age", "p98")
    assert tracker.run_tags == {"method": "neurosfl", "task": "brain_age", "seed": str(study.config.seed)}
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "sparsity")
    named = build_tracker("http://mlflow", study, Path("p98"))
    assert named is not None
    assert named.experiment_name == "sparsity"
    assert build_tracker(None, study, Path("p98")) is None
