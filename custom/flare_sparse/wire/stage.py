"""A stage that the values of updates pass on their way: what a site and the server do with them beside the messages.

The classes here are the stage without effect: values travel in the message of their update. One that hides the values
of single sites keeps them at the site, where they leave in messages of the stage's own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ..core.errors import RequestRefused
from ..core.exchange import Assignment, Contribution, Patch, RequestId, Update
from ..core.params import Layout
from .ledger import Ledger

Reply = Contribution | Exception | str
"""What came back from a site: a contribution, the error that rejected it, or a reason code."""


@dataclass(frozen=True)
class Questions:
    """The questions of one step of a stage.

    Attributes:
        messages: question by site; equal questions share one buffer.
        seconds: time for the replies; None: the transport decides.
    """

    messages: Mapping[str, np.ndarray]
    seconds: float | None = None


StepReply = np.ndarray | str
"""Reply to a question: a message, or the reason code of a refusal."""
StepTransport = Callable[[Questions], Iterable[tuple[str, StepReply]]]
"""Carries the questions of a step to its sites and yields their replies.

Each reply is yielded with the name of its site as soon as it arrives, so that no two need be in memory.
"""


@dataclass(frozen=True)
class Opened:
    """What the server reads of the updates of an attempt.

    Attributes:
        replies: replies of the sites; one that dropped out on the way has none.
        total: contribution that stands for all others, whose values the server cannot read; None: it reads each.
        failure: why it could read nothing; empty: it could.
    """

    replies: Mapping[str, Reply]
    total: Contribution | None = None
    failure: str = ""


class RevealedSum(BaseModel):
    """A sum over sites' answers, as a site records it before it helps to reveal it.

    Attributes:
        run, kind, round: run, and the request whose answers are summed.
        model: digest of the model of the request.
        answer: digest of this site's values.
        shares: share of the sum by member.
        survivors: names of the members whose values are in the sum, sorted; empty: not yet known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    kind: str
    round: int
    model: str
    answer: str
    shares: dict[str, float]
    survivors: list[str] = []


Admit = Callable[[RevealedSum, Callable[[Iterable[RevealedSum], RevealedSum], str]], None]
"""Records a sum unless a rule names a reason why it must not follow the earlier ones of this site."""


@dataclass(frozen=True)
class StageRun:
    """What both ends of a stage know of their run.

    Attributes:
        layout: layout of the model.
        run: id of the run, 16 hex digits.
        get_weights: weights of the method's aggregation, by kind of request.
    """

    layout: Layout
    run: str
    get_weights: Callable[[str], Callable[[Sequence[Contribution]], Sequence[float]]]


class SiteStage:
    """A site's end.

    Attributes:
        hides_values: whether the message of an update carries no values.
        message_bytes: length of the message with the values that wait to leave; 0: none wait.
    """

    hides_values: ClassVar[bool] = False
    message_bytes: int = 0

    def seal(self, update: Update, request: RequestId, model: Tensor, get_digest: Callable[[], str]) -> None:
        """Keep the values that its message does not carry.

        Args:
            update: the update.
            request: id of the request that it answers.
            model: ``(P,)`` the model of the request.
            get_digest: returns its digest.

        Raises:
            RejectedMessage: a value cannot pass. Nothing may be sent.
        """

    def holds(self, patch: Patch) -> bool:
        """Whether the values that leave are exactly these."""
        return True

    def discard(self) -> None:
        """Drop the values that wait: they may not leave."""

    def answer(self, data: object) -> np.ndarray:
        """Return the reply to a question, which is not trusted.

        Raises:
            RejectedMessage, RequestRefused: the question is malformed, or this site does not answer it.
        """
        raise RequestRefused("a step of a sum, but updates of this site's copy of the job carry their values")

    def take_reply(self) -> np.ndarray | None:
        """Return the last reply once, for a process that lets only this site's own messages leave; None: none."""
        return None


class ServerStage:
    """The server's end.

    Attributes:
        hides_values: whether the message of an update carries no values.
    """

    hides_values: ClassVar[bool] = False

    def open(
        self,
        assignments: Mapping[str, Assignment],
        sequence: int,
        replies: Mapping[str, Reply],
        transport: StepTransport,
        deadline: float | None,
    ) -> Opened:
        """Return what the server reads.

        Args:
            assignments: by site.
            sequence: number of the attempt.
            replies: replies to the requests.
            transport: carries the steps of the stage.
            deadline: time on the monotonic clock at which the attempt ends; None: the transport decides.
        """
        return Opened(replies)


ReadKit = Callable[[str], bytes]
"""Returns the content of a file of this participant's startup kit.

Raises:
    OSError: it cannot be read.
"""


@dataclass(frozen=True)
class Stage:
    """Builds both ends.

    Attributes:
        hides_values: whether the server reads no value of a single site.
    """

    hides_values: ClassVar[bool] = False

    def build_server(self, run: StageRun, ledger: Ledger, read_kit: ReadKit) -> ServerStage:
        """Return the server's end.

        Raises:
            ConfigError: a file of the startup kit is missing or cannot be read.
        """
        return ServerStage()

    def build_site(self, name: str, run: StageRun, read_kit: ReadKit, admit: Admit, min_sites: int = 0) -> SiteStage:
        """Return the end of a site.

        Args:
            name: name of the site.
            run: the run.
            read_kit: reads the site's startup kit.
            admit: records what the site helps to reveal.
            min_sites: fewest sites of which the site lets a sum be read.

        Raises:
            ConfigError: a file of the startup kit is missing or cannot be read.
        """
        return SiteStage()

    def generate_kits(self, sites: Iterable[str]) -> dict[str, dict[str, bytes]]:
        """Return the files that a startup kit would have, by site and name, for a run on one machine; ``""``: server's.

        They prove nothing there: one process holds every key.
        """
        return {name: {} for name in ("", *sites)}


PLAIN_STAGE = Stage()
