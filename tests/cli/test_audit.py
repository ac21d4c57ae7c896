"""``flare-sparse audit``: attacks on finished runs, one that overfits and one that cannot."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from scripts import BENCHMARKS, load_script
from typer.testing import CliRunner, Result

from flare_sparse.api.local import run as run_in_process
from flare_sparse.cli import app
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

COLUMNS = 600
LEAKY = ["method={name: fedavg, rounds: 2, training: {epochs: 30, batch_size: 64, optimizer: adam, lr: 2e-2}}"]
IDLE = ["method={name: fedavg, rounds: 1, training: {epochs: 1, lr: 1e-9}}"]


def write_noise(path: Path, count: int) -> None:
    """Write stays whose outcome is a coin toss: what a model knows of it, it knows by heart."""
    draw = random.Random(path.stem)
    head = ",".join(f"med_{i}" for i in range(COLUMNS))
    rows = [
        f"{path.stem}-{i},{i % 2}," + ",".join(str(draw.randint(0, 1)) for _ in range(COLUMNS)) for i in range(count)
    ]
    path.write_text("\n".join([f"stay,died,{head}", *rows]) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that learned its training examples by heart and one that learned nothing."""
    folder = tmp_path_factory.mktemp("audit")
    for name in ("site-1", "site-2", "site-3"):
        write_noise(folder / f"{name}.csv", 80)
    file = folder / "job.yaml"
    file.write_text(
        "name: stays\nmethod: {name: fedavg}\n"
        f"task: {{name: table, kind: binary, target: died, id: stay, features: ['med_{{0..{COLUMNS - 1}}}'],"
        " scaling: none, split: {test: 0.4}, model: {name: mlp, hidden: [32]}}\n"
        "simulator: {sites: 3, data: {path: '{site}.csv'}}\n"
    )
    for name, settings in (("leaky", LEAKY), ("idle", IDLE)):
        run_in_process(Study.load(file, settings), RunFolder(folder / name))
    return folder


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)], env={"COLUMNS": "200"})


def list_attacks(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {attack["attack"]: attack for attack in record["attacks"]}


@pytest.mark.slow
def test_run_that_learned_by_heart_is_found_out_by_every_attack(runs: Path) -> None:
    result = call(runs / "leaky", "--references", 2, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads((runs / "leaky" / "audit.json").read_text())
    assert json.loads(result.stdout) == record
    assert (record["members"], record["non_members"]) == (144, 96)
    attacks = list_attacks(record)
    assert list(attacks) == ["loss threshold", "rmia", "gradient classifier"]
    for name, attack in attacks.items():
        assert attack["auc"] > 0.6, name
        low, high = attack["intervals"]["auc"]
        assert 0.5 < low < attack["auc"] < high <= 1
    assert attacks["gradient classifier"]["pairs"] == attacks["gradient classifier"]["above_half"] == 6
    assert attacks["gradient classifier"]["successful"] > 0
    assert record["skipped"] == []
    card = (runs / "leaky" / "model_card.md").read_text()
    assert "## Attacks" in card


@pytest.mark.slow
def test_run_that_learned_nothing_withstands(runs: Path) -> None:
    result = call(runs / "idle", "--references", 2)
    assert result.exit_code == 0, result.output
    record = json.loads((runs / "idle" / "audit.json").read_text())
    attacks = list_attacks(record)
    for name in ("loss threshold", "rmia"):
        low, high = attacks[name]["intervals"]["auc"]
        assert low < 0.5 < high, name
    # Two attacks by one site share its classifier, so one unlucky site may seem to succeed twice.
    assert attacks["gradient classifier"]["successful"] <= 2
    assert record["skipped"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("privacy", "claim", "is_wrong"), [("epsilon: 2", 2, False), ("noise_multiplier: 0.0001", 0.1, True)]
)
def test_canaries_believe_an_honest_budget_and_not_a_false_one(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, privacy: str, claim: float, is_wrong: bool
) -> None:
    file = runs / "job.yaml"
    learning = "{epochs: 30, batch_size: 64, optimizer: adam, lr: 2e-2}"
    settings = [f"method={{name: fedavg, rounds: 1, training: {learning}}}", f"privacy={{{privacy}, delta: 1e-5}}"]
    run_in_process(Study.load(file, settings), RunFolder(tmp_path / "run"))
    monkeypatch.syspath_prepend(BENCHMARKS / "experiments")
    canaries = load_script("experiments/canaries").attack_by_canaries(tmp_path / "run", 200, claim)
    assert (canaries["epsilon_lower_bound"] > claim) == canaries["contradicts_claim"] == is_wrong


@pytest.mark.slow
def test_interrupted_audit_trains_no_model_twice(runs: Path) -> None:
    arguments = (runs / "idle", "--references", 1)
    first, second = call(*arguments), call(*arguments)
    assert "training" not in second.stderr
    assert first.exit_code == second.exit_code == 0
    # A file of another model is not used.
    file = runs / "idle" / "audit" / "reference-1.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "identity": "another"}))
    assert "reference model 1 of 1: training" in call(*arguments).stderr


@pytest.mark.slow
def test_report_lists_the_attacks(runs: Path) -> None:
    done = call(runs / "idle", "--references", 0)
    assert "rmia: not made: RMIA needs reference models; references is 0" in done.output
    result = CliRunner().invoke(app, ["report", str(runs / "idle"), "--plain"])
    assert result.exit_code == 0, result.output
    page = (runs / "idle" / "report" / "report.html").read_text()
    assert "<h2>Attacks</h2>" in page
    assert "<td>gradient classifier</td>" in page
    attack = list_attacks(json.loads((runs / "idle" / "audit.json").read_text()))["loss threshold"]
    low, high = attack["intervals"]["auc"]
    assert f"<td>{attack['auc']:.3f} [{low:.3f}, {high:.3f}]</td>" in page
