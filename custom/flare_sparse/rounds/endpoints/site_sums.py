"""A site's end of the sums of padded values: it withholds an update until its sum, and answers the sum's steps."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import RejectedMessage, RequestRefused
from ...core.exchange import Patch, RequestId, Update
from ...core.params import Layout
from ...methods.aggregation.weighted import Weights
from ...privacy.secure_aggregation.identities import SiteIdentity
from ...privacy.secure_aggregation.keys import SumId, read_sum_id
from ...privacy.secure_aggregation.limits import RevealedSum, SumRules
from ...privacy.secure_aggregation.messages import (
    FINGERPRINT_BYTES,
    HEADER_BYTES,
    Step,
    pack_message,
    unpack_boxes,
    unpack_members,
    unpack_message,
    unpack_names,
)
from ...privacy.secure_aggregation.party import SumParty
from ...privacy.secure_aggregation.rings import RingFormat
from .request_log import RequestLog
from .server_sums import build_ring, compute_reference, compute_shares


@dataclass(frozen=True)
class Withheld:
    """An update that waits for its sum.

    Attributes:
        request: id of the request that it answers.
        update: the update.
        values: float64 ``(k,)``, what is summed.
        ring: format of the values.
        model_digest: digest of the model of the request.
    """

    request: RequestId
    update: Update
    values: np.ndarray
    ring: RingFormat
    model_digest: str


class SiteSums:
    """Answers the steps of the sums of a job. Nothing is kept on disk but the records of the revealed sums.

    Args:
        identity: signs this site's keys and checks those of the others.
        layout: layout of the model.
        run: id of the run, 16 hex digits.
        rules: bound and smallest size of the sums.
        get_weights: weights of the method's aggregation, by kind of request.
        requests: records of the revealed sums; None: they are remembered as long as this process runs.

    """

    def __init__(
        self,
        identity: SiteIdentity,
        layout: Layout,
        run: str,
        rules: SumRules,
        get_weights: Callable[[str], Weights],
        requests: RequestLog | None = None,
    ):
        self.identity, self.layout, self.run, self.rules = identity, layout, run, rules
        self.get_weights = get_weights
        # Records of sums do not depend on the number of attempts.
        self.requests = requests or RequestLog(run, lambda kind, t: 1, attempts=1)
        self._reply: np.ndarray | None = None
        self._withheld: Withheld | None = None
        self._party: SumParty | None = None
        self._sum: RevealedSum | None = None
        self._newest = 0

    def withhold(self, update: Update, request: RequestId, model: Tensor, model_digest: str = "") -> None:
        """Keep the values of an update for its sum.

        Args:
            update: the update.
            request: id of the request that it answers.
            model: ``(P,)`` the model of the request.
            model_digest: its digest; a sum has values of one model only.

        Raises:
            RejectedMessage: a value is not finite, or above the bound of the ring. Nothing may be sent.
        """
        self._withheld = self._party = None
        if update.content == "metrics":
            return
        update = replace(update, patch=update.patch.copy_to_host())
        mask = update.patch.mask
        ring = build_ring(update.content, mask, self.layout, self.rules)
        values = update.patch.values.double().numpy() - compute_reference(update.content, mask, model)
        # Refused now and not in the sum, where it would cost the other sites an attempt.
        ring.encode(values, 1.0)
        self._withheld = Withheld(request, update, values, ring, model_digest)

    def discard(self) -> None:
        """Drop the values that wait for a sum: they may not leave."""
        self._withheld = self._party = None

    def is_withheld(self, patch: Patch) -> bool:
        """Whether the values that wait for a sum are exactly these."""
        if self._withheld is None:
            return False
        own = self._withheld.update.patch
        return own.mask == patch.mask and torch.equal(own.values, patch.values)

    @property
    def message_bytes(self) -> int:
        """Length of the message of a sum with the values that wait for it; 0: none wait."""
        return HEADER_BYTES + FINGERPRINT_BYTES + self._withheld.ring.section_bytes if self._withheld else 0

    def answer(self, data: Any) -> np.ndarray:
        """Return the reply to a question of a sum, which is not trusted.

        Raises:
            RejectedMessage: the message is malformed, or holds keys or shares that are not those of their sites.
            RequestRefused: this site does not take part in such a sum, or a step is out of order.
        """
        step, raw_id, payload = unpack_message(data, "server")
        sum_id = read_sum_id(raw_id)
        if step == Step.KEYS:
            answer = self._publish_keys(sum_id, payload)
        else:
            if self._party is None or sum_id != self._party.sum_id:
                raise RequestRefused("this site has no part in the sum of the message, or has restarted since")
            steps = {Step.SHARES: self._share, Step.VALUES: self._pad, Step.REVEAL: self._reveal}
            answer = steps[step](self._party, payload)
        self._reply = pack_message(step, sum_id, answer)
        return self._reply

    def take_reply(self) -> np.ndarray | None:
        """Return the last reply once, for a process that lets only this site's own messages leave; None: none."""
        reply, self._reply = self._reply, None
        return reply

    def _publish_keys(self, sum_id: SumId, payload: bytes) -> bytes:
        """Return this site's keys; nothing if no update waits, as at a site without training examples."""
        self._party = self._sum = None
        if payload:
            raise RejectedMessage("E_LEN", "payload", 0, len(payload), "server")
        if self._withheld is None:
            return b""
        self._admit(sum_id, self._withheld)
        examples, digest = self._withheld.update.num_examples, self._withheld.model_digest
        self._party = SumParty(sum_id, self.identity, examples, self.rules.min_sites, digest)
        return self._party.keys.to_bytes()

    def _admit(self, sum_id: SumId, withheld: Withheld) -> None:
        """Raises:
        RejectedMessage: the sum is not one over the update that waits, or an outdated one.
        """
        kind, t = withheld.request
        # A number is used for one sum.
        if (sum_id.run, sum_id.kind, sum_id.round) != (self.run, kind, t):
            raise RejectedMessage("E_REPLAY", "sum", (kind, t), sum_id, "server")
        if sum_id.sequence <= self._newest:
            raise RejectedMessage("E_REPLAY", "sequence", f"above {self._newest}", sum_id.sequence, "server")
        self._newest = sum_id.sequence

    def _require_withheld(self) -> Withheld:
        """Return the update that waits for its sum.

        Raises:
            RequestRefused: there is none.
        """
        if self._withheld is None:
            raise RequestRefused("the values of this update have left in a sum already")
        return self._withheld

    def _share(self, party: SumParty, payload: bytes) -> bytes:
        members, withheld = unpack_members(payload), self._require_withheld()
        boxes = party.share(members)
        examples = {keys.name: keys.num_examples for keys in members}
        new = RevealedSum(
            run=party.sum_id.run,
            kind=party.sum_id.kind,
            round=party.sum_id.round,
            model=withheld.model_digest,
            answer=hashlib.sha256(withheld.values.data).hexdigest(),
            shares=compute_shares(examples, list(examples), self.get_weights(party.sum_id.kind)),
        )
        # Checked again with the survivors; a sum that cannot be revealed should fail before the values are sent.
        self.requests.admit_sum(new)
        self._sum = new
        return b"".join(boxes)

    def _pad(self, party: SumParty, payload: bytes) -> bytes:
        withheld, boxes = self._require_withheld(), unpack_boxes(payload)
        if self._sum is None:
            raise RequestRefused("the values of this sum are asked for before the shares")
        share = self._sum.shares[self.identity.name]
        section = party.pad(boxes, withheld.ring.encode(withheld.values, share), withheld.ring)
        # The same values are never padded twice: another sum needs another attempt at the request.
        self._withheld = None
        return bytes.fromhex(withheld.update.patch.mask.fingerprint) + section.tobytes()

    def _reveal(self, party: SumParty, payload: bytes) -> bytes:
        survivors = unpack_names(payload)
        party.check_survivors(survivors)
        assert self._sum is not None, "a site with shares of others has shared its own"
        # Recorded before anything is revealed: a site that is killed in between must not forget it.
        self.requests.admit_sum(self._sum.model_copy(update={"survivors": sorted(survivors)}))
        return b"".join(party.reveal(survivors))
