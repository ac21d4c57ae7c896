"""The link between a server and its sites, whose state is addressed by content, as commits are by their parents.

A vector is named by its digest; a request by the commit that it follows and the vector that it leads to; an answer by
its request. A request says on which vector it builds (``base``), to which one it leads (``target``), what it is called
(``request``), and beside the message which answer of the site counts (``counted``). So a retry is a request that has
the same name, a site that lost its vector or its memory finds no such name, and a server that goes back needs no rule:

======================= ==================================================================================
server                  commit: what the sites held and what counts of them, with the vectors that were sent
site                    answer: the residual after it, under its name, beside those of the last two that counted
======================= ==================================================================================

Names are the first 8 bytes of a SHA-256. They find accidents; the transport authenticates the sender.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from torch import Tensor

from ..core.exchange import Patch
from ..core.mask import Mask

KEPT_VECTORS = 4
"""Values of vectors that a server keeps for each model of a round: those that most sites hold. A site with another one
receives the full model. Otherwise, after some missed rounds, every site would hold a vector of its own, which the
server would have to keep, and would need a message of its own in each round."""

M = TypeVar("M")


@dataclass(frozen=True)
class Vector:
    """A vector that messages build on.

    Attributes:
        name: its name.
        mask: its live entries; all others are zero.
        values: ``(P,)``, where this end needs them to compute what another one holds; else None.
    """

    name: str
    mask: Mask
    values: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, patch: Patch, *, keeps_values: bool = False) -> Vector:
        """Return the vector of a patch over zeros."""
        return cls(name_vector(patch), patch.mask, patch.to_vector() if keeps_values else None)


def name_vector(patch: Patch) -> str:
    """Return the name of the vector of a patch over zeros."""
    return patch.digest[:16]


def name_request(commit: str, kind: str, t: int, target: str) -> str:
    """Return the name of a request.

    Args:
        commit: name of the commit that it follows.
        kind: its kind.
        t: its round.
        target: name of the vector that it leads to.
    """
    return _hash(commit, kind, str(t), target)


def name_new_start(request: str) -> str:
    """Return the name of an answer whose site has lost what it carried on, and begins anew."""
    return _hash(request, "anew")


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ServerLink:
    """What a server knows of its sites after a commit. An attempt changes nothing, so every retry is the same.

    Attributes:
        commit: name of the commit.
        held: name of the vector that a site held when it sent its last answer in a commit.
        counted: name of a site's last answer that counts.
        vectors: the vectors that sites hold, by name, the oldest first.
        latest: names of the vectors that the commit's own requests led to; patches over "previous" build on these.
        residuals: ``(P,)`` rounding residual of each stream of messages, added to the next one (error feedback).
    """

    commit: str = ""
    held: dict[str, str] = field(default_factory=dict)
    counted: dict[str, str] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)
    latest: tuple[str, ...] = ()
    residuals: dict[str, Tensor | None] = field(default_factory=dict)

    def find_base(self, site: str) -> Vector | None:
        """Return the vector that a site holds; None: it needs the full model."""
        return self.vectors.get(self.held.get(site, ""))

    def forget(self, sites: Collection[str]) -> ServerLink:
        """Return the state in which it is not known what some sites hold."""
        return replace(self, held={site: name for site, name in self.held.items() if site not in sites})

    def add_commit(
        self,
        sent: Mapping[str, Vector],
        counted: Mapping[str, str],
        residuals: Mapping[str, Tensor | None],
        models: int = 1,
    ) -> ServerLink:
        """Return the state after a commit.

        Args:
            sent: vector that each site holds whose answer has arrived, whether or not it counts.
            counted: name of the answer of each site whose answer counts.
            residuals: new residuals by stream; the others stay.
            models: number of different models that the sites were sent, each of which keeps its vectors.
        """
        new = {vector.name: vector for vector in sent.values()}
        vectors = {name: vector for name, vector in self.vectors.items() if name not in new} | new
        held = {**self.held, **{site: vector.name for site, vector in sent.items()}}
        held = _drop_rare_vectors({s: n for s, n in held.items() if n in vectors}, vectors, KEPT_VECTORS * models)
        return ServerLink(
            _hash(self.commit, *(f"{site} {name}" for site, name in sorted(counted.items()))),
            held,
            {**self.counted, **counted},
            {name: vector for name, vector in vectors.items() if name in held.values()},
            tuple(new),
            {**self.residuals, **residuals},
        )


def _drop_rare_vectors(held: Mapping[str, str], vectors: Mapping[str, Vector], limit: int) -> dict[str, str]:
    """Return what sites hold without the vectors with values that are not among the ``limit`` that most of them hold.

    Of vectors with as many sites, the newer one counts as held by more.
    """
    holders, ages = Counter(held.values()), {name: age for age, name in enumerate(vectors)}
    kept = [name for name, vector in vectors.items() if vector.values is not None]
    dropped = set(sorted(kept, key=lambda name: (-holders[name], -ages[name]))[limit:])
    return {site: name for site, name in held.items() if name not in dropped}


@dataclass(frozen=True)
class Answer(Generic[M]):
    """What a site keeps of one of its answers.

    Attributes:
        after: name of the last answer before it that counted; None: there was none, or its memory was lost.
        memory: memory after it, from which the next answer starts if this one counts.
        number: number of its checkpoint.
    """

    after: str | None
    memory: M
    number: int = 0


@dataclass(frozen=True)
class SiteLink(Generic[M]):
    """What a site keeps between messages, beside the vector itself.

    Attributes:
        held: the vector that it holds, without values; None: none.
        answers: its last answers by name: one that the server may yet count, the last that counted, and that before
            it, to which a server goes back that loses a commit.
    """

    held: Vector | None = None
    answers: Mapping[str, Answer[M]] = field(default_factory=dict)

    def recall(self, counted: str | None, empty: M) -> tuple[M, bool]:
        """Return the memory from which an answer starts, and whether the memory after the last one is lost.

        Args:
            counted: name of the last answer that counts; None: there is none.
            empty: the memory before all answers.
        """
        if counted is None:
            return empty, False
        answer = self.answers.get(counted)
        return (empty, True) if answer is None else (answer.memory, False)

    def add_answer(self, name: str, counted: str | None, memory: M, number: int = 0) -> SiteLink[M]:
        """Return the state after an answer; a retry replaces the one before it.

        Args:
            name: name of the answer.
            counted: name of the last answer that counts.
            memory: memory after the answer.
            number: number of its checkpoint.
        """
        last = self.answers.get(counted or "")
        kept = {key: answer for key, answer in self.answers.items() if key in (counted, last.after if last else None)}
        return replace(self, answers={**kept, name: Answer(counted if last else None, memory, number)})
