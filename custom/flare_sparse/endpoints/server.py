"""The server's end of the wire: who holds what, what each question weighs, and whether an answer fits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..aggregation.weighted import weigh_by_examples
from ..encryption import ServerCipher
from ..errors import RejectedMessage, abbreviate
from ..exchange import EVALUATE, Assignment, Contribution, EncryptedValues, Patch
from ..mask import Mask
from ..params import Layout
from ..wire.ciphertexts import get_key_id
from ..wire.codec import Decoded, Encoded, decode, encode, min_message_bytes
from ..wire.ledger import Ledger
from ..wire.plan import Plan, ValueType
from ..wire.values import is_representable

SERVER = "server"
"""What the server's end is called among those that keep checkpoints."""

TEST_EXAMPLES = "test_examples"
"""The metric that the others are weighted by."""

_MOST_EXAMPLES = 2**53
_LARGEST_METRIC = torch.finfo(torch.float32).max  # times 2**53, over any number of sites, is still a float


@dataclass(frozen=True)
class Attempt:
    """One encoded question to some sites; a broadcast is one buffer, shared by all.

    Attributes:
        sequence: counts the questions of a run; an answer must carry it.
        kind, round: of the requests.
        messages: uint8 buffer per site.
    """

    sequence: int
    kind: str
    round: int
    messages: dict[str, np.ndarray]


@dataclass(frozen=True)
class SiteBase:
    """What a site holds since the last message that it acknowledged."""

    mask: Mask
    sequence: int


@dataclass(frozen=True)
class EncryptedModel:
    """A model that the server has and cannot read: where its values go, and the values."""

    mask: Mask
    values: EncryptedValues


@dataclass(frozen=True)
class ServerSnapshot:
    """What a server must remember to go on after a crash: its last question, who holds what, what was rounded off,
    and the model where the method's state cannot hold it because it is encrypted.

    Attributes:
        sequence: of the last message's question.
        opened: that of the same question when it was first asked.
        held, residuals: by site, and by stream of messages.
        sealed: the encrypted model.
    """

    sequence: int
    opened: int
    held: dict[str, SiteBase]
    residuals: dict[str, Tensor | None]
    encrypted: EncryptedModel | None = None


class ServerEndpoint:
    """Encodes questions, decodes answers and keeps the ledger. Knows nothing of FLARE and nothing of methods.

    Args:
        layout: of the model.
        run: 16 hex digits that name the run.
        values: number format on the wire.
        ledger: receives one line per message.
        cipher: weights come encrypted and are summed unread; None: in the clear.

    Attributes:
        sealed: the model since the first encrypted sum.
    """

    def __init__(self, layout: Layout, run: str, values: ValueType, ledger: Ledger, cipher: ServerCipher | None = None):
        self.layout, self.run, self.values, self.ledger, self.cipher = layout, run, values, ledger, cipher
        self.encrypted: EncryptedModel | None = None
        self._sequence = self._opened = self._before = 0
        self._held: dict[str, SiteBase] = {}
        self._residuals: dict[str, Tensor | None] = {}
        self._remainders: dict[str, Tensor | None] = {}
        self._question: list[Assignment] = []
        self._asked: dict[str, Assignment] = {}
        self._sent: dict[str, Patch] = {}

    def ask(self, assignments: Mapping[str, Assignment]) -> Attempt:
        """Encode one request per site; equal requests to sites that hold the same are encoded once.

        A request that is asked again, by whichever sites, says the same bits: a site that misses changes nobody else's.
        """
        again = self._opens(list(assignments.values()))
        self._asked, self._sent = dict(assignments), {}
        settled: set[str] = set()
        done: dict[tuple[int, str | None, str], Encoded] = {}
        messages: dict[str, np.ndarray] = {}
        for site in sorted(assignments):
            assignment = assignments[site]
            request = assignment.request
            patch, plan = self._fitting(site, assignment)
            key = (id(assignment), plan.base_mask.fingerprint if plan.base_mask else None, patch.base)
            if key not in done:
                stream = "all" if len(self._question) == 1 else site
                done[key] = encode(
                    patch,
                    plan,
                    trainable=request.trainable,
                    values=self.values,
                    residual=self._remainders.get(stream),
                )
                if not again and (patch is request.model or stream not in settled):
                    self._residuals[stream] = done[key].residual
                    settled.add(stream)
            messages[site] = done[key].data
            self._sent[site] = patch
            self.ledger.record_sent(done[key], plan, site, assignment.expected.content)
        first = next(iter(assignments.values())).request
        return Attempt(self._sequence, first.kind, first.round, messages)

    def _opens(self, assignments: list[Assignment]) -> bool:
        """Count a question; returns whether it only repeats the last one."""
        self._sequence += 1
        again = all(any(assignment is asked for asked in self._question) for assignment in assignments)
        if not again:
            self._before, self._opened = self._opened, self._sequence
            self._question = list({id(assignment): assignment for assignment in assignments}.values())
            self._remainders = dict(self._residuals)
        return again

    def _fitting(self, site: str, assignment: Assignment) -> tuple[Patch, Plan]:
        """The patch that this site can read, and what both ends hold."""
        held, request = self._held.get(site), assignment.request
        patch = request.model
        if patch.base == "previous" and (held is None or held.sequence < self._before):
            assert assignment.full_model is not None, "a patch over the previous model needs Assignment.full_model"
            patch = assignment.full_model
        plan = Plan(
            self.layout,
            self.run,
            base_mask=held.mask if held else None,
            base_sequence=held.sequence if held else None,
            sequence=self._sequence,
            round=request.round,
            kind=request.kind,
        )
        return self._as_it_is(patch), plan

    def _as_it_is(self, patch: Patch) -> Patch:
        """The model with its encrypted values, for a method's state only knows that it cannot be read. A patch of other
        entries stays as it is: it has no values, and the codec refuses to send what is not a number.
        """
        if self.encrypted is None or patch.mask != self.encrypted.mask:
            return patch
        return Patch.from_encrypted(self.encrypted.values, patch.mask, patch.base)

    def aggregate_encrypted(self, updates: Sequence[Contribution]) -> None:
        """The mean by examples of a round's encrypted answers is the model from now on; without any, nothing happens.

        Raises:
            ValueError: answers on different entries, or encrypted and plain ones.
        """
        ordered = sorted(updates, key=lambda update: update.site)
        answers = [update.patch.encrypted for update in ordered if update.patch.encrypted is not None]
        if self.cipher is None or not answers:
            return
        on = ordered[0].patch.mask
        if len(answers) != len(ordered) or any(update.patch.mask != on for update in ordered):
            raise ValueError("encrypted answers can be summed on one selection only")
        self.encrypted = EncryptedModel(on, self.cipher.weighted_sum(answers, weigh_by_examples(ordered), on.count))

    def find_underweight_sites(self, updates: Sequence[Contribution]) -> list[str]:
        """Sites whose share of an encrypted sum is too small for a number there."""
        ordered = [update for update in updates if update.patch.encrypted is not None]
        if self.cipher is None or not ordered:
            return []
        shares = weigh_by_examples(ordered)
        return [update.site for update, share in zip(ordered, shares, strict=True) if share < self.cipher.least_weight]

    def find_sites_with_wrong_key(self, updates: Sequence[Contribution]) -> list[str]:
        """Sites whose answer is under another key than the model's or, before there is one, than most answers'."""
        keys = {
            update.site: get_key_id(update.patch.encrypted) for update in updates if update.patch.encrypted is not None
        }
        if not keys:
            return []
        counts = Counter(keys.values())
        agreed = get_key_id(self.encrypted.values) if self.encrypted else max(sorted(counts), key=counts.__getitem__)
        return sorted(site for site, key in keys.items() if key != agreed)

    def compute_min_upload(self, site: str, assignment: Assignment) -> tuple[int, int]:
        """Entries and bytes that the answer of ``site`` to ``request`` has at least; the bytes of a selection that
        must be said are not among them.
        """
        expected = assignment.expected
        entries = expected.mask.count if expected.mask else expected.min_entries(site) if expected.min_entries else 0
        if assignment.request.kind == EVALUATE:
            entries = 0
        return entries, min_message_bytes(entries, "float32" if expected.content == "scores" else self.values)

    def is_encodable(self, model: Patch) -> bool:
        """Whether a question can carry a model: each value is finite in the wire's format. A model that cannot be read
        here is taken to be.
        """
        return self.cipher is not None or is_representable(model.values, self.values)

    def snapshot(self) -> ServerSnapshot:
        """A value, for a checkpoint."""
        return ServerSnapshot(self._sequence, self._opened, dict(self._held), dict(self._residuals), self.encrypted)

    def restore(self, memory: ServerSnapshot) -> None:
        """Go on where :meth:`memory` was taken; a site that has lost what it held says so and is sent everything."""
        self._sequence, self._opened, self.encrypted = memory.sequence, memory.opened, memory.encrypted
        self._held, self._residuals = dict(memory.held), dict(memory.residuals)

    def forget_base(self, site: str) -> None:
        """The site lost what it held: it is sent everything next time (the one recovery path)."""
        self._held.pop(site, None)

    def decode(self, site: str, data: Any, examples: Any, metrics: Any) -> Contribution:
        """An answer to the last question, checked against it.

        Args:
            site: the name the framework knows.
            data: the message.
            examples: the number that came beside it.
            metrics: names and numbers that came beside it.

        Raises:
            RejectedMessage: nobody asked this site, or something does not fit; the code says what.
        """
        assignment = self._asked.get(site)
        if assignment is None:
            raise RejectedMessage("E_REPLAY", "site", f"one of {sorted(self._asked)}", site, site)
        request, expected = assignment.request, assignment.expected
        plan = Plan(
            self.layout,
            self.run,
            base_mask=request.trainable,
            sequence=self._sequence,
            round=request.round,
            kind=request.kind,
            ciphertext_format=self.cipher.ciphertext_format if self.cipher else None,
        )
        message = decode(data, plan, site)
        if message.patch.base != "zeros" or message.trainable is not None:
            raise RejectedMessage("E_KIND", "over", "an answer over zeros", "a question's form", site)
        if message.content not in (expected.content, "metrics"):
            raise RejectedMessage("E_KIND", "content", expected.content, message.content, site)
        self._written_as_agreed(message, site)
        if expected.mask is not None and message.content != "metrics" and message.patch.mask != expected.mask:
            raise RejectedMessage("E_MASK", "selection", expected.mask, message.patch.mask, site)
        accepts = expected.accepts
        if accepts is not None and message.content != "metrics" and not accepts(site, message.patch.mask):
            raise RejectedMessage(
                "E_MASK", "selection", "one that the method allows this site", message.patch.mask, site
            )
        if expected.min_value is not None and bool((message.patch.values < expected.min_value).any()):
            raise RejectedMessage("E_RANGE", "values", f"at least {expected.min_value:g}", "smaller ones", site)
        update = Contribution(site, message.patch, message.content, _examples(examples, site), _metrics(metrics, site))
        self.ledger.record_received(message, plan, site, len(data))
        self._acknowledge(site)
        return update

    def _written_as_agreed(self, message: Decoded, site: str) -> None:
        """Raises:
        RejectedMessage: weights in the clear where they are to be encrypted, the reverse, or no ciphertext; another
            number format than the job's.
        """
        sealed = message.patch.encrypted
        wanted = self.cipher is not None and message.content in ("weights", "delta")
        if wanted != (sealed is not None):
            raise RejectedMessage(
                "E_SEALED", f"values of {message.content}", "ckks" if wanted else "numbers", message.values, site
            )
        if self.cipher is not None and sealed is not None:
            self.cipher.check(sealed, message.patch.mask.count, site)
        elif message.values != ("float32" if message.content == "scores" else self.values):
            raise RejectedMessage("E_DTYPE", "values", self.values, message.values, site)

    def _acknowledge(self, site: str) -> None:
        """Who answers holds what was sent."""
        patch, held = self._sent[site], self._held.get(site)
        known = held.mask if patch.base == "previous" and held else patch.mask
        self._held[site] = SiteBase(known, self._sequence)
        del self._asked[site]


def _examples(value: Any, site: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST_EXAMPLES:
        raise RejectedMessage("E_WEIGHT", "examples", "an integer from 0", abbreviate(value), site)
    return value


def _metrics(value: Any, site: str) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > 64:
        raise RejectedMessage("E_METRICS", "metrics", "at most 64 names with numbers", type(value).__name__, site)
    for name, number in value.items():
        if not isinstance(name, str) or len(name) > 64 or isinstance(number, bool):
            raise RejectedMessage("E_METRICS", "metrics", "names of up to 64 characters", abbreviate(name), site)
        if not isinstance(number, (int, float)) or not abs(number) <= _LARGEST_METRIC:
            raise RejectedMessage("E_METRICS", f"metrics.{name}", "a finite float32", abbreviate(number), site)
    if not 1 <= value.get(TEST_EXAMPLES, 1) < _MOST_EXAMPLES:  # the means over all sites are weighted by it
        raise RejectedMessage("E_METRICS", TEST_EXAMPLES, "at least 1", abbreviate(value[TEST_EXAMPLES]), site)
    return {name: float(number) for name, number in value.items()}
