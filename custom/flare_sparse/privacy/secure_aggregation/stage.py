"""Sums of padded values as a stage: updates wait at their sites, and the server reads the sum over these alone.

The ring of an update and the sites' weights are computed alike at both ends.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError, RejectedMessage, RequestRefused, WireError
from ...core.exchange import EVALUATE, Assignment, Content, Contribution, Patch, RequestId, Update
from ...core.mask import Mask
from ...core.params import Layout
from ...wire.codec import Cost
from ...wire.ledger import Ledger
from ...wire.plan import Plan
from ...wire.stage import (
    Admit,
    Opened,
    Questions,
    ReadKit,
    Reply,
    RevealedSum,
    ServerStage,
    SiteStage,
    Stage,
    StageRun,
    StepTransport,
)
from ...wire.steps import HEADER_BYTES, Step, SumId, pack_message, unpack_message
from .collector import SumCollector, TooFewSites
from .identities import CERTIFICATE_FILE, KEY_FILE, ROOT_FILE, RootCertificate, SiteIdentity, generate_kits
from .keys import SHARE_BYTES, SignedKeys
from .limits import FEWEST_SITES, find_violation
from .messages import (
    FINGERPRINT_BYTES,
    bound_reply_bytes,
    pack_boxes,
    pack_members,
    pack_names,
    split_payload,
    unpack_boxes,
    unpack_members,
    unpack_names,
    unpack_reply,
)
from .party import BOX_BYTES, SumParty
from .rings import Ring, RingFormat

Weigh = Callable[[Sequence[Contribution]], Sequence[float]]
"""Weights of the method's aggregation."""
_LOG = logging.getLogger(__name__)

SUM_SITE = "sum"
"""Site of the contribution that stands for all summed ones."""


@dataclass(frozen=True)
class SumRules(Stage):
    """Sums of a job, ``wire.aggregation: masked``.

    Attributes:
        bound: largest absolute change of a parameter, which decides the ring.
        min_sites: fewest sites of a sum.
    """

    hides_values: ClassVar[bool] = True
    bound: float
    min_sites: int = FEWEST_SITES

    def build_server(self, run: StageRun, ledger: Ledger, read_kit: ReadKit) -> ServerSums:
        return ServerSums(run, self, RootCertificate(_read(read_kit, ROOT_FILE)), ledger)

    def build_site(self, name: str, run: StageRun, read_kit: ReadKit, admit: Admit, min_sites: int = 0) -> SiteSums:
        identity = SiteIdentity.from_pem(
            name, *(_read(read_kit, file) for file in (CERTIFICATE_FILE, KEY_FILE, ROOT_FILE))
        )
        # The site's own minimum counts, too: the job and its server may ask for less.
        return SiteSums(identity, run, replace(self, min_sites=max(self.min_sites, min_sites)), admit)

    def generate_kits(self, sites: Iterable[str]) -> dict[str, dict[str, bytes]]:
        return generate_kits(sites)


def _read(read_kit: ReadKit, file: str) -> bytes:
    """Return the content of a file of the startup kit.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_kit(file)
    except OSError as error:
        raise ConfigError(
            f"wire.aggregation: masked: {error.filename}: {error.strerror}. Start the job with flare-sparse run, or in "
            "a provisioned federation, whose startup kits have certificates (docs/secure-aggregation.md)"
        ) from error


def build_ring(content: Content, mask: Mask, layout: Layout, rules: SumRules) -> RingFormat:
    """Return the format of the values of a mask.

    Scores and buffers take 64 bits: saliencies differ by orders of magnitude, and a running variance has no bound.
    """
    is_wide = np.ones(mask.count, dtype=bool) if content == "scores" else mask.find_buffers(layout).numpy()
    return RingFormat(is_wide, Ring(32, rules.bound))


def compute_reference(content: Content, mask: Mask, model: Tensor) -> np.ndarray:
    """Return what is subtracted from the values of an update, float64 ``(mask.count,)``: for weights, the model.

    The change of a round is far smaller than the weights, so the same ring holds it more exactly.
    """
    return mask.take(model).double().numpy() if content == "weights" else np.zeros(mask.count)


def compute_shares(examples: Mapping[str, int], sites: Sequence[str], weigh: Weigh) -> dict[str, float]:
    """Return each site's share of a sum: its weight over the sum of the weights of ``sites``.

    Args:
        examples: numbers of examples by site.
        sites: names of the sites of the sum.
        weigh: weights of the method's aggregation.
    """
    weights = compute_weights(examples, sites, weigh)
    total = sum(weights.values())
    return {site: weight / total for site, weight in weights.items()}


def compute_weights(examples: Mapping[str, int], sites: Sequence[str], weigh: Weigh) -> dict[str, float]:
    """Return the weight of each site in the method's aggregation over ``sites``."""
    without_values = Patch.empty(1)
    counted = [Contribution(site, without_values, "weights", examples[site]) for site in sorted(sites)]
    return dict(zip(sorted(sites), weigh(counted), strict=True))


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


class SiteSums(SiteStage):
    """Answers the steps of the sums of a job. Nothing is kept on disk but the records of the revealed sums.

    Args:
        identity: signs this site's keys and checks those of the others.
        run: the run.
        rules: bound and smallest size of the sums.
        admit: records the revealed sums.
    """

    hides_values = True

    def __init__(self, identity: SiteIdentity, run: StageRun, rules: SumRules, admit: Admit):
        self.identity, self.run, self.rules, self.admit = identity, run, rules, admit
        self._reply: np.ndarray | None = None
        self._withheld: Withheld | None = None
        self._party: SumParty | None = None
        self._sum: RevealedSum | None = None
        self._newest = 0

    def seal(self, update: Update, request: RequestId, model: Tensor, get_digest: Callable[[], str]) -> None:
        """Keep the values of an update for its sum.

        Raises:
            RejectedMessage: a value is not finite, or above the bound of the ring. Nothing may be sent.
        """
        self._withheld = self._party = None
        if update.content == "metrics":
            return
        update = replace(update, patch=update.patch.copy_to_host())
        mask = update.patch.mask
        ring = build_ring(update.content, mask, self.run.layout, self.rules)
        values = update.patch.values.double().numpy() - compute_reference(update.content, mask, model)
        # Refused now and not in the sum, where it would cost the other sites an attempt.
        ring.encode(values, 1.0)
        self._withheld = Withheld(request, update, values, ring, get_digest())

    def discard(self) -> None:
        self._withheld = self._party = None

    def holds(self, patch: Patch) -> bool:
        if self._withheld is None:
            return False
        own = self._withheld.update.patch
        return own.mask == patch.mask and torch.equal(own.values, patch.values)

    @property
    def message_bytes(self) -> int:  # type: ignore[override]
        return HEADER_BYTES + FINGERPRINT_BYTES + self._withheld.ring.section_bytes if self._withheld else 0

    def answer(self, data: Any) -> np.ndarray:
        """Return the reply to a question of a sum.

        Raises:
            RejectedMessage: the message is malformed, or holds keys or shares that are not those of their sites.
            RequestRefused: this site does not take part in such a sum, or a step is out of order.
        """
        step, sum_id, payload = unpack_message(data, "server")
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
        if (sum_id.run, sum_id.kind, sum_id.round) != (self.run.run, kind, t):
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
            shares=compute_shares(examples, list(examples), self.run.get_weights(party.sum_id.kind)),
        )
        # Checked again with the survivors; a sum that cannot be revealed should fail before the values are sent.
        self.admit(new, find_violation)
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
        party.require_shares(survivors)
        assert self._sum is not None, "a site with shares of others has shared its own"
        # Recorded before anything is revealed: a site that is killed in between must not forget it.
        self.admit(self._sum.model_copy(update={"survivors": sorted(survivors)}), find_violation)
        return b"".join(party.reveal(survivors))


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


class ServerSums(ServerStage):
    """What the server knows of the sums of a job.

    Args:
        run: the run.
        rules: bound and smallest size of the sums.
        root: root certificate of the federation.
        ledger: receives a line per message.

    Attributes:
        current: what is remembered of the current request.
    """

    hides_values = True

    def __init__(self, run: StageRun, rules: SumRules, root: RootCertificate, ledger: Ledger):
        self.run, self.rules, self.root, self.ledger = run, rules, root, ledger
        self.current = RequestSums()

    def open(
        self,
        assignments: Mapping[str, Assignment],
        sequence: int,
        replies: Mapping[str, Reply],
        transport: StepTransport,
        deadline: float | None,
    ) -> Opened:
        exchange = self.start_sum(assignments, sequence)
        return Opened(replies) if exchange is None else exchange.run(replies, transport, deadline)

    def start_sum(self, assignments: Mapping[str, Assignment], sequence: int) -> SumExchange | None:
        """Return the sum over the updates of an attempt; None if its requests ask for metrics only.

        Raises:
            ValueError: the sites have different assignments, which no sum can have.
        """
        assignment = next(iter(assignments.values()))
        mask = assignment.expected.mask
        if mask is None or assignment.request.kind == EVALUATE:
            return None
        if any(other is not assignment for other in assignments.values()):
            raise ValueError("updates can only be summed if all sites have the same assignment")
        request = assignment.request
        if (self.current.kind, self.current.round) != (request.kind, request.round):
            self.current = RequestSums(request.kind, request.round)
        sum_id = SumId(self.run.run, request.kind, request.round, sequence)
        return SumExchange(self, sum_id, assignment, mask, self.current)


class SumExchange:
    """The steps of one sum. Each has questions, one for each site that is still in it, and replies.

    Attributes:
        attempts: what is remembered of all attempts at the request.
    """

    def __init__(self, sums: ServerSums, sum_id: SumId, assignment: Assignment, mask: Mask, attempts: RequestSums):
        self.sums, self.sum_id, self.assignment, self.mask, self.attempts = sums, sum_id, assignment, mask, attempts
        ring = build_ring(assignment.expected.content, mask, sums.run.layout, sums.rules)
        self._section_bytes = ring.section_bytes
        self.collector = SumCollector(sum_id, ring, sums.root, sums.rules.min_sites)

    def ask(self, step: Step, examples: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return the question of a step to each site that is still in the sum.

        Args:
            step: the step.
            examples: reported numbers of examples of the sites that have an update.

        Raises:
            TooFewSites: the sum has failed.
        """
        payloads = dict(self._iterate_payloads(step, examples))
        messages: dict[bytes, np.ndarray] = {}
        # Equal questions share one buffer, so that a transport can send them as one broadcast.
        for payload in payloads.values():
            messages.setdefault(payload, pack_message(step, self.sum_id, payload))
        for site, payload in payloads.items():
            self._record(step, site, "down", messages[payload].size)
        return {site: messages[payload] for site, payload in payloads.items()}

    def _iterate_payloads(self, step: Step, examples: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
        before = self.attempts
        if step == Step.KEYS:
            is_again = before.members and before.members <= examples.keys()
            yield from ((site, b"") for site in sorted(before.members if is_again else examples.keys() - before.silent))
        elif step == Step.SHARES:
            members = pack_members(self.collector.list_members())
            yield from dict.fromkeys(sorted(self.collector.members), members).items()
        elif step == Step.VALUES:
            sharers = self.collector.sharers
            # Sites that have begun to reveal a sum reveal that one only: a member that was lost in it stays out of it.
            asked = sorted(before.survivors) if before.members == set(sharers) else sharers
            yield from ((site, pack_boxes(self.collector.collect_boxes(site))) for site in asked)
        else:
            survivors = self.collector.list_survivors()
            before.members, before.survivors = frozenset(self.collector.members), frozenset(survivors)
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
        # Check the size before the message is copied or summed up.
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

    def finish(self, contributions: Mapping[str, Contribution]) -> tuple[Contribution, dict[str, Contribution]]:
        """Return the contribution that stands for all summed ones, and the contributions of its sites.

        The values of a single contribution are NaN: the server cannot read them.

        Args:
            contributions: the sites' replies without values.

        Raises:
            TooFewSites: the sum has failed.
        """
        total = self.collector.compute_sum()
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
        weigh, counts = self.sums.run.get_weights(self.sum_id.kind), self.collector.examples
        among_sharers = compute_weights(counts, self.collector.sharers, weigh)
        among_survivors = sum(compute_weights(counts, self.collector.survivors, weigh).values())
        part = sum(among_sharers[site] for site in self.collector.survivors) / sum(among_sharers.values())
        model = (self.assignment.full_model or self.assignment.request.model).to_vector()
        reference = compute_reference(self.assignment.expected.content, self.mask, model)
        scaled: np.ndarray = total * (among_survivors / part) + reference * among_survivors
        return scaled

    def run(self, replies: Mapping[str, Reply], transport: StepTransport, deadline: float | None) -> Opened:
        """Return the replies after the sum, and the contribution that stands for the summed ones; None if it failed.

        A site that drops out before its values are in the sum has not replied, or with the code of its refusal. One
        that drops out later contributes.

        Args:
            replies: replies to the request, without values.
            transport: carries the steps.
            deadline: as in :meth:`~flare_sparse.wire.stage.ServerStage.open`.
        """
        contributions = {site: reply for site, reply in replies.items() if isinstance(reply, Contribution)}
        # A weight of 0 adds nothing to a sum, and a sum of such weights cannot be divided by them.
        examples = {site: reply.num_examples for site, reply in contributions.items() if reply.num_examples}
        after: dict[str, Reply] = dict(replies)
        refused: dict[str, str] = {}
        for site in self.attempts.silent.keys() & examples.keys():
            _apply_code(after, site, self.attempts.silent[site])
        try:
            for step in Step:
                questions = self.ask(step, examples)
                answers = self._send(step, questions, transport, deadline, examples) if questions else {}
                if step == Step.REVEAL:
                    # Their values are in the sum: what they answer matters only if it fails.
                    refused = {site: code for site, code in answers.items() if code}
                    break
                if step == Step.SHARES:
                    # All members must share: the next attempt at this request begins without those that did not.
                    self.attempts.silent |= {site: answers.get(site) for site in questions if answers.get(site) != ""}
                for site in questions:
                    _apply_code(after, site, answers.get(site))
            total, summed = self.finish(contributions)
        except TooFewSites as error:
            _LOG.warning("round %d (%s): %s", self.sum_id.round, self.sum_id.kind, error)
            return Opened({**after, **refused}, failure=str(error))
        return Opened({**after, **summed}, total)

    def _send(
        self,
        step: Step,
        questions: Mapping[str, np.ndarray],
        transport: StepTransport,
        deadline: float | None,
        examples: Mapping[str, int],
    ) -> dict[str, str]:
        """Return the reason code of each site that replied to a step; empty if its reply is accepted."""
        seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        codes: dict[str, str] = {}
        lines = self.sums.ledger.lines
        first_line = len(lines)
        # Add and forget each reply as it arrives: integers of a ring have one sum in every order.
        for site, answer in transport(Questions(questions, seconds)):
            # A site may answer twice: the first answer counts.
            if site not in questions or site in codes:
                continue
            codes[site] = answer if isinstance(answer, str) else ""
            if isinstance(answer, np.ndarray):
                try:
                    self.accept(step, site, answer, examples)
                except WireError as error:
                    codes[site] = error.code
        # Sort by name, so that the ledgers of equal runs are equal.
        lines[first_line:] = sorted(lines[first_line:], key=lambda line: line.site)
        return codes

    def _record(self, step: Step, site: str, direction: Any, size: int) -> None:
        """Add a message to the ledger; keys, shares and reveals count as messages without values."""
        has_values = step == Step.VALUES and direction == "up"
        content = self.assignment.expected.content if has_values else "metrics"
        plan = Plan(self.sums.run.layout, **vars(self.sum_id))
        cost = Cost(
            encoding="shared" if has_values else step.name.lower(),
            values="masked",
            scalars_sent=self.mask.count if has_values else 0,
            payload_bytes=size,
            selection_bytes=0,
            floor_bytes=self._section_bytes if has_values else 0,
        )
        self.sums.ledger.record(plan, site, direction, content, cost)


def _apply_code(replies: dict[str, Reply], site: str, code: str | None) -> None:
    """Remove the reply of a site that was silent (None) in a step of the sum, or replace it by its code, if any."""
    if code is None:
        replies.pop(site, None)
    elif code:
        replies[site] = code
