"""In how many rooms of the package a feature is mentioned: a stage should need one, and at most three.

The numbers are those reached so far. They may fall and must not grow: who changes a feature has to read all its rooms.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "custom" / "flare_sparse"
FEATURES = {
    # Not the word masked alone, which elsewhere is about the mask of a model.
    "sums": (
        r"SumRules|sum_rules|ServerSums|SiteSums|secure_aggregation|site_sums|is_masked|aggregation.*masked|[.]masked\b",
        2,
    ),
    "statistics of inputs": (
        r"(?<!DataKind\.)\bSTATISTICS\b|statistics_mask|\bcompute_statistics|select_statistics|drop_rests",
        3,
    ),
    # Not torch's quantised modules and tensors.
    "few-bit values": (r'\bsends_differences\b|(?<!"\.)\bquantized\b', 3),
    "transition of the link": (r"ServerLink|SiteLink", 1),
}
"""By feature: the names and words by which code mentions it, and the rooms that do."""


def find_rooms(pattern: str) -> set[str]:
    """Return the rooms that mention a pattern."""
    return {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in PACKAGE.rglob("*.py")
        if re.search(pattern, path.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_is_mentioned_in_no_more_rooms_than_so_far(feature: str) -> None:
    pattern, reached = FEATURES[feature]
    rooms = find_rooms(pattern)
    assert len(rooms) <= reached, f"{feature} is mentioned in {sorted(rooms)}"
