"""What a site remembers between messages, as one immutable value with named transitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .bases import SiteBase


class RequestId(NamedTuple):
    """Kind and round of a request. Every attempt at one request has the same id."""

    kind: str
    round: int


@dataclass(frozen=True)
class SiteMemory:
    """What a site carries from one update to the next.

    Attributes:
        residual: rounding residual that is added to the next update (error feedback); None: zero.
        method: tensors that the method keeps at the site.
    """

    residual: Tensor | None = None
    method: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteSnapshot:
    """A site's checkpoint, written before each update is sent.

    Attributes:
        kind: kind of the answered request.
        round: round of the answered request.
        values: ``(base.mask.count,)`` live entries of the vector that the site holds; all others are zero.
        base: mask of the vector and sequence number of their message, which also numbers the checkpoint.
        memory: memory after the update, from which the next request starts.
    """

    kind: str
    round: int
    values: Tensor
    base: SiteBase
    memory: SiteMemory

    @property
    def request(self) -> RequestId:
        """Id of the answered request."""
        return RequestId(self.kind, self.round)

    def to_vector(self) -> Tensor:
        """Return the vector ``(P,)`` that the site held."""
        return self.base.mask.put(self.values, torch.zeros(self.base.mask.size))


@dataclass(frozen=True)
class SiteState:
    """State of a site's end of the wire.

    A retry has the kind and the round of the previous request. The server discarded the update of the earlier attempt,
    so the site discards what that attempt changed in its memory: a retry starts from the memory before the first
    attempt, and its update is bit-identical. A retry may apply to any base since the first attempt, because the server
    does not know which attempts reached the site, and all attempts carry the same vector.

    Each row is a transition, each column a field. A cell is the field's next value; "." means that it is unchanged.
    "(..., base)" appends the previous base to ``earlier_bases``; "before" and "after" refer to the two memories.

    ========================== ==== ======== =========== ======== ====== ======= ======= ======== ========== ========
    transition                 base received earlier_    answered memory memory_ memory_ check    fallback   reserve
                                             bases                       before  after   point
    ========================== ==== ======== =========== ======== ====== ======= ======= ======== ========== ========
    receive, not yet answered  new  request  (base,)     .        after  .       .       .        .          .
    receive, answered earlier  new  request  (base,)     .        before .       .       .        .          .
    retry, not yet answered    new  .        (..., base) .        after  .       .       .        .          .
    retry, answered            new  .        (..., base) .        before .       .       .        .          .
    answer, first time         .    .        .           request  .      memory  new     sequence checkpoint fallback
    answer, again              .    .        .           .        .      memory  new     sequence .          .
    restart from one request   [1]  [1]      (None,)     [1]      [1]    empty   [1]     [1]      None       None
    restart from two requests  [1]  [1]      ([2].base,) [1]      [1]    [2]     [1]     [1]      [2]        [3]
    forget memory              .    .        .           .        .      .       empty   .        .          .
    take back                  .    .        .           .        .      .       before  fallback reserve    None
    ========================== ==== ======== =========== ======== ====== ======= ======= ======== ========== ========

    [1] is the newest checkpoint, [2] the newest one of another request than [1], [3] that of
    another request than [2]. If a damaged checkpoint lies between
    [2] and [1], "before" is empty.

    Attributes:
        base: base that the site holds; None: none.
        received: the last request that the site received.
        earlier_bases: base before each attempt at ``received``.
        answered: the last request that the site answered.
        memory: memory from which the update in progress starts.
        memory_before: memory before the update to ``answered``.
        memory_after: memory after the update to ``answered``.
        checkpoint: number of the checkpoint written with the last update.
        fallback: number of the last checkpoint of another request than ``answered``.
        reserve: number of the last checkpoint of a request before that of ``fallback``.
    """

    base: SiteBase | None = None
    received: RequestId | None = None
    earlier_bases: tuple[SiteBase | None, ...] = ()
    answered: RequestId | None = None
    memory: SiteMemory = field(default_factory=SiteMemory)
    memory_before: SiteMemory = field(default_factory=SiteMemory)
    memory_after: SiteMemory = field(default_factory=SiteMemory)
    checkpoint: int | None = None
    fallback: int | None = None
    reserve: int | None = None

    @property
    def sequence(self) -> int:
        """Sequence number of the last message that the site accepted; 0: none."""
        return self.base.sequence if self.base else 0

    def receive(self, request: RequestId, base: SiteBase) -> SiteState:
        """Return the state after the model of a request is written into the site's vector.

        Args:
            request: id of the request.
            base: base that the site holds now.
        """
        if request == self.received:
            return self.retry(base)
        return replace(
            self,
            base=base,
            received=request,
            earlier_bases=(self.base,),
            memory=self._get_initial_memory(request),
        )

    def retry(self, base: SiteBase) -> SiteState:
        """Return the state after another attempt at the last received request.

        Args:
            base: base that the site holds now.
        """
        return replace(
            self,
            base=base,
            earlier_bases=(*self.earlier_bases, self.base),
            memory=self._get_initial_memory(self.received),
        )

    def answer(self, request: RequestId, memory: SiteMemory) -> SiteState:
        """Return the state after an update is encoded.

        Args:
            request: id of the request that the update answers.
            memory: memory after the update, from which the next request starts.
        """
        # A second update to one request replaces the first: the fallback stays the checkpoint of the previous request,
        # however often the server retries, because every retry starts from it.
        is_again = request == self.answered
        fallback = self.fallback if is_again else self.checkpoint
        # The server keeps two commits. It returns to the older one if the newer one is damaged or discarded, after this
        # site has answered the round that follows both: the site then starts from the checkpoint of the older commit.
        reserve = self.reserve if is_again else self.fallback
        return replace(
            self,
            answered=request,
            memory_before=self.memory,
            memory_after=memory,
            checkpoint=self.sequence,
            fallback=fallback,
            reserve=reserve,
        )

    def forget_memory(self) -> SiteState:
        """Return the state of a site that has lost an update later than ``answered``, and what it carried on."""
        # The memory before ``answered`` stays: the server retries that request only if it has no later update.
        return replace(self, memory_after=SiteMemory())

    def take_back(self) -> SiteState:
        """Return the state of a site whose last update does not count: its memory is that before the update."""
        # Otherwise what the update sent of earlier rounds would be lost with it. Its checkpoint is none to return to.
        return replace(
            self, memory_after=self.memory_before, checkpoint=self.fallback, fallback=self.reserve, reserve=None
        )

    @classmethod
    def restart(
        cls,
        newest: SiteSnapshot,
        fallback: SiteSnapshot | None,
        damaged: Sequence[int] = (),
        *,
        reserve: int | None = None,
    ) -> SiteState:
        """Return the state of a process that starts from checkpoints.

        Args:
            newest: the newest checkpoint.
            fallback: the newest checkpoint of another request than ``newest``; None: there is none.
            damaged: numbers of the damaged checkpoints.
            reserve: number of the newest checkpoint of another request than ``fallback``; None: there is none.
        """
        # A checkpoint is written before its update is sent: a damaged one stands for an update that the server may
        # have. The memory before that update holds values that the update sent, and would send them twice. Whether the
        # server has an update later than ``newest`` is for the caller to decide, see forget_memory.
        first, last = fallback.base.sequence if fallback else 0, newest.base.sequence
        is_before_lost = any(first < number < last for number in damaged)
        # A restarted site cannot know whether the server committed the round of ``newest`` or will retry it. The state
        # therefore keeps the memory and the base of both cases.
        return cls(
            base=newest.base,
            received=newest.request,
            earlier_bases=(fallback.base if fallback else None,),
            answered=newest.request,
            memory=newest.memory,
            memory_before=fallback.memory if fallback and not is_before_lost else SiteMemory(),
            memory_after=newest.memory,
            checkpoint=newest.base.sequence,
            fallback=fallback.base.sequence if fallback else None,
            reserve=reserve,
        )

    def _get_initial_memory(self, request: RequestId | None) -> SiteMemory:
        return self.memory_before if request == self.answered else self.memory_after
