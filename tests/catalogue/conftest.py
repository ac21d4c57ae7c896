"""A federation of three sites in this process, whose second site sends what a test makes of its honest update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import toy
from local_federation import RUN, LocalFederation, Upload

from flare_sparse.core.exchange import Assignment, Patch, Request, Update, UpdateSpec
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.aggregation.weighted import weigh_by_examples, weighted_sum
from flare_sparse.methods.method import Method, MethodConfig, broadcast
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire import codec
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.envelope import HEADER_BYTES, Header, read_header, write_header
from flare_sparse.wire.formats import ValueType
from flare_sparse.wire.ledger import Ledger

HOSTILE, HONEST = "site-2", ["site-1", "site-3"]
SITES = sorted([HOSTILE, *HONEST])


@dataclass(frozen=True)
class Parts:
    """Header, selection and values of a message."""

    header: Header
    selection: bytes
    values: bytes

    @classmethod
    def from_message(cls, message: np.ndarray) -> Parts:
        header = read_header(message)
        selection_end = HEADER_BYTES + header.selection_bytes
        # A format of version 2 is no multiple of its values: its section is kept with the padding.
        width = {1: 4, 2: 2, 3: 2}.get(header.values)
        values_end = None if width is None else header.values_start + width * header.scalars
        values = message[header.values_start : values_end]
        return cls(header, message[HEADER_BYTES:selection_end].tobytes(), values.tobytes())

    def to_message(self, **header_fields: Any) -> np.ndarray:
        """Return the message, with valid checksums, after changing some fields of its header."""
        header = replace(self.header, selection_bytes=len(self.selection))
        buffer = np.zeros(header.values_start + -(-len(self.values) // 8) * 8, np.uint8)
        buffer[HEADER_BYTES : HEADER_BYTES + len(self.selection)] = np.frombuffer(self.selection, np.uint8)
        buffer[header.values_start : header.values_start + len(self.values)] = np.frombuffer(self.values, np.uint8)
        write_header(replace(header, **header_fields), buffer)
        return buffer


@dataclass(frozen=True)
class Sent(Upload):
    """An encoded upload, with ways to forge other messages from it."""

    @property
    def parts(self) -> Parts:
        return Parts.from_message(self.message)

    def with_header(self, **header_fields: Any) -> Sent:
        """Return the upload with other fields in the message's header."""
        return replace(self, message=self.parts.to_message(**header_fields))

    def with_selection(self, selection: bytes) -> Sent:
        """Return the upload with other bytes as its selection."""
        return replace(self, message=replace(self.parts, selection=selection).to_message())

    def with_mask(self, encoding: str, mask: Mask, values: ValueType = "float32") -> Sent:
        """Return an upload of ones at the entries of ``mask``, in a given encoding."""
        update = replace(self.update, patch=Patch.from_vector(torch.ones(mask.size), mask))
        with force_encoding(encoding), patch.object(self.endpoint, "values", values):
            return replace(self, message=self.endpoint.encode(self.request, update).data)


Attack = Callable[[Sent], Any]
"""Returns what the hostile site sends instead of its upload: another upload, or None for nothing."""


def force_encoding(name: str | None) -> Any:
    """Return a context in which every selection is encoded by ``name``, even if another takes fewer bytes.

    None leaves the choice to the codec.
    """
    if name is None:
        return nullcontext()
    encoding = ENCODINGS[name]
    return patch.object(
        codec,
        "choose_encoding",
        lambda mask, base_mask, layout: (encoding, encoding.encode(mask, base_mask, layout)),
    )


class EncodingFederation(LocalFederation):
    """A local federation whose training updates are written by one encoding."""

    encoding: str | None = None

    def encode(self, upload: Upload) -> Any:
        with force_encoding(None if upload.request.kind == "evaluate" else self.encoding):
            return super().encode(upload)


@dataclass(frozen=True)
class State:
    round: int
    weights: torch.Tensor


class SelectedDelta(Method[MethodConfig, State]):
    """FedAvg whose sites send the delta of the entries of ``selection``, whichever those are.

    With ``is_free`` the server does not check the selection.
    """

    name = "selected_delta"
    selection: Mask
    trainable: Mask
    is_free = False

    def init(self, weights: torch.Tensor, sites: Any) -> State:
        return State(1, weights)

    def ask(self, state: State, sites: Any) -> dict[str, Request] | None:
        if state.round > self.config.rounds:
            return None
        expected = UpdateSpec("delta", mask=None if self.is_free else self.selection)
        request = Request("train", state.round, self.model(state), self.trainable)
        return broadcast(sites, Assignment(request, expected))

    def answer(self, request: Request, site: Any) -> Update:
        trained = site.train(site.weights, request.trainable, self.config.training, request.round)
        return Update(Patch.from_vector(trained - site.weights, self.selection), "delta", site.num_examples)

    def learn(self, state: State, updates: Any) -> State:
        return State(state.round + 1, state.weights + weighted_sum(updates, weigh_by_examples))

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, Mask.full(self.layout.size))


def draw_mask(size: int, density: float, seed: int) -> Mask:
    return Mask(torch.rand(size, generator=torch.Generator().manual_seed(seed)) < density)


def build_selections(layout: Any) -> dict[str, tuple[Mask, Mask]]:
    """Return, for every encoding, the mask of the entries to send and the mask of the trainable entries."""
    size = layout.size
    full, most, some = Mask.full(size), draw_mask(size, 0.7, 1), draw_mask(size, 0.4, 2)
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
        "slices": (Mask(layout.flatten(rows)), full),
        "gaps": (Mask(few), full),
    }


class Wire:
    """Runs with one encoding, in which a rejection leaves a code in the round's record and no other trace.

    Args:
        encoding: writes every training update.
        values: number format.
        is_free: whether a site may choose what it sends.
    """

    def __init__(self, encoding: str, values: ValueType = "float32", *, is_free: bool = False):
        self.encoding: str | None = encoding
        self.values, self.is_free = values, is_free
        self.bench = toy.ToyBench(toy.Plain())
        self.layout = self.bench.layout
        self.selection, self.trainable = build_selections(self.layout)[encoding]

    def build_method(self, rounds: int) -> Method[Any, Any]:
        training = {"lr": 0.05, "epochs": 1, "batch_size": 16}
        config = MethodConfig.model_validate({"rounds": rounds, "training": training})
        method = SelectedDelta(config, self.layout, 1)
        method.selection, method.trainable, method.is_free = self.selection, self.trainable, self.is_free
        return method

    def run(
        self,
        attack: Callable[[int, Sent], Any] = lambda t, sent: sent,
        rounds: int = 2,
        sites: list[str] = SITES,
        rules: RoundRules | None = None,
        hostile: tuple[str, ...] = (HOSTILE,),
    ) -> tuple[Outcome, Ledger]:
        """Return outcome and ledger of a run whose hostile sites send what ``attack`` makes of each upload."""

        def change_message(upload: Upload) -> Any:
            if upload.request.kind == "evaluate" or upload.site not in hostile:
                return upload
            sent = Sent(**{field.name: getattr(upload, field.name) for field in fields(Upload)})
            return attack(upload.request.round, sent)

        federation = EncodingFederation(
            self.build_method(rounds),
            self.bench,
            sites={name: site for name, site in self.bench.sites().items() if name in sites},
            rules=rules or RoundRules(quarantine_after=0),
            values=self.values,
        )
        federation.encoding, federation.change_message = self.encoding, change_message
        return federation.run(), federation.ledger

    def assert_rejects(self, *attacks: tuple[str, Attack]) -> None:
        """Run one round for each attack, and assert that it is rejected with its code and changes nothing else."""
        rounds = len(attacks)
        outcome, ledger = self.run(lambda t, sent: attacks[t - 1][1](sent), rounds)
        *training, last = outcome.rounds
        assert [record.rejected for record in training] == [{HOSTILE: code} for code, _ in attacks]
        assert all(record.sites_contributed == HONEST and record.is_balanced for record in training)
        assert last.sites_contributed == SITES, "the run continues, and so does the site"
        assert not [line for line in ledger.lines if (line.site, line.direction, line.kind) == (HOSTILE, "up", "train")]
        assert compute_digest(outcome.weights) == self.compute_digest_without_site(rounds)

    def compute_digest_without_site(self, rounds: int = 2) -> str:
        """Return the digest of the final model of a run without the hostile site."""
        return _compute_digest_without_site(self.encoding, self.values, self.is_free, rounds)

    def compute_honest_digest(self, rounds: int = 2) -> str:
        """Return the digest of the final model of a run of three honest sites."""
        return compute_digest(self.run(rounds=rounds)[0].weights)


@lru_cache
def _compute_digest_without_site(encoding: str, values: ValueType, is_free: bool, rounds: int) -> str:
    outcome, _ = Wire(encoding, values, is_free=is_free).run(rounds=rounds, sites=HONEST)
    return compute_digest(outcome.weights)


class MethodWire(Wire):
    """Runs of a method of the package, whose updates are written in the fewest bytes."""

    def __init__(self, name: str, values: ValueType = "float32", task: str = "Plain", **settings: Any):
        self.name, self.values, self.settings = name, values, settings
        self.encoding = None
        self.bench = toy.ToyBench(getattr(toy, task)())
        self.layout = self.bench.layout

    def build_method(self, rounds: int) -> Method[Any, Any]:
        method: Method[Any, Any] = self.bench.method(self.name, rounds=rounds, **self.settings)
        return method

    def compute_digest_without_site(self, rounds: int = 2) -> str:
        return compute_digest(self.run(rounds=rounds, sites=HONEST)[0].weights)


@pytest.fixture
def wire(encoding: str) -> Wire:
    return Wire(encoding)


@pytest.fixture
def catalogue() -> SimpleNamespace:
    """What the rows that need another federation than ``wire`` build theirs from."""
    return SimpleNamespace(Wire=Wire, MethodWire=MethodWire, Parts=Parts, RUN=RUN, toy=toy)
