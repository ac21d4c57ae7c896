"""Validation of the numbers that a site reports beside its message."""

from typing import Any

import torch

from ...core.errors import RejectedMessage, abbreviate
from ...tasks.task import COUNTS, METRIC_NAMES, is_metric_name

_MAX_NAMES = 1024
"""Most metrics: 20 subgroups with 20 metrics, each with its standard error."""

# Integers below 2**53 are exact in float64, which weights are computed in.
_EXAMPLES_LIMIT = 2**53

# A float32 times 2**53, summed over any number of sites, is still a finite float64.
_LARGEST_METRIC = torch.finfo(torch.float32).max


def validate_num_examples(value: Any, site: str) -> int:
    """Return the reported number of training examples.

    Raises:
        RejectedMessage: it is not an integer from 0 to 2**53 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _EXAMPLES_LIMIT:
        raise RejectedMessage("E_WEIGHT", "examples", "an integer from 0", abbreviate(value), site)
    return value


def validate_metrics(value: Any, site: str) -> dict[str, float]:
    """Return the reported metrics as floats.

    Raises:
        RejectedMessage: it is not a dict of at most 1,024 short names with finite numbers.
    """
    if not isinstance(value, dict) or len(value) > _MAX_NAMES:
        raise RejectedMessage(
            "E_METRICS", "metrics", f"at most {_MAX_NAMES} names with numbers", type(value).__name__, site
        )
    for name, number in value.items():
        if not is_metric_name(name) or isinstance(number, bool):
            raise RejectedMessage("E_METRICS", "metrics", f"names of {METRIC_NAMES}", abbreviate(name), site)
        # "not abs(x) <= limit" and not "abs(x) > limit", which NaN would pass.
        if not isinstance(number, (int, float)) or not abs(number) <= _LARGEST_METRIC:
            raise RejectedMessage("E_METRICS", f"metrics.{name}", "a finite float32", abbreviate(number), site)
    # The means over all sites are weighted by these metrics: a zero or a huge number would make them useless.
    for count in COUNTS:
        if not 1 <= value.get(count, 1) < _EXAMPLES_LIMIT:
            raise RejectedMessage("E_METRICS", count, "at least 1", abbreviate(value[count]), site)
    return {name: float(number) for name, number in value.items()}
