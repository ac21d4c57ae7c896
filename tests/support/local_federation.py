"""A federation in one process that a test can disturb: silent sites, changed updates, changed messages, restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from toy import Toy, ToyBench

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import FlareSparseError, SiteExcluded, WireError
from flare_sparse.core.exchange import Contribution, Patch, Request, Update
from flare_sparse.methods.method import Method
from flare_sparse.rounds.endpoints.events import SERVER, pack_events
from flare_sparse.rounds.endpoints.server import Attempt, ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.federation.loop import Federation
from flare_sparse.rounds.federation.records import Outcome, RoundRecord
from flare_sparse.rounds.federation.roster import Connections, Handshake
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.run import build_stages
from flare_sparse.training import Site
from flare_sparse.wire.codec import Encoded
from flare_sparse.wire.formats import ValueType
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.stage import PLAIN_STAGE, Questions, Reply, Stage
from flare_sparse.wire.steps import Step, unpack_message

RUN = "0" * 16


@dataclass(frozen=True)
class Upload:
    """What one site sends in one attempt.

    Attributes:
        site: name of the site.
        attempt: server's attempt that the site replies to.
        request: request as the site decoded it.
        update: site's update.
        examples, metrics: number of examples and metrics that travel beside the message.
        endpoint, server: both ends of the wire.
        message: encoded update; None before it is encoded.
    """

    site: str
    attempt: Attempt
    request: Request
    update: Update
    examples: Any
    metrics: Any
    endpoint: SiteEndpoint
    server: ServerEndpoint
    message: Any = None

    def with_values(self, values: torch.Tensor) -> Upload:
        """Return the upload with other values at the same entries."""
        return replace(self, update=replace(self.update, patch=Patch(values, self.update.patch.mask)))

    def decode(self) -> Any:
        """Return the contribution that the server decodes from the message."""
        events = pack_events(self.endpoint.events)
        return self.server.decode(self.site, self.message, self.examples, self.metrics, events)


class LocalFederation:
    """A server and its sites in this process, connected by the real wire, with hooks for a test to disturb them.

    Args:
        method: method, or its name in the registry; ``settings`` are its configuration then.
        bench: builds sites and methods; None: one of the ``Toy`` task.
        sites: sites by name, or how many to build.
        rules: rules of the rounds.
        values: number format on the wire.
        stores: checkpoint store of each end; None for an end without checkpoints.
        stage: what the values of updates pass on their way to the server.

    Attributes:
        is_silent: whether a site stays silent in an attempt; it does not even receive the request.
        change_update: changes an upload before it is encoded.
        change_message: changes an upload after it is encoded; returns an :class:`Upload`, a reply as the server would
            see it, or None for a lost message.
        is_sum_lost: whether a site drops out of a sum before it answers a step.
        change_question: changes the server's question to a site in a sum.
        sum_messages: (site, step, message) of every reply of a sum that a site sent.
        returned: returns those of the given quarantined sites that have sent another hello.
        restarts: (sequence, site) pairs: the site loses its memory before it receives this attempt.
        order: order in which the sites are listed and replies arrive; None: by name.
        requested: (round, site) of every message that was delivered.
        records: record of every committed round.
        warnings: why sites were excluded.
        encoded: last update of each site, as it encoded it.
    """

    def __init__(
        self,
        method: str | Method[Any, Any] = "fedavg",
        bench: ToyBench | None = None,
        *,
        sites: Mapping[str, Site] | int = 3,
        rules: RoundRules | None = None,
        values: ValueType = "float32",
        stores: Callable[[str], Store | None] = lambda end: None,
        stage: Stage = PLAIN_STAGE,
        **settings: Any,
    ):
        self.bench = bench or ToyBench(Toy())
        self.method = self.bench.method(method, **settings) if isinstance(method, str) else method
        self.rules, self.values, self.stores = rules, values, stores
        self.ledger = Ledger()
        names = self._names(sites)
        server_stage, self.stages = build_stages(self.method, RUN, stage, names, self.ledger)
        self.server = ServerEndpoint(self.method.layout, RUN, values, self.ledger, server_stage, self.method.seed)
        self.sites = self.bench.sites(sites) if isinstance(sites, int) else dict(sites)
        self.endpoints = {name: self._build_endpoint(name) for name in self.sites}

        self.is_silent: Callable[[str, Attempt], bool] = lambda site, attempt: False
        self.change_update: Callable[[Upload], Upload] = lambda upload: upload
        self.change_message: Callable[[Upload], Upload | Reply | None] = lambda upload: upload
        self.is_sum_lost: Callable[[str, Step], bool] = lambda site, step: False
        self.change_question: Callable[[str, Any], Any] = lambda site, question: question
        self.sum_messages: list[tuple[str, Step, Any]] = []
        self.returned: Callable[[list[str]], list[str]] = lambda sites: []
        self.restarts: set[tuple[int, str]] = set()
        self.order: Sequence[str] | None = None
        self.on_round: Callable[[RoundRecord], None] = lambda record: None
        self.requested: list[tuple[int, str]] = []
        self.records: list[RoundRecord] = []
        self.warnings: list[SiteExcluded] = []
        self.encoded: dict[str, Encoded] = {}

    @staticmethod
    def _names(sites: Mapping[str, Site] | int) -> list[str]:
        return [f"site-{i}" for i in range(1, sites + 1)] if isinstance(sites, int) else list(sites)

    def _build_endpoint(self, name: str) -> SiteEndpoint:
        return SiteEndpoint(self.sites[name], self.method, RUN, self.values, self.stores(name), self.stages.get(name))

    def restart_site(self, name: str) -> None:
        """Replace a site by a new process: what it knows is what its checkpoints hold."""
        self.sites[name] = self.bench.sites(len(self.sites))[name]
        self.endpoints[name] = self._build_endpoint(name)

    def list_sites(self) -> list[str]:
        """Return the names of the sites present."""
        return list(self.order or sorted(self.endpoints))

    def build_hellos(self, names: list[str]) -> Mapping[str, Any]:
        """Return each site's hello, as the handshake brings it to the server."""
        return {name: self.endpoints[name].build_hello() for name in names}

    def deliver(self, attempt: Attempt) -> Mapping[str, Reply]:
        """Take an attempt's messages to the sites and return the replies of those that sent one."""
        replies: dict[str, Any] = {}
        for name in self.order or attempt.messages:
            if name not in attempt.messages or self.is_silent(name, attempt):
                continue
            try:
                reply = self._exchange(name, attempt)
                if reply is not None:
                    replies[name] = reply.decode() if isinstance(reply, Upload) else reply
                if isinstance(reply, Upload):
                    self._compare_updates(name, reply, replies[name])
            except WireError as error:
                replies[name] = error
        return replies

    def _exchange(self, name: str, attempt: Attempt) -> Any:
        if (attempt.sequence, name) in self.restarts:
            self.restart_site(name)
        self.requested.append((attempt.round, name))
        endpoint = self.endpoints[name]
        request = endpoint.receive(attempt.messages[name], attempt.counted[name])
        self._compare_vectors(name)
        update = endpoint.answer(request)
        changed = self.change_update(
            Upload(name, attempt, request, update, update.num_examples, update.metrics, endpoint, self.server)
        )
        return self.change_message(replace(changed, message=self.encode(changed)))

    def deliver_sum(self, step_questions: Questions) -> dict[str, Any]:
        """Take the questions of a step of a sum to the sites and return their replies."""
        replies: dict[str, Any] = {}
        questions = step_questions.messages
        for name in self.order or questions:
            if name not in questions:
                continue
            step, _, _ = unpack_message(questions[name], "server")
            if self.is_sum_lost(name, step):
                continue
            try:
                reply = self.stages[name].answer(self.change_question(name, questions[name]))
                replies[name] = reply
                self.sum_messages.append((name, step, reply))
            except FlareSparseError as error:
                replies[name] = error.code
        return replies

    def yield_sum_replies(self, questions: Questions) -> Iterator[tuple[str, Any]]:
        """Yield the replies to a step of a sum, as a transport does."""
        yield from self.deliver_sum(questions).items()

    def _compare_vectors(self, name: str) -> None:
        """Compare what a site reads in a message with what the server takes for it: by name, and by values if kept."""
        target, held = self.server._round.sent[name].target, self.endpoints[name]._link.held
        assert held is not None
        assert target.name == held.name, f"the server takes another vector for that of {name}"
        if target.values is not None:
            assert torch.equal(self.sites[name].weights, target.values), f"another vector than that of {name}"

    def _compare_updates(self, name: str, upload: Upload, contribution: Contribution) -> None:
        """Compare what the server decodes with what the site takes for received, from which its residual follows."""
        encoded = self.encoded[name]
        if encoded.received is not None and np.array_equal(upload.message, encoded.data):
            decoded, received = contribution.patch.values, encoded.received
            # The server reads a variance below 0, which is all that it changes, as 0.
            is_equal = (decoded == received) | ((decoded == 0) & (received < 0))
            assert is_equal.all(), f"the server decodes another update than the one that {name} takes for received"

    def encode(self, upload: Upload) -> Any:
        """Return the message of an upload, as a buffer that the test may write to."""
        self.encoded[upload.site] = upload.endpoint.encode(upload.request, upload.update)
        return self.encoded[upload.site].data.copy()

    def run(
        self,
        *,
        sites: Callable[[], list[str]] | None = None,
        handshake: Handshake | None = None,
        resume: bool = False,
    ) -> Outcome:
        """Run the method from the first round, or from the newest checkpoint."""

        def record_round(record: RoundRecord) -> None:
            self.records.append(record)
            self.on_round(record)

        federation = Federation(
            self.method,
            self.server,
            self.bench.task.metric,
            Connections(
                sites or self.list_sites,
                self.deliver,
                self.yield_sum_replies,
                handshake,
                self.returned,
                self.warnings.append,
            ),
            rules=self.rules,
            on_round=record_round,
            store=self.stores(SERVER),
        )
        return federation.run(self.bench.weights, resume=resume)
