"""``flare-sparse evaluate``: the models of finished runs on data at hand, and every model at every site."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from flare_sparse.api.local import run as run_in_process
from flare_sparse.cli import app
from flare_sparse.config.study import Study
from flare_sparse.results.runs.evaluation import bootstrap
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.tasks.table import TableTask

METHODS = {
    "fedavg": "{name: fedavg, rounds: 2}",
    "local_only": "{name: local_only, rounds: 2}",
    "per_fedavg": "{name: per_fedavg, rounds: 2}",
}


def write_stays(path: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    rows = [f"{path.stem}-{i},{i % 2},{draw.randint(0, 1)},{i % 3 % 2}\n" for i in range(count)]
    path.write_text("stay,died,med_a,med_b\n" + "".join(rows))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with finished runs over three sites, of which site-3 has one stay and no test example."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name, count in (("site-1", 40), ("site-2", 30), ("site-3", 1), ("held-out", 24)):
        write_stays(folder / f"{name}.csv", count, seed=count)
    file = folder / "job.yaml"
    file.write_text(
        "name: stays\nmethod: {name: fedavg}\n"
        "task: {name: table, kind: binary, target: died, id: stay, "
        "features: [med_a, med_b], scaling: none, split: {validation: 0.1}, model: {name: mlp, hidden: [3]}}\n"
        "simulator: {sites: 3, data: {path: '{site}.csv'}}\n"
    )
    for name, method in METHODS.items():
        run_in_process(Study.load(file, [f"method={method}"]), RunFolder(folder / name))
    return folder


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)], env={"COLUMNS": "300"})


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.slow
def test_test_split_of_a_site_has_the_metrics_of_the_run(finished: Path) -> None:
    result = call(finished / "fedavg", "--data", finished / "site-1.csv", "--split", "test", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.output)
    final = read_json(finished / "fedavg" / "summary.json")["final"]["sites"]["site-1"]
    on_test = {name: value for name, value in final.items() if not name.startswith("validation_")}
    assert {**printed["metrics"], "test_examples": printed["examples"]} == on_test
    assert printed == read_json(finished / "fedavg" / "evaluations" / "site-1.json")
    again = call(finished / "fedavg", "--data", finished / "site-1.csv", "--name", "own")
    assert "this is the data that the run trained on: the metrics count training examples" in again.output


@pytest.mark.slow
def test_held_out_hospital_is_evaluated_whole_with_intervals_around_the_values(finished: Path) -> None:
    result = call(finished / "fedavg", "--data", finished / "held-out.csv", "--model", "best")
    assert result.exit_code == 0, result.output
    assert "best model on held-out, 24 examples" in result.output
    record = read_json(finished / "fedavg" / "evaluations" / "held-out-best.json")
    assert (record["examples"], record["split"], record["model"]) == (24, "all", "best")
    assert {"auc", "brier", "accuracy"} <= record["intervals"].keys()
    # The interval of a share p in 24 is about p +- 1.96 * sqrt(p (1 - p) / 24).
    share = record["metrics"]["accuracy"]
    half = 1.96 * (share * (1 - share) / 24) ** 0.5
    assert record["intervals"]["accuracy"] == pytest.approx([share - half, share + half], abs=0.06)
    card = (finished / "fedavg" / "model_card.md").read_text()
    assert f"| held-out | stays: best model | 24 | {record['metrics']['auc']:.3f} [" in card


def test_metric_that_few_resamples_define_has_no_interval() -> None:
    task = TableTask({"kind": "binary", "target": "died", "features": ["med_a"]})
    predictions, targets = torch.tensor([0.2, 0.6, 0.4])[:, None], torch.tensor([0.0, 1.0, 0.0])[:, None]
    intervals, notes = bootstrap(task.metrics, predictions, targets, ["auc", "brier"], 200)
    assert intervals.keys() == {"brier"}
    assert notes[0].startswith("auc: no interval, defined on ")


def test_task_may_keep_what_its_metrics_need(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_all, metrics = TableTask.measure_all, TableTask.metrics

    def count(task: Any, model: Any, dataset: Any, *rest: Any) -> Any:
        task.counted = float(len(dataset))
        return measure_all(task, model, dataset, *rest)

    monkeypatch.setattr(TableTask, "measure_all", count)
    monkeypatch.setattr(TableTask, "metrics", lambda task, *parts: {**metrics(task, *parts), "counted": task.counted})
    result = call(finished / "fedavg", "--data", finished / "held-out.csv", "--name", "counted", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert (record["metrics"]["counted"], record["intervals"]["counted"]) == (24, [24, 24])


def test_finished_evaluation_is_not_overwritten_unasked(finished: Path) -> None:
    arguments = (finished / "fedavg", "--data", finished / "held-out.csv", "--name", "twice")
    assert call(*arguments).exit_code == 0
    again = call(*arguments)
    assert again.exit_code == 2
    assert "exists already; choose another --name, or remove the file" in again.output


def test_every_model_is_evaluated_at_every_site(finished: Path) -> None:
    result = call(finished / "local_only", finished / "per_fedavg", finished / "fedavg")
    assert result.exit_code == 0, result.output
    for name in METHODS:
        record = read_json(finished / name / "evaluations" / "cross_site.json")
        final = read_json(finished / name / "summary.json")["final"]["sites"]
        assert record["examples"] == {"site-1": 8, "site-2": 6, "site-3": 0}
        assert record["results"]["site-3"] == {model: {} for model in record["results"]["site-1"]}
        for site in ("site-1", "site-2"):
            model = "final" if name == "fedavg" else site
            assert record["results"][site][model].items() <= final[site].items()
    results = read_json(finished / "local_only" / "evaluations" / "cross_site.json")["results"]
    assert list(results["site-1"]) == ["site-1", "site-2", "site-3"]
    assert results["site-1"]["site-2"] != results["site-1"]["site-1"]


@pytest.mark.slow
def test_sites_own_model_is_evaluated_on_request_and_named_where_it_is_not(finished: Path) -> None:
    data = finished / "held-out.csv"
    result = call(finished / "local_only", "--data", data)
    assert result.exit_code == 2
    assert "local_only trains no common model: each site's model is trained at the site alone" in result.output
    own = call(finished / "local_only", "--data", data, "--model", "site-2")
    assert own.exit_code == 0, own.output
    assert (finished / "local_only" / "evaluations" / "held-out-site-2.json").is_file()
    wrong = call(finished / "local_only", "--data", data, "--model", "site-9")
    assert wrong.exit_code == 2
    assert "no own model of site 'site-9'" in wrong.output
    adapting = call(finished / "per_fedavg", "--data", data)
    assert "this is the run's common model" in adapting.output
    assert "flare-sparse evaluate RUN --data DIR --model adapted adapts it first" in adapting.output


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--data", "missing.csv"), 2, "--data missing.csv: there is no file or folder of this name"),
        (("--data", "DATA", "--name", "a/b"), 2, "--name 'a/b': expected letters"),
        (("--data", "OTHER"), 2, "no column 'med_b'"),
    ],
)
def test_unusable_options_and_data_are_refused_with_the_fix(
    options: tuple[str, ...], code: int, message: str, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.csv").write_text("stay,died,med_a,med_c\n1,0,1,1\n2,1,0,1\n")
    paths = {"DATA": str(finished / "held-out.csv"), "OTHER": str(tmp_path / "other.csv")}
    result = call(finished / "fedavg", *(paths.get(option, option) for option in options))
    assert result.exit_code in (1, code)
    assert message in result.output
