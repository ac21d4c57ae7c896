"""What a part of a run needs of the others: the one vocabulary in which methods, tasks and settings are compared.

A part declares its needs and says nothing about features; a feature (``config/needs.py``) says which needs it takes
away, and says nothing about methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Need(Enum):
    """A need; its value is the reason that an error gives where a part gives none of its own."""

    SINGLE_UPDATES = "the server computes with the values of single sites"
    SINGLE_SCORES = "the server reads the scores of single sites"
    OWN_ENTRIES = "each site sends entries of its own choice"
    LATE_WEIGHTS = "a site's weight depends on the other sites that contribute"
    EXACT_MODEL = "the next model contains the rounding error of the last one more than once"
    EXACT_STATISTICS = "statistics of the inputs travel in the clear as float32, without noise"
    OWN_FORMAT = "values have a number format of their own"
    MORE_READS = "a site may read its training examples beyond the one training of a round"
    JOINT_SUBJECTS = "one subject changes the inputs or the loss of another"
    PLAIN_STEPS = "a training step has no noise"
    FLOAT32_STEPS = "a training step computes in float32"
    PACKAGE_STEPS = "a site does more than train and evaluate"
    SCRIPT_STEPS = "a training script takes the steps"
    WHOLE_MODEL = "no tensor of the model can stay at a site"
    SAMPLED_SITES = "some sites take no part in a round"
    LAST_ROUND = "a site must know the last round in advance"
    NUMBER_OF_ROUNDS = "the rounds depend on their number"
    NO_COMMON_MODEL = "the sites' models are never averaged"
    HIDDEN_EXAMPLES = "a training script loads the data, so its examples are not known"
    OWN_MODEL = "each site ends with a model of its own"
    VALIDATION = "validation examples decide"
    QUORUM = "a round needs the contributions of several sites"

    def because(self, reason: str = "", remedy: str = "") -> Requirement:
        """Return this need with its cause.

        Args:
            reason: the setting that causes it and why; empty: the need's own text.
            remedy: how to do without, such as ``"set aggregation to mean"``; empty: the validator names what works.
        """
        return Requirement(self, reason or self.value, remedy)


@dataclass(frozen=True)
class Requirement:
    """A need of one part with its cause.

    Attributes:
        need: what is needed.
        reason: why, as part of an error.
        remedy: how to do without; empty: not known to the part.
    """

    need: Need
    reason: str
    remedy: str = ""


Needs = frozenset[Requirement]
"""The needs of one part of a run."""


def find_need(needs: Needs, need: Need) -> Requirement | None:
    """Return the first requirement of a kind, in the order of the reasons; None where there is none."""
    return min((r for r in needs if r.need is need), key=lambda r: r.reason, default=None)
