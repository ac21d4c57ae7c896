"""The generic table task: every kind of target and column, and a clear answer to each defect of a table."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from flare_sparse.cli import app
from flare_sparse.config.loading import load_config, serialize_job
from flare_sparse.config.study import prepare_site_data
from flare_sparse.config.yaml_files import parse_yaml
from flare_sparse.core.errors import ConfigError, DataError
from flare_sparse.tasks.data.features import ATLASES, format_labels
from flare_sparse.tasks.data.partition import NaturalPartition
from flare_sparse.tasks.table import TableTask
from flare_sparse.tasks.task import Examples, SiteData
from flare_sparse.training.local_task import iterate_pass

ROWS = """patient,visit,age,sex,ward,outcome,months,died
p1,1,60,F,A,benign,5,1
p2,2,40,M,B,malignant,8,0
p3,3,50,F,A,benign,3,1
p4,4,70,M,C,malignant,9,0
"""


SURVIVAL = {"kind": "survival", "target": "months", "event": "died"}
DISCRETE = """{name: table, kind: survival, target: months, event: died, features: [age], loss: discrete,
  times: [30, 45, 60]}"""
BINARY = """{name: table, kind: binary, target: outcome, classes: [benign, malignant], id: patient,
  features: [age, sex], categories: {sex: [F, M]}}"""


def write(folder: Path, text: str = ROWS) -> SiteData:
    path = folder / "clinic.csv"
    path.write_text(text)
    return SiteData("clinic", path)


def build(**settings: Any) -> TableTask:
    labels = {} if "kind" in settings else {"kind": "binary", "target": "outcome", "classes": ["benign", "malignant"]}
    return TableTask({"features": ["age", "sex"], "categories": {"sex": ["F", "M"]}, **labels, **settings})


def collect(examples: Examples) -> dict[str, tuple[list[float], list[float]]]:
    """Return inputs and targets of all examples by identifier."""
    parts = ((examples.train, examples.train_ids), (examples.test, examples.test_ids),
             (examples.validation, examples.validation_ids))  # fmt: skip
    return {
        name: (inputs.tolist(), target.tolist())
        for dataset, ids in parts
        if dataset is not None
        for name, (inputs, target) in zip(ids, dataset, strict=True)
    }


def test_numbers_are_scaled_and_categories_are_one_hot(tmp_path: Path) -> None:
    task = build(id="patient", scaling={"age": [50, 10]})
    examples = task.load(write(tmp_path), seed=1)
    assert examples.columns == ("age", "sex=F", "sex=M")
    assert collect(examples) == {
        "p1": ([1, 1, 0], [0]), "p2": ([-1, 0, 1], [1]), "p3": ([0, 1, 0], [0]), "p4": ([2, 0, 1], [1])
    }  # fmt: skip
    assert task.model()(torch.zeros(2, 3)).shape == (2, 1)


def test_scaling_by_the_site_uses_its_training_rows_only(tmp_path: Path) -> None:
    examples = build(split={"test": 0.25}, id="patient").load(write(tmp_path), seed=1)
    ages = {"p1": 60, "p2": 40, "p3": 50, "p4": 70}
    train = [ages[name] for name in examples.train_ids]
    for name, (inputs, _) in collect(examples).items():
        assert inputs[0] == pytest.approx((ages[name] - np.mean(train)) / np.std(train))


@pytest.mark.parametrize("constant", ["0.1", "0.7", "36.6", "0", "-1e6"])
def test_column_that_is_constant_in_training_is_centered_and_not_divided(constant: str, tmp_path: Path) -> None:
    task = build(features=["dose"], categories={}, id="patient")
    names = [f"p{i}" for i in range(25)]
    (other, *_) = task.config.split.assign(names, 1).test
    rows = [f"{name},{50 if name == other else constant},benign" for name in names]
    examples = task.load(write(tmp_path, "\n".join(["patient,dose,outcome", *rows])), seed=1)
    doses = {name: inputs[0] for name, (inputs, _) in collect(examples).items()}
    assert doses.pop(other) == pytest.approx(50 - float(constant))
    assert [*doses.values()] == pytest.approx([0] * 24, abs=1e-9)


def test_labels_that_yaml_reads_as_numbers_are_quoted(tmp_path: Path) -> None:
    labels = ["0x1f", "1:30", "1e3", "None", "a: b", "no", "plain"]
    text = "\n".join(["1e2,y,z", *(f"{label},a,1" for label in labels[:3])])
    task = build(kind="classes", target="y", features=["1e2"], classes=["a", "b", "c"], categories={}, id=None)
    assert parse_yaml(format_labels(labels)) == labels
    with pytest.raises(
        DataError, match=r"set task\.categories: \{\"1e2\": \[\"0x1f\", \"1:30\", \"1e3\"\]\} with"
    ) as caught:
        task.load(write(tmp_path, text), seed=1)
    assert "column '1e2' contains text" in str(caught.value)


def test_remedy_shows_names_of_columns_and_labels_as_the_table_has_them(tmp_path: Path) -> None:
    text = "\n".join(["Größe,y", "groß,a", "klein,b"])
    task = build(target="y", features=["Größe"], classes=["a", "b"], categories={}, id=None)
    with pytest.raises(DataError, match=r'set task\.categories: \{"Größe": \["groß", "klein"\]\} with'):
        task.load(write(tmp_path, text), seed=1)


def test_column_of_large_numbers_that_differ_little_is_scaled(tmp_path: Path) -> None:
    """Seconds since 1970 of a year differ by less than a millionth of their value in minutes."""
    task = build(features=["time"], categories={}, id="patient")
    rows = [f"p{i},{1_700_000_000 + 60 * i},benign" for i in range(25)]
    examples = task.load(write(tmp_path, "\n".join(["patient,time,outcome", *rows])), seed=1)
    train = [int(name[1:]) for name in examples.train_ids]
    expected = {name: (int(name[1:]) - np.mean(train)) / np.std(train) for name in examples.train_ids}
    scaled = {name: inputs[0] for name, (inputs, _) in collect(examples).items() if name in expected}
    assert scaled == pytest.approx(expected, abs=1e-3)


def test_missing_values_are_refused_or_imputed_with_an_indicator(tmp_path: Path) -> None:
    data = write(tmp_path, ROWS.replace("p1,1,60,F", "p1,1,NA,").replace("p4,4,70", "p4,4,"))
    with pytest.raises(DataError) as caught:
        build(id="patient").load(data, seed=1)
    assert "p1: features are missing: age, sex; task.missing: impute fills them in" in str(caught.value)
    assert "p4: features are missing: age" in str(caught.value)
    task = build(id="patient", missing="impute", scaling={"age": [50, 10]})
    examples = task.load(data, seed=1)
    assert examples.columns == ("age", "sex=F", "sex=M", "age missing", "sex missing")
    rows = {name: inputs for name, (inputs, _) in collect(examples).items()}
    assert rows["p1"] == [0, 0, 0, 1, 1]
    assert rows["p4"] == [0, 0, 1, 1, 0]
    assert rows["p2"] == [-1, 0, 1, 0, 0]
    assert task.model()(torch.zeros(2, 5)).shape == (2, 1)
    skipping = build(id="patient", skip_bad_subjects=True).load(data, seed=1)
    assert (skipping.skipped, sorted(collect(skipping))) == (2, ["p2", "p3"])


@pytest.mark.parametrize("others", ["Mild", "2"], ids=["among text", "among numbers"])
def test_declared_label_is_no_missing_value(others: str, tmp_path: Path) -> None:
    rows = [f"p1,None,NA,{others}", f"p2,{others},null,None", f"p3,{others},NA,3", "p4,None,NA,None"]
    data = write(tmp_path, "\n".join(["patient,smoking,ward,grade", *rows]))
    task = TableTask(
        {"kind": "classes", "target": "grade", "classes": ["None", others, "3"], "features": ["smoking", "ward"]}
        | {"categories": {"smoking": ["None", others], "ward": ["NA", "A"]}, "id": "patient", "missing": "impute"}
    )
    assert collect(task.load(data, seed=1)) == {
        "p1": ([1, 0, 1, 0, 0, 0], [1]),
        "p2": ([0, 1, 0, 0, 0, 1], [0]),
        "p3": ([0, 1, 1, 0, 0, 0], [2]),
        "p4": ([1, 0, 1, 0, 0, 0], [0]),
    }


def test_labels_are_merged_and_codes_are_missing_values(tmp_path: Path) -> None:
    rows = ["p1,9,?,0,B", "p2,200.0,6,1,None", "p3,0,-9.0,2,C", "p4,180,3,9,B"]
    task = TableTask(
        {
            "kind": "binary",
            "target": "grade",
            "classes": {"none": 0, "disease": [1, 2]},
            "features": ["chol", "thal", "w"],
        }
        | {"categories": {"w": {"absent": "None", "present": ["B", "C"]}}, "missing": "impute", "id": "patient"}
        | {"missing_codes": {"chol": 0, "thal": ["?", -9], "grade": 9}, "skip_bad_subjects": True}
        | {"scaling": {"chol": [0, 1], "thal": [0, 1]}}
    )
    data = write(tmp_path, "\n".join(["patient,chol,thal,grade,w", *rows]))
    again = TableTask(json.loads(json.dumps(task.config.model_dump(mode="json"), sort_keys=True)))
    assert again.config == task.config
    examples = again.load(data, seed=1)
    assert examples.columns[:4] == ("chol", "thal", "w=absent", "w=present")
    assert collect(examples) == {
        "p1": ([9, 0, 0, 1, 0, 1, 0], [0]), "p2": ([200, 6, 1, 0, 0, 0, 0], [1]), "p3": ([0, 0, 0, 1, 1, 1, 0], [1])
    }  # fmt: skip
    described = {column.name: column for column in task.describe_columns(data)}
    assert (described["thal"].missing, described["thal"].numbers.tolist()) == (2, [6, 3])
    assert described["grade"].labels == {"none": 1, "disease": 2}


def test_transformed_target_is_predicted_in_its_own_unit() -> None:
    task = build(kind="regression", target="months", target_scale=[2, 0.5], target_transform="log1p", classes=[])
    targets = torch.tensor([[3.0], [40.0]])
    exact = torch.from_numpy((np.log1p(targets.numpy()) - 2) / 0.5)
    assert task.loss(torch.nn.Identity(), (exact, targets)).item() == pytest.approx(0, abs=1e-6)
    assert task.predict(torch.nn.Identity(), (exact, targets))[0].flatten().tolist() == pytest.approx([3, 40])


@pytest.mark.parametrize(
    ("features", "selected"),
    [
        ("[age, 'thick_*', '*_lh']", ["age", "thick_lh", "thick_rh", "area_lh"]),
        ("{all_but: [site, 'area_*']}", ["age", "thick_lh", "thick_rh"]),
        ("['*_x']", "task.features: no column '*_x'"),
        ("{all_but: [stie]}", "task.features: no column 'stie'. Did you mean 'site'"),
        ("{but: [site]}", "expected names and patterns, or {all_but:"),
    ],
)
@pytest.mark.parametrize("header", ["", "header: columns.csv, "])
def test_columns_are_selected_by_pattern_before_the_job_is_sent(
    features: str, selected: list[str] | str, header: str, tmp_path: Path
) -> None:
    names = "id,site,age,thick_lh,thick_rh,area_lh,score"
    (tmp_path / ("columns.csv" if header else "site-1.csv")).write_text(f"{names}\n")
    data = "" if header else "simulator: {sites: 2, data: {path: '{site}.csv'}}\n"
    (tmp_path / "job.yaml").write_text(
        f"name: job\nmethod: {{name: fedavg, rounds: 1}}\n{data}"
        f"task: {{name: table, kind: regression, target: score, id: id, {header}features: {features}}}\n"
    )
    if isinstance(selected, str):
        with pytest.raises(ConfigError, match=re.escape(selected)):
            load_config(tmp_path / "job.yaml")
        return
    task = serialize_job(load_config(tmp_path / "job.yaml"))["task"]
    assert (task["features"], task["header"]) == (selected, None)


def test_rows_of_a_subject_are_at_one_simulated_site(tmp_path: Path) -> None:
    rows = [f"p{i % 20},{i},{i},F,A,benign,1,1" for i in range(60)]
    path = write(tmp_path, "\n".join([ROWS.splitlines()[0], *rows])).path
    (tmp_path / "job.yaml").write_text(
        "name: job\nmethod: {name: fedavg, rounds: 1}\n"
        "task: {name: table, kind: regression, target: months, features: [age], group: patient}\n"
        f"simulator: {{sites: 4, data: {{path: {path}, partition: {{kind: iid}}}}}}\n"
    )
    config = load_config(tmp_path / "job.yaml")
    sites = prepare_site_data(config, TableTask(config.task.config), tmp_path)
    subjects = {name: {(int(row) - 1) % 20 for row in own.subset or ()} for name, own in sites.items()}
    assert [len(own.subset or ()) for own in sites.values()] == [15, 15, 15, 15]
    assert [len(own) for own in subjects.values()] == [5, 5, 5, 5]
    assert len(set.union(*subjects.values())) == 20


def test_check_shows_what_the_columns_of_all_sites_contain(tmp_path: Path) -> None:
    header = ROWS.splitlines()[0]
    for site, shift in (("site-1", 0), ("site-2", 10)):
        rows = [f"p{i},{i},{i + shift},{'FM'[i % 2]},A,{'NA' if i < shift else i},1,1" for i in range(20)]
        (tmp_path / f"{site}.csv").write_text("\n".join([header, *rows]) + "\n")
    (tmp_path / "job.yaml").write_text(
        "name: clinics\nmethod: {name: fedavg, rounds: 1}\ntask: {name: table, kind: regression, target: age, "
        "features: [sex, outcome], categories: {sex: [F, M]}, group: patient, target_scale: [15, 8]}\n"
        "simulator: {sites: 2, data: {path: '{site}.csv'}}\n"
    )
    result = CliRunner().invoke(app, ["check", str(tmp_path / "job.yaml")], env={"COLUMNS": "160"})
    assert [line for line in result.output.splitlines() if line.startswith("NOTE column ")] == [
        "NOTE column age: target; 0 to 29, mean 14.5, deviation 7.63; missing: 0",
        "NOTE column patient: subject; 20 subjects, up to 2 rows each, 20 with rows at several sites; missing: 0",
        "NOTE column sex: category; F 20, M 20; missing: 0",
        "NOTE column outcome: number; 0 to 19, mean 11.17; missing: 10 (25%)",
    ]
    # The notes of the columns explain why a site is refused.
    assert "FAIL data of site-2" in result.output


def test_missing_target_makes_a_row_unusable(tmp_path: Path) -> None:
    data = write(tmp_path, ROWS.replace("benign,5", ",5"))
    with pytest.raises(DataError, match="1: its outcome is missing"):
        build().load(data, seed=1)
    assert build(skip_bad_subjects=True).load(data, seed=1).skipped == 1
    survival = TableTask(
        {"kind": "survival", "target": "months", "event": "died", "features": ["age"], "id": "patient"}
    )
    data = write(tmp_path, ROWS.replace("benign,5,1", "benign,5,").replace("malignant,8,0", "malignant,,0"))
    with pytest.raises(DataError) as caught:
        survival.load(data, seed=1)
    assert "p1: its died is missing" in str(caught.value)
    assert "p2: its months is missing" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "is_far"),
    [
        ({}, True), ({"target_scale": [5, 50]}, False), ({"target_scale": [50, 1]}, True),
        ({"target_scaling": "site"}, False),
    ],
)  # fmt: skip
def test_target_far_from_the_scale_of_the_network_is_warned_about(
    settings: dict[str, Any], is_far: bool, tmp_path: Path
) -> None:
    task = TableTask({"kind": "regression", "target": "age", "features": ["x"], "id": "patient"} | settings)
    data = write(tmp_path, "\n".join(["patient,age,x", *(f"p{i},{40 + i},1" for i in range(25))]))
    warnings = task.load(data, seed=1).warnings
    assert len(warnings) == is_far
    if is_far:
        (advised,) = re.findall(r"Set task\.target_scale: (\[.*?\])", warnings[0])
        again = TableTask(task.config.model_dump() | {"target_scale": json.loads(advised)})
        assert again.load(data, seed=1).warnings == ()
        years = [f"p{i},{2010 + i},1" for i in range(25)]
        (warning,) = task.load(write(tmp_path, "\n".join(["patient,age,x", *years])), seed=1).warnings
        assert re.search(r"Set task\.target_scale: \[202\d\.?\d*, \d(\.\d)?\]", warning)
    if is_far and not settings:
        assert "age has the mean 5" in warnings[0]
        assert "task.target_scale is [0, 1]: the network starts at 0" in warnings[0]


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        (
            {"id": "patient"},
            ("p2", "p1"),
            "identifiers in column 'patient' occur more than once.*'p1'.*task.group: patient",
        ),
        (
            {"id": "patient"},
            ("p2", ""),
            r"column 'patient' has no identifier in 1 of \d+ rows \(first: row \d+\); fill it in",
        ),
        (
            {"features": ["age", "ward", "sex"], "categories": {}},
            ("", ""),
            r"column 'ward' contains text such as 'A'.*\{.ward.: \[.A., .B., .C.\], .sex.: \[.F., .M.\]\}",
        ),
        (
            {"features": ["aeg", "ward", "sex"], "categories": {"ward": ["A", "B"]}},
            ("", ""),
            r"(?s)no column 'aeg'.*Did you mean 'age'.*'C' \(row 4\).*none of its categories.*column 'sex' contains",
        ),
        (
            {"classes": ["0", "1"]},
            ("", ""),
            r"has the labels benign, malignant, but.*task.classes: \[\"benign\", \"malignant\"\]",
        ),
        (
            {"target": "sex", "classes": ["0", "1"]},
            ("F", "no"),
            r"has the labels M, no, but.*task.classes: \[\"M\", \"no\"\]",
        ),
        (
            {"target": "ward", "classes": ["0", "1"], "features": ["age"], "categories": {}},
            ("", ""),
            r"has the labels A, B, C, but.*task.classes: {no: \[...\], yes: \[...\]}, or task.kind: classes",
        ),
        ({}, ("benign", "none"), "its outcome is missing: 'none' counts as missing, unless task.classes names it"),
        (
            {"kind": "survival", "target": "months", "event": "visit"},
            ("", ""),
            r"column 'visit' is 2 \(row \d\); expected 1 for an",
        ),
        (
            {"features": ["ward"]},
            (",[ABC],", ",3.12.19,"),
            r"'ward' must have numbers, but it contains dates such as 3\.12\.19. Compute a number .*age",
        ),
        (
            {"features": ["months"]},
            (re.compile(r"(\d),([01])$", re.MULTILINE), r"2019030\1,\2"),
            "contains dates such as 20190303",
        ),
        (
            {"kind": "regression", "target": "months", "target_transform": "log1p"},
            (",5,1", ",-1,1"),
            "is -1 .row 1.*log1p",
        ),
        (
            SURVIVAL,
            (",5,1", ",-5,1"),
            r"is -5 \(row 1\); expected 0 or more",
        ),
        (
            SURVIVAL | {"loss": "weibull", "times": [12]},
            (",5,1", ",0,1"),
            r"is 0 \(row 1\); expected above 0",
        ),
    ],
)
def test_defect_of_a_table_is_named_with_its_remedy(
    settings: dict[str, Any], change: tuple[Any, str], message: str, tmp_path: Path
) -> None:
    base = {} if "kind" in settings else {"kind": "binary", "target": "outcome", "classes": ["benign", "malignant"]}
    task = TableTask({"features": ["age"], **base, **settings})
    with pytest.raises(DataError, match=message):
        task.load(write(tmp_path, re.sub(*change, ROWS) if change[0] else ROWS), seed=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": []}, "at least 1"),
        ({"features": ["age", "outcome"]}, "the target is among them"),
        ({"features": ["age", "age"]}, "a column occurs twice"),
        ({"categories": {"ward": ["A"]}}, "'ward' is not among the features"),
        ({"scaling": {"ward": [0, 1]}}, "'ward' is not among the features"),
        ({"missing": "impute", "scaling": "none"}, r"scaling gives 'age' none; add age: \[center, spread\] to scaling"),
        ({"missing": "impute", "features": ["age", "x"], "categories": {}, "scaling": {"age": [5, 1]}}, "'x' none"),
        ({"classes": ["a", "b", "c"]}, "classes has 3 labels; expected 2 for binary"),
        ({"classes": [True, False]}, "write labels such as 'yes' in quotes"),
        ({"classes": ["a", "a"]}, "a label occurs twice: 'a'"),
        ({"classes": {"a": 1, "b": [2, 1]}}, "a label occurs twice: '1'"),
        ({"classes": {"a": 1, "b": []}}, "class 'b' has no label"),
        ({"classes": 2}, r"found 2; expected labels, \[a, b\], or groups of them"),
        ({"missing_codes": {"sex": ["F", 9]}}, "'F' of column 'sex' is one of its labels, too"),
        ({"missing_codes": {"agge": 0}}, "no column 'agge'. Did you mean 'age'"),
        ({"features": ["ag*"], "categories": {}}, "columns are not known here; set task.header"),
        ({"target_transform": "log1p"}, "target_transform is for kind regression"),
        ({"class_weights": [1, 4, 2]}, "class_weights has 3 numbers for 2 classes; give one for each"),
        (
            {"kind": "regression", "target": "months", "class_weights": [1, 4]},
            "class_weights is for kind binary and classes, not for regression",
        ),
        ({"event": "died"}, "event is for kind survival"),
        ({"kind": "survival", "target": "months"}, "event is missing"),
        ({"loss": "weibull", "times": [1]}, "loss is for kind survival, not for binary"),
        (SURVIVAL | {"loss": "discrete"}, r"loss is discrete; set them, as \[12, 24, 60\]"),
        (SURVIVAL | {"times": [12]}, "loss is cox; remove them, or set loss: discrete"),
        (SURVIVAL | {"loss": "discrete", "times": [2, 1]}, "expected ascending times"),
        ({"kind": "classes", "target": "ward"}, "3 or more for classes"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build(**settings)


def test_rows_of_one_subject_are_in_one_part(tmp_path: Path) -> None:
    rows = [f"p{i // 3},{i},{i},F,A,{'benign' if i % 2 else 'malignant'},1,1" for i in range(60)]
    data = write(tmp_path, "\n".join([ROWS.splitlines()[0], *rows]) + "\n")
    examples = build(group="patient", split={"validation": 0.2}).load(data, seed=3)
    parts = (examples.train_ids, examples.test_ids, examples.validation_ids)
    patients = [{(int(name) - 1) // 3 for name in ids} for ids in parts]
    assert [len(part) for part in patients] == [12, 4, 4]
    assert len(set.union(*patients)) == 20
    assert sum(len(ids) for ids in parts) == 60


def test_site_of_one_class_trains_and_has_no_auc(tmp_path: Path) -> None:
    task = build()
    examples = task.load(write(tmp_path, ROWS.replace("malignant", "benign")), seed=1)
    assert math.isfinite(task.loss(task.model(), examples.train[:]).item())
    assert set(task.evaluate(task.model(), examples.test)) <= {"accuracy", "f1", "brier", "calibration_error"}


def test_class_1_is_the_second_label_and_several_classes_have_one_output_each(tmp_path: Path) -> None:
    task = build(kind="classes", target="ward", classes=["A", "B", "C"], id="patient")
    examples = task.load(write(tmp_path), seed=1)
    assert {name: target for name, (_, target) in collect(examples).items()} == {
        "p1": [0], "p2": [1], "p3": [0], "p4": [2]
    }  # fmt: skip
    predictions, targets = task.predict(task.model(), examples.train[:])
    assert predictions.sum(dim=1).tolist() == pytest.approx([1] * len(predictions))
    metrics = task.metrics(torch.eye(3)[[0, 0, 2, 2]], torch.tensor([[0.0], [0], [1], [2]]))
    assert metrics == {"accuracy": 0.75, "balanced_accuracy": pytest.approx(2 / 3)}
    assert (task.metric.name, task.kind) == ("accuracy", "classes")
    assert math.isfinite(task.loss(task.model(), (examples.train[:][0], targets)).item())


@pytest.mark.parametrize(
    ("settings", "errors"),
    [
        ({"kind": "binary", "target": "y"}, [math.log(1 + math.e), math.log(1 + math.exp(-2))]),
        ({"kind": "classes", "target": "y", "classes": ["a", "b", "c"]}, [math.log(1 + 2 / math.e), math.log(3)]),
    ],
)
def test_class_weights_are_those_of_the_examples_in_the_mean(settings: dict[str, Any], errors: list[float]) -> None:
    is_binary = settings["kind"] == "binary"
    outputs = torch.tensor([[1.0], [2.0]] if is_binary else [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    batch = (outputs, torch.tensor([[0.0], [1.0]]))
    for weights in ([], [1, 4] if is_binary else [1, 4, 2]):
        task = build(**settings, class_weights=weights)
        first, second = weights[:2] or (1, 1)
        expected = (first * errors[0] + second * errors[1]) / (first + second)
        assert task.loss(torch.nn.Identity(), batch).item() == pytest.approx(expected)


def test_number_is_predicted_in_its_unit(tmp_path: Path) -> None:
    task = build(kind="regression", target="months", target_scale=[6, 2], unit="months", classes=[])
    assert (task.metric.name, task.metric.unit, task.kind) == ("mae", "months", "regression")
    inputs, targets = task.load(write(tmp_path), seed=1).train[:]
    model = task.model()
    predictions, _ = task.predict(model, (inputs, targets))
    assert torch.equal(predictions, model(inputs) * 2 + 6)
    metrics = task.metrics(torch.tensor([[1.0], [2], [3]]), torch.tensor([[1.0], [2], [6]]))
    assert metrics == {"mae": 1, "rmse": pytest.approx(3**0.5), "bias": -1, "r2": pytest.approx(1 - 9 / 14)}
    assert "r2" not in task.metrics(torch.ones(2, 1), torch.ones(2, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "metric"),
    [
        (BINARY, "auc"),
        (DISCRETE, "c_index"),
    ],
)
def test_table_is_federated_without_code(task: str, metric: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [
        f"p{i},{i},{age:.0f},{'FM'[i % 2]},{'AB'[i % 2]},{'malignant' if age > 55 else 'benign'},"
        f"{100 - age:.1f},{i % 3 % 2}"
        for i, age in enumerate(draw.normal(55, 10, size=120))
    ]
    (tmp_path / "all.csv").write_text("\n".join([ROWS.splitlines()[0], *rows]) + "\n")
    (tmp_path / "job.yaml").write_text(
        "name: clinics\nseed: 1\nmethod: {name: fedavg, rounds: 20, training: {epochs: 2, lr: 0.01}}\n"
        f"task: {task}\nsimulator: {{data: {{path: all.csv, partition: {{kind: natural, column: ward}}}}}}\n"
    )
    runner, out = CliRunner(), tmp_path / "out"
    result = runner.invoke(app, ["run", str(tmp_path / "job.yaml"), "--env", "local", "--out", str(out)])
    assert result.exit_code == 0, result.output
    printed = runner.invoke(app, ["report", str(out), "--json"])

    run = json.loads(printed.stdout)["runs"][0]
    assert run["note"] == ""
    assert run["final"]["all"][metric] > 0.85
    # Rankings of a site's subjects have another name than those of all sites' together.
    ranked = f"{metric}_across_sites"
    assert run["pooled"][ranked] > 0.85
    assert metric not in run["pooled"]
    assert run["differences"]["site_mean"][ranked]["verdict"] == "ahead"
    assert run["differences"]["site_mean"][ranked]["second"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
def test_evaluation_states_which_rows_the_scale_came_from(tmp_path: Path) -> None:
    header = ROWS.splitlines()[0]
    for site, count in (("site-1", 40), ("site-2", 40), ("new", 30), ("few", 20)):
        rows = [f"p{i},{i},{i % 17},{'FM'[i % 2]},A,{'malignant' if i % 3 else 'benign'},1,1" for i in range(count)]
        (tmp_path / f"{site}.csv").write_text("\n".join([header, *rows]) + "\n")
    (tmp_path / "job.yaml").write_text(
        f"name: clinics\nmethod: {{name: fedavg, rounds: 1}}\ntask: {BINARY}\n"
        "simulator: {sites: 2, data: {path: '{site}.csv'}}\n"
    )
    runner, out = CliRunner(), tmp_path / "out"
    result = runner.invoke(app, ["run", str(tmp_path / "job.yaml"), "--env", "local", "--out", str(out)])
    assert result.exit_code == 0, result.output
    notes = {}
    for cohort in ("new", "few"):
        assert runner.invoke(app, ["evaluate", str(out), "--data", str(tmp_path / f"{cohort}.csv")]).exit_code == 0
        (notes[cohort],) = json.loads((out / "evaluations" / f"{cohort}.json").read_text())["notes"]
    scale = "task.scaling: site: numbers are scaled by mean and standard deviation of"
    assert notes["new"] == f"{scale} 24 rows of this data, those that the split assigns to training"
    assert notes["few"].startswith(f"{scale} 16 rows of this data: so few rows make the scale inaccurate")


def test_atlas_stands_for_its_columns() -> None:
    task = TableTask({"kind": "regression", "target": "age", "features": ["desikan", "sex"]})
    assert task.config.features == (*ATLASES["desikan"], "sex")
    assert len(task.config.numeric_inputs) == len(ATLASES["desikan"]) + 1


def test_scaled_numbers_are_clipped_and_categories_are_not(tmp_path: Path) -> None:
    task = build(id="patient", scaling={"age": [50, 10]}, clip=0.5)
    inputs = {name: row for name, (row, _) in collect(task.load(write(tmp_path), seed=1)).items()}
    assert inputs == {"p1": [0.5, 1, 0], "p2": [-0.5, 0, 1], "p3": [0.0, 1, 0], "p4": [0.5, 0, 1]}


AGE = {"kind": "regression", "target": "age", "features": ["months"], "categories": {}, "id": "patient"}


def test_network_predicts_in_units_of_the_sites_own_targets(tmp_path: Path) -> None:
    task = build(**AGE, target_scale=[50, 10], target_scaling="site", scaling="none", split={"test": 0.25})
    examples = task.load(write(tmp_path), seed=1)
    ages = np.array([age for _, age in (collect(examples)[name] for name in examples.train_ids)])
    (statistics,) = task.describe_site(examples.train).values()
    assert statistics.tolist() == pytest.approx([(ages.mean() - 50) / 10, ages.std() / 10])
    network = task.model()
    network.get_buffer("target.statistics").copy_(statistics)
    # An output of 0 is the mean of the site, and one of 1 a standard deviation above it.
    for parameter in network.parameters():
        torch.nn.init.zeros_(parameter)
    batch = next(task.iterate_batches(examples.test, 1))
    assert task.predict(network, batch)[0].item() == pytest.approx(ages.mean())
    torch.nn.init.ones_(list(network.parameters())[-1])
    assert task.predict(network, batch)[0].item() == pytest.approx(ages.mean() + ages.std())
    assert build(**AGE).describe_site(examples.train) == {}


def test_target_scaling_needs_numbers() -> None:
    with pytest.raises(ValidationError, match="target_scaling is for kind regression, not for binary"):
        build(target_scaling="site")


def write_stays(folder: Path) -> SiteData:
    """Write stays with the codes of three medicines, beside the names of two wards."""
    codes = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1]])
    np.savez(
        folder / "stays.npz",
        stay=np.arange(100, 105),
        died=np.array([1, 0, 0, 1, -1]),
        has_codes=np.array([True, False, True, True, True]),
        region=np.array(["West", "West", "", "South", "South"]),
        med=codes.astype(np.uint8),
        wards=np.array(["A", "B"]),
    )
    return SiteData("clinic", folder / "stays.npz")


STAYS = {"kind": "binary", "target": "died", "id": "stay", "features": ["med_{0..2}"], "scaling": "none"}


def test_arrays_of_codes_are_columns_and_rows_are_chosen_by_their_values(tmp_path: Path) -> None:
    task = TableTask({**STAYS, "rows": {"has_codes": 1}, "missing_codes": {"died": -1}, "skip_bad_subjects": True})
    data = write_stays(tmp_path)
    examples = task.load(data, seed=0)
    assert collect(examples) == {
        "100": ([1.0, 0.0, 1.0], [1.0]),
        "102": ([0.0, 1.0, 0.0], [0.0]),
        "103": ([1.0, 1.0, 1.0], [1.0]),
    }
    assert examples.skipped == 1
    cohort = task.cohort(data.path)
    assert cohort.ids == ("100", "102", "103", "104")
    parts = NaturalPartition(column="region", missing="unknown").divide(cohort)
    assert parts == {"South": ("103", "104"), "West": ("100",), "unknown": ("102",)}
    with pytest.raises(DataError, match=r"101: it has no row in stays.npz among those with has_codes 1"):
        task.load(SiteData("clinic", data.path, ("101",)), seed=0)
    with pytest.raises(DataError, match=r"no row has region North or East \(task.rows\)"):
        TableTask({**STAYS, "rows": {"region": ["North", "East"]}}).cohort(data.path)


@pytest.mark.parametrize("name", ["med_{2..0}", "med_{0..1000000}"])
def test_range_of_columns_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="expected ascending numbers"):
        TableTask({**STAYS, "features": [name]})


def test_volumes_are_not_scaled_without_the_intracranial_volume() -> None:
    settings = {"kind": "regression", "target": "age", "scaling": "freesurfer"}
    assert TableTask({**settings, "features": ["a_thickness"]}).config.numeric_inputs == (True,)
    with pytest.raises(ValidationError, match="add ICV to the features"):
        TableTask({**settings, "features": ["a_thickness", "Left-Caudate"]})


@pytest.mark.slow
def test_first_day_medications_predict_death(shared_data: Path) -> None:
    """AUC above 0.65 on the test stays of the whole cohort (logistic regression in the data's README: 0.79)."""
    config = load_config(Path(__file__).parents[2] / "app_configs" / "scbf_mortality.yaml", ["task.split.test=0.3"])
    task, path = TableTask(config.task.config), shared_data / "eicu_demo" / "mortality.npz"
    examples = task.load(SiteData("all", path), seed=0)
    torch.manual_seed(0)
    model, order = task.model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(6):
        for batch in iterate_pass(examples.train, 32, order, joins_last=False):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
    figures = task.evaluate(model, examples.test)
    assert figures["auc"] > 0.65
    assert figures["auc_pr"] > 1.5 * 0.089
