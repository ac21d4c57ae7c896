"""Damaged result folders: every command that reads one ends with a result or an error that has a code."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from flare_sparse.cli import app, watch
from flare_sparse.results.runs.continuation import FINAL

CHECKPOINT = f"{FINAL}/*/server/*"
FILES = (
    "summary.json",
    "rounds.jsonl",
    "ledger.jsonl",
    "config.yaml",
    "model.safetensors",
    "evaluations/t.json",
    "withdrawn.json",
    "flare_sparse_egress/A/egress.jsonl",
    "flare_sparse_egress/A/head.txt",
    f"{CHECKPOINT}/manifest.json",
    f"{CHECKPOINT}/tensors.safetensors",
)


def change_json(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of each line of a file that is JSON, or of the whole file; another one stays as it is."""
    text = file.read_text(errors="replace")
    for parts in (text.splitlines(), [text]):
        with suppress(ValueError):
            file.write_text("".join(json.dumps(change(json.loads(part))) + "\n" for part in parts))
            return


def spoil_numbers(value: Any) -> Any:
    """Return a value with texts in place of its numbers."""
    if isinstance(value, dict):
        return {key: spoil_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [spoil_numbers(item) for item in value]
    return "x" if isinstance(value, int | float) else value


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "gone": lambda file: file.unlink(),
    "noise": lambda file: file.write_bytes(random.Random(1).randbytes(300)),
    "zeros": lambda file: file.write_bytes(bytes(300)),
    "UTF-16": lambda file: file.write_bytes(file.read_bytes().decode(errors="replace").encode("utf-16")),
    "deep": lambda file: file.write_bytes(b"[" * 100_000),
    "a list": lambda file: file.write_text("[]\n"),
    "a text": lambda file: file.write_text('"x"\n'),
    "null": lambda file: file.write_text("null\n"),
    "no keys": lambda file: file.write_text("{}\n"),
    "texts for numbers": lambda file: change_json(file, spoil_numbers),
    "half of the keys": lambda file: change_json(file, lambda value: dict(list(value.items())[1::2])),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a loop": lambda file: (file.unlink(), file.symlink_to(file.name)),
    "twice": lambda file: file.write_bytes(file.read_bytes() * 2),
    "one bit": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
}
COMMANDS: dict[str, Callable[[Path, Path], list[Any]]] = {
    "report": lambda run, made: ["report", run, "--plain", "--json"],
    "evaluate": lambda run, made: ["evaluate", run, "--data", made / "t.csv"],
    "matrix": lambda run, made: ["evaluate", run],
    "save": lambda run, made: ["save", run, "--format", "sparse"],
    "dpia": lambda run, made: ["evidence", run, "--out", run / "dpia.md"],
    "withdraw": lambda run, made: ["withdraw", run, "B", "--dry-run"],
    "watch": lambda run, made: ["watch", run, "--json"],
    "page": lambda run, made: ["watch", run, "--page", run / "page.html"],
    "continue": lambda run, made: [
        "run", made / "study.yaml", "--env", "local", "--set", "method.rounds=2", "--start", run,
        "--out", run / "more",
    ],
    "resume": lambda run, made: ["run", made / "study.yaml", "--env", "local", "--start", "last", "--out", run],
    "egress": lambda run, made: ["site", "log", run],
}  # fmt: skip


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, a study of it and its run of one round with an evaluation, none of which a test changes."""
    folder = tmp_path_factory.mktemp("made")
    rows = "".join(f"s{i},{'AB'[i % 2]},{i * 7 % 13},{i * 3 % 17}\n" for i in range(40))
    (folder / "t.csv").write_text(f"id,hospital,a,dose\n{rows}")
    task = {"name": "table", "kind": "regression", "target": "dose", "features": ["a"], "id": "id"}
    data = {"path": str(folder / "t.csv"), "partition": {"kind": "natural", "column": "hospital"}}
    study = {"name": "study", "method": {"name": "fedavg", "rounds": 1}, "task": task, "simulator": {"data": data}}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    for words in (
        ("run", folder / "study.yaml", "--env", "local", "--out", folder / "run"),
        ("evaluate", folder / "run", "--data", folder / "t.csv"),
    ):
        assert call(*words).exit_code == 0
    nobody = {"subjects": [], "sites": [], "note": "", "id": None}
    (folder / "run" / "withdrawn.json").write_text(json.dumps(nobody))
    return folder


@pytest.mark.slow(rows=11)
@pytest.mark.parametrize("number", range(len(FILES)), ids=FILES)
def test_command_on_a_damaged_folder_ends_with_a_result_or_a_code(
    number: int, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file with each command; the damages alternate, so that each file and each command meets most of them."""
    # A run without its summary is one that goes on: the first look at it is the last.
    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=interrupt))
    for other, (command, build) in enumerate(COMMANDS.items()):
        damage = list(DAMAGES)[(number * 4 + other) % len(DAMAGES)]
        folder = tmp_path / command
        shutil.copytree(made / "run", folder)
        (file,) = folder.glob(FILES[number])
        DAMAGES[damage](file)
        done = call(*build(folder, made))
        assert isinstance(done.exception, SystemExit | None), (
            f"{FILES[number]}, {damage}, {command}: {done.exception!r}"
        )
        assert done.exit_code == 0 or "E_" in done.output, f"{FILES[number]}, {damage}, {command}: {done.output}"
