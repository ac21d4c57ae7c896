"""``report --json``: metrics, baselines and paired differences of finished runs, subject by subject."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from flare_sparse.cli import app
from flare_sparse.results.report.findings import build_comparisons, describe_findings
from flare_sparse.results.runs.comparison import OTHER_SUBJECTS, describe_runs
from flare_sparse.results.runs.predictions import RUN, Predictions
from flare_sparse.results.runs.results import RunResult

BASELINES = ["site_mean", "ridge_local", "ridge_pooled"]


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def printed(finished: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Any]:
    """Copies of the finished runs, and what ``report --json`` prints of them."""
    folder = tmp_path_factory.mktemp("compared")
    copies = {name: Path(shutil.copytree(path, folder / name)) for name, path in finished.items()}
    result = call(*copies.values(), "--json")
    assert result.exit_code == 0, result.output
    return copies, json.loads(result.stdout)


def test_predictions_reproduce_the_record_of_the_run_and_of_each_sites_own_model(printed: Any) -> None:
    for run in printed[1]["runs"]:
        assert run["note"] == ""
        for site, metrics in run["final"]["by_site"].items():
            assert run["pooled"]["mae_by_site"][site] == pytest.approx(metrics["mae"], rel=1e-5), run["label"]
            assert not any(name.startswith("validation_") for name in metrics)
        assert run["pooled"]["mae"] == pytest.approx(run["final"]["all"]["mae"])
        assert run["bytes"].keys() == {"up", "down"}
        assert run["best"]["round"] >= 0 or run["method"] == "local_only"


def test_baselines_and_differences_stand_beside_every_run(printed: Any) -> None:
    runs = {run["label"]: run for run in printed[1]["runs"]}
    for run in runs.values():
        assert list(run["baselines"]) == list(run["differences"]) == BASELINES
        assert run["baselines"] == runs["fedavg"]["baselines"], "the same subjects, so the same baselines"
        for name, differences in run["differences"].items():
            difference = differences["mae"]
            assert difference["first"] == run["pooled"]["mae"]
            assert difference["second"] == run["baselines"][name]["mae"]
            assert difference["low"] <= difference["value"] <= difference["high"]
            assert difference["by_site"].keys() == {"site-1", "site-2"}


@pytest.mark.slow
def test_runs_are_compared_with_one_another_on_the_same_subjects(printed: Any) -> None:
    groups = {group["label"]: group for group in printed[1]["groups"]}
    forward = groups["fedavg"]["differences"]["local_only"]["mae"]
    backward = groups["local_only"]["differences"]["fedavg"]["mae"]
    assert forward["subjects"] == groups["fedavg"]["subjects"] == 4
    assert forward["value"] == pytest.approx(-backward["value"])
    assert (forward["low"], forward["high"]) == (pytest.approx(-backward["high"]), pytest.approx(-backward["low"]))
    assert {*BASELINES, "neurosfl", "local_only"} == set(groups["fedavg"]["differences"])


def test_predictions_are_computed_once_and_belong_to_one_model(printed: Any) -> None:
    copies, _ = printed
    folder = copies["fedavg"]
    file = folder / "evaluations" / "test_predictions.json"
    content = json.loads(file.read_text())
    assert set(content["subjects"]) <= set(range(10))
    assert "sub-" not in file.read_text(), "no identifier of a subject"
    content["values"]["run"] = [[0.0]] * len(content["sites"])
    file.write_text(json.dumps(content))
    mean_age = float(np.mean(content["targets"]))
    described = json.loads(call(folder, "--json").stdout)["runs"][0]
    assert described["pooled"]["mae_by_site"] != described["final"]["by_site"]
    assert described["differences"]["site_mean"]["mae"]["first"] == pytest.approx(mean_age)
    file.write_text(json.dumps({**content, "identity": "another"}))
    described = json.loads(call(folder, "--json").stdout)["runs"][0]
    assert described["pooled"]["mae"] == pytest.approx(described["final"]["all"]["mae"]), "computed again"


@pytest.mark.slow
def test_page_shows_the_baselines(printed: Any, tmp_path: Path) -> None:
    result = call(printed[0]["neurosfl"], "--out", tmp_path / "page")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page" / "report.html").read_text()
    assert "Compared with trivial baselines" in page
    assert "neurosfl against ridge_pooled" in page
    assert "Runs on the same test subjects" not in page, "there is one run"
    (_, table) = build_comparisons(printed[1])
    assert len(table.rows) == 3
    difference = next(group for group in printed[1]["groups"] if group["label"] == "fedavg")["differences"]
    assert any(f"{difference['local_only']['mae']['value']:+.3f} [" in row[4] for row in table.rows)


def test_run_whose_data_changed_is_not_compared(printed: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(printed[0]["fedavg"], tmp_path / "run"))
    (folder / "evaluations" / "test_predictions.json").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    summary["final"]["sites"]["site-2"]["mae"] += 1
    (folder / "summary.json").write_text(json.dumps(summary))
    described = json.loads(call(folder, "--json").stdout)["runs"][0]
    assert "site site-2: mae of the final model is" in described["note"]
    assert (described["pooled"], described["baselines"], described["differences"]) == (None, None, None)


@pytest.mark.slow
def test_deployed_run_has_metrics_only(printed: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(printed[0]["fedavg"], tmp_path / "run"))
    shutil.rmtree(folder / "evaluations")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    del config["simulator"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    described = json.loads(call(folder, "--json").stdout)["runs"][0]
    assert described["note"] == "the data of the sites is not on this machine; a deployed site sends metrics only"
    assert described["final"]["all"]["mae"] > 0
    result = call(folder, "--out", tmp_path / "page")
    assert result.exit_code == 0
    assert "fedavg: no baselines: the data of the sites is not on this machine" in result.stderr
    assert "Compared with trivial baselines" not in (tmp_path / "page" / "report.html").read_text()


@pytest.mark.slow
def test_run_of_a_script_has_no_baselines_and_needs_no_trust_for_that(printed: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(printed[0]["fedavg"], tmp_path / "run"))
    shutil.rmtree(folder / "evaluations")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["task"] = {"script": "client.py", "model": "model.Net"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert json.loads(call(folder, "--json").stdout)["runs"][0]["note"] == "a training script reads the data itself"


def test_json_prints_and_writes_no_page(printed: Any, tmp_path: Path) -> None:
    result = call(printed[0]["fedavg"], "--json", "--out", tmp_path)
    assert result.exit_code == 2
    assert "--json prints and writes no page" in result.output


def build_run(
    label: str,
    method: str,
    seed: int,
    fold: int,
    errors: list[float],
    subjects: list[int],
    sites: str = "",
    digests: str = "x",
    targets: list[float] | None = None,
) -> RunResult:
    """Return a run of one fold with given absolute errors of given subjects, of site a unless sites are given."""
    summary = {
        "method": method, "seed": seed, "rounds": 1, "sites": ["a"], "best": {"round": -1, "metrics": {}},
        "metric": {"name": "mae", "unit": "", "mode": "min"},
        "final": {"metrics": {"mae": 1.0, "test_examples": 2.0}, "sites": {"a": {"mae": 1.0, "test_examples": 2.0}}},
        "contributions": {"a": {"asked": 1, "contributed": 1, "missed": {}}},
        "traffic": {way: {"payload_bytes": 1, "dense_bytes": 1} for way in ("up", "down")},
    }  # fmt: skip
    run = RunResult(label, Path(label), summary, [], [])
    count = len(subjects)
    run.__dict__["config"] = {"seed": seed, "method": method, "task": {"split": {"folds": 2, "fold": fold}}}
    truth = np.array(targets or [0.0] * count)[:, None]
    run.__dict__["predictions"] = Predictions(
        "", "regression", np.array([*(sites or "a" * count)]), np.array(subjects), truth,
        {RUN: truth + np.array(errors)[:, None], "site_mean": truth + 3.0},
        dict(zip("abc", digests, strict=False)), ("ridge_local",),
    )  # fmt: skip
    return run


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (1.0, "run predicts better than site_mean, the best trivial baseline: its mae is 2 lower"),
        (4.0, "run predicts worse than site_mean, the best trivial baseline: its mae is 1 higher"),
        (3.1, "predicts better cannot be told from these test subjects: mae differs by +0.1 "),
    ],
)
def test_findings_compare_with_the_best_trivial_baseline(error: float, words: str) -> None:
    """The site's mean is wrong by 3 for each of twelve subjects."""
    run = build_run("run", "fedavg", 1, 1, [error + (-1) ** i for i in range(12)], list(range(12)))
    (sentence,) = [line for line in describe_findings([run]) if "baseline" in line]
    assert words in sentence


def test_folds_and_seeds_of_a_method_are_taken_together_subject_by_subject() -> None:
    runs = [
        build_run("f11", "fedavg", 1, 1, [1.0, 2.0], [0, 1]),
        build_run("f12", "fedavg", 1, 2, [3.0, 4.0], [2, 3]),
        build_run("f21", "fedavg", 2, 1, [3.0, 4.0], [0, 3]),
        build_run("n11", "neurosfl", 1, 1, [0.0, 0.0], [0, 1]),
        build_run("n12", "neurosfl", 1, 2, [0.0, 0.0], [2, 3]),
    ]
    groups = describe_runs(runs, {})["groups"]
    assert [group["label"] for group in groups] == ["fedavg (2 seeds, 2 folds)", "neurosfl (2 folds)"]
    fedavg = groups[0]
    # Subject 0 has the errors 1 and 3, subject 3 has 4 and 4.
    assert (fedavg["subjects"], fedavg["mae"]) == (4, pytest.approx((2 + 2 + 3 + 4) / 4))
    assert fedavg["differences"]["site_mean"]["mae"]["value"] == pytest.approx(2.75 - 3)
    other = fedavg["differences"]["neurosfl (2 folds)"]["mae"]
    assert (other["value"], other["verdict"], other["subjects"]) == (pytest.approx(2.75), "undecided", 4)


def test_subjects_without_identifiers_are_not_taken_for_one_another() -> None:
    runs = [build_run(f"f{seed}", "fedavg", seed, 1, [float(seed), 1.0], [-1, -1]) for seed in (1, 2)]
    group = describe_runs(runs, {})["groups"][0]
    assert group["subjects"] == 4


def compare_two(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the first of two runs of one seed, with three subjects at each of two sites."""
    common = {"seed": 1, "fold": 1, "subjects": [0, 1, 2] * 2, "sites": "aaabbb", "digests": "xy"}
    runs = [
        build_run("f", "fedavg", **{**common, "errors": [1.0] * 3 + [5.0] * 3, **first}),
        build_run("n", "neurosfl", **{**common, "errors": [0.0] * 6, **second}),
    ]
    group: dict[str, Any] = describe_runs(runs, {})["groups"][0]
    return group


def test_sites_with_other_identifiers_or_targets_are_left_out_with_a_note() -> None:
    same = compare_two({}, {})
    assert same["notes"] == {}
    assert same["differences"]["n"]["mae"]["subjects"] == 6
    for change, reason in (
        ({"digests": "xz"}, f"b left out: {OTHER_SUBJECTS}"),
        ({"targets": [0.0] * 5 + [1.0]}, "b left out: targets of the same subjects differ"),
    ):
        group = compare_two({}, change)
        assert group["notes"] == {"n": reason}
        difference = group["differences"]["n"]["mae"]
        assert (difference["subjects"], difference["by_site"]) == (3, {"a": 1.0})
    group = compare_two({}, {"digests": "vw"})
    assert "n" not in group["differences"]
    assert group["notes"]["n"] == f"a, b left out: {OTHER_SUBJECTS}"
    assert compare_two({"targets": [50.0] * 6}, {"targets": [50.00001] * 6})["notes"] == {}, "rounding"


def test_runs_without_names_of_subjects_are_compared_where_seed_and_fold_are_the_same() -> None:
    def compare(*seeds: int, digests: str, own: str = "vw") -> dict[str, Any]:
        first = [
            build_run(f"f{seed}", "fedavg", seed, 1, [1.0] * 2, [-1, -1], digests=digest)
            for seed, digest in zip((1, 2), own, strict=True)
        ]
        other = [
            build_run(f"n{seed}", "neurosfl", seed, 1, [0.0] * 2, [-1, -1], digests=digest)
            for seed, digest in zip(seeds, digests, strict=True)
        ]
        group: dict[str, Any] = describe_runs([*first, *other], {})["groups"][0]
        (name,) = {*group["differences"], *group["notes"]} - {"site_mean"}
        subjects = group["differences"].get(name, {}).get("mae", {}).get("subjects")
        return {"note": group["notes"].get(name, ""), "subjects": subjects}

    assert compare(1, 2, digests="vw") == {"note": "", "subjects": 4}
    paired = f"a in part left out: {OTHER_SUBJECTS}"
    assert compare(1, digests="v") == {"note": paired, "subjects": 2}
    none = f"a left out: {OTHER_SUBJECTS}"
    for digest in "vy":
        assert compare(3, digests=digest) == {"note": none, "subjects": None}
    assert compare(1, digests="z") == {"note": none, "subjects": None}
    # All runs test the same examples, so that their digests are the same.
    assert compare(1, 2, digests="vv", own="vv") == {"note": "", "subjects": 4}
    assert compare(1, digests="v", own="vv") == {"note": paired, "subjects": 2}
    assert compare(3, digests="v", own="vv") == {"note": none, "subjects": None}


def test_page_says_which_sites_are_left_out() -> None:
    runs = [
        build_run("f", "fedavg", 1, 1, [1.0, 2.0], [0, 1], digests="x"),
        build_run("n", "neurosfl", 1, 1, [1.0, 2.0], [0, 1], digests="y"),
    ]
    (_, table) = build_comparisons(describe_runs(runs, {}))
    assert table.rows == []
    assert "f against n: a left out: the runs do not have the same" in table.note


def test_runs_of_one_group_with_other_identifiers_have_other_subjects() -> None:
    runs = [build_run(f"f{seed}", "fedavg", seed, 1, [1.0, 3.0], [0, 1], digests=str(seed)) for seed in (1, 2)]
    assert describe_runs(runs, {})["groups"][0]["subjects"] == 4


def test_predictions_without_digests_are_computed_again(printed: Any) -> None:
    folder = printed[0]["neurosfl"]
    file = folder / "evaluations" / "test_predictions.json"
    content = json.loads(file.read_text())
    digests = content.pop("digests")
    file.write_text(json.dumps(content))
    assert RunResult.read(folder).predictions is None
    assert call(folder, "--json").exit_code == 0
    assert json.loads(file.read_text())["digests"] == digests
    assert digests.keys() == {"site-1", "site-2"}


@pytest.mark.parametrize(("key", "value"), [("subjects", None), ("subjects", 2**70), ("targets", [10**400])])
def test_predictions_with_a_damaged_number_are_computed_again(printed: Any, key: str, value: Any) -> None:
    folder = printed[0]["neurosfl"]
    file = folder / "evaluations" / "test_predictions.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {key: [value, *content[key][1:]]}))
    assert RunResult.read(folder).predictions is None
    assert call(folder, "--json").exit_code == 0
    assert json.loads(file.read_text()) == content
