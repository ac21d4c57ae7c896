"""Predictions of runs on a table: subjects by rank, and digests that tell whether ranks name the same subjects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flare_sparse.api.local import run as run_in_process
from flare_sparse.api.report import ensure_predictions
from flare_sparse.config.study import Study
from flare_sparse.results.report.findings import build_comparisons
from flare_sparse.results.report.page import write_report
from flare_sparse.results.runs.bootstrap import compute_t_quantile
from flare_sparse.results.runs.comparison import OTHER_SUBJECTS, describe_runs
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.results.runs.predictions import RUN, Predictions
from flare_sparse.results.runs.results import RunResult, read_runs

SUBJECTS, VISITS = 10, 3
REGRESSION = "kind: regression, target: y"


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of two sites with three visits of every subject; a feature of one visit at site a is missing."""
    draw = np.random.default_rng(1)
    lines = ["visit,subject,site,x,y,months,died"]
    for site in "ab":
        for visit, (x, y) in enumerate(draw.normal(size=(SUBJECTS * VISITS, 2))):
            shown = "" if (site, visit) == ("a", 4) else f"{x:.3f}"
            outcomes = f"{x + y:.3f},{np.exp(y):.3f},{int(y > 0)}"
            lines.append(f"{site}{visit},{site}-subject-{visit // VISITS},{site},{shown},{outcomes}")
    file = tmp_path_factory.mktemp("table") / "visits.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def run_table(visits: Path, name: str, task: str, method: str = "fedavg") -> RunResult:
    config = visits.with_name(f"{name}.yaml")
    config.write_text(
        f"name: {name}\nseed: 1\nmethod: {{name: {method}, rounds: 1}}\n"
        f"task: {{name: table, features: [x], {task}}}\n"
        f"simulator: {{data: {{path: {visits}, partition: {{kind: natural, column: site}}}}}}\n"
    )
    folder = visits.with_name(name)
    run_in_process(Study.load(config, []), RunFolder(folder))
    run = RunResult.read(folder)
    assert ensure_predictions(run) == ""
    return RunResult.read(folder)


def collect_figures(runs: list[Path]) -> set[str]:
    """Return the names of the figures of predictions in a report on some runs."""
    written = write_report(read_runs(runs), runs[0] / "figures")
    return {path.stem for path in written} & {"predicted", "risks", "survival"}


def read_predictions(run: RunResult) -> Predictions:
    assert run.predictions is not None
    return run.predictions


@pytest.mark.slow
def test_runs_with_other_usable_subjects_are_not_paired_by_rank(visits: Path) -> None:
    imputed = run_table(visits, "imputed", f"{REGRESSION}, id: visit, missing: impute")
    skipped = run_table(visits, "skipped", f"{REGRESSION}, id: visit, skip_bad_subjects: true")
    first, second = read_predictions(imputed).digests, read_predictions(skipped).digests
    assert (first["a"] == second["a"], first["b"] == second["b"]) == (False, True)
    group = describe_runs(read_runs([imputed.path, skipped.path]), {})["groups"][0]
    assert group["notes"]["skipped"] == f"a left out: {OTHER_SUBJECTS}"
    difference = group["differences"]["skipped"]["mae"]
    assert list(difference["by_site"]) == ["b"]
    assert difference["subjects"] == round(0.2 * SUBJECTS * VISITS)


@pytest.mark.slow
def test_rows_of_one_subject_have_its_rank_and_count_once(visits: Path) -> None:
    run = run_table(visits, "grouped", f"{REGRESSION}, group: subject, missing: impute")
    predictions = read_predictions(run)
    ranks, counts = np.unique(predictions.subjects[predictions.sites == "a"], return_counts=True)
    assert counts.tolist() == [VISITS, VISITS]
    assert ranks.max() < SUBJECTS
    described = describe_runs([run], {})
    (group,), (alone,) = described["groups"], described["runs"]
    assert (group["subjects"], len(predictions.sites)) == (4, 4 * VISITS)
    # Each site tests two subjects and a resample draws one of them: the quantiles are the means of two subjects, which
    # the interval stretches for four subjects at two sites.
    errors = {
        name: np.abs(predictions.values[name] - predictions.targets)[:, 0].reshape(4, VISITS).mean(axis=1)
        for name in (RUN, "ridge_pooled")
    }
    change = (errors[RUN] - errors["ridge_pooled"]).reshape(2, 2)
    for difference in (group["differences"]["ridge_pooled"], alone["differences"]["ridge_pooled"]):
        bounds = difference["mae"]["low"], difference["mae"]["high"]
        quantiles = np.array([change.min(axis=1).mean(), change.max(axis=1).mean()])
        assert bounds == pytest.approx(
            change.mean() + compute_t_quantile(1.959964, 2) / 1.959964 * (quantiles - change.mean())
        )


@pytest.mark.slow
def test_binary_runs_are_compared_by_accuracy_and_auc(visits: Path) -> None:
    task = "kind: binary, target: died, id: visit, missing: impute"
    paths = [run_table(visits, f"binary-{name}", task, name).path for name in ("fedavg", "local_only")]
    fedavg, local_only = describe_runs(read_runs(paths), {})["groups"]
    assert collect_figures(paths) == {"risks"}
    assert fedavg["differences"]["local_only"].keys() == {"accuracy", "auc_across_sites"}
    assert fedavg["auc_across_sites"] == pytest.approx(read_predictions(RunResult.read(paths[0])).pooled["auc"])
    difference = fedavg["differences"]["local_only"]["auc_across_sites"]
    assert (difference["first"], difference["second"]) == pytest.approx(
        (fedavg["auc_across_sites"], local_only["auc_across_sites"])
    )


@pytest.mark.slow
def test_survival_runs_are_compared_across_sites_unless_a_model_is_a_sites_own(
    visits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = "kind: survival, target: months, event: died, id: visit, missing: impute"
    paths = [run_table(visits, f"survival-{name}", task, name).path for name in ("fedavg", "local_only")]
    fedavg, local_only = describe_runs(read_runs(paths), {})["groups"]
    assert collect_figures(paths) == {"survival"}
    assert {other: [*metrics] for other, metrics in fedavg["differences"].items()} == {
        "site_mean": ["c_index_across_sites"],
        "cox_local": ["c_index_within_sites"],
        "cox_pooled": ["c_index_across_sites"],
        "local_only": ["c_index_within_sites"],
    }
    run = RunResult.read(paths[0])
    (alone,) = describe_runs([run], {})["runs"]
    assert alone["differences"]["cox_local"].keys() == {"c_index_within_sites"}
    assert fedavg["c_index_across_sites"] == pytest.approx(read_predictions(run).pooled["c_index"])
    assert "c_index_across_sites" not in local_only
    monkeypatch.setattr("flare_sparse.results.runs.bootstrap.MOST_PAIRED", 3)
    compared = describe_runs([run], {})
    (too_many,) = compared["groups"]
    assert (too_many["c_index_across_sites"], too_many["differences"]) == (None, {})
    expected = "no c_index_across_sites: it compares all pairs of at most"
    assert too_many["notes"]["cox_pooled"].startswith(expected)
    assert compared["runs"][0]["notes"]["cox_pooled"].startswith(expected)
    (table,) = build_comparisons(compared)
    assert f"{run.label} against cox_pooled: {expected}" in table.note
