"""The server's end of the wire: encodes requests, validates updates and knows which base each site holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ...core.errors import RejectedMessage
from ...core.exchange import EVALUATE, STATISTICS, Assignment, Contribution, Patch, Request, UpdateSpec
from ...core.params import Layout
from ...core.seeds import make_generator
from ...privacy.encryption import ServerCipher
from ...wire.capabilities import Capabilities
from ...wire.codec import compute_min_message_bytes, decode, encode
from ...wire.formats import ValueType, is_quantized
from ...wire.ledger import Ledger
from ...wire.messages import Decoded, Encoded
from ...wire.plan import Plan
from ...wire.values import is_representable
from .bases import (
    InitialModel,
    SiteBase,
    choose_values,
    compute_site_vector,
    correct_variances,
    plan_request,
    plan_update,
)
from .encrypted import aggregate_ciphertexts, find_sites_with_wrong_key, find_underweight_sites
from .events import parse_events
from .reported import validate_metrics, validate_num_examples
from .server_state import EncryptedModel, ServerSnapshot, ServerState
from .server_sums import ServerSums
from .update_store import UpdateStore

SERVER = "server"
"""The server's name where sites are identified by theirs, for example in the checkpoint folder."""

_MessageKey = tuple[int, str | None, int | None, int | None]
"""What one message depends on: the assignment, and mask, number and vector of the receiver's base where it uses them.
"""


@dataclass(frozen=True)
class Attempt:
    """One try at a round: the encoded requests to some sites. Equal requests share one buffer.

    Attributes:
        sequence: number of the attempt in its run; an update must carry it.
        kind: kind of the requests.
        round: round of the requests.
        messages: uint8 buffer per site.
        acknowledged: number of the attempt with the last update of each site that the server has, of those that no
            retry replaces; 0: none. It travels beside the message and tells a restarted site whether its newest
            checkpoint is that of its last update.
        seconds: time for the replies; None: the transport decides.
    """

    sequence: int
    kind: str
    round: int
    messages: dict[str, np.ndarray]
    acknowledged: dict[str, int] = field(default_factory=dict)
    seconds: float | None = None


class ServerEndpoint:
    """Encodes requests, decodes updates and keeps the ledger, without FLARE and for every method.

    :class:`~flare_sparse.rounds.endpoints.server_state.ServerState` is what the server remembers between messages.
    It defines how a message, a retry and a restart change that state.

    Args:
        layout: layout of the model.
        run: id of the run, 16 hex digits.
        values: number format on the wire.
        ledger: receives one line per message.
        cipher: aggregates encrypted weights without decrypting them; None: all values travel in the clear.
        seed: seed of the run, for the rounding of quantized values.
        sums: sums of fixed-point values, which updates then do not carry; None: the server reads each update.
        updates: memory for the updates of a round; None: the default.
    """

    def __init__(
        self,
        layout: Layout,
        run: str,
        values: ValueType,
        ledger: Ledger,
        cipher: ServerCipher | None = None,
        seed: int = 0,
        sums: ServerSums | None = None,
        updates: UpdateStore | None = None,
    ):
        self.layout, self.run, self.values, self.ledger, self.cipher = layout, run, values, ledger, cipher
        self.seed, self.sums, self.updates = seed, sums, updates or UpdateStore()
        self._state = ServerState()
        self._initial: InitialModel | None = None
        self._builders: set[str] = set()
        self._not_building: set[str] = set()

    def note_builders(self, weights: Tensor, capabilities: Mapping[str, Capabilities]) -> None:
        """Take note of the sites that have built the initial model ``(P,)``: their first request need not carry it.

        A site with another digest is none of them, such as one with another version of torch.
        """
        declared = {site: own.initial_model for site, own in capabilities.items() if own.initial_model is not None}
        if declared and self._initial is None:
            self._initial = InitialModel(weights, self.layout)
        is_same = {site for site, digest in declared.items() if self._initial and digest == self._initial.digest}
        self._builders = is_same - self._not_building

    @property
    def has_short_statistics(self) -> bool:
        """Whether statistics travel without their rests."""
        return choose_values(STATISTICS, self.values, self._initial) != "float32"

    @property
    def encrypted(self) -> EncryptedModel | None:
        """The model since the first encrypted sum; None: the server can read the model."""
        return self._state.encrypted

    def encode_requests(self, assignments: Mapping[str, Assignment]) -> Attempt:
        """Encode one request per site; equal requests to sites with the same base are encoded once.

        Retries are bit-identical: a site that missed an attempt does not change what the others receive.

        Args:
            assignments: by site. The same objects as in the previous attempt make this a retry.
        """
        is_retry = self._state.is_retry(assignments)
        self._state = self._state.retry(assignments) if is_retry else self._state.start(assignments)
        self.updates.set_num_sites(len(assignments), is_retry=is_retry)
        encoded: dict[_MessageKey, Encoded] = {}
        messages: dict[str, np.ndarray] = {}
        patches: dict[str, Patch] = {}
        residuals: dict[str, Tensor | None] = {}
        vectors: dict[_MessageKey, Tensor] = {}
        site_vectors: dict[str, Tensor] = {}
        shortened: dict[int, Patch | None] = {}
        bases = self._state.bases_before if self._sends_differences else self._state.bases
        for site, assignment in sorted(assignments.items()):
            patch = self._select_patch(bases.get(site), assignment)
            # What is sent may be shorter than what the site then holds: the initial model, which it has built itself.
            sent, base = self._shorten(site, patch, bases.get(site), shortened)
            plan = plan_request(self.layout, self.run, base, request=assignment.request, sequence=self._state.sequence)
            key = self._identify_message(assignment, sent, base)
            if key not in encoded:
                # A broadcast has one residual, since all sites hold the same vector; different models have their own.
                stream = "all" if len(self._state.assignments) == 1 else site
                # Of statistics alone nothing is rounded.
                is_exact = self._sends_differences and sent is not patch and sent.mask.count > 0
                values: ValueType = "float32_zstd" if is_exact else self.values
                encoded[key] = self._encode_request(sent, plan, assignment.request, stream, values)
                received = sent.values if is_exact else encoded[key].received
                if received is not None:
                    vectors[key] = compute_site_vector(Patch(received, sent.mask, sent.base), base)
                # The residual of a broadcast is that of the regular patch. That of a full model counts only if no
                # site of the stream can take the regular patch. Differences contain what earlier ones lost.
                is_regular = sent is assignment.request.model or stream not in residuals
                if not is_retry and not self._sends_differences and is_regular:
                    residuals[stream] = _get_residual(encoded[key], sent)
            messages[site], patches[site] = encoded[key].data, patch
            if self._sends_differences:
                site_vectors[site] = vectors[key]
            self.ledger.record_sent(encoded[key], plan, site, assignment.expected.content)
        self._state = self._state.send(patches, residuals, site_vectors)
        first = next(iter(assignments.values())).request
        acknowledged = {site: self._state.acknowledged_before.get(site, 0) for site in messages}
        return Attempt(self._state.sequence, first.kind, first.round, messages, acknowledged)

    @property
    def _sends_differences(self) -> bool:
        """Whether messages carry differences to the receiver's vector."""
        return is_quantized(self.values)

    def _shorten(
        self, site: str, patch: Patch, base: SiteBase | None, shortened: dict[int, Patch | None]
    ) -> tuple[Patch, SiteBase | None]:
        """Return what is sent in the place of a patch, and its base: less if the site has built the initial model.

        ``shortened`` keeps the result for each patch, whose values are all compared.
        """
        if base is not None or site not in self._builders or self._initial is None:
            return patch, base
        if id(patch) not in shortened:
            shortened[id(patch)] = self._initial.shorten(patch)
        short = shortened[id(patch)]
        return (patch, base) if short is None else (short, self._initial.base)

    def _identify_message(self, assignment: Assignment, sent: Patch, base: SiteBase | None) -> _MessageKey:
        # A patch over the previous model names the receiver's base. Sites with one mask can hold bases of different
        # age, for example after one of them missed an attempt, and each refuses a message over another base.
        # Differences refer to the receiver's vector, whatever the patch applies to. Two sites can hold different
        # vectors of one attempt, because one of them missed an earlier one and got a difference of its own.
        if base is None:
            return id(assignment), None, None, None
        sequence = base.sequence if sent.base == "previous" or self._sends_differences else None
        return id(assignment), base.mask.fingerprint, sequence, id(base.vector) if self._sends_differences else None

    def _encode_request(self, sent: Patch, plan: Plan, request: Request, stream: str, values: ValueType) -> Encoded:
        return encode(
            sent,
            plan,
            trainable=request.trainable,
            values=values,
            residual=self._state.residuals_before.get(stream),
            generator=make_generator(self.seed, "rounding", SERVER, stream, request.kind, request.round),
        )

    def decode(self, site: str, data: Any, examples: Any, metrics: Any, events: Any = ()) -> Contribution:
        """Decode and validate an update of the last attempt.

        Args:
            site: sender's name as FLARE authenticated it.
            data: the message.
            examples: reported number of training examples.
            metrics: reported metrics by name.
            events: reported events; malformed ones are ignored.

        Raises:
            RejectedMessage: the site has no request to answer, or the update breaks a rule; the code says which.
        """
        assignment = self._state.pending.get(site)
        if assignment is None:
            raise RejectedMessage("E_REPLAY", "site", f"one of {sorted(self._state.pending)}", site, site)
        ciphertext_format = self.cipher.ciphertext_format if self.cipher else None
        plan = plan_update(
            self.layout,
            self.run,
            assignment.request,
            self._state.sequence,
            ciphertext_format,
            self._state.vectors.get(site),
        )
        message = decode(data, plan, site)
        if message.patch.base != "zeros" or message.trainable is not None:
            raise RejectedMessage("E_KIND", "base", "an update, with base zeros", "a request", site)
        self._check_values(message, assignment.expected, site)
        _check_selection(message, assignment.expected, site)
        is_model = message.content == "weights"
        patch = correct_variances(message.patch, self.layout) if is_model else message.patch
        contribution = Contribution(
            site,
            self.updates.keep(patch, assignment.expected.mask),
            message.content,
            validate_num_examples(examples, site),
            validate_metrics(metrics, site),
            events=parse_events(events, self._state.sequence),
        )
        self.ledger.record_received(message, plan, site, len(data))
        # Only a valid update acknowledges the request: an invalid one is no proof of the site's base.
        self._state = self._state.acknowledge(site)
        return contribution

    def forget_base(self, site: str) -> None:
        """Send the full model to ``site`` with the next request; nothing else restores a lost base."""
        if site in self._state.sent and self._state.sent[site].mask.is_full:
            # It asks for everything: what it has built itself does not count, either.
            self._not_building.add(site)
            self._builders.discard(site)
        self._state = self._state.forget_base(site)

    def compute_min_upload(self, site: str, assignment: Assignment) -> tuple[int, int]:
        """Return the fewest entries and bytes of an update of ``site``; the bytes of its selection are not counted."""
        expected = assignment.expected
        entries = expected.mask.count if expected.mask else expected.min_entries(site) if expected.min_entries else 0
        if assignment.request.kind == EVALUATE:
            entries = 0
        return entries, compute_min_message_bytes(entries, choose_values(expected.content, self.values, self._initial))

    def is_encodable(self, model: Patch) -> bool:
        """Whether all values of a model are finite in the wire's number format; an encrypted model always passes."""
        return self.cipher is not None or is_representable(model.values, self.values)

    def aggregate_encrypted(self, contributions: Sequence[Contribution]) -> None:
        """Replace the model with the mean of a round's encrypted updates; without such updates, do nothing.

        Raises:
            ValueError: the updates have different masks, or some are encrypted and some are not.
        """
        model = aggregate_ciphertexts(self.cipher, contributions) if self.cipher else None
        if model is not None:
            self._state = self._state.aggregate(model)

    def find_underweight_sites(self, contributions: Sequence[Contribution]) -> list[str]:
        """Return the sites whose share of an encrypted sum is below the smallest factor that the cipher can apply."""
        return find_underweight_sites(self.cipher, contributions) if self.cipher else []

    def find_sites_with_wrong_key(self, contributions: Sequence[Contribution]) -> list[str]:
        """Return the sites whose update is encrypted with another key than the model or than most updates."""
        return find_sites_with_wrong_key(contributions, self._state.encrypted)

    def snapshot(self) -> ServerSnapshot:
        """Return the part of a checkpoint that belongs to this endpoint."""
        return self._state.snapshot()

    def restore(self, snapshot: ServerSnapshot) -> None:
        """Continue from :meth:`snapshot`. A site without its base replies MissingBase and receives the full model."""
        self._state = ServerState.restore(snapshot)

    def step_back(self, snapshot: ServerSnapshot) -> None:
        """Continue from an older snapshot while the sites' processes run on; every site receives the full model."""
        self._state = ServerState.restore(self._state.step_back(snapshot))

    def _select_patch(self, base: SiteBase | None, assignment: Assignment) -> Patch:
        """Return the request's patch, or the full model for a site without the base that the patch applies to."""
        patch = assignment.request.model
        if patch.base == "previous" and self._state.needs_full_model(base):
            assert assignment.full_model is not None, "a patch over the previous model needs Assignment.full_model"
            patch = assignment.full_model
        return self._attach_ciphertext(patch)

    def _attach_ciphertext(self, patch: Patch) -> Patch:
        """Return a patch of the encrypted model with its ciphertext.

        The method's state contains NaN where the server cannot read a value. A patch with another mask keeps the NaNs:
        it has no ciphertext, and the codec refuses to send NaN.
        """
        model = self._state.encrypted
        if model is None or patch.mask != model.mask:
            return patch
        return Patch.from_encrypted(model.values, patch.mask, patch.base)

    def _check_values(self, message: Decoded, expected: UpdateSpec, site: str) -> None:
        """Raise unless content, encryption and number format are those that the job requires.

        Raises:
            RejectedMessage: unexpected content, weights in the clear where they must be encrypted, the reverse, values
                that must be withheld for a sum, or another number format than the job's.
        """
        if self.sums is not None and message.content != "metrics":
            aggregation = "masked" if self.sums.rules.is_padded else "fixed_point"
            raise RejectedMessage("E_SEALED", f"values of {message.content}", aggregation, message.values, site)
        # A site without training examples answers every request with metrics only.
        if message.content not in (expected.content, "metrics"):
            raise RejectedMessage("E_KIND", "content", expected.content, message.content, site)
        ciphertext = message.patch.encrypted
        must_be_encrypted = self.cipher is not None and message.content in ("weights", "delta")
        if must_be_encrypted != (ciphertext is not None):
            raise RejectedMessage(
                "E_SEALED",
                f"values of {message.content}",
                "ckks" if must_be_encrypted else "numbers",
                message.values,
                site,
            )
        if self.cipher is not None and ciphertext is not None:
            self.cipher.check(ciphertext, message.patch.mask.count, site)
        elif message.values != (values := choose_values(message.content, self.values, self._initial)):
            raise RejectedMessage("E_DTYPE", "values", values, message.values, site)


def _get_residual(encoded: Encoded, sent: Patch) -> Tensor | None:
    """Return the residual of a message, to be added to the next one."""
    if encoded.residual is None or sent.base != "zeros":
        return encoded.residual
    # A patch over zeros sets every entry outside it to zero, so no residual remains there.
    return encoded.residual.where(sent.mask.bits, 0.0)


def _check_selection(message: Decoded, expected: UpdateSpec, site: str) -> None:
    """Raise unless the update's mask and values are among those that the method accepts.

    Raises:
        RejectedMessage: the mask is not the required one or not accepted by the method, or a value is too small.
    """
    if message.content != "metrics":
        mask = message.patch.mask
        if expected.mask is not None and mask != expected.mask:
            raise RejectedMessage("E_MASK", "selection", expected.mask, mask, site)
        if expected.accepts is not None and not expected.accepts(site, mask):
            raise RejectedMessage("E_MASK", "selection", "one that the method accepts from this site", mask, site)
    if expected.min_value is not None and bool((message.patch.values < expected.min_value).any()):
        raise RejectedMessage("E_RANGE", "values", f"at least {expected.min_value:g}", "a smaller value", site)
