"""``deployment.track``: which services a run takes, and the names of its run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from flare_sparse.api.deployment import Env, build_tracker, check_service
from flare_sparse.config.schema import Service
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.observer import SILENT
from flare_sparse.results.runs.progress import Printer

CONFIG = Path(__file__).parents[2] / "app_configs" / "neurosfl_brain_age.yaml"


@pytest.mark.parametrize(
    ("service", "env", "message"),
    [
        ("wandb", "sim", r"pip install 'flare-sparse\[track\]'"),
        ("tensorboard", "prod", r"pip install 'flare-sparse\[track\]'"),
        ("mlflow", "prod", ""),
    ],
)
def test_service_that_would_receive_nothing_is_refused(
    service: Service, env: Env, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    if message:
        with pytest.raises(ConfigError, match=message):
            check_service(service, env, SILENT)
    else:
        check_service(service, env, SILENT)


def test_local_run_says_that_no_figure_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    check_service("mlflow", "local", Printer())
    assert "a local run has no FLARE server that could send figures" in capsys.readouterr().err


def test_run_is_named_after_its_folder_and_the_experiment_after_the_configuration() -> None:
    study = Study.load(CONFIG)
    tracker = build_tracker("mlflow", study, Path("runs/p98"))
    assert (tracker.service, tracker.experiment_name, tracker.run_name) == ("mlflow", "neurosfl_brain_age", "p98")
    assert tracker.run_tags == {"method": "neurosfl", "task": "brain_age", "seed": str(study.config.seed)}
