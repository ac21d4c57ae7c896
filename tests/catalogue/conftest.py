"""A federation of three sites in this process, whose second site sends what a test makes of its honest answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import toy

from flare_sparse.aggregation.weighted import weigh_by_examples, weighted_sum
from flare_sparse.endpoints.server import ServerEndpoint
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.errors import WireError
from flare_sparse.exchange import Assignment, Patch, Request, Update, UpdateSpec
from flare_sparse.federation import Federation, Outcome, RoundRules
from flare_sparse.mask import Mask
from flare_sparse.methods import Method
from flare_sparse.methods.method import MethodConfig, broadcast
from flare_sparse.params import compute_digest
from flare_sparse.wire import codec
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.envelope import HEADER_BYTES, Header, read_header, write_header
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.plan import ValueType

RUN, HOSTILE, OTHERS = "0" * 16, "site-2", ["site-1", "site-3"]
SITES = sorted([HOSTILE, *OTHERS])


@dataclass(frozen=True)
class Parts:
    """A message taken apart; ``sealed`` puts it together with checksums that hold, as a forger would."""

    header: Header
    selection: bytes
    values: bytes

    @classmethod
    def of(cls, message: np.ndarray) -> Parts:
        header = read_header(message)
        cut = HEADER_BYTES + header.selection_bytes
        width = 4 if header.values == 1 else 2
        values = message[header.values_start : header.values_start + width * header.scalars]
        return cls(header, message[HEADER_BYTES:cut].tobytes(), values.tobytes())

    def sealed(self, **fields: Any) -> np.ndarray:
        """The message, with other header fields than its parts have."""
        header = replace(self.header, selection_bytes=len(self.selection))
        buffer = np.zeros(header.values_start + -(-len(self.values) // 8) * 8, np.uint8)
        buffer[HEADER_BYTES : HEADER_BYTES + len(self.selection)] = np.frombuffer(self.selection, np.uint8)
        buffer[header.values_start : header.values_start + len(self.values)] = np.frombuffer(self.values, np.uint8)
        write_header(replace(header, **fields), buffer)
        return buffer


@dataclass(frozen=True)
class Sent:
    """An answer and what came beside it, with both desks at hand."""

    message: Any
    examples: Any
    metrics: Any
    request: Request
    update: Update
    site: SiteEndpoint
    server: ServerEndpoint

    @property
    def parts(self) -> Parts:
        return Parts.of(self.message)

    def sealed(self, **fields: Any) -> Sent:
        """With other fields in the message's header."""
        return replace(self, message=self.parts.sealed(**fields))

    def said(self, selection: bytes) -> Sent:
        """With other bytes for the selection."""
        return replace(self, message=replace(self.parts, selection=selection).sealed())

    def on(self, encoding: str, on: Mask, values: ValueType = "float32") -> Sent:
        """Ones on other entries than were asked for, in a given encoding."""
        update = replace(self.update, patch=Patch.from_vector(torch.ones(on.size), on))
        with forced(encoding), patch.object(self.site, "values", values):
            return replace(self, message=self.site.encode(self.request, update).data)

    def arriving(self) -> Update:
        return self.server.decode(HOSTILE, self.message, self.examples, self.metrics)


Attack = Callable[[Sent], Any]
"""What leaves the hostile site instead of its answer; None: nothing. An update has been decoded already."""


def forced(name: str | None) -> Any:
    """Within this, every selection is said by one encoding, whether or not another takes fewer bytes; None: as ever."""
    if name is None:
        return nullcontext()
    encoding = ENCODINGS[name]
    return patch.object(
        codec, "choose_encoding", lambda on, known, layout: (encoding, encoding.encode(on, known, layout))
    )


@dataclass(frozen=True)
class State:
    round: int
    weights: torch.Tensor


class Picked(Method[State]):
    """The sites send how the entries ``on`` have changed, whichever those are."""

    name = "picked"
    on: Mask
    trainable: Mask
    free = False

    def init(self, weights: torch.Tensor, sites: Any) -> State:
        return State(1, weights)

    def ask(self, state: State, sites: Any) -> dict[str, Request] | None:
        if state.round > self.config.rounds:
            return None
        expected = None if self.free else self.on
        return broadcast(
            sites,
            Assignment(
                Request("train", state.round, self.model(state), self.trainable), UpdateSpec("delta", mask=expected)
            ),
        )

    def answer(self, request: Request, site: Any) -> Update:
        trained = site.train(site.weights, request.trainable, self.config.training, request.round)
        return Update(Patch.from_vector(trained - site.weights, self.on), "delta", site.num_examples)

    def learn(self, state: State, updates: Any) -> State:
        return State(state.round + 1, state.weights + weighted_sum(updates, weigh_by_examples))

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)


def _random(size: int, share: float, seed: int) -> Mask:
    return Mask(torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share)


def selections(layout: Any) -> dict[str, tuple[Mask, Mask]]:
    """For every encoding, the entries that a site is to send and those that may change."""
    size = layout.size
    full, most, some = Mask.full(size), _random(size, 0.7, 1), _random(size, 0.4, 2)
    few, rows = torch.zeros(size, dtype=torch.bool), layout.unflatten(torch.zeros(size, dtype=torch.bool))
    few[[0, 3, 14, 30, 125, 139]] = True
    rows["0.weight"][[0, 3]] = True
    rows["0.bias"][:] = True
    rows["2.weight"][:, [1, 4]] = True
    return {
        "dense": (full, full),
        "shared": (most, most),
        "shrink": (some & most, most),
        "bitmap": (some, most),
        "csr": (Mask(few), full),
        "slices": (Mask(layout.flatten(rows)), full),
    }


class Wire:
    """Runs of one encoding: what is refused has its code in the round's record and leaves no other trace."""

    def __init__(self, encoding: str, values: ValueType = "float32", *, free: bool = False):
        self.encoding, self.values, self.free = encoding, values, free
        self.bench = toy.Bench(toy.Plain())
        self.layout = self.bench.layout
        self.on, self.trainable = selections(self.layout)[encoding]

    def method(self, rounds: int) -> Method[Any]:
        training = {"lr": 0.05, "epochs": 1, "batch_size": 16}
        made = Picked(MethodConfig.model_validate({"rounds": rounds, "training": training}), self.layout, 1)
        made.on, made.trainable, made.free = self.on, self.trainable, self.free
        return made

    def play(
        self,
        attack: Callable[[int, Sent], Any] = lambda t, sent: sent,
        rounds: int = 2,
        sites: list[str] = SITES,
        rules: RoundRules | None = None,
        hostile: tuple[str, ...] = (HOSTILE,),
    ) -> tuple[Outcome, Ledger]:
        """A run in which the hostile sites answer questions of training with what ``attack`` makes of their answer."""
        method, ledger = self.method(rounds), Ledger()
        server = ServerEndpoint(self.layout, RUN, self.values, ledger)
        made = self.bench.sites()
        endpoints = {name: SiteEndpoint(made[name], method, RUN, self.values) for name in sites}

        def answered(name: str, message: Any) -> Any:
            endpoint = endpoints[name]
            request = endpoint.receive(message)
            update = endpoint.answer(request)
            if request.kind == "evaluate":
                return server.decode(name, endpoint.encode(request, update).data, update.num_examples, update.metrics)
            with forced(self.encoding):
                data = endpoint.encode(request, update).data.copy()
            sent = Sent(data, update.num_examples, update.metrics, request, update, endpoint, server)
            sent = attack(request.round, sent) if name in hostile else sent
            if not isinstance(sent, Sent):
                return sent
            return server.decode(name, sent.message, sent.examples, sent.metrics)

        def carry(question: Any) -> dict[str, Any]:
            replies: dict[str, Any] = {}
            for name, message in question.messages.items():
                try:
                    reply = answered(name, message)
                except WireError as error:
                    reply = error
                if reply is not None:
                    replies[name] = reply
            return replies

        rules = rules or RoundRules(quarantine_after=0)
        federation = Federation(method, server, self.bench.task.metric, rules)
        return federation.run(self.bench.weights, lambda: sites, carry), ledger

    def refuses(self, *attacks: tuple[str, Attack]) -> None:
        """One round for each attack and the code that it is refused with."""
        rounds = len(attacks)
        outcome, ledger = self.play(lambda t, sent: attacks[t - 1][1](sent), rounds)
        *training, last = outcome.rounds
        assert [record.rejected for record in training] == [{HOSTILE: code} for code, _ in attacks]
        assert all(record.sites_contributed == OTHERS and record.is_balanced for record in training)
        assert last.sites_contributed == SITES, "the job lives, and the site may go on"
        assert not [line for line in ledger.lines if (line.site, line.direction, line.kind) == (HOSTILE, "up", "train")]
        assert compute_digest(outcome.weights) == self.without(rounds)

    def without(self, rounds: int = 2) -> str:
        """The model's digest of a run that the site has no part in."""
        return _without(self.encoding, self.values, self.free, rounds)

    def undisturbed(self, rounds: int = 2) -> str:
        """The model's digest of a run in which all three sites are honest."""
        return compute_digest(self.play(rounds=rounds)[0].weights)


@lru_cache
def _without(encoding: str, values: ValueType, free: bool, rounds: int) -> str:
    return compute_digest(Wire(encoding, values, free=free).play(rounds=rounds, sites=OTHERS)[0].weights)


class Ready(Wire):
    """The same with a method of the package, whose messages are said in the fewest bytes."""

    encoding = None  # type: ignore[assignment]

    def __init__(self, name: str, values: ValueType = "float32", task: str = "Plain", **settings: Any):
        self.name, self.values, self.settings = name, values, settings
        self.bench = toy.Bench(getattr(toy, task)())
        self.layout = self.bench.layout

    def method(self, rounds: int) -> Method[Any]:
        made: Method[Any] = self.bench.method(self.name, rounds=rounds, **self.settings)
        return made

    def without(self, rounds: int = 2) -> str:
        return compute_digest(self.play(rounds=rounds, sites=OTHERS)[0].weights)


@pytest.fixture
def wire(encoding: str) -> Wire:
    return Wire(encoding)


@pytest.fixture
def catalogue() -> SimpleNamespace:
    """What rows that need another federation than ``wire`` make theirs of."""
    return SimpleNamespace(Wire=Wire, Ready=Ready, Parts=Parts, RUN=RUN, toy=toy)
