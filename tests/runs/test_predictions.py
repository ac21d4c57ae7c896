"""Predictions of runs on a table: subjects by rank, and digests that tell whether ranks name the same subjects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flare_sparse.cli.local import run_config_locally
from flare_sparse.cli.predictions import ensure_predictions
from flare_sparse.config import load_config
from flare_sparse.runs.comparison import describe_groups
from flare_sparse.runs.predictions import Predictions
from flare_sparse.runs.results import RunResult, read_runs

SUBJECTS, VISITS = 10, 3


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of two sites with three visits of every subject; a feature of one visit at site a is missing."""
    draw = np.random.default_rng(1)
    lines = ["visit,subject,site,x,y"]
    for site in "ab":
        for visit, (x, y) in enumerate(draw.normal(size=(SUBJECTS * VISITS, 2))):
            shown = "" if (site, visit) == ("a", 4) else f"{x:.3f}"
            lines.append(f"{site}{visit},{site}-subject-{visit // VISITS},{site},{shown},{x + y:.3f}")
    file = tmp_path_factory.mktemp("table") / "visits.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def run_table(visits: Path, name: str, task: str) -> RunResult:
    config = visits.with_name(f"{name}.yaml")
    config.write_text(
        f"name: {name}\nseed: 1\nmethod: {{name: fedavg, rounds: 1}}\n"
        f"task: {{name: table, kind: regression, target: y, features: [x], {task}}}\n"
        f"simulator: {{data: {{path: {visits}, partition: {{kind: natural, column: site}}}}}}\n"
    )
    folder = visits.with_name(name)
    run_config_locally(load_config(config, []), config, folder)
    run = RunResult.read(folder)
    assert ensure_predictions(run) == ""
    return RunResult.read(folder)


def read_predictions(run: RunResult) -> Predictions:
    assert run.predictions is not None
    return run.predictions


def test_runs_with_other_usable_subjects_are_not_paired_by_rank(visits: Path) -> None:
    imputed = run_table(visits, "imputed", "id: visit, missing: impute")
    skipped = run_table(visits, "skipped", "id: visit, skip_bad_subjects: true")
    first, second = read_predictions(imputed).digests, read_predictions(skipped).digests
    assert (first["a"] == second["a"], first["b"] == second["b"]) == (False, True)
    group = describe_groups(read_runs([imputed.path, skipped.path]))[0]
    assert group["notes"]["skipped"] == "a left out: the runs do not have the same usable subjects there"
    difference = group["differences"]["skipped"]["mae"]
    assert list(difference["by_site"]) == ["b"]
    assert difference["subjects"] == round(0.2 * SUBJECTS * VISITS)


def test_rows_of_one_subject_have_its_rank(visits: Path) -> None:
    predictions = read_predictions(run_table(visits, "grouped", "group: subject, missing: impute"))
    ranks, counts = np.unique(predictions.subjects[predictions.sites == "a"], return_counts=True)
    assert counts.tolist() == [VISITS, VISITS]
    assert ranks.max() < SUBJECTS
