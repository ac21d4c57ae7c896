"""What the user of ``flare-sparse run`` reads: interruptions, full disks, folders that hold a run, exit codes."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner, Result

from flare_sparse.api import deployment
from flare_sparse.cli import app
from flare_sparse.core.checkpoint.store import Store
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task

EVENTS: dict[str, Any] = {}
"""What ``CountTask`` does when a site trains for the first time in a round, by number of the call of ``loss``."""


class CountTask(Task):
    """Predict the sum of two numbers; ``EVENTS`` may interrupt the training."""

    metric = Metric("mae", "", "min")

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def load(self, data: SiteData, seed: int) -> Examples:
        x = torch.rand(10, 2, generator=torch.Generator().manual_seed(seed))
        return Examples(TensorDataset(x[:8], x[:8].sum(1)), TensorDataset(x[8:], x[8:].sum(1)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        EVENTS["calls"] = EVENTS.get("calls", 0) + 1
        if EVENTS["calls"] == EVENTS.get("at"):
            EVENTS["do"]()
        return nn.functional.l1_loss(model(batch[0]).squeeze(1), batch[1]) * EVENTS.get("factor", 1)

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]).squeeze(1), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mae": float((predictions - targets).abs().mean())}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of two sites and three rounds, each of two calls of ``loss``; the current folder is empty."""
    monkeypatch.setitem(TASKS, "count", CountTask)
    EVENTS.clear()
    for site in ("site-1", "site-2"):
        (tmp_path / site).mkdir()
    monkeypatch.chdir(tmp_path)
    file = Path("count.yaml")
    file.write_text(
        "name: count\nmethod: {name: fedavg, rounds: 3, training: {lr: 0.01, batch_size: 8}}\ntask: {name: count}\n"
        "simulator: {sites: 2, data: {path: '{site}'}}\n"
    )
    return file


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def run(config: Path, *options: str) -> Result:
    return call("run", config, "--env", "local", *options)


def follow(line: str) -> Result:
    """Type the command at the end of a line that the terminal shows."""
    words = shlex.split(line[line.index("flare-sparse run") :])
    return call(*words[1:])


def find_line(result: Result, start: str) -> str:
    (line,) = [line for line in result.output.splitlines() if line.startswith(start)]
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "cause", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)]
)
def test_interrupted_run_says_what_is_safe_and_the_command_that_continues_it(
    config: Path, number: int, cause: str, code: int
) -> None:
    whole = run(config, "--out", "whole")
    assert whole.exit_code == 0, whole.output
    EVENTS.update(calls=0, at=5, do=lambda: os.kill(os.getpid(), number))
    stopped = run(config, "--set", "seed=0", "--set", "method.training.lr=0.01", "--out", "a folder")
    assert stopped.exit_code == code
    lines = stopped.output.splitlines()
    options = "--env local --set seed=0 --set method.training.lr=0.01 --out 'a folder'"
    assert lines[2:] == [
        f"stopped by {cause}; the processes of the run are ended",
        "safe: round 2 is committed in a folder/checkpoints",
        f"to continue: flare-sparse run count.yaml {options} --start last",
    ]
    EVENTS.clear()
    resumed = follow(lines[-1])
    assert resumed.exit_code == 0, resumed.output
    digests = {json.loads((Path(out) / "summary.json").read_text())["model_sha256"] for out in ("whole", "a folder")}
    assert len(digests) == 1
    assert EVENTS["calls"] == 2, "only the third round is trained again"


def test_run_interrupted_before_its_first_commit_is_started_again(config: Path) -> None:
    EVENTS.update(at=1, do=lambda: os.kill(os.getpid(), signal.SIGINT))
    stopped = run(config)
    assert stopped.exit_code == 130
    assert "safe: no round was committed yet" in stopped.output
    assert find_line(stopped, "to continue").endswith("run count.yaml --env local --out runs/count-local")
    EVENTS.clear()
    assert follow(find_line(stopped, "to continue")).exit_code == 0


def test_interrupted_run_is_not_started_again_unasked(config: Path) -> None:
    EVENTS.update(at=5, do=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run(config).exit_code == 130
    again = run(config)
    assert again.exit_code == 2
    assert "--out runs/count-local: holds an interrupted run. Continue it from its last committed round" in again.output
    assert find_line(again, "or start again").endswith("--out runs/count-local --start new")
    assert follow(find_line(again, "or start again")).exit_code == 0


def test_finished_run_is_not_overwritten_unasked(config: Path) -> None:
    assert run(config, "--out", "out").exit_code == 0
    before = (Path("out") / "model.safetensors").read_bytes()
    again = run(config, "--out", "out", "--set", "seed=9")
    assert again.exit_code == 2
    assert "holds a finished run, which would be lost" in again.output
    assert (Path("out") / "model.safetensors").read_bytes() == before
    replaced = follow(find_line(again, "--out out"))
    assert replaced.exit_code == 0, replaced.output
    assert json.loads((Path("out") / "summary.json").read_text())["seed"] == 9
    assert (Path("out") / "model.safetensors").read_bytes() != before


def test_command_without_out_can_be_repeated(config: Path) -> None:
    for folder in ("runs/count-local", "runs/count-local-2", "runs/count-local-3"):
        result = run(config)
        assert result.exit_code == 0, result.output
        assert f"model:  {Path(folder).resolve()}/model.safetensors" in result.output
    assert "runs/count-local holds a finished run; this one is written to runs/count-local-3" in result.output


def test_resume_without_out_continues_the_newest_folder(config: Path) -> None:
    assert run(config).exit_code == 0
    EVENTS.update(calls=0, at=5, do=lambda: os.kill(os.getpid(), signal.SIGINT))
    stopped = run(config)
    assert find_line(stopped, "to continue").endswith("--out runs/count-local-2 --start last")
    EVENTS.clear()
    assert run(config, "--start", "last").exit_code == 0
    assert Path("runs/count-local-2/summary.json").is_file()


def test_interrupted_replacement_leaves_nothing_of_the_run_before(config: Path) -> None:
    assert run(config, "--out", "out").exit_code == 0
    # An evaluation is of the old model, a report of an error of a site that may work now.
    for name in ("evaluations/cohort.json", "site_errors/site-1.txt"):
        (Path("out") / name).parent.mkdir()
        (Path("out") / name).write_text("{}")
    EVENTS.update(calls=0, at=3, do=lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run(config, "--out", "out", "--start", "new").exit_code == 130
    left = {path.name for path in Path("out").iterdir()}
    old = {"summary.json", "model.safetensors", "model_card.md", "evaluations", "site_errors", "final_checkpoints"}
    assert not left & old


@pytest.mark.parametrize(
    "options",
    [
        ("--set", "method.sparsity=0.9"),
        ("--set", "simulator={sites: 2, data: {path: nowhere, partition: {kind: iid}}}"),
        ("--env", "sim", "--set", "deployment.track=wandb"),
        ("--env", "prod"),
        ("--env", "prod", "--kit", "nowhere"),
        ("--env", "nowhere"),
    ],
)
def test_what_a_refused_run_was_to_replace_is_still_there(
    config: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(config, "--out", "out").exit_code == 0
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    # No extra is installed.
    monkeypatch.setattr(deployment, "find_spec", lambda _name: None)
    refused = run(config, "--out", "out", "--start", "new", *options)
    assert refused.exit_code in (1, 2), refused.output
    after = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert before.items() <= after.items(), refused.output


def stop_after_a_poisoned_round(config: Path) -> None:
    """Run in ``out`` until the third round; the updates of the second one are wrong."""

    def poison() -> None:
        EVENTS.update(factor=-1, at=5, do=lambda: os.kill(os.getpid(), signal.SIGINT))

    EVENTS.update(calls=0, at=3, do=poison)
    assert run(config, "--out", "out").exit_code == 130
    EVENTS.clear()


def read_digest(out: str) -> str:
    return str(json.loads((Path(out) / "summary.json").read_text())["model_sha256"])


def test_commit_set_aside_is_repeated_as_if_it_had_never_been_committed(config: Path) -> None:
    assert run(config, "--out", "whole").exit_code == 0
    stop_after_a_poisoned_round(config)
    shutil.copytree("out", "poisoned")
    assert run(config, "--out", "poisoned", "--start", "last").exit_code == 0
    assert read_digest("poisoned") != read_digest("whole")
    EVENTS.clear()
    newest = next(Path("out").glob("checkpoints/*/server/00000002"))
    newest.rename(newest.with_name("stepped-back-00000002"))
    resumed = run(config, "--out", "out", "--start", "last")
    assert resumed.exit_code == 0, resumed.output
    assert EVENTS["calls"] == 4, "rounds 2 and 3 are trained"
    assert read_digest("out") == read_digest("whole")
    event = "the run steps back by one commit: checkpoint 00000002 is set aside as stepped-back-00000002"
    texts = [line.split("  ")[0] for line in resumed.output.splitlines()]
    assert texts[texts.index("round 1/3") :][:4] == ["round 1/3", f"server: {event}", "round 2/3", "round 3/3"]
    summary = json.loads((Path("out") / "summary.json").read_text())
    assert summary["events"] == [{"round": 2, "site": "server", "event": "stepped_back", "detail": event}]
    rounds = [json.loads(line)["round"] for line in (Path("out") / "rounds.jsonl").read_text().splitlines()]
    assert rounds == [1, 2, 3, 4]


def test_start_that_is_none_is_refused(config: Path) -> None:
    result = run(config, "--start", "lest")
    assert result.exit_code == 2
    assert "expected last, new, or the result folder" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("count.yaml", "--out count.yaml: this is a file; choose a folder"),
        ("count.yaml/below", "--out count.yaml/below: cannot be written (Not a directory); choose another folder"),
        ("/proc/out", "--out /proc/out: cannot be written (No such file or directory); choose another folder"),
    ],
)
def test_folder_that_cannot_be_written_is_refused_before_anything_starts(config: Path, out: str, message: str) -> None:
    result = run(config, "--out", out)
    assert result.exit_code == 2
    assert message in result.output
    assert not EVENTS


def test_full_disk_is_named_before_anything_starts(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    result = run(config, "--out", "out")
    assert result.exit_code == 1
    assert "E_DISK" in result.output
    assert "is full: 4,096 bytes free for out. Free some space, or choose another --out" in result.output
    assert not EVENTS


def test_disk_that_fills_up_is_named_with_the_command_that_continues(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, saved = Store.save, []

    def fill_up(store: Store, number: int, content: Any, also_keep: Any = ()) -> None:
        saved.append(number)
        # A full disk stays full: the checkpoint of site-2 in round 3 fails, and then that of the server.
        if len(saved) >= 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(store, number, content, also_keep)

    monkeypatch.setattr(Store, "save", fill_up)
    result = run(config, "--out", "out")
    assert result.exit_code == 1
    assert "error E_DISK" in result.output
    assert "safe: round 2 is committed in out/checkpoints" in result.output
    monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--start", "new"), ("--start", "last")])
def test_second_command_does_not_write_to_a_folder_in_use(config: Path, options: tuple[str, ...]) -> None:
    seen = []
    EVENTS.update(calls=0, at=5, do=lambda: seen.append(run(config, "--out", "out", *options)))
    first = run(config, "--out", "out")
    assert first.exit_code == 0, first.output
    assert seen[0].exit_code == 2
    assert "--out out: another flare-sparse command is writing to this folder" in seen[0].output
    lines = [json.loads(line) for line in Path("out/rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert run(config, "--out", "out", "--start", "new").exit_code == 0, "the lock ends with the command"


def test_json_is_a_line_for_each_round_and_one_of_the_run(config: Path) -> None:
    *rounds, last = map(json.loads, run(config, "--out", "out", "--json").stdout.splitlines())
    assert rounds == [json.loads(line) for line in Path("out/rounds.jsonl").read_text().splitlines()]
    assert last == {"folder": str(Path("out").resolve()), **json.loads(Path("out/summary.json").read_text())}


def test_run_goes_on_when_nobody_reads_its_lines(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as ended:
            app(["run", str(config), "--env", "local", "--out", "out"])
    assert ended.value.code == 0
    assert "standard output took no more lines" in capfd.readouterr().err
    assert len(Path("out/rounds.jsonl").read_text().splitlines()) == 4


START = """
import os, signal, sys
class Hook:
    def find_spec(self, name, *_):
        if name == "typer":
            {event}
sys.meta_path.insert(0, Hook())
sys.argv[1:] = ["run", "count.yaml", "--env", "local", "--out", "a folder"]
from flare_sparse.__main__ import main
main()
"""
"""The command line, with an event during its imports."""


@pytest.mark.parametrize(
    ("event", "code", "happened"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "stopped by Ctrl-C; the run was not started yet"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "stopped by SIGTERM; the run was not started yet"),
        ("raise MemoryError", 1, "memory ran out: MemoryError"),
        (
            "raise ImportError('libtorch.so: failed to map segment from shared object')",
            1,
            "memory ran out: libtorch.so: failed to map segment from shared object",
        ),
    ],
)
def test_command_that_stops_during_its_imports_says_what_to_type(event: str, code: int, happened: str) -> None:
    command = [sys.executable, "-c", START.format(event=event)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.splitlines()[-3:] == [
        happened,
        "safe: every round that was committed before",
        "to continue: flare-sparse run count.yaml --env local --out 'a folder'",
    ]


def test_lack_of_memory_is_named_with_the_command_that_continues(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(CountTask, "model", fail)
    result = run(config, "--out", "out")
    assert result.exit_code == 1
    assert "error E_MEMORY" in result.output
    assert "safe: no round was committed yet" in result.output
    assert find_line(result, "to continue").endswith("run count.yaml --env local --out out")


def test_error_of_a_site_is_shown_once_with_the_line_of_the_task(config: Path) -> None:
    def fail() -> None:
        EVENTS["at"] = EVENTS["calls"] + 1
        raise KeyError("age")

    EVENTS.update(calls=0, at=1, do=fail)
    result = run(config)
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if line.startswith("site site-1 failed")]
    (line,) = lines
    assert "KeyError: 'age' at " in line
    assert "test_run.py:" in line
    assert line.endswith("site_errors/site-1.txt")


def test_exit_code_tells_that_a_site_contributed_to_no_round(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        "site-1": {"asked": 3, "contributed": 3, "missed": {}},
        "site-2": {"asked": 3, "contributed": 0, "missed": {"E_DATA": 3}},
    }

    def run_partly(_env: str, _study: Any, folder: RunFolder, *_: Any) -> Any:
        summary = {
            "name": "count", "method": "fedavg", "note": "", "rounds": 3, "seconds": 1.0, "model_sha256": "0" * 64,
            "metric": {"name": "mae", "unit": ""}, "best": {"round": -1}, "sites": ["site-1", "site-2"],
            "final": {"sites": {"site-1": {"mae": 1.0, "test_examples": 2.0}}, "metrics": {"mae": 1.0}},
            "traffic": {way: dict.fromkeys(("payload_bytes", "dense_bytes", "floor_bytes", "messages"), 1)
                        for way in ("down", "up")},
            "contributions": parts, "events": [],
        }  # fmt: skip
        for name, text in (("summary.json", json.dumps(summary)), ("rounds.jsonl", ""), ("ledger.jsonl", "")):
            (folder.path / name).write_text(text)
        return SimpleNamespace(summary=summary)

    monkeypatch.setattr("flare_sparse.api.start.launch", run_partly)
    result = run(config)
    assert result.exit_code == 3
    lines = result.output.splitlines()
    assert lines[-2] == "contributed: site-1 3/3, site-2 0/3 (3 x E_DATA)"
    assert lines[-1].startswith(
        "warning: the model was trained without site-2: no contribution in any round (exit code 3)"
    )
    parts["site-2"] = {"asked": 3, "contributed": 1, "missed": {"timed_out": 2}}
    assert run(config, "--start", "new").exit_code == 0


def test_help_of_run_documents_the_exit_codes() -> None:
    text = " ".join(call("run", "--help").output.split())
    assert "3: finished, but a site contributed to no round" in text
    assert "130: stopped by Ctrl-C" in text
