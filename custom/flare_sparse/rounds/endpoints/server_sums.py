"""The server's end of the sums of padded values: questions and replies of each step, their bytes, and the sum.

The ring of an update and the sites' weights are computed alike at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import RejectedMessage
from ...core.exchange import Assignment, Content, Contribution, Patch
from ...core.mask import Mask
from ...core.params import Layout
from ...methods.aggregation.weighted import Weights
from ...privacy.secure_aggregation.collector import SumCollector, TooFewSites
from ...privacy.secure_aggregation.identities import RootCertificate
from ...privacy.secure_aggregation.keys import SHARE_BYTES, SignedKeys, SumId
from ...privacy.secure_aggregation.limits import SumRules
from ...privacy.secure_aggregation.messages import (
    FINGERPRINT_BYTES,
    Step,
    bound_reply_bytes,
    pack_boxes,
    pack_members,
    pack_message,
    pack_names,
    split_payload,
    unpack_reply,
)
from ...privacy.secure_aggregation.party import BOX_BYTES
from ...privacy.secure_aggregation.rings import Ring, RingFormat
from ...wire.ledger import Ledger
from ...wire.plan import Plan
from ...wire.quantized import find_exact_values


def build_ring(content: Content, mask: Mask, layout: Layout, rules: SumRules) -> RingFormat:
    """Return the format of the values of a mask.

    Scores and buffers take 64 bits: saliencies differ by orders of magnitude, and a running variance has no bound.
    """
    is_wide = np.ones(mask.count, dtype=bool) if content == "scores" else find_exact_values(mask, layout).numpy()
    return RingFormat(is_wide, Ring(32, rules.bound))


def compute_reference(content: Content, mask: Mask, model: Tensor) -> np.ndarray:
    """Return what is subtracted from the values of an update, float64 ``(mask.count,)``: for weights, the model.

    The change of a round is far smaller than the weights, so the same ring holds it more exactly.
    """
    return mask.take(model).double().numpy() if content == "weights" else np.zeros(mask.count)


def compute_shares(examples: Mapping[str, int], sites: Sequence[str], weigh: Weights) -> dict[str, float]:
    """Return each site's share of a sum: its weight over the sum of the weights of ``sites``.

    Args:
        examples: numbers of examples by site.
        sites: names of the sites of the sum.
        weigh: weights of the method's aggregation.
    """
    weights = compute_weights(examples, sites, weigh)
    total = sum(weights.values())
    return {site: weight / total for site, weight in weights.items()}


def compute_weights(examples: Mapping[str, int], sites: Sequence[str], weigh: Weights) -> dict[str, float]:
    """Return the weight of each site in the method's aggregation over ``sites``."""
    without_values = Patch.empty(1)
    counted = [Contribution(site, without_values, "weights", examples[site]) for site in sorted(sites)]
    return dict(zip(sorted(sites), weigh(counted), strict=True))


SUM_SITE = "sum"
"""Site of the contribution that stands for all summed ones."""


@dataclass
class RequestSums:
    """What the server remembers of the attempts at the sum of one request.

    Attributes:
        kind, round: those of the request.
        members, survivors: those of the last sum whose shares it asked for; the survivors reveal no other one.
        silent: reason code of each site that published keys and did not share the secrets of its pads; None: it did
            not answer.
    """

    kind: str = ""
    round: int = -1
    members: frozenset[str] = frozenset()
    survivors: frozenset[str] = frozenset()
    silent: dict[str, str | None] = field(default_factory=dict)

    def choose_members(self, sites: Collection[str]) -> list[str]:
        """Return which of the sites with an update to ask for keys, in the order of names."""
        if self.members and self.members <= set(sites):
            return sorted(self.members)
        return sorted(set(sites) - self.silent.keys())

    def choose_survivors(self, members: Collection[str]) -> frozenset[str]:
        """Return which members to ask for values."""
        return self.survivors if self.members == set(members) else frozenset(members)


@dataclass(eq=False)
class ServerSums:
    """What the server knows of the sums of a job.

    Attributes:
        layout: layout of the model.
        run: id of the run, 16 hex digits.
        rules: bound and smallest size of the sums.
        get_weights: weights of the method's aggregation, by kind of request.
        root: root certificate of the federation.
        ledger: receives a line per message.
        current: what is remembered of the current request.
    """

    layout: Layout
    run: str
    rules: SumRules
    get_weights: Callable[[str], Weights]
    root: RootCertificate
    ledger: Ledger
    current: RequestSums = field(default_factory=RequestSums)

    def start_sum(self, assignments: Mapping[str, Assignment], sequence: int) -> SumExchange | None:
        """Return the sum over the updates of an attempt; None if its requests ask for metrics only.

        Raises:
            ValueError: the sites have different assignments, which no sum can have.
        """
        assignment = next(iter(assignments.values()))
        mask = assignment.expected.mask
        if mask is None or assignment.request.kind == "evaluate":
            return None
        if any(other is not assignment for other in assignments.values()):
            raise ValueError("updates can only be summed if all sites have the same assignment")
        request = assignment.request
        if (self.current.kind, self.current.round) != (request.kind, request.round):
            self.current = RequestSums(request.kind, request.round)
        sum_id = SumId(self.run, request.kind, request.round, sequence)
        return SumExchange(self, sum_id, assignment, mask, self.current)


class SumExchange:
    """The steps of one sum. Each has questions, one for each site that is still in it, and replies.

    Attributes:
        attempts: what is remembered of all attempts at the request.
        failure: why the sum has failed; empty: it has not.
    """

    def __init__(self, sums: ServerSums, sum_id: SumId, assignment: Assignment, mask: Mask, attempts: RequestSums):
        self.sums, self.sum_id, self.assignment, self.mask, self.attempts = sums, sum_id, assignment, mask, attempts
        ring = build_ring(assignment.expected.content, mask, sums.layout, sums.rules)
        self._section_bytes = ring.section_bytes
        self.collector = SumCollector(sum_id, ring, sums.root, sums.rules.min_sites)
        self.failure = ""

    def ask(self, step: Step, examples: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return the question of a step to each site that is still in the sum; none after a failure.

        Args:
            step: the step.
            examples: reported numbers of examples of the sites that have an update.
        """
        if self.failure:
            return {}
        try:
            payloads = dict(self._iterate_payloads(step, examples))
        except TooFewSites as error:
            self.failure = str(error)
            return {}
        messages: dict[bytes, np.ndarray] = {}
        # Equal questions share one buffer, so that a transport can send them as one broadcast.
        for payload in payloads.values():
            messages.setdefault(payload, pack_message(step, self.sum_id, payload))
        for site, payload in payloads.items():
            self._record(step, site, "down", messages[payload].size)
        return {site: messages[payload] for site, payload in payloads.items()}

    def _iterate_payloads(self, step: Step, examples: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
        if step == Step.KEYS:
            yield from dict.fromkeys(self.attempts.choose_members(examples), b"").items()
        elif step == Step.SHARES:
            members = pack_members(self.collector.list_members())
            yield from dict.fromkeys(sorted(self.collector.members), members).items()
        elif step == Step.VALUES:
            boxes = {site: pack_boxes(self.collector.list_boxes(site)) for site in self.collector.sharers}
            # Sites that have begun to reveal a sum reveal that one only: a member that was lost in it stays out of it.
            yield from ((site, boxes[site]) for site in sorted(self.attempts.choose_survivors(boxes)))
        else:
            survivors = self.collector.list_survivors()
            self.attempts.members, self.attempts.survivors = frozenset(self.collector.members), frozenset(survivors)
            yield from dict.fromkeys(survivors, pack_names(survivors)).items()

    def accept(self, step: Step, site: str, data: Any, examples: Mapping[str, int]) -> None:
        """Take the reply of a site, which is not trusted.

        Args:
            step: the step.
            site: the site.
            data: the message.
            examples: as in :meth:`ask`.

        Raises:
            RejectedMessage: it is malformed, or not the reply of this site to this step.
        """
        limit = bound_reply_bytes(step, self._section_bytes, len(examples))
        # Before the message is copied or summed up.
        if not isinstance(data, np.ndarray) or data.size > limit:
            found = data.size if isinstance(data, np.ndarray) else type(data).__name__
            raise RejectedMessage("E_LEN", "message", f"at most {limit} bytes", found, site)
        payload = unpack_reply(data, step, self.sum_id, site)
        if step == Step.KEYS and payload:
            self._accept_keys(SignedKeys.from_bytes(site, payload), examples)
        elif step == Step.SHARES:
            self.collector.accept_boxes(site, split_payload(payload, BOX_BYTES, site))
        elif step == Step.VALUES:
            fingerprint = bytes.fromhex(self.mask.fingerprint)
            if payload[:FINGERPRINT_BYTES] != fingerprint:
                found = payload[:FINGERPRINT_BYTES].hex()
                raise RejectedMessage("E_MASK", "selection", self.mask.fingerprint, found, site)
            self.collector.accept_values(site, np.frombuffer(payload[FINGERPRINT_BYTES:], np.uint8))
        elif step == Step.REVEAL:
            self.collector.accept_shares(site, split_payload(payload, SHARE_BYTES, site))
        self._record(step, site, "up", data.size)

    def _accept_keys(self, keys: SignedKeys, examples: Mapping[str, int]) -> None:
        # The sites weigh by the signed number, the quorum by the reported one.
        if keys.num_examples != examples[keys.name]:
            raise RejectedMessage("E_WEIGHT", "examples", examples[keys.name], keys.num_examples, keys.name)
        self.collector.accept_keys(keys)

    def finish(self, contributions: Mapping[str, Contribution]) -> tuple[Contribution | None, dict[str, Contribution]]:
        """Return the contribution that stands for all summed ones, and the contributions of its sites.

        The values of a single contribution are NaN: the server cannot read them.

        Args:
            contributions: the sites' replies without values.
        """
        if self.failure:
            return None, {}
        try:
            total = self.collector.compute_sum()
        except TooFewSites as error:
            self.failure = str(error)
            return None, {}
        content, survivors = self.assignment.expected.content, self.collector.survivors
        hidden = Patch(torch.full((1,), torch.nan).expand(self.mask.count), self.mask)
        summed = {site: replace(contributions[site], content=content, patch=hidden) for site in survivors}
        examples = sum(contribution.num_examples for contribution in summed.values())
        patch = Patch(torch.from_numpy(self._scale(total)).float(), self.mask)
        return Contribution(SUM_SITE, patch, content, examples), summed

    def _scale(self, total: np.ndarray) -> np.ndarray:
        """Return the sum that the method expects of the survivors, from the ring's.

        The ring's is ``T = sum_k p_k (v_k - r)`` over the survivors, where ``r`` is the reference, ``s_k`` and ``w_k``
        are the weights of site k among all sharers and among the survivors, and ``p_k = s_k / sum_sharers s``. The
        method's is ``sum_k w_k v_k = T sum_k w_k / sum_k p_k + r sum_k w_k``.
        """
        weigh, counts = self.sums.get_weights(self.sum_id.kind), self.collector.examples
        among_sharers = compute_weights(counts, self.collector.sharers, weigh)
        among_survivors = sum(compute_weights(counts, self.collector.survivors, weigh).values())
        part = sum(among_sharers[site] for site in self.collector.survivors) / sum(among_sharers.values())
        model = (self.assignment.full_model or self.assignment.request.model).to_vector()
        reference = compute_reference(self.assignment.expected.content, self.mask, model)
        scaled: np.ndarray = total * (among_survivors / part) + reference * among_survivors
        return scaled

    def _record(self, step: Step, site: str, direction: Any, size: int) -> None:
        """Add a message to the ledger; keys, shares and reveals count as messages without values."""
        has_values = step == Step.VALUES and direction == "up"
        content = self.assignment.expected.content if has_values else "metrics"
        plan = Plan(
            self.sums.layout,
            self.sum_id.run,
            round=self.sum_id.round,
            sequence=self.sum_id.sequence,
            kind=self.sum_id.kind,
        )
        self.sums.ledger.record(
            plan,
            site,
            direction,
            content,
            encoding="shared" if has_values else step.name.lower(),
            values="masked",
            scalars_sent=self.mask.count if has_values else 0,
            payload_bytes=size,
            selection_bytes=0,
            floor_bytes=self._section_bytes if has_values else 0,
        )
