"""A run with ``task.subgroups`` reports each subgroup of the last model, in record, report, card and evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flare_sparse.api.run import Run
from flare_sparse.api.start import run as start
from flare_sparse.cohorts.subgroups import split_metric
from flare_sparse.config.policy.policy import Policy
from flare_sparse.config.study import Study
from flare_sparse.core.errors import DataError
from flare_sparse.core.observer import SILENT
from flare_sparse.results.report.findings import describe_findings
from flare_sparse.results.report.tables import build_subgroups, describe_gap
from flare_sparse.results.runs.load import load_model
from flare_sparse.results.runs.results import RunResult
from flare_sparse.results.runs.subgroups import Subgroup, find_largest_gap, pool_subgroups
from flare_sparse.tasks.task import load_examples


def write_study(folder: Path, **task: Any) -> Path:
    """Write 160 subjects at two hospitals; the target is noisier for men and above 60 years."""
    generator = np.random.default_rng(3)
    rows = ["subject,hospital,sex,age,a,dose"]
    for number in range(160):
        sex, age, a = "FM"[number // 2 % 2], 40 + number % 45, generator.normal()
        noise = generator.normal() * (4.0 if sex == "M" else 0.5)
        rows.append(f"s{number},{'AB'[number % 2]},{sex},{age},{a:.3f},{10 + 2 * a + noise:.3f}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    content = {
        "name": "study",
        "seed": 2,
        "method": {"name": "fedavg", "rounds": 3, "training": {"optimizer": "sgd", "lr": 0.05, "batch_size": 8}},
        "task": {
            "name": "table",
            "kind": "regression",
            "target": "dose",
            "target_scale": [10, 4],
            "features": ["a"],
            "id": "subject",
            "model": {"name": "mlp", "hidden": [4]},
            "split": {"test": 0.5},
            "subgroups": ["sex", "age:20"],
            **task,
        },
        "simulator": {"data": {"path": "table.csv", "partition": {"kind": "natural", "column": "hospital"}}},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    return folder / "study.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("subgroups")
    return start(write_study(folder), out=folder / "run", observer=SILENT)


def test_subgroups_are_those_of_the_final_model_on_the_test_subjects(run: Run) -> None:
    cells = {f"{cell.column} {cell.label}": cell for cell in pool_subgroups(RunResult.read(run.path))}
    assert list(cells) == ["sex F", "sex M", "age 40 to 60"]
    study, model = run.study, load_model(run.path)
    errors: dict[str, list[float]] = {"F": [], "M": []}
    for data in study.prepare_sites(run.path).values():
        task = study.load_task()
        examples = load_examples(task, data, study.config.seed)
        predictions, targets = task.measure_all(model, examples.test)
        for label, error in zip(examples.test_subgroups["sex"], (predictions - targets).abs()[:, 0], strict=True):
            errors[label].append(float(error))
    for label, own in errors.items():
        assert cells[f"sex {label}"].subjects == len(own)
        assert cells[f"sex {label}"].sites == 2
        assert cells[f"sex {label}"].metrics["mae"][0] == pytest.approx(np.mean(own), rel=1e-5)
        low, high = cells[f"sex {label}"].compute_interval("mae")
        assert (high - low) / 2 == pytest.approx(1.96 * np.std(own) / np.sqrt(len(own)), rel=0.25)


@pytest.mark.parametrize(
    ("metric", "value", "error", "interval"),
    [
        # Wilson's for n of n, 0 of n and 9 of 10 subjects: n / (n + z^2), z = 1.959964.
        ("auc", 1.0, 0.0, (0.722467, 1.0)),
        ("brier", 0.0, 0.0, (0.0, 0.277533)),
        ("accuracy", 0.9, np.sqrt(0.09 / 10), (0.595850, 0.982124)),
        ("val_mean_dice", 0.9, np.sqrt(0.09 / 10), (0.595850, 0.982124)),
        # A rounded value keeps the error of one below 1.
        ("c_index", 1.0, 0.01, (0.722467, 1.0)),
        ("mae", 1.0, 1.0, (0.0, 3.262144)),
        ("hd95_anterior", 1.0, 1.0, (0.0, 3.262144)),
        ("r2", 0.5, 0.5, (-0.631072, 1.0)),
        ("bias", 0.5, 0.5, (-0.631072, 1.631072)),
        # Student's with 9 degrees of freedom, t = 2.262144; the last one of a task of one's own, in percent.
        ("accuracy", 93.0, 5.0, (81.689282, 104.310718)),
    ],
)
def test_interval_stays_in_the_range_of_the_metric(
    metric: str, value: float, error: float, interval: tuple[float, float]
) -> None:
    cell = Subgroup("sex", "F", 10, 1, {metric: (value, error)})
    assert cell.compute_interval(metric) == pytest.approx(interval, abs=1e-6)
    if (value, error) == (1.0, 0.0):
        assert cell.compute_interval(metric)[1] == 1.0


@pytest.mark.slow
def test_interval_of_a_gap_follows_from_those_of_its_subgroups(run: Run) -> None:
    """Newcombe (1998, Stat. Med. 17:873), table II, method 10: 56 of 70 less 48 of 80, and 10 of 10 less 0 of 10."""
    result = RunResult.read(run.path)
    result.summary["metric"] = {"name": "auc", "unit": "", "mode": "max"}
    for (first, n), (second, m), interval in (
        ((56 / 70, 70), (48 / 80, 80), (0.0524, 0.3339)),
        ((1.0, 10), (0.0, 10), (0.6075, 1.0)),
    ):
        cells = [
            Subgroup("sex", label, count, 1, {"auc": (share, np.sqrt(share * (1 - share) / count))})
            for label, share, count in (("F", first, n), ("M", second, m))
        ]
        gap = find_largest_gap(result, cells)
        assert gap is not None
        assert (gap.low, gap.high) == pytest.approx(interval, abs=5e-5)
        assert (gap.better.label, gap.worse.label) == ("F", "M")


def test_only_the_last_model_is_evaluated_by_subgroup_and_means_over_sites_have_none(run: Run) -> None:
    for line in run.rounds[:-1]:
        assert not [name for metrics in line["site_metrics"].values() for name in metrics if split_metric(name)]
    assert not [name for name in run.summary["final"]["metrics"] if split_metric(name)]
    assert RunResult.read(run.path).metric_names == ["mae", "bias", "r2", "rmse"]


def test_largest_gap_is_named_first_in_report_and_card_and_stands_in_the_evidence(run: Run) -> None:
    result = RunResult.read(run.path)
    gap = find_largest_gap(result, pool_subgroups(result))
    assert gap is not None
    assert (gap.better.label, gap.worse.label) == ("F", "M")
    assert gap.low > 0
    sentence = describe_gap(result)
    assert "between subgroups is" in sentence
    assert "by sex: M" in sentence
    assert "It is more than chance" in sentence
    assert describe_findings([result])[0] == sentence
    card = (run.path / "model_card.md").read_text()
    assert f"**{sentence}**" in card
    assert "| sex F |" in card
    table = build_subgroups([result])
    assert table is not None
    assert table.columns == ["subgroup", "run", "subjects", "sites", "mae", "bias", "r2", "rmse"]
    assert "| sex F | " in run.evidence().read_text()


def test_policy_and_setting_keep_small_subgroups_at_the_site(run: Run, tmp_path: Path) -> None:
    metrics = run.summary["final"]["sites"]["A"]
    counts = {"test_examples": 40, "validation_examples": 0}
    assert "mae in sex=F" in Policy().sanitize_metrics(metrics, counts)
    strict = Policy(min_test_examples=25, metrics="rounded").sanitize_metrics(metrics, counts)
    assert "mae" in strict
    # Of 40 subjects 26 are below 60: the 14 others, left out by the job's minimum of 10, would follow from the total.
    assert metrics["subjects in age=40 to 60"] >= 25
    assert [name for name in strict if split_metric(name)] == ["subjects in all=subjects"]
    assert not Policy(metrics="none").sanitize_metrics(metrics, counts)
    few = start(write_study(tmp_path, min_subgroup=30), out=tmp_path / "run", observer=SILENT)
    result = RunResult.read(few.path)
    assert pool_subgroups(result) == []
    assert "no column has two subgroups that are large enough to report" in describe_gap(result)


def test_subgroups_by_a_column_that_is_not_there_are_refused(tmp_path: Path) -> None:
    file = write_study(tmp_path, subgroups=["scanner"])
    study = Study.load(file)
    with pytest.raises(DataError, match=r"no column 'scanner'\. Found: subject, hospital, sex"):
        load_examples(study.load_task(), study.prepare_sites(tmp_path)["A"], 2)
