"""The attacks of ``flare-sparse audit`` as sentences and as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..runs.results import RunResult
from .tables import ReportTable, format_interval, format_metric

KNOWLEDGE = {
    "loss threshold": "An outsider with the final model alone, who looks at its errors",
    "rmia": "An outsider with the final model and similar models of their own (RMIA)",
    "gradient classifier": "A site that trains a classifier on the gradients of its own subjects",
}
"""Every attack, as the subject of a sentence."""
COLUMNS = ("attacker", "attack", "AUC [95 %]", "TPR at 1 % FPR", "result")
NOTE = (
    "flare-sparse audit. AUC: how often the attacker ranks a training subject above another one, 0.5 by guessing; in "
    "brackets the 95 % bootstrap interval. TPR at 1 % FPR: share of the training subjects found where 1 % of the "
    "others are accused wrongly."
)


def describe_attacks(run: RunResult) -> list[str]:
    """Return one sentence per attack on a run; empty without an audit."""
    audit = run.audit
    sentences = [describe_attack(attack) for attack in audit.get("attacks", [])]
    return sentences + [f"Not made: {entry['attack']}: {entry['reason']}." for entry in audit.get("skipped", [])]


def describe_attack(attack: Mapping[str, Any]) -> str:
    """Return what an attack achieved, as a sentence."""
    _, name, auc, *_ = format_attack(attack)
    found = f"{100 * attack['tpr_at_1_percent_fpr']:.1f} % of them at 1 % false alarms"
    also = f"; {describe_result(attack)}" if "pairs" in attack else ""
    return f"{KNOWLEDGE[name]}, tells training subjects from others: AUC {auc}, {found}{also}."


def describe_result(attack: Mapping[str, Any]) -> str:
    """Return how often the attacker calls a subject correctly."""
    if "pairs" in attack:
        accuracy = f"mean accuracy {attack['balanced_accuracy']:.3f}"
        return f"{attack['successful']} of {attack['pairs']} attacks between sites succeed, {accuracy}"
    return f"balanced accuracy {attack['balanced_accuracy']:.3f}"


def format_attack(attack: Mapping[str, Any]) -> list[str]:
    """Return the cells of an attack, see ``COLUMNS``."""
    auc, found = format_interval(attack["auc"], attack["interval"]), format_metric(attack["tpr_at_1_percent_fpr"])
    return [str(attack["attacker"]), str(attack["attack"]), auc, found, describe_result(attack)]


def build_attacks(runs: Sequence[RunResult]) -> ReportTable | None:
    """Return the attacks on all runs; None without an audit."""
    rows = [[run.label, *format_attack(attack)] for run in runs for attack in run.audit.get("attacks", [])]
    return ReportTable("Attacks", ["run", *COLUMNS], rows, NOTE) if rows else None
