"""Signs that a run does not learn: tensors that are cut off, and metrics that stay the same."""

from collections.abc import Sequence

from ...core.errors import list_first
from ...core.mask import Mask
from ...core.params import Layout
from .evaluation import Evaluation

ROUNDS = 3
"""Evaluations in a row with the same metrics from which a run is reported to stand still."""


def describe_cut_tensors(layout: Layout, before: Mask, after: Mask) -> str:
    """Return, in words, which weights have lost their last live entry; empty: none. Biases and norms do not count."""
    if before == after:
        return ""
    live = [layout.unflatten(mask.bits) for mask in (before, after)]
    weights = [spec.name for spec in layout.tensors if spec.role in ("weight", "other") and spec.size]
    cut = [name for name in weights if live[0][name].any() and not live[1][name].any()]
    if not cut:
        return ""
    return (
        f"no entry is live any more of {len(cut)} of {len(weights)} weights: {list_first(cut, 3)}; lower the sparsity"
    )


def describe_constant_metrics(evaluations: Sequence[Evaluation]) -> str:
    """Return, in words, that the last models have the same metrics over all sites; empty: they differ, or are too few.

    Args:
        evaluations: of the models of a run, in order; those without metrics do not count.
    """
    last = [evaluation.overall for evaluation in evaluations if evaluation.overall][-ROUNDS:]
    if len(last) < ROUNDS or any(overall != last[0] for overall in last):
        return ""
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in last[0].items())
    return (
        f"the models of {ROUNDS} evaluations in a row have the same metrics: {metrics}; does training change the model?"
    )
