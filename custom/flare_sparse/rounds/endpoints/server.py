"""The server's end of the wire: encodes requests, validates updates and knows which base each site holds."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import RejectedMessage
from ...core.exchange import EVALUATE, Assignment, Contribution, Patch, Request, RequestId, UpdateSpec
from ...core.params import Layout
from ...core.seeds import make_generator
from ...wire.capabilities import Capabilities
from ...wire.codec import Decoded, Encoded, compute_min_message_bytes, decode, encode
from ...wire.formats import FORMATS, ValueType
from ...wire.ledger import Ledger
from ...wire.stage import ServerStage
from ..link import ServerLink, Vector, name_new_start, name_request
from .events import SERVER, parse_events, validate_metrics, validate_num_examples
from .plans import InitialModel, choose_values, correct_variances, find_target, plan_request, plan_update
from .update_store import UpdateStore


@dataclass(frozen=True)
class Attempt:
    """One try at a round: the encoded requests to some sites. Equal requests share one buffer.

    Attributes:
        sequence: number of the attempt in its run; an update must carry it.
        kind: kind of the requests.
        round: round of the requests.
        messages: uint8 buffer per site.
        counted: name of the last answer of each site that counts, which travels beside the message; None: none.
        seconds: time for the replies; None: the transport decides.
    """

    sequence: int
    kind: str
    round: int
    messages: dict[str, np.ndarray]
    counted: dict[str, str | None] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True)
class ServerSnapshot:
    """What the server's end of the wire writes into a checkpoint.

    Attributes:
        sequence: number of the last attempt.
        link: what it knows of its sites after the commit.
    """

    sequence: int = 0
    link: ServerLink = field(default_factory=ServerLink)


@dataclass(frozen=True)
class _Sent:
    """A request as some sites were sent it.

    Attributes:
        message: the message.
        name: its name.
        target: the vector that it leads to.
        copy: the patch of that vector, where rounding may give it other values than the model's; else None.
    """

    message: Encoded
    name: str
    target: Vector
    copy: Patch | None = None


@dataclass
class _OpenRound:
    """What happened since the last commit; no message depends on it.

    Attributes:
        request: id of the requests.
        models: number of different assignments.
        sent: last request to each site.
        answers: name of the last valid answer of each site.
        residuals: residuals that become valid with the commit.
        pending: assignments by site that have no valid update in this attempt; an update of another site is a replay.
    """

    request: RequestId | None = None
    models: int = 1
    sent: dict[str, _Sent] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    residuals: dict[str, Tensor | None] = field(default_factory=dict)
    pending: dict[str, Assignment] = field(default_factory=dict)


class ServerEndpoint:
    """Encodes requests, decodes updates and keeps the ledger, without FLARE and for every method.

    Between rounds it remembers a :class:`~flare_sparse.rounds.link.ServerLink`, which only a commit changes: a retry
    and the first attempt of a server that was killed start from the same state, and so send the same.

    Args:
        layout: layout of the model.
        run: id of the run, 16 hex digits.
        values: number format on the wire.
        ledger: receives one line per message.
        stage: what opens the updates; None: each carries its values.
        seed: seed of the run, for rounding at random.
        updates: memory for the updates of a round; None: the default.
    """

    def __init__(
        self,
        layout: Layout,
        run: str,
        values: ValueType,
        ledger: Ledger,
        stage: ServerStage | None = None,
        seed: int = 0,
        updates: UpdateStore | None = None,
    ):
        self.layout, self.run, self.values, self.ledger = layout, run, values, ledger
        self.stage, self.seed, self.updates = stage or ServerStage(), seed, updates or UpdateStore()
        self._sequence, self._link, self._round = 0, ServerLink(), _OpenRound()
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

    def encode_requests(self, assignments: Mapping[str, Assignment]) -> Attempt:
        """Encode one request per site; equal requests to sites that hold the same vector are encoded once.

        Args:
            assignments: by site. Requests of the kind and round of the last ones are another attempt at these.
        """
        first = next(iter(assignments.values())).request
        self._sequence += 1
        if self._round.request != (first.kind, first.round):
            models = len({id(assignment) for assignment in assignments.values()})
            self._round = _OpenRound(RequestId(first.kind, first.round), models)
        round_, is_first = self._round, not self._round.sent
        round_.pending = dict(assignments)
        self.updates.set_num_sites(len(assignments), is_retry=not is_first)
        requests: dict[tuple[Any, ...], _Sent] = {}
        shortened: dict[int, Patch | None] = {}
        bases: dict[str, Vector | None] = {}
        for site, assignment in sorted(assignments.items()):
            base = self._link.find_base(site)
            patch = self._select_patch(base, assignment)
            # What is sent may be shorter than what the site then holds: the initial model, which it has built itself.
            sent, base = self._shorten(site, patch, base, shortened)
            key = id(assignment), base and base.mask.fingerprint
            request = requests.get((*key, None)) or requests.get((*key, base and base.name))
            if request is None:
                # A broadcast has one rounding residual, since all sites hold the same vector; different models have
                # their own.
                stream = "all" if round_.models == 1 else site
                request = self._encode_request(assignment, patch, sent, base, stream)
                requests[*key, request.message.base] = request
                # The residual of a broadcast is that of the regular patch. That of a full model counts only if no site
                # of the stream can take the regular patch. Differences contain what earlier ones lost.
                is_regular = sent is assignment.request.model or stream not in round_.residuals
                if is_first and not self._sends_differences and is_regular:
                    round_.residuals[stream] = _get_residual(request.message, sent)
            round_.sent[site], bases[site] = request, base
        if first.kind == EVALUATE:
            self._send_one_copy(assignments, bases)
        for site, assignment in sorted(assignments.items()):
            plan = plan_request(self.layout, self.run, bases[site], **self._number(assignment.request))
            self.ledger.record(plan, site, "down", assignment.expected.content, round_.sent[site].message)
        messages = {site: round_.sent[site].message.data for site in assignments}
        counted = {site: self._link.counted.get(site) for site in assignments}
        return Attempt(self._sequence, first.kind, first.round, messages, counted)

    def _send_one_copy(self, assignments: Mapping[str, Assignment], bases: dict[str, Vector | None]) -> None:
        """Send the copy that most sites will hold, exactly, to those that would hold another one: one is evaluated."""
        sent = self._round.sent
        common = _find_common([sent[site] for site in sorted(assignments)])
        if common is None or common.copy is None:
            return
        others = [site for site in assignments if sent[site].target.name != common.target.name]
        if not others:
            return
        # There is a copy of a broadcast alone: all sites have one assignment, and so one message.
        request = self._encode_request(assignments[others[0]], common.copy, common.copy, None, "copy", is_exact=True)
        for site in others:
            sent[site], bases[site] = request, None

    def round_model(self, model: Patch) -> Patch:
        """Return the model that the sites have evaluated: ``model`` as most of those that answered hold it."""
        common = _find_common([self._round.sent[site] for site in sorted(self._round.answers)])
        if common is None or common.copy is None:
            return model
        bits = common.copy.mask.bits & model.mask.bits
        return Patch.from_vector(torch.where(bits, common.copy.to_vector(), model.to_vector()), model.mask)

    def _number(self, request: Request) -> dict[str, Any]:
        return {"sequence": self._sequence, "round": request.round, "kind": request.kind}

    @property
    def _sends_differences(self) -> bool:
        """Whether messages carry differences to the receiver's vector."""
        return FORMATS[self.values].sends_differences

    def _shorten(
        self, site: str, patch: Patch, base: Vector | None, shortened: dict[int, Patch | None]
    ) -> tuple[Patch, Vector | None]:
        """Return what is sent in the place of a patch, and its base: less if the site has built the initial model.

        ``shortened`` keeps the result for each patch, whose values are all compared.
        """
        if base is not None or site not in self._builders or self._initial is None:
            return patch, base
        if id(patch) not in shortened:
            shortened[id(patch)] = self._initial.shorten(patch)
        short = shortened[id(patch)]
        return (patch, base) if short is None else (short, self._initial.vector)

    def _encode_request(
        self,
        assignment: Assignment,
        patch: Patch,
        sent: Patch,
        base: Vector | None,
        stream: str,
        *,
        is_exact: bool = False,
    ) -> _Sent:
        """Return the request that leads from a base to a patch, of which ``sent`` is what the base lacks.

        Args:
            assignment: the request and its requirements.
            patch: the patch that the site then holds.
            sent: the patch to send.
            base: vector that the site holds; None: none.
            stream: stream of the rounding residual.
            is_exact: whether no value is rounded.
        """
        request, target = assignment.request, Vector("", patch.mask)
        copy: Patch | None = None
        # Statistics alone are not rounded.
        is_exact |= self._sends_differences and sent is not patch and sent.mask.count > 0
        # The whole model, which the site then holds if nothing is rounded.
        whole = patch if patch.base == "zeros" else assignment.full_model or patch
        rounds = bool(self._sends_differences or FORMATS[self.values].rounding)
        # Models of single sites are not the run's model, and a request may have none.
        keeps_copy = rounds and self._round.models == 1 and patch.mask.count > 0

        def name_target(received: Tensor | None) -> tuple[str, str]:
            """Return the names of the vector that the site then holds, and of the request."""
            nonlocal target, copy
            if sent.base == "previous" and (not sent.mask.count or (rounds and received is not None)):
                read = sent if received is None else replace(sent, source=received)
            else:
                read = whole if received is None or sent.base == "previous" else replace(whole, source=received)
            keeps_values = self._sends_differences or (rounds and assignment.full_model is not None)
            is_whole = read.base == "zeros"
            target = find_target(read, base, self.layout, keeps_values=keeps_values or (keeps_copy and not is_whole))
            if keeps_copy and is_whole:
                copy = correct_variances(read, self.layout)
            elif keeps_copy and target.values is not None:
                copy = Patch.from_vector(target.values, target.mask)
            target = target if keeps_values else replace(target, values=None)
            return target.name, name_request(self._link.commit, request.kind, request.round, target.name)

        message = encode(
            sent,
            plan_request(self.layout, self.run, base, **self._number(request)),
            trainable=request.trainable,
            values="float32_zstd" if is_exact else self.values,
            residual=self._link.residuals.get(stream),
            generator=make_generator(self.seed, "rounding", SERVER, stream, request.kind, request.round),
            name_target=name_target,
        )
        return _Sent(message, message.request, target, copy)

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
        assignment = self._round.pending.get(site)
        if assignment is None:
            raise RejectedMessage("E_REPLAY", "site", f"one of {sorted(self._round.pending)}", site, site)
        sent = self._round.sent[site]
        plan = plan_update(
            self.layout,
            self.run,
            assignment.request,
            sent.target if self._sends_differences else replace(sent.target, values=None),
            sequence=self._sequence,
        )
        message = decode(data, plan, site)
        # A site that has lost what it carried on says so: its answer is another one.
        names = [sent.name, name_new_start(sent.name)] if site in self._link.counted else [sent.name]
        if message.header.request not in names:
            raise RejectedMessage("E_REPLAY", "request", names, message.header.request, site)
        if message.patch.base != "zeros":
            raise RejectedMessage("E_KIND", "base", "zeros, as in an update", message.patch.base, site)
        self._check_values(message, assignment.expected, site)
        num_examples = validate_num_examples(examples, site)
        _check_selection(message, assignment.expected, num_examples, site)
        is_model = message.content == "weights"
        patch = correct_variances(message.patch, self.layout) if is_model else message.patch
        contribution = Contribution(
            site,
            self.updates.keep(patch, assignment.expected.mask),
            message.content,
            num_examples,
            validate_metrics(metrics, site),
            events=parse_events(events, self._sequence),
        )
        self.ledger.record_received(message, plan, site, len(data))
        # Only a valid update is a proof of what the site holds.
        del self._round.pending[site]
        self._round.answers[site] = message.header.request
        return contribution

    def forget_base(self, site: str) -> None:
        """Send the full model to ``site`` with the next request; nothing else restores a lost base."""
        # What it has built itself does not count, either.
        self._not_building.add(site)
        self._builders.discard(site)
        self._link = self._link.forget([site])

    def commit(self, arrived: Collection[str]) -> None:
        """Remember a round that is decided: what its sites hold, and which of their answers count.

        Args:
            arrived: sites with a valid answer, each of which holds the vector that it was sent. Of another answer
                nothing has arrived: its site starts the next one from the memory before it.
        """
        round_ = self._round
        # After a request without a model, such as that for statistics, the sites hold what they are sent next.
        sent = {site: target for site in arrived if (target := round_.sent[site].target).mask.count}
        answers = {site: round_.answers[site] for site in arrived}
        self._link = self._link.add_commit(sent, answers, round_.residuals, round_.models)
        self._round = _OpenRound()

    def compute_min_upload(self, site: str, assignment: Assignment) -> tuple[int, int]:
        """Return the fewest entries and bytes of an update of ``site``; the bytes of its selection are not counted."""
        expected = assignment.expected
        entries = expected.mask.count if expected.mask else expected.min_entries(site) if expected.min_entries else 0
        if assignment.request.kind == EVALUATE:
            entries = 0
        return entries, compute_min_message_bytes(entries, choose_values(expected.content, self.values, self._initial))

    def snapshot(self) -> ServerSnapshot:
        """Return the part of a checkpoint that belongs to this endpoint."""
        return ServerSnapshot(self._sequence, self._link)

    def restore(self, snapshot: ServerSnapshot) -> None:
        """Continue from :meth:`snapshot`. A site that holds another vector replies MissingBase."""
        self._sequence, self._link, self._round = snapshot.sequence, snapshot.link, _OpenRound()

    def step_back(self, snapshot: ServerSnapshot) -> None:
        """Continue from an older snapshot while the sites' processes run on; every site receives the full model."""
        # The number of an attempt is used once. The sites hold later vectors than those of the snapshot.
        self.restore(replace(snapshot, sequence=self._sequence, link=replace(snapshot.link, held={})))

    def _select_patch(self, base: Vector | None, assignment: Assignment) -> Patch:
        """Return the request's patch, or the full model for a site without the base that the patch applies to."""
        patch = assignment.request.model
        # Such a patch contains the change since the last commit's requests. Where values are rounded, what results
        # depends on the vector that it is written into.
        is_unknown = base is None or base.name not in self._link.latest
        if not is_unknown and base is not None and patch.mask.count and FORMATS[self.values].rounding:
            is_unknown = base.values is None
        if patch.base == "previous" and is_unknown:
            assert assignment.full_model is not None, "a patch over the previous model needs Assignment.full_model"
            patch = assignment.full_model
        return patch

    def _check_values(self, message: Decoded, expected: UpdateSpec, site: str) -> None:
        """Raise unless content and number format are those that the job requires, and values that must be masked stay.

        Raises:
            RejectedMessage: unexpected content, values that must be masked, or another number format.
        """
        # A site without training examples answers every request with metrics only.
        if message.content not in (expected.content, "metrics"):
            raise RejectedMessage("E_KIND", "content", expected.content, message.content, site)
        if self.stage.hides_values and message.content != "metrics":
            raise RejectedMessage("E_SEALED", f"values of {message.content}", "masked", message.values, site)
        if message.values != (values := choose_values(message.content, self.values, self._initial)):
            raise RejectedMessage("E_DTYPE", "values", values, message.values, site)


def _find_common(sent: Sequence[_Sent]) -> _Sent | None:
    """Return a request that leads to the vector that most of the requests lead to; None: there is none."""
    names = Counter(request.target.name for request in sent)
    return max(sent, key=lambda request: names[request.target.name], default=None)


def _get_residual(encoded: Encoded, sent: Patch) -> Tensor | None:
    """Return the residual of a message, to be added to the next one."""
    if encoded.residual is None or sent.base != "zeros":
        return encoded.residual
    # A patch over zeros sets every entry outside it to zero, so no residual remains there.
    return encoded.residual.where(sent.mask.bits, 0.0)


def _check_selection(message: Decoded, expected: UpdateSpec, examples: int, site: str) -> None:
    """Raise unless the update's mask and values are among those that the method accepts.

    Raises:
        RejectedMessage: the mask is not the required one or not accepted by the method, or a value cannot be.
    """
    if message.content != "metrics":
        mask = message.patch.mask
        if expected.mask is not None and mask != expected.mask:
            raise RejectedMessage("E_MASK", "selection", expected.mask, mask, site)
        if expected.accepts is not None and not expected.accepts(site, mask):
            raise RejectedMessage("E_MASK", "selection", "one that the method accepts from this site", mask, site)
        if expected.is_valid is not None and not expected.is_valid(message.patch, examples):
            raise RejectedMessage("E_RANGE", "values", f"{message.content} of {examples} examples", "others", site)
    if expected.min_value is not None and bool((message.patch.values < expected.min_value).any()):
        raise RejectedMessage("E_RANGE", "values", f"at least {expected.min_value:g}", "a smaller value", site)
