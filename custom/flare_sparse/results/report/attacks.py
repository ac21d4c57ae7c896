"""The attacks of ``flare-sparse audit`` as sentences and as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..runs.results import RunResult
from .tables import ReportTable, format_metric

KNOWLEDGE = {
    "loss threshold": "An outsider with the final model alone, who looks at its errors",
    "rmia": "An outsider with the final model and similar models of their own (RMIA)",
    "gradient classifier": "A site that trains a classifier on the gradients of its own subjects",
}
"""Subject of the sentence on an attack that tells training subjects from others."""
NOTE = (
    "flare-sparse audit. AUC: how often the attacker ranks a training subject above another one, 0.5 by guessing; in "
    "brackets the 95 % bootstrap interval. TPR at 1 % FPR: share of the training subjects found where 1 % of the "
    "others are accused wrongly. Inversion: number of examples behind the message; peak signal-to-noise ratio of the "
    "rebuilt input that is closest to a true one."
)


def describe_attacks(run: RunResult) -> list[str]:
    """Return one sentence per attack on a run; empty without an audit."""
    audit = run.audit
    sentences = [describe_attack(attack) for attack in audit.get("attacks", [])]
    return sentences + [
        f"Not made: {entry['attacker']}, {entry['attack']}: {entry['reason']}." for entry in audit.get("skipped", [])
    ]


def describe_attack(attack: Mapping[str, Any]) -> str:
    """Return what an attack achieved, as a sentence."""
    name, result = str(attack["attack"]), describe_result(attack)
    if name == "canaries":
        confidence = f"95 %, delta {attack['delta']:g}"
        return f"One more run with {attack['canaries']} planted examples shows: {result} ({confidence})."
    if "batch_size" in attack:
        return f"{_describe_message(attack)}: {result}."
    if "chance" in attack:
        return f"The {name} is recognised: {result}."
    figures = f"AUC {_format_auc(attack)}, {_format_share(attack['tpr_at_1_percent_fpr'])} of them at 1 % false alarms"
    also = f"; {result}" if "pairs" in attack else ""
    return f"{KNOWLEDGE.get(name, name)}, tells training subjects from others: {figures}{also}."


def describe_result(attack: Mapping[str, Any]) -> str:
    """Return what is particular to an attack."""
    if "pairs" in attack:
        accuracy = f"mean accuracy {attack['balanced_accuracy']:.3f}"
        return f"{attack['successful']} of {attack['pairs']} attacks between sites succeed, {accuracy}"
    if "epsilon_lower_bound" in attack:
        claim = attack["claimed_epsilon"]
        verdict = "which this contradicts" if attack["contradicts_claim"] else "which this does not contradict"
        beside = "" if claim is None else f"; claimed {claim:g}, {verdict}"
        return f"epsilon is at least {attack['epsilon_lower_bound']:.2f}{beside}"
    if "batch_size" in attack:
        return _describe_inversion(attack)
    if "chance" in attack:
        return f"accuracy {attack['accuracy']:.3f}, by guessing {attack['chance']:.3f}"
    return f"balanced accuracy {attack['balanced_accuracy']:.3f}"


def build_attacks(runs: Sequence[RunResult]) -> ReportTable | None:
    """Return the attacks on all runs; None without an audit."""
    rows = [
        [
            *(run.label, attack["attacker"], _name_attack(attack), _format_auc(attack)),
            *(format_metric(attack["tpr_at_1_percent_fpr"]), describe_result(attack)),
        ]
        for run in runs
        for attack in run.audit.get("attacks", [])
    ]
    columns = ["run", "attacker", "attack", "AUC", "TPR at 1 % FPR", "result"]
    return ReportTable("Attacks", columns, rows, NOTE) if rows else None


def _name_attack(attack: Mapping[str, Any]) -> str:
    return f"{attack['attack']}, {attack['batch_size']}" if "batch_size" in attack else str(attack["attack"])


def _describe_message(attack: Mapping[str, Any]) -> str:
    examples = f"{attack['batch_size']} examples" if attack["batch_size"] > 1 else "one example"
    policy = f" under the policy {attack['policy']}" if attack["policy"] else ""
    return f"A server that inverts {attack['message']} of {examples}{policy}"


def _describe_inversion(attack: Mapping[str, Any]) -> str:
    if attack["psnr"] is None:
        return f"rebuilds nothing: {' '.join(attack['notes'])}"
    ssim = "" if attack["ssim"] is None else f", SSIM {attack['ssim']:.2f}"
    guess = f"the mean of other examples {attack['psnr_of_mean']:.1f} dB"
    return f"best input {attack['psnr']:.1f} dB{ssim}, by {attack['way']}; {guess}"


def _format_auc(attack: Mapping[str, Any]) -> str:
    bounds = attack["interval"]
    return format_metric(attack["auc"]) + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def _format_share(value: float) -> str:
    return f"{100 * value:.1f} %"
