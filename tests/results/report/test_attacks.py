"""Sentences on the attacks of an audit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flare_sparse.cli import app
from flare_sparse.results.report.attacks import describe_attack

FIGURES: dict[str, Any] = {
    "auc": 0.75, "interval": [0.7, 0.8], "tpr_at_1_percent_fpr": 0.125, "balanced_accuracy": 0.6
}  # fmt: skip


def test_membership_attack_is_described_by_auc_and_low_false_alarms() -> None:
    assert describe_attack({**FIGURES, "attack": "loss threshold"}) == (
        "An outsider with the final model alone, who looks at its errors, tells training subjects from others: "
        "AUC 0.750 [0.700, 0.800], 12.5 % of them at 1 % false alarms."
    )


def test_attacks_between_sites_are_counted() -> None:
    text = describe_attack({**FIGURES, "attack": "gradient classifier", "pairs": 56, "successful": 50})
    assert text.endswith("; 50 of 56 attacks between sites succeed, mean accuracy 0.600.")


def test_bound_on_epsilon_stands_beside_the_claim() -> None:
    attack = {
        "attack": "canaries", "canaries": 100, "delta": 1e-5, "epsilon_lower_bound": 2.5, "claimed_epsilon": 1.0,
        "contradicts_claim": True,
    }  # fmt: skip
    assert describe_attack(attack) == (
        "One more run with 100 planted examples shows: epsilon is at least 2.50; claimed 1, which this contradicts "
        "(95 %, delta 1e-05)."
    )


def test_attribution_stands_beside_a_guess() -> None:
    attack = {"attack": "site of a prediction", "accuracy": 0.4, "chance": 0.125}
    assert describe_attack(attack) == ("The site of a prediction is recognised: accuracy 0.400, by guessing 0.125.")


@pytest.mark.long
def test_inverted_messages_of_images_are_in_the_table(finished: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(finished["fedavg"], tmp_path / "run")
    # The phantoms of the first run lie beside it.
    done = CliRunner().invoke(app, ["audit", str(run), "--set", "attackers=server", "--set", "steps=1", "--json"])
    assert done.exit_code == 0, done.output
    attacks = json.loads(done.stdout)["attacks"]
    assert [(a["message"], a["batch_size"]) for a in attacks] == [
        (m, b) for m in ("update", "scores") for b in (1, 2, 4)
    ]
    assert all(a["way"] == "optimisation" and -1 <= a["ssim"] <= 1 for a in attacks)
    done = CliRunner().invoke(app, ["report", str(run), "--plain"])
    assert done.exit_code == 0, done.output
    assert "inversion of scores, 4" in (run / "report" / "report.html").read_text()
