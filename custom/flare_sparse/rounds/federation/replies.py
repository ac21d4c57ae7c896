"""The replies to one attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...core.exchange import Contribution, Patch
from ..endpoints.server import Attempt

Reply = Contribution | Exception | str
"""What came back from a site: a contribution, the error that rejected it, or a reason code."""
Transport = Callable[[Attempt], Mapping[str, Reply]]
"""Carries an attempt to its sites and returns their replies; sites that do not reply in time are absent."""


@dataclass(frozen=True)
class SumQuestions:
    """The questions of one step of a sum.

    Attributes:
        messages: question by site; equal questions share one buffer.
        seconds: time for the replies; None: the transport decides.
    """

    messages: Mapping[str, np.ndarray]
    seconds: float | None = None


SumReply = np.ndarray | str
"""Reply to a step of a sum: a message, or the reason code of a refusal."""
SumTransport = Callable[[SumQuestions], Iterable[tuple[str, SumReply]]]
"""Carries the questions of a step of a sum to its sites and yields their replies.

Each reply is yielded with the name of its site as soon as it arrives, so that no two need be in memory.
"""


@dataclass(frozen=True)
class AttemptResult:
    """The replies to one attempt. Each site asked is in exactly one of the last three fields.

    Attributes:
        attempt: the attempt; after the loss of a base, the one that sent the full model.
        accepted: accepted contributions in site-name order, with and without values.
        rejected: reason codes by site.
        timed_out: sites that did not reply.
        counts_empty: sites of which an update with an empty selection contributes a delta of zero.
        total: contribution that stands for all others, whose values the server cannot read; None: it reads each.
        sum_failure: why the server could not read the sum; empty: it could, or reads each.
    """

    attempt: Attempt
    accepted: list[Contribution]
    rejected: dict[str, str]
    timed_out: list[str]
    counts_empty: frozenset[str] = frozenset()
    total: Contribution | None = None
    sum_failure: str = ""

    def drop_values(self) -> AttemptResult:
        """Return the result without values, as a record of an attempt that has failed."""
        if not self.accepted:
            return self
        empty = Patch.empty(self.accepted[0].patch.mask.size)
        accepted = [replace(contribution, patch=empty) for contribution in self.accepted]
        return replace(self, accepted=accepted, total=None)

    @property
    def contributed(self) -> list[Contribution]:
        """Contributions that a method can learn from: with values or a delta of zero, and with a positive weight."""
        # Weight 0 would add nothing to a sum but would count towards the quorum, and alone would divide by zero.
        return [
            contribution
            for contribution in self.accepted
            if contribution.content != "metrics"
            and contribution.num_examples
            and (contribution.patch.mask.count or contribution.site in self.counts_empty)
        ]

    def reject(self, site: str, code: str) -> AttemptResult:
        """Return the result with the contribution of ``site`` rejected for ``code``."""
        accepted = [contribution for contribution in self.accepted if contribution.site != site]
        return replace(self, accepted=accepted, rejected={**self.rejected, site: code})


def get_reason_code(reply: Exception | str) -> str:
    """Return the code of a rejection: the error's own, or else the name of its type."""
    return reply if isinstance(reply, str) else str(getattr(reply, "code", type(reply).__name__))
