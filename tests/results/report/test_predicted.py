"""Figures of predictions: which runs have them, what they show, and what stands in their place elsewhere."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from sklearn.metrics import roc_curve

from flare_sparse.api import report
from flare_sparse.core.observer import SILENT
from flare_sparse.core.ranking import bin_risks, find_curve
from flare_sparse.results.report.figures import draw_risks, draw_survival, explain_missing_predictions
from flare_sparse.results.report.page import write_report
from flare_sparse.results.report.tables import build_cohorts
from flare_sparse.results.runs.predictions import RUN, Predictions
from flare_sparse.results.runs.results import RunResult
from flare_sparse.tasks.classes import compute_risk_metrics

SITES = np.array(["site-1"] * 4 + ["site-2"] * 4)


def predict(finished: Path, kind: Any, targets: list[Any], values: list[Any], **more: Any) -> RunResult:
    """Return a run whose folder has these predictions."""
    run = RunResult.read(finished)
    rows = [np.array(part, dtype=np.float64).reshape(len(SITES), -1) for part in (targets, values)]
    found = Predictions(
        run.identity, kind, SITES, np.arange(8), rows[0], {RUN: rows[1]}, {"site-1": "", "site-2": ""}, **more
    )
    run.__dict__["predictions"] = found
    return run


def test_roc_has_a_point_for_every_risk() -> None:
    draw = np.random.default_rng(3)
    risk, classes = draw.integers(0, 9, 60) / 8, draw.integers(0, 2, 60)
    expected = roc_curve(classes, risk, drop_intermediate=False)
    found = find_curve(torch.from_numpy(risk), torch.from_numpy(classes))
    np.testing.assert_allclose(found, expected[:2])


def test_bins_of_risks_are_those_of_the_calibration_error() -> None:
    draw = np.random.default_rng(4)
    risk, classes = torch.from_numpy(draw.random(80)), torch.from_numpy(draw.integers(0, 2, 80).astype(float))
    counts, mean_risk, share = bin_risks(risk, classes)
    error = float((counts * (mean_risk - share).abs()).sum() / counts.sum())
    assert error == pytest.approx(compute_risk_metrics(risk, classes)["calibration_error"])


def test_figure_of_risks_shows_each_run_with_its_recorded_auc(finished: dict[str, Path]) -> None:
    classes, risks = [0, 0, 1, 1] * 2, [0.1, 0.6, 0.5, 0.9] * 2
    run = predict(finished["fedavg"], "binary", classes, risks, pooled={"auc": 0.75})
    left, right = draw_risks([run]).axes
    assert left.get_legend_handles_labels()[1] == ["brains: auc_across_sites 0.750"]
    np.testing.assert_allclose(left.lines[0].get_ydata(), [0, 0.5, 0.5, 1, 1])
    np.testing.assert_allclose(right.lines[0].get_ydata(), [0, 1, 0, 1])
    assert [row[-1] for row in build_cohorts([run]).rows] == ["2 (50%)", "2 (50%)", "4 (50%)"]


def test_survival_is_drawn_by_halves_of_the_predicted_risk(finished: dict[str, Path]) -> None:
    times, events = [1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 1, 1, 0, 0, 0, 0]
    run = predict(finished["fedavg"], "survival", list(zip(times, events, strict=True)), [8, 7, 6, 5, 4, 3, 2, 1])
    (axes,) = draw_survival([run]).axes
    low, high = axes.lines
    assert axes.get_legend_handles_labels()[1] == ["lower risk (4)", "higher risk (4)"]
    np.testing.assert_allclose(low.get_ydata(), np.ones(9))
    np.testing.assert_allclose(high.get_ydata(), [1, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0])


def test_deployed_run_says_why_it_shows_no_predictions(finished: dict[str, Path], tmp_path: Path) -> None:
    run = RunResult.read(finished["neurosfl"])
    deployed = replace(run, path=tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": "x"}))
    assert deployed.predictions is None
    assert "no prediction of a person" in explain_missing_predictions([deployed])
    written = write_report([deployed], tmp_path / "report")
    assert not {"predicted", "risks", "survival"} & {path.stem for path in written}
    assert "no prediction of a person" in written[0].read_text(encoding="utf-8")
    assert "synthetic" not in written[0].read_text(encoding="utf-8")


def test_report_without_pictures_shows_no_mark_of_a_subject(finished: dict[str, Path], tmp_path: Path) -> None:
    run = predict(finished["fedavg"], "regression", list(range(8)), list(range(8)))
    names = [{path.stem for path in write_report([run], tmp_path, pictures=shown)} for shown in (True, False)]
    assert names[0] - names[1] == {"predicted"}
    assert "predicted.png" not in {path.name for path in tmp_path.iterdir()}


def test_plain_report_shows_nothing_that_an_earlier_one_computed_from_subjects(
    finished: dict[str, Path], tmp_path: Path
) -> None:
    """At a site with one test subject, the mean of the true values is that subject's."""
    folder = tmp_path / "run"
    shutil.copytree(finished["fedavg"], folder)
    shown = [report.write_reports([folder], baselines=not plain, pictures=not plain)[0].read_text("utf-8")
             for plain in (False, True)]  # fmt: skip
    for text in ("true value in the test", "Compared with trivial baselines"):
        assert [text in page for page in shown] == [True, False]
    assert (folder / "evaluations" / "test_predictions.json").is_file()
    assert not (folder / "report" / "predicted.png").exists()
    (described,) = report.compare_runs([folder], baselines=False)["runs"]
    assert not described["baselines"]
    assert not described["differences"]


def test_run_whose_cost_is_known_is_not_loaded_again(
    finished: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may name code that nobody here trusts."""
    monkeypatch.setattr(report, "load_study", lambda path: pytest.fail(f"{path} was loaded"))
    run = predict(finished["fedavg"], "regression", list(range(8)), list(range(8)))
    run.__dict__["cost"] = {"macs": 1}
    assert report._measure(run, SILENT, pictures=False) is run
