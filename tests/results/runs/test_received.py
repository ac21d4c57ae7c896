"""A received result folder is data: nothing in it is executed unasked, and no text in it is more than text."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from flare_sparse.api.run import Run
from flare_sparse.api.start import run as start
from flare_sparse.cli import app
from flare_sparse.cli.watch import follow_folder
from flare_sparse.config import user_code
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError, UntrustedCode
from flare_sparse.core.observer import SILENT
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.results.runs.load import load_model, load_study
from flare_sparse.results.runs.progress import find_training
from flare_sparse.results.runs.received import check_links, neutralize
from flare_sparse.results.runs.results import RunResult

TASK = """
import numpy as np, torch
from torch import nn
from torch.utils.data import TensorDataset
from flare_sparse.tasks.task import Metric, Task, TaskConfig, build_examples
class Own(Task):
    Config = TaskConfig
    metric = Metric("mse", "", "min")
    def model(self): return nn.Linear(3, 1)
    def load(self, data, seed):
        t = np.load(data.path); x, y = torch.from_numpy(t["x"]).float(), torch.from_numpy(t["y"]).float()
        split = self.config.split.assign([str(i) for i in range(len(x))], seed)
        return build_examples(split, lambda n: TensorDataset(x[[int(i) for i in n]], y[[int(i) for i in n]]))
    def loss(self, m, b): return (m(b[0]) - b[1]).square().mean()
    def predict(self, m, b): return m(b[0]), b[1]
    def metrics(self, p, t): return {"mse": float((p - t).square().mean())}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a user's task, and its run of one round, which no test changes."""
    folder = tmp_path_factory.mktemp("own")
    for i in (1, 2):
        np.savez(folder / f"site-{i}.npz", x=np.eye(30)[:, :3], y=np.eye(30)[:, 4:5])
    (folder / "own.py").write_text(TASK)
    (folder / "s.yaml").write_text(
        "name: s\nseed: 1\nmethod: {name: fedavg, rounds: 1}\ntask: {class: own.Own}\n"
        f"simulator: {{sites: 2, data: {{path: '{folder}/{{site}}.npz'}}}}\n"
    )
    return start(folder / "s.yaml", out=folder / "run", observer=SILENT).path


@pytest.fixture
def received(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run whose code writes a file; in a process that has not made it."""
    folder = tmp_path / "received"
    shutil.copytree(made, folder)
    code = folder / "code" / "own.py"
    code.write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w').close()\n{code.read_text()}")
    own, path = sys.modules.pop("own", None), list(sys.path)
    yield folder
    user_code._trusted.discard(folder)
    sys.path[:] = path
    if own is not None:
        sys.modules["own"] = own


def test_code_of_a_received_run_is_executed_only_when_asked(received: Path) -> None:
    mark = received.with_name("PWNED")
    run = Run.load(received)
    assert run.summary["rounds"] == 1
    for read in (lambda: run.study, run.model, lambda: load_model(received), lambda: Run.load(received).evidence()):
        with pytest.raises(UntrustedCode, match="nothing of it was executed"):
            read()
    commands = (["report", "--plain"], ["evidence"], ["save"], ["evaluate"])
    for command, *options in commands:
        result = CliRunner().invoke(app, [command, str(received), *options])
        assert (result.exit_code, "E_CODE" in result.output) == ((0, False) if command == "report" else (2, True))
    assert not mark.exists()
    result = CliRunner().invoke(app, ["--trust-code", "evaluate", str(received)])
    assert result.exit_code == 0, result.output
    assert mark.exists()
    mark.unlink()
    # The word holds for one command.
    with pytest.raises(UntrustedCode):
        _ = Run.load(received).study
    assert Run.load(received, trust_code=True).model()(np_zeros()).shape == (1, 1)


def np_zeros() -> object:
    import torch

    return torch.zeros(1, 3)


def test_code_without_a_record_beside_it_is_not_executed_either(received: Path) -> None:
    for name in ("rounds.jsonl", "summary.json"):
        (received / name).unlink()
    with pytest.raises(UntrustedCode):
        load_model(received)
    assert not received.with_name("PWNED").exists()


def test_own_file_continues_a_run_with_its_own_code_alone(made: Path, received: Path, tmp_path: Path) -> None:
    """The folder's code is not needed, so nobody has to trust it; nor is what its settings name imported."""

    def go_on(out: str) -> Result:
        options = ["--env", "local", "--set", "method.rounds=2", "--start", str(received)]
        return CliRunner().invoke(app, ["run", str(made.parent / "s.yaml"), *options, "--out", str(tmp_path / out)])

    result = go_on("longer")
    assert result.exit_code == 0, result.output
    config = received / "config.yaml"
    config.write_text(config.read_text().replace("own.Own", "antigravity.Own"))
    refused = go_on("other")
    assert refused.exit_code == 2
    assert "only method.rounds may differ from the finished run" in " ".join(refused.output.split())
    assert "antigravity" not in sys.modules
    assert not received.with_name("PWNED").exists()


HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "](javascript:alert(3)) [x",
    "=cmd|'/c calc'!A1",
    "a\nb| c |",
    "\x1b[2J\u202e",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_record_is_markup_a_formula_or_a_control_sequence(text: str) -> None:
    (shown,) = neutralize({text: [text]})
    assert neutralize({text: [text]})[shown] == [shown]
    assert not set(shown) & set("<>[]`|\n\x1b\u202e")
    assert not shown.startswith("=")
    assert neutralize(shown) == shown


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE[:2])
def test_pages_of_a_hostile_record_hold_its_texts_as_text(text: str, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "received"
    shutil.copytree(made, folder)
    raw = json.dumps(text)[1:-1]
    for name in ("summary.json", "rounds.jsonl", "ledger.jsonl"):
        (folder / name).write_text((folder / name).read_text().replace('"site-1"', f'"{raw}"'))
    (folder / "withdrawn.json").write_text(json.dumps({"subjects": [], "sites": [text], "note": text, "id": None}))
    (folder / "code" / f"{text}.py").touch()
    run = Run.load(folder, trust_code=True)
    run.write_card()
    for command in ("report", "evidence"):
        options = ["--plain"] if command == "report" else ["--out", str(folder / "dpia.md")]
        result = CliRunner().invoke(app, ["--trust-code", command, str(folder), *options])
        assert result.exit_code == 0, result.output
        assert text not in result.output
    assert (folder / "dpia.md").read_text().count(neutralize(text)) > 4
    for file in [file for file in folder.rglob("*") if file.suffix in (".md", ".html", ".csv")]:
        assert text not in file.read_text(), file


@pytest.mark.parametrize(
    "name",
    ["model_card.md", "dpia.md", "report", "report/report.html", "evaluations/x.json.part", "saved", ".lock",
     "config.yaml", "withdrawn.json"],
)  # fmt: skip
def test_link_out_of_a_received_folder_is_refused_at_each_door(
    name: str, made: Path, received: Path, tmp_path: Path
) -> None:
    """Whoever made the folder would decide which file of this machine a report shows, or a command overwrites."""
    (tmp_path / "mine").write_text("mine: a secret")
    link = received / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path if name in ("report", "saved") else tmp_path / "mine")
    own = Study.load(made.parent / "s.yaml", ["method.rounds=2"])
    for open_folder in (
        lambda: RunResult.read(received),
        lambda: load_study(received, trust_code=True),
        lambda: next(follow_folder(received)),
        lambda: RunFolder(received, replaces=True).claim().__enter__(),
        lambda: RunFolder.continue_run(received, own, tmp_path / "longer"),
    ):
        with pytest.raises(ConfigError, match=f"{link}: leads out of the result folder"):
            open_folder()
    for command in (["report", "--plain"], ["evidence"], ["save"], ["evaluate"], ["watch"]):
        result = CliRunner().invoke(app, ["--trust-code", command[0], str(received), *command[1:]])
        assert result.exit_code == 2
    assert (tmp_path / "mine").read_text() == "mine: a secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "received"]


def test_pipe_is_refused_and_links_within_the_folder_are_not(received: Path) -> None:
    (received / "again.json").symlink_to("summary.json")
    (received / "loop").symlink_to("loop")
    (received / "poc").mkdir()
    (received / "poc" / "of_flare").symlink_to("/")
    check_links(received)
    assert RunResult.read(received).summary["rounds"] == 1
    (received / "evaluations").mkdir()
    os.mkfifo(received / "evaluations" / "pipe.json")
    with pytest.raises(ConfigError, match=r"pipe\.json: is no file"):
        RunResult.read(received)


def test_aliases_in_the_settings_of_a_received_run_are_refused(received: Path) -> None:
    """Nine lines of ten aliases each stand for a billion values."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    (received / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="aliases such as"):
        _ = RunResult.read(received).config


def test_progress_of_a_received_run_cannot_move_the_cursor(received: Path) -> None:
    line = {"site": "\x1b]0;title\x07[bold]A", "round": 3, "step": 7, "steps": 20, "epochs": 1}
    for name, text in {"a": json.dumps(line), "b": "[" * 100_000, "c": "7"}.items():
        (received / "progress" / name).mkdir(parents=True)
        (received / "progress" / name / "flare_sparse_progress.json").write_text(text)
    assert find_training(received) == [" )0;title (bold)A: round 3, step 7 of 20"]


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [("report", "contributions", {"site-1": 3}), ("report", "examples", None), ("evidence", "examples", None)],
)
def test_record_of_other_types_is_named_damaged(command: str, key: str, value: object, received: Path) -> None:
    summary = json.loads((received / "summary.json").read_text())
    (received / "summary.json").write_text(json.dumps({**summary, key: value}))
    options = ["--plain"] if command == "report" else []
    result = CliRunner().invoke(app, ["--trust-code", command, str(received), *options], env={"COLUMNS": "300"})
    assert (result.exit_code, "the folder is damaged or was changed" in result.output) == (2, True), result.output
