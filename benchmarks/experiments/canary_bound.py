"""A lower bound on epsilon from one run with canaries: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import binom
from torch.utils.data import Dataset

SHARES = (0.1, 0.25, 0.5, 1.0)
"""Shares of the canaries on which the attacker guesses; the confidence is divided among them."""
LEVEL = 0.95


@dataclass(frozen=True)
class CanaryBound:
    """What the attacker's guesses prove.

    Attributes:
        epsilon: lower bound on epsilon at 95 %.
        canaries: number of canaries, each included with probability 1/2.
        guesses: number of canaries that the attacker called included or excluded.
        correct: number of correct guesses.
    """

    epsilon: float
    canaries: int
    guesses: int
    correct: int


def compute_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the probability of at least ``correct`` correct guesses if the run is (epsilon, delta)-private.

    arXiv:2305.08846, theorem 5.2 and the program in appendix D.
    """
    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(binom.sf(correct - 1, guesses, accuracy))
    # Largest mean probability of the counts just below ``correct``, which delta may shift upwards.
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    alpha = float((below / np.arange(1, correct + 1)).max()) if correct else 0.0
    return min(beta + 2 * alpha * delta * canaries, 1.0)


def compute_epsilon_bound(canaries: int, guesses: int, correct: int, delta: float, level: float = LEVEL) -> float:
    """Return the largest epsilon that the guesses contradict at this level; 0 if they contradict none.

    Args:
        canaries: number of canaries, each included independently with probability 1/2.
        guesses: number of guesses, fixed beforehand.
        correct: number of correct guesses.
        delta: delta of the claim.
        level: confidence.
    """
    if compute_p_value(canaries, guesses, correct, 0.0, delta) >= 1 - level:
        return 0.0
    low, high = 0.0, 1.0
    while compute_p_value(canaries, guesses, correct, high, delta) < 1 - level:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if compute_p_value(canaries, guesses, correct, middle, delta) < 1 - level:
            low = middle
        else:
            high = middle
    return low


def bound_epsilon(scores: np.ndarray, is_included: np.ndarray, delta: float) -> CanaryBound:
    """Return the best bound of an attacker who calls the highest scores included and the lowest ones excluded.

    The attacker tries each of :data:`SHARES`, so that each gets its part of the error probability (Bonferroni).

    Args:
        scores: ``(m,)``; higher: rather included.
        is_included: ``(m,)`` bool, drawn independently with probability 1/2.
        delta: delta of the claim.
    """
    count, order = len(scores), np.argsort(-scores, kind="stable")
    level = 1 - (1 - LEVEL) / len(SHARES)
    bounds = []
    for share in SHARES:
        half = max(int(share * count) // 2, 1) if count > 1 else 0
        if not half:
            continue
        correct = int(is_included[order[:half]].sum() + (~is_included[order[-half:]]).sum())
        epsilon = compute_epsilon_bound(count, 2 * half, correct, delta, level)
        bounds.append(CanaryBound(epsilon, count, 2 * half, correct))
    return max(bounds, key=lambda bound: bound.epsilon, default=CanaryBound(0.0, count, 0, 0))


class Canaries(Dataset[Any]):
    """Examples with the targets of other examples, which a model can only know by heart.

    Args:
        dataset: examples whose first part is the input; the others, such as target and weight, belong together.
        rows: the examples that become canaries.
        seed: seed of the permutation of their targets.

    Raises:
        TypeError: an example is not a tuple of at least two parts.
    """

    def __init__(self, dataset: Dataset[Any], rows: Sequence[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(rows), generator=generator).tolist()
        # A cycle through a random order: no canary keeps its own target.
        shifted = {order[i]: order[(i + 1) % len(order)] for i in range(len(order))}
        self._examples = []
        for position, row in enumerate(rows):
            example, other = dataset[row], dataset[rows[shifted[position]]]
            if not isinstance(example, (tuple, list)) or len(example) < 2:
                raise TypeError(f"an example is {type(example).__name__}")
            self._examples.append((example[0], *other[1:]))

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        return self._examples[index]
