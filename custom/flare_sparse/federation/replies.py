"""What became of one question: who answered, with what, and who did not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..endpoints.server import Attempt
from ..exchange import Contribution

Reply = Contribution | Exception | str
"""What became of a site's answer: an update, the error it was rejected with, or a short reason code."""
Transport = Callable[[Attempt], Mapping[str, Reply]]
"""Takes a question to its sites and brings back what each one answered; sites that miss are absent."""


@dataclass(frozen=True)
class AttemptResult:
    """A question's answers in order of the sites' names, the codes that others were rejected with, and who was silent."""

    question: Attempt
    answered: list[Contribution]
    rejected: dict[str, str]
    silent: list[str]

    @property
    def contributed(self) -> list[Contribution]:
        """The answers that something can be learned from."""
        return [u for u in self.answered if u.content != "metrics" and u.num_examples and u.patch.mask.count]

    def without(self, site: str, code: str) -> AttemptResult:
        """The same with the answer of ``site`` rejected."""
        answered = [update for update in self.answered if update.site != site]
        return replace(self, answered=answered, rejected={**self.rejected, site: code})


def get_reason_code(reply: Exception | str) -> str:
    """The code of a rejection."""
    return reply if isinstance(reply, str) else str(getattr(reply, "code", type(reply).__name__))
