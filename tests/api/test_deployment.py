"""``deployment.track``: which services a run takes, and the names of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flare_sparse.api import deployment
from flare_sparse.api.deployment import build_recipe, check_service
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.observer import SILENT
from flare_sparse.flare.tracking import Tracker
from flare_sparse.results.runs.progress import Printer

CONFIG = Path(__file__).parents[2] / "app_configs" / "neurosfl_brain_age.yaml"


def test_service_that_would_receive_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'flare-sparse\[track\]'"):
        check_service("wandb", "sim", SILENT)
    # Its package is needed where the server runs.
    check_service("mlflow", "prod", SILENT)


def test_local_run_says_that_no_figure_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    check_service("mlflow", "local", Printer())
    assert "a local run has no FLARE server that could send figures" in capsys.readouterr().err


def test_run_is_named_after_its_folder_and_the_experiment_after_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study, found = Study.load(CONFIG, ["deployment.track=mlflow"]), list[Any]()
    monkeypatch.setattr(Tracker, "__init__", lambda self, *arguments: found.extend(arguments))
    monkeypatch.setattr("flare_sparse.flare.recipe.SparseRecipe", lambda *_, **__: None)
    build_recipe(study, Path("runs/p98"))
    tags = {"method": "neurosfl", "task": "brain_age", "seed": str(study.config.seed)}
    assert found == ["mlflow", "neurosfl_brain_age", "p98", tags]
