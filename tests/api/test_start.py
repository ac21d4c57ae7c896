"""The Python API: a run, what it can be asked, a sweep, and what is refused."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flare_sparse as fs
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.observer import SILENT

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
CONFIG = "app_configs/neurosfl_brain_age.yaml"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small configuration under the name of the one that the page shows, in the working folder."""
    draw = random.Random(0)
    rows = [(draw.gauss(0, 1), draw.gauss(0, 1), "AB"[i % 2]) for i in range(60)]
    (tmp_path / "all.csv").write_text("a,b,site,y\n" + "".join(f"{a},{b},{site},{a - b}\n" for a, b, site in rows))
    (tmp_path / "app_configs").mkdir()
    (tmp_path / CONFIG).write_text(
        "name: small\nseed: 4\nmethod: {name: neurosfl, sparsity: 0.5, rounds: 3, training: {lr: 0.01}}\n"
        "task: {name: table, target: y, features: [a, b], kind: regression, model: {name: mlp, hidden: [20]}}\n"
        "simulator: {data: {path: ../all.csv, partition: {kind: natural}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    return CONFIG


@pytest.mark.slow
def test_code_of_the_page_runs(job: str) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert isinstance(names["network"], nn.Module)
    assert not names["network"].training
    assert Path("runs/p90/report/report.html") in names["files"]
    assert set(names["record"]["results"]) == {"A", "B"}
    assert names["result"].winner.is_file()


@pytest.mark.slow
def test_runs_in_threads_end_with_the_models_of_runs_one_after_another(job: str) -> None:
    """Dropout, the initial model and the number of threads belong to the process: runs wait for each other."""
    model = {"name": "mlp", "hidden": [20], "dropout": 0.3}

    def run(seed: int, folder: str) -> str:
        # Each with a number of threads of its own, which the others must not change.
        settings = {"seed": seed, "task.model": model, "federation.threads": 1 + seed % 2}
        done = fs.run(job, overrides=settings, out=Path(folder) / str(seed), observer=SILENT)
        return str(done.summary["model_sha256"])

    state = torch.get_rng_state()
    alone = [run(seed, "alone") for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(4), ["together"] * 4)) == alone
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_run_prints_its_rounds_and_equals_the_run_of_the_command(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = fs.run(job, overrides={"method.rounds": 2})
    assert run.path == Path("runs/small-local").resolve()
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "round 0/2", "round 1/2", "round 2/2", "final model"
    ]  # fmt: skip
    command = ["run", job, "--env", "local", "--set", "method.rounds=2", "--out", "by-command"]
    subprocess.run([sys.executable, "-m", "flare_sparse", *command], check=True, capture_output=True)
    assert fs.Run.load("by-command").summary["model_sha256"] == run.summary["model_sha256"]
    assert fs.Run.load("by-command").study.run_id == run.study.run_id


@pytest.mark.slow
def test_interrupted_run_can_be_read_and_resumed(job: str) -> None:
    class Interruption(fs.Observer):
        def see_round(self, line: dict[str, Any]) -> None:
            if line["round"] == 2:
                raise KeyboardInterrupt

    whole = fs.run(job, out="whole", observer=SILENT)
    with pytest.raises(KeyboardInterrupt):
        fs.run(job, out="out", observer=Interruption())
    cut = fs.Run.load("out")
    assert not cut.is_finished
    assert cut.rounds[-1]["round"] == 2
    with pytest.raises(ConfigError, match=r"out: no summary\.json; expected the result folder of a finished"):
        _ = cut.summary
    with pytest.raises(ConfigError, match=r"holds an interrupted run(.|\n)*start=\"last\"\n(.|\n)*start=\"new\""):
        fs.run(job, out="out", observer=SILENT)
    assert (
        fs.run(job, out="out", start="last", observer=SILENT).summary["model_sha256"] == whole.summary["model_sha256"]
    )


def test_evaluation_is_kept_with_the_run_and_not_replaced_unasked(job: str) -> None:
    run = fs.run(job, out="out", observer=SILENT)
    record = run.evaluate("all.csv", resamples=0)
    assert json.loads(Path("out/evaluations/all.json").read_text()) == json.loads(json.dumps(record))
    with pytest.raises(ConfigError, match=r"all\.json: exists already"):
        run.evaluate("all.csv")
    assert run.evaluate("all.csv", resamples=0, overwrite=True) == record


def test_folder_without_a_run_and_unknown_environment_are_refused(job: str) -> None:
    with pytest.raises(ConfigError, match=r"app_configs: no rounds\.jsonl; expected the result folder"):
        fs.Run.load("app_configs")
    with pytest.raises(ConfigError, match=r"env 'simulator': there is no such environment"):
        fs.run(job, "simulator")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--env prod needs --kit"):
        fs.run(job, "prod")
    with pytest.raises(ConfigError, match=r"--kit is for --env prod, not for --env local"):
        fs.run(job, kit=Path("kit"))


def test_import_of_the_package_imports_no_heavy_library() -> None:
    code = "import sys, flare_sparse; print(*{'torch', 'nvflare', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.long
def test_local_run_imports_nothing_of_flare(job: str) -> None:
    code = f"import sys, flare_sparse as fs; fs.run({job!r}, out='out'); print('nvflare' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
