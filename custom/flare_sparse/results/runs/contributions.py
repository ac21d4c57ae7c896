"""Each site's part in a run, as terminal, model card and report show it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Contributions:
    """A site's part in the rounds of a run, evaluations aside.

    Attributes:
        asked: number of rounds in which the site was asked.
        contributed: number of rounds in which its update counted.
        missed: number of the other rounds, by reason; it was not asked in those where it was excluded or quarantined.
    """

    asked: int = 0
    contributed: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)

    @property
    def expected(self) -> int:
        """Number of rounds that the site was to contribute to; 0 for a site that the method only evaluates."""
        return self.contributed + sum(self.missed.values())

    @property
    def is_idle(self) -> bool:
        """Whether the site was to contribute and did so in no round."""
        return self.expected > 0 and not self.contributed


def describe_missed(part: Contributions) -> str:
    """Return why a site did not contribute.

    >>> describe_missed(Contributions(4, 1, {"timed_out": 1, "E_DATA": 2}))
    '2 x E_DATA, 1 x timed out'
    """
    words = {reason: reason if reason.startswith("E_") else reason.replace("_", " ") for reason in part.missed}
    return ", ".join(f"{count} x {words[reason]}" for reason, count in sorted(part.missed.items()))


def read_contributions(summary: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> dict[str, Contributions]:
    """Return the part of each site in a run, from its summary, or from its rounds where the summary does not tell.

    Args:
        summary: content of ``summary.json``.
        rounds: lines of ``rounds.jsonl``; the last one is enough for a summary with counts.
    """
    recorded = summary.get("contributions")
    if recorded is not None:
        parts = {site: Contributions(p["asked"], p["contributed"], p.get("missed", {})) for site, p in recorded.items()}
        # A method whose sites train in answer to the final request has no rounds before it.
        if any(part.expected for part in parts.values()):
            return dict(sorted(parts.items()))
    lines = rounds[:-1] or rounds
    reasons: dict[str, list[str]] = {site: [] for site in summary["sites"]}
    contributed = Counter(site for line in lines for site in line["sites_contributed"])
    asked = Counter(site for line in lines for site in line["sites_asked"])
    for line in lines:
        missed = {**line["rejected"], **dict.fromkeys(line["timed_out"], "timed_out")}
        missed |= {**dict.fromkeys(line["abstained"], "abstained"), **line.get("excluded", {})}
        missed |= dict.fromkeys(line.get("quarantined", []), "quarantined")
        for site, reason in missed.items():
            reasons.setdefault(site, []).append(reason.split(":")[0])
    return {site: Contributions(asked[site], contributed[site], Counter(reasons[site])) for site in sorted(reasons)}
