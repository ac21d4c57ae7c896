"""Sentences on the attacks of an audit."""

from __future__ import annotations

from typing import Any

from flare_sparse.results.report.attacks import describe_attack

FIGURES: dict[str, Any] = {
    "attacker": "outsider", "auc": 0.75, "interval": [0.7, 0.8], "tpr_at_1_percent_fpr": 0.125, "balanced_accuracy": 0.6
}  # fmt: skip


def test_membership_attack_is_described_by_auc_and_low_false_alarms() -> None:
    assert describe_attack({**FIGURES, "attack": "loss threshold"}) == (
        "An outsider with the final model alone, who looks at its errors, tells training subjects from others: "
        "AUC 0.750 [0.700, 0.800], 12.5 % of them at 1 % false alarms."
    )


def test_attacks_between_sites_are_counted() -> None:
    text = describe_attack({**FIGURES, "attack": "gradient classifier", "pairs": 56, "successful": 50})
    assert text.endswith("; 50 of 56 attacks between sites succeed, mean accuracy 0.600.")
