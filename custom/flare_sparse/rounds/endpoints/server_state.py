"""What the server remembers between messages, as one immutable value with named transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from ...core.exchange import Assignment, EncryptedValues, Patch
from ...core.mask import Mask
from .bases import SiteBase

KEPT_VECTORS = 4
"""Vectors that the server keeps for each model of a round, if the job's values are quantized: those that most sites
hold. A site with another one receives the full model. Otherwise, after some missed rounds, every site would hold a
vector of its own, which the server would have to keep, and would need a message of its own in each round."""


@dataclass(frozen=True)
class EncryptedModel:
    """The model as a server without the key holds it: its mask and the ciphertext of its values."""

    mask: Mask
    values: EncryptedValues


@dataclass(frozen=True)
class ServerSnapshot:
    """What the server's end of the wire writes into a checkpoint.

    Attributes:
        sequence: number of the last attempt.
        first_sequence: number of the first attempt at the same assignments.
        bases: base of each site.
        residuals: rounding residual of each stream of messages.
        acknowledged: number of the attempt with the last valid update of each site.
        encrypted: the encrypted model; None: the model is in the method's state.
    """

    sequence: int
    first_sequence: int
    bases: dict[str, SiteBase]
    residuals: dict[str, Tensor | None]
    acknowledged: dict[str, int] = field(default_factory=dict)
    encrypted: EncryptedModel | None = None


@dataclass(frozen=True)
class ServerState:
    """State of the server's end of the wire.

    A retry sends assignments of the previous attempt again, to all of their sites or to some. Retries are
    bit-identical: each starts from the residuals before the first attempt, so a site that missed an attempt does not
    change what the others receive. Only the first attempt updates the residuals. For the same reason, quantized values
    are differences to the bases before the first attempt.

    Each row is a transition, each column a field. A cell is the field's next value; "." means that it is unchanged.

    ===========  ====  ======  =========  ===========  ======  ======  =========  ==========  =======  ====  =======
    transition   seq.  first_  previous_  assignments  bases   bases_  residuals  residuals_  pending  sent  vectors
                       seq.    first_seq.                      before             before
    ===========  ====  ======  =========  ===========  ======  ======  =========  ==========  =======  ====  =======
    start        + 1   seq.+1  first_seq  distinct     kept    kept    .          residuals   new      {}    {}
    retry        + 1   .       .          .            .       .       .          .           new      {}    {}
    send         .     .       .          .            .       .       updated    .           .        new   new
    acknowledge  .     .       .          .            + site  .       .          .           - site   .     .
    forget_base  .     .       .          .            - site  - site  .          .           .        .     .
    aggregate    .     .       .          .            .       .       .          .           .        .     .
    restore      file  file    0          ()           file    {}      file       {}          {}       {}    {}
    ===========  ====  ======  =========  ===========  ======  ======  =========  ==========  =======  ====  =======

    ===========  ============  ===================  =========
    transition   acknowledged  acknowledged_before  encrypted
    ===========  ============  ===================  =========
    start        .             acknowledged         .
    retry        [1]           .                    .
    acknowledge  + site        .                    .
    aggregate    .             .                    new
    restore      file          {}                   file
    ===========  ============  ===================  =========

    "+ site" adds the entry of one site, "- site" removes it; "kept" are the bases without vectors that few sites hold;
    "file" is the value of the snapshot; [1] is ``acknowledged_before`` for the sites asked again, and unchanged for the
    others; "seq." stands for "sequence".

    Attributes:
        sequence: number of the last attempt; attempts are counted over the whole run.
        first_sequence: number of the first attempt at the current assignments.
        previous_first_sequence: number of the first attempt at the previous assignments.
        assignments: the distinct current assignments.
        bases: base of each site, from the last message that it acknowledged.
        bases_before: the bases before the first attempt at the current assignments.
        residuals: rounding residual of each stream of messages, added to the next one (error feedback).
        residuals_before: the residuals before the first attempt at the current assignments.
        pending: assignments by site that have no valid update yet; an update of another site is a replay.
        sent: patch of the last message to each site of the attempt.
        vectors: ``(P,)`` the vector that each site of the attempt reads, if the job's values are quantized.
        acknowledged: number of the attempt with the last valid update of each site.
        acknowledged_before: ``acknowledged`` before the first attempt at the current assignments: these updates are
            decided, and no retry replaces them.
        encrypted: the model after the first encrypted sum; None: the server can read the model.
    """

    sequence: int = 0
    first_sequence: int = 0
    previous_first_sequence: int = 0
    assignments: tuple[Assignment, ...] = ()
    bases: Mapping[str, SiteBase] = field(default_factory=dict)
    bases_before: Mapping[str, SiteBase] = field(default_factory=dict)
    residuals: Mapping[str, Tensor | None] = field(default_factory=dict)
    residuals_before: Mapping[str, Tensor | None] = field(default_factory=dict)
    pending: Mapping[str, Assignment] = field(default_factory=dict)
    sent: Mapping[str, Patch] = field(default_factory=dict)
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    acknowledged: Mapping[str, int] = field(default_factory=dict)
    acknowledged_before: Mapping[str, int] = field(default_factory=dict)
    encrypted: EncryptedModel | None = None

    def is_retry(self, assignments: Mapping[str, Assignment]) -> bool:
        """Whether all these assignments are current ones: the same objects, not merely equal ones."""
        return all(any(new is current for current in self.assignments) for new in assignments.values())

    def start(self, assignments: Mapping[str, Assignment]) -> ServerState:
        """Return the state of a first attempt at new assignments.

        Args:
            assignments: by site.
        """
        distinct = tuple({id(assignment): assignment for assignment in assignments.values()}.values())
        # Models of single sites are as many vectors, which a round that sends one model to all must not drop.
        bases = _drop_rare_vectors(self.bases, KEPT_VECTORS * max(len(distinct), len(self.assignments)))
        return replace(
            self,
            sequence=self.sequence + 1,
            first_sequence=self.sequence + 1,
            previous_first_sequence=self.first_sequence,
            bases=bases,
            bases_before=bases,
            assignments=distinct,
            residuals_before=self.residuals,
            acknowledged_before=self.acknowledged,
            pending=dict(assignments),
            sent={},
            vectors={},
        )

    def retry(self, assignments: Mapping[str, Assignment]) -> ServerState:
        """Return the state of another attempt at current assignments.

        Args:
            assignments: by site.
        """
        # A site that is asked again must know that its earlier update is dropped. Those of the others count: one site
        # alone is asked again if it has lost its base.
        others = {site: number for site, number in self.acknowledged.items() if site not in assignments}
        again = {site: number for site, number in self.acknowledged_before.items() if site in assignments}
        return replace(
            self,
            sequence=self.sequence + 1,
            acknowledged={**others, **again},
            pending=dict(assignments),
            sent={},
            vectors={},
        )

    def send(
        self,
        patches: Mapping[str, Patch],
        residuals: Mapping[str, Tensor | None],
        vectors: Mapping[str, Tensor] | None = None,
    ) -> ServerState:
        """Return the state after the messages of an attempt are encoded.

        Args:
            patches: patch sent to each site.
            residuals: new residuals by stream; the other streams keep theirs.
            vectors: vector that each site reads, if the job's values are quantized.
        """
        return replace(self, sent=patches, residuals={**self.residuals, **residuals}, vectors=vectors or {})

    def acknowledge(self, site: str) -> ServerState:
        """Return the state after a valid update of ``site``, which proves that the site has the vector sent to it."""
        patch, base = self.sent[site], self.bases.get(site)
        mask = base.mask if patch.base == "previous" and base else patch.mask
        return replace(
            self,
            bases={**self.bases, site: SiteBase(mask, self.sequence, self.vectors.get(site))},
            acknowledged={**self.acknowledged, site: self.sequence},
            pending={name: assignment for name, assignment in self.pending.items() if name != site},
        )

    def forget_base(self, site: str) -> ServerState:
        """Return the state without a base of ``site``."""
        bases, bases_before = (
            {name: base for name, base in bases.items() if name != site} for bases in (self.bases, self.bases_before)
        )
        return replace(self, bases=bases, bases_before=bases_before)

    def aggregate(self, encrypted: EncryptedModel) -> ServerState:
        """Return the state after a round whose updates were aggregated without decryption."""
        return replace(self, encrypted=encrypted)

    def needs_full_model(self, base: SiteBase | None) -> bool:
        """Whether a site with this base lacks the vector that a patch over ``"previous"`` applies to."""
        # Such a patch contains the change since the previous assignments. Every attempt at those carried the vector
        # that the patch applies to; a base older than their first attempt is outdated.
        return base is None or base.sequence < self.previous_first_sequence

    def snapshot(self) -> ServerSnapshot:
        """Return the part of this state that a checkpoint contains."""
        # Attempts in progress are left out: a resumed run starts its round again, with a higher sequence number.
        return ServerSnapshot(
            self.sequence,
            self.first_sequence,
            dict(self.bases),
            dict(self.residuals),
            dict(self.acknowledged),
            self.encrypted,
        )

    def step_back(self, snapshot: ServerSnapshot) -> ServerSnapshot:
        """Return an older snapshot with this state's sequence numbers and without bases."""
        # Sequence numbers never go back: a running site refuses a message that is not newer than its last one. The
        # sites hold later vectors than the snapshot's, so none of its bases is valid.
        return replace(snapshot, sequence=self.sequence, first_sequence=self.sequence, bases={})

    @classmethod
    def restore(cls, snapshot: ServerSnapshot) -> ServerState:
        """Return the state of a server that continues from a checkpoint."""
        return cls(
            sequence=snapshot.sequence,
            first_sequence=snapshot.first_sequence,
            bases=dict(snapshot.bases),
            residuals=dict(snapshot.residuals),
            acknowledged=dict(snapshot.acknowledged),
            encrypted=snapshot.encrypted,
        )


def _drop_rare_vectors(bases: Mapping[str, SiteBase], limit: int) -> Mapping[str, SiteBase]:
    """Return the bases without those whose vector is not among the ``limit`` ones that most sites hold.

    Of vectors with as many sites, the newer one counts as held by more, then the one of the first site by name.
    """
    holders: dict[int, list[str]] = {}
    for site, base in sorted(bases.items()):
        if base.vector is not None:
            holders.setdefault(id(base.vector), []).append(site)
    ranked = sorted(holders.values(), key=lambda sites: (-len(sites), -bases[sites[0]].sequence, sites[0]))
    dropped = {site for sites in ranked[limit:] for site in sites}
    return {site: base for site, base in bases.items() if site not in dropped}
