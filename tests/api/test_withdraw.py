"""A run that is made again without a subject or a site has the bits of one that never had it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from flare_sparse.api.run import Run
from flare_sparse.api.start import run as start
from flare_sparse.api.withdraw import find_start, list_touched_rounds, trace_withdrawal, withdraw
from flare_sparse.cli import app
from flare_sparse.cohorts.split import SplitConfig
from flare_sparse.config.withdrawals import WITHDRAWN, Withdrawals
from flare_sparse.core.errors import ConfigError, DataError
from flare_sparse.core.observer import SILENT
from flare_sparse.results.runs.continuation import FINAL
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Examples, SiteData, load_examples

METHODS: dict[str, dict[str, Any]] = {
    "neurosfl": {"name": "neurosfl", "sparsity": 0.5, "rounds": 3},
    "fedsparsify": {"name": "fedsparsify", "sparsity": 0.6, "rounds": 3},
    "topk_ef": {"name": "topk_ef", "fraction": 0.2, "rounds": 4},
    "scbf": {"name": "scbf", "budget": 0.3, "aggregation": "mean", "rounds": 3},
}


def is_subject_of(site: str) -> Callable[[int], bool]:
    return lambda number: "ABCD"[number % 4] == site


def write_table(file: Path, keep: Callable[[int], bool] = lambda number: True) -> Path:
    """Write 80 subjects at four hospitals; ``keep`` says which rows the table has."""
    rows = [
        f"s{number},{'ABCD'[number % 4]},{number * 7 % 13},{number * 5 % 11},{number * 3 % 17 + number % 4}"
        for number in range(80)
        if keep(number)
    ]
    file.write_text("\n".join(["subject,hospital,a,b,dose", *rows]) + "\n")
    return file


def write_study(folder: Path, table: Path, method: Mapping[str, Any], **sections: Any) -> Path:
    training = {"optimizer": "sgd", "lr": 0.05, "batch_size": 8}
    content = {
        "name": "study",
        "seed": 5,
        "method": {**method, "training": training},
        "task": {
            "name": "table",
            "kind": "regression",
            "target": "dose",
            "target_scale": [10, 5],
            "features": ["a", "b"],
            "id": "subject",
            "model": {"name": "mlp", "hidden": [12]},
        },
        "wire": {"values": "bfloat16"},
        "simulator": {"data": {"path": str(table), "partition": {"kind": "natural", "column": "hospital"}}},
        **sections,
    }
    folder.mkdir(exist_ok=True)
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    return folder / "study.yaml"


def run(folder: Path, table: Path, method: Mapping[str, Any], **sections: Any) -> Run:
    return start(write_study(folder, table, method, **sections), out=folder / "run", observer=SILENT)


def run_again(done: Run, gone: Withdrawals) -> Run:
    return withdraw(done, gone, trace_withdrawal(done, gone))


def digest(done: Run) -> tuple[str, Any]:
    """Return the model's SHA-256 and the final metrics of each site."""
    return done.summary["model_sha256"], done.summary["final"]["sites"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_without_subjects_the_run_has_the_bits_of_one_that_never_had_them(method: Any, tmp_path: Path) -> None:
    leaving = {8, 13}
    done = run(tmp_path / "all", write_table(tmp_path / "all.csv"), method)
    never = run(tmp_path / "never", write_table(tmp_path / "fewer.csv", lambda i: i not in leaving), method)
    assert digest(done)[0] != digest(never)[0], "the subjects change the model"
    again = run_again(done, Withdrawals(frozenset({"s8", "s13"})))
    assert digest(again) == digest(never)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_without_a_site_the_run_has_the_bits_of_one_that_never_had_it(method: Any, tmp_path: Path) -> None:
    done = run(tmp_path / "all", write_table(tmp_path / "all.csv"), method)
    never = run(tmp_path / "never", write_table(tmp_path / "fewer.csv", lambda i: not is_subject_of("C")(i)), method)
    again = run_again(done, Withdrawals(sites=frozenset({"C"})))
    assert digest(again) == digest(never)
    assert sorted(again.summary["final"]["sites"]) == ["A", "B", "D"]


@pytest.mark.slow
def test_subjects_of_a_site_that_was_drawn_late_start_after_the_last_round_before(tmp_path: Path) -> None:
    """Sampled sites: with seed 5, one of the four takes no part in the first rounds."""
    method = {"name": "topk_ef", "fraction": 0.2, "rounds": 6, "participation": 0.5, "decay": 0.9}
    history = {"federation": {"kept_commits": 9}}
    done = run(tmp_path / "all", write_table(tmp_path / "all.csv"), method, **history)
    first = {site: min(list_touched_rounds(done.rounds, site)) for site in "ABCD"}
    late = max(first, key=lambda site: first[site])
    assert first[late] > 1
    leaving = next(i for i in range(80) if is_subject_of(late)(i))
    gone = Withdrawals(frozenset({f"s{leaving}"}))
    touched = trace_withdrawal(done, gone)
    assert touched.start is not None
    assert touched.start["round"] == first[late] - 1
    assert touched.rounds[late][0] == first[late]
    never = run(tmp_path / "never", write_table(tmp_path / "fewer.csv", lambda i: i != leaving), method, **history)
    assert digest(done)[0] != digest(never)[0]
    again = withdraw(done, gone, touched)
    assert digest(again) == digest(never)
    timeless = [{k: v for k, v in line.items() if k not in ("seconds", "committed_at")} for line in again.rounds]
    assert timeless == [
        {k: v for k, v in line.items() if k not in ("seconds", "committed_at")} for line in never.rounds
    ]


def test_without_history_or_with_a_leaving_site_a_sampled_run_starts_at_the_beginning(tmp_path: Path) -> None:
    method = {"name": "topk_ef", "fraction": 0.2, "rounds": 6, "participation": 0.5}
    done = run(tmp_path / "all", write_table(tmp_path / "all.csv"), method)
    first = {site: min(list_touched_rounds(done.rounds, site)) for site in "ABCD"}
    late = max(first, key=lambda site: first[site])
    subject = next(f"s{i}" for i in range(80) if is_subject_of(late)(i))
    assert trace_withdrawal(done, Withdrawals(frozenset({subject}))).start is None
    assert find_start(done.rounds, [late], done.study.config, leaves=False) == first[late] - 1
    # A site that is there changes which others are drawn.
    assert find_start(done.rounds, [late], done.study.config, leaves=True) == 0


def find_used(done: Run) -> set[str]:
    """Return the subjects at site A whom a command that opens a result folder would use."""
    examples = load_examples(done.study.load_task(), done.study.prepare_sites(done.path)["A"], 5)
    return {*examples.train_ids, *examples.test_ids}


@pytest.mark.slow
def test_no_way_back_by_a_longer_run_or_an_evaluation_and_nothing_is_left_but_the_marked_model(tmp_path: Path) -> None:
    done = run(tmp_path / "all", write_table(tmp_path / "all.csv"), METHODS["topk_ef"])
    (done.path / "evaluations").mkdir()
    (done.path / "evaluations" / "test_predictions.json").write_text("{}")
    assert (done.path / FINAL).is_dir()
    again = run_again(done, Withdrawals(frozenset({"s8"})))
    assert not (done.path / FINAL).exists()
    assert not (done.path / "evaluations" / "test_predictions.json").exists()
    card = (done.path / "model_card.md").read_text()
    assert "Withdrawn: 1 subject. The model in this folder has learned from them and must not be used" in card
    assert "trained without them, from the start" in (again.path / "model_card.md").read_text()
    # Whatever reads the sites' data again, such as a report, leaves the subject out, in both folders.
    for folder in (done, again):
        assert "s8" not in find_used(folder)
    # A longer run, a run of the same settings elsewhere, and an evaluation of the very table inherit the list.
    longer = call(
        "run", again.path / "config.yaml", "--set", "method.rounds=6", "--start", again.path, "--env", "local"
    )
    assert longer.exit_code == 0, longer.output
    elsewhere = start(again.path / "config.yaml", out=tmp_path / "elsewhere", observer=SILENT)
    for path in (again.path.with_name("run-without-6"), elsewhere.path):
        assert "s8" not in find_used(Run.load(path))
        assert Withdrawals.read(path).subjects == {"s8"}
    assert sum(elsewhere.summary["examples"].values()) == sum(again.summary["examples"].values())
    record = again.evaluate(tmp_path / "all.csv", resamples=0)
    assert record["examples"] == 79
    assert "left out: 1 subjects who have withdrawn from the run" in record["notes"]
    # A second withdrawal adds to the first.
    third = withdraw(
        again,
        Withdrawals(frozenset({"s13"})),
        trace_withdrawal(again, Withdrawals(frozenset({"s13"}))),
        out=tmp_path / "third",
    )
    assert Withdrawals.read(third.path).subjects == {"s8", "s13"}
    never = run(tmp_path / "never", write_table(tmp_path / "two.csv", lambda i: i not in (8, 13)), METHODS["topk_ef"])
    assert digest(third) == digest(never)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of one round, which no test changes."""
    folder = tmp_path_factory.mktemp("finished")
    return run(folder / "all", write_table(folder / "all.csv"), {"name": "fedavg", "rounds": 1})


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


@pytest.mark.slow
def test_command_says_what_the_data_touched_and_changes_nothing_when_dry(tmp_path: Path) -> None:
    done = run(tmp_path / "all", write_table(tmp_path / "all.csv"), METHODS["topk_ef"])
    (tmp_path / "leaving.txt").write_text("s8\n\n s12\n")
    result = call("withdraw", done.path, tmp_path / "leaving.txt", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "A: 1 in testing, 1 in training; rounds touched: 1 to 5; 1 other examples change their part" in result.output
    assert "train again from the start" in result.output
    assert not (done.path / WITHDRAWN).exists()
    result = call("withdraw", done.path, "B", "--delete-models")
    assert result.exit_code == 0, result.output
    assert not (done.path / "model.safetensors").exists()
    assert (tmp_path / "all" / "run-without" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("E",), "E: no such file, nor such a site"),
        (("unknown.txt",), "1 of 1 identifiers are at no site of this run (first: 's999')"),
        (("missing.txt",), "missing.txt: no such file"),
        (("empty.txt",), "the file lists no identifier"),
    ],
)
def test_impossible_withdrawal_is_refused_with_the_reason(
    options: tuple[str, ...], message: str, finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unknown.txt").write_text("s999\n")
    (tmp_path / "empty.txt").write_text("\n")
    result = call("withdraw", finished.path, *options)
    assert result.exit_code != 0
    assert message in result.output


def test_stable_split_moves_no_other_subject() -> None:
    names = [f"s{i}" for i in range(200)]
    for settings in ({"test": 0.2, "validation": 0.1}, {"folds": 5, "fold": 4, "validation": 0.2}):
        split = SplitConfig(stable=True, **settings)
        whole = split.assign(names, 3)
        assert sorted(whole.train + whole.validation + whole.test) == sorted(names)
        assert 25 <= len(whole.test) <= 55
        for leaving in names[::20]:
            fewer = split.assign([name for name in names if name != leaving], 3)
            for part in ("train", "validation", "test"):
                assert getattr(fewer, part) == tuple(n for n in getattr(whole, part) if n != leaving)
    tested = [n for fold in range(1, 6) for n in SplitConfig(stable=True, folds=5, fold=fold).assign(names, 3).test]
    assert sorted(tested) == sorted(names)


def test_task_that_lets_withdrawn_data_in_is_refused(tmp_path: Path) -> None:
    """A task of the user that ignores the list, or does not say whose data it tests with."""
    table = write_table(tmp_path / "all.csv")
    config = {"kind": "regression", "target": "dose", "features": ["a", "b"], "id": "subject"}
    task = TASKS["table"](config)
    data = SiteData("A", table, withdrawn=frozenset({"s8"}), id="subject")

    class Careless(TASKS["table"]):  # type: ignore[misc]
        def load(self, data: SiteData, seed: int) -> Examples:
            return super().load(SiteData(data.site, data.path), seed)

    class Silent(TASKS["table"]):  # type: ignore[misc]
        def load(self, data: SiteData, seed: int) -> Examples:
            whole = super().load(data, seed)
            return Examples(whole.train, whole.test, train_ids=whole.train_ids)

    assert "s8" not in load_examples(task, data, 1).train_ids
    with pytest.raises(DataError, match="returned data of 1 withdrawn subjects"):
        load_examples(Careless(config), data, 1)
    with pytest.raises(DataError, match="without identifiers"):
        load_examples(Silent(config), data, 1)


@pytest.mark.slow
def test_checkpoints_of_a_result_folder_live_as_long_as_the_settings_say(tmp_path: Path) -> None:
    table = write_table(tmp_path / "all.csv")
    none = run(tmp_path / "none", table, METHODS["topk_ef"], federation={"checkpoint_days": 0})
    assert not (none.path / FINAL).exists()
    kept = run(tmp_path / "kept", table, METHODS["topk_ef"], federation={"checkpoint_days": 30})
    Run.load(kept.path)
    assert (kept.path / FINAL).is_dir()
    long_ago = time.time() - 31 * 86_400
    for folder in (kept.path / FINAL).glob("*/*/[0-9]*"):
        os.utime(folder, (long_ago, long_ago))
    result = call(
        "run", kept.path / "config.yaml", "--env", "local", "--set", "method.rounds=5", "--start", kept.path
    )  # fmt: skip
    assert result.exit_code == 2
    assert "its checkpoints are older than federation.checkpoint_days and were deleted" in result.output
    assert not (kept.path / FINAL).exists()


def test_unreadable_list_lets_no_data_back_in(finished: Run, tmp_path: Path) -> None:
    (tmp_path / WITHDRAWN).write_text(json.dumps({"subjects": "s8"}))
    with pytest.raises(ConfigError, match="it lists what must not be used"):
        finished.study.prepare_sites(tmp_path)
