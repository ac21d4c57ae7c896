"""Bad input, section 2: messages that are well made and come at the wrong time, or from the wrong end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ServerCommandKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable

from flare_sparse.checkpoint.store import Store
from flare_sparse.endpoints.server import ServerEndpoint, SiteBase
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.errors import MissingBase, RejectedMessage
from flare_sparse.exchange import Assignment, Patch, Request
from flare_sparse.flare.aggregator import StagingAggregator
from flare_sparse.flare.filters import DecodeUpdate
from flare_sparse.flare.payload import REPLY, TASK, message_to_shareable
from flare_sparse.flare.session import ServerSession
from flare_sparse.mask import Mask
from flare_sparse.params import Layout, compute_digest
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.ledger import Ledger

every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)


@every_encoding
def test_row_21_answers_of_another_round(wire: Any, encoding: str) -> None:
    kept = []

    def stale(sent: Any) -> Any:
        return replace(sent, message=kept[0])

    wire.refuses(
        ("E_ROUND", lambda sent: kept.append(sent.message) or sent.sealed(round=0)),
        ("E_ROUND", stale),
        ("E_ROUND", lambda sent: sent.sealed(round=sent.request.round + 1)),
    )


@every_encoding
def test_row_22_an_answer_under_another_mask(wire: Any, encoding: str) -> None:
    """Shared and shrink lean on the mask: who leans on another is sent everything, once, in the same round.

    The others say their entries themselves and must name no mask; other entries than asked for are row 6.
    """
    requires_base = encoding in ("shared", "shrink")
    wire.refuses(
        *[
            ("E_NOT_HELD" if requires_base else "E_CANON", lambda sent: sent.sealed(base_mask=b"another mask...."))
            for _ in "12"
        ]
    )
    if requires_base:
        asked: list[int] = []

        def once(t: int, sent: Any) -> Any:
            asked.append(t)
            return sent.sealed(base_mask=b"another mask....") if asked.count(t) == 1 else sent

        outcome, _ = wire.play(once)
        assert asked == [1, 1, 2, 2]
        assert [record.attempts for record in outcome.rounds] == [1, 1, 1]
        assert compute_digest(outcome.weights) == wire.undisturbed()


@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["fedavg", "topk_ef", "scbf"])
def test_row_22_a_site_that_asks_for_everything_again_changes_nobody_elses_bits(
    catalogue: Any, name: str, values: Any
) -> None:
    """What a short format has rounded off is not spent on the site that lost its mask, nor is a patch sent whole."""

    def asks_again(sent: Any) -> Any:
        raise MissingBase("E_NOT_HELD", "known", "a mask", "nothing")

    catalogue.Ready(name, values).refuses(*[("E_NOT_HELD", asks_again)] * 3)


@every_encoding
def test_row_23_another_base(wire: Any, encoding: str) -> None:
    """Of a frozen base, of the vector that the site was sent, and of one that no answer may lean on."""
    other = Layout(wire.layout.tensors, base="0" * 64)
    wire.refuses(
        ("E_LAYOUT", lambda sent: sent.sealed(layout=bytes.fromhex(other.fingerprint))),
        ("E_REPLAY", lambda sent: sent.sealed(sequence=sent.parts.header.sequence - 1)),
        ("E_NOT_HELD", lambda sent: sent.sealed(base=1, base_sequence=1)),
        ("E_RUN", lambda sent: sent.sealed(run=bytes(7) + b"\1")),
    )


@every_encoding
def test_row_24_the_same_answer_again(wire: Any, encoding: str) -> None:
    """The bytes of round 1 in round 2, as they are and with the round made right; the first of them counted."""
    kept: dict[int, np.ndarray] = {}

    def again(t: int, sent: Any) -> Any:
        kept[t] = sent.message.copy()
        if t == 1:
            return sent
        first = replace(sent, message=kept[1])
        return first if t == 2 else first.sealed(round=t)

    outcome, _ = wire.play(again, rounds=3)
    assert [record.rejected for record in outcome.rounds] == [{}, {"site-2": "E_ROUND"}, {"site-2": "E_REPLAY"}, {}]
    silent, _ = wire.play(lambda t, sent: sent if t == 1 else None, rounds=3)
    assert compute_digest(outcome.weights) == compute_digest(silent.weights)


@every_encoding
def test_row_25_two_answers_in_one_round(wire: Any, encoding: str) -> None:
    """The first wins at the desk; FLARE drops the second, and the aggregator would, too."""

    def twice(t: int, sent: Any) -> Any:
        first = sent.arriving()
        with pytest.raises(RejectedMessage, match="E_REPLAY"):
            replace(sent, message=sent.parts.sealed(), examples=10**6).arriving()
        staging, context = StagingAggregator(), FLContext()
        for reply in (first, "E_REPLAY"):
            result = from_("site-2")
            result[REPLY] = reply
            staging.accept(result, context)
        assert staging.aggregate(context)[REPLY] == {"site-2": first}
        return first

    outcome, _ = wire.play(twice)
    assert compute_digest(outcome.weights) == wire.undisturbed()


def from_(site: str, result: Shareable | None = None) -> Shareable:
    """A result as FLARE's server hands it on: with the client that the connection's token belongs to."""
    result = Shareable() if result is None else result
    result.set_header(ServerCommandKey.FL_CLIENT, Client(site, "token"))
    return result


def test_row_26_an_answer_to_another_sites_question() -> None:
    """FLARE drops what comes under a task that is not the sender's, whatever the sender calls itself."""
    received: list[str] = []
    task = Task(TASK, Shareable(), result_received_cb=lambda client_task, fl_ctx: received.append(client_task.id))
    theirs = ClientTask(Client("site-1", "one"), task)
    server = WFCommServer()
    server._client_task_map[theirs.id] = theirs
    server.process_submission(Client("site-2", "two"), TASK, theirs.id, from_("site-2"), FLContext())
    assert received == []
    assert theirs.result is None


@every_encoding
def test_row_26_a_site_that_calls_itself_another_or_was_not_asked(wire: Any, encoding: str) -> None:
    """The name that FLARE has by the token is believed, not the one in the sender's own context."""
    decode = DecodeUpdate()

    def as_site_1(sent: Any) -> Any:
        session = ServerSession()
        session.endpoint = sent.server
        engine = SimpleNamespace(get_component=lambda name: session, fire_event=lambda *event: None)
        peer = FLContextManager(identity_name="site-1").new_context()
        context = FLContextManager(engine=engine, identity_name="server", job_id="job").new_context()
        context.set_peer_context(peer)
        meta = {"examples": "many", "metrics": {}}
        result = decode.process(from_("site-2", message_to_shareable(sent.message, meta)), context)
        assert (result[REPLY].code, result[REPLY].site) == ("E_WEIGHT", "site-2")
        assert decode.process(message_to_shareable(sent.message, meta), context)[REPLY] == "E_KIND"
        with pytest.raises(RejectedMessage, match="E_REPLAY"):
            sent.server.decode("stranger", sent.message, sent.examples, sent.metrics)
        return replace(sent, examples="many")

    wire.refuses(("E_WEIGHT", as_site_1), ("E_WEIGHT", as_site_1))


@every_encoding
def test_row_27_weights_where_differences_were_asked_for(wire: Any, encoding: str) -> None:
    wire.refuses(
        ("E_KIND", lambda sent: sent.sealed(content=0)),
        ("E_KIND", lambda sent: sent.sealed(content=2)),
        ("E_KIND", lambda sent: sent.sealed(kind="evaluate")),
        ("E_KIND", lambda sent: replace(sent, message=question(sent))),
    )


def question(sent: Any) -> np.ndarray:
    """The answer in the form of a question, with a selection of what may change."""
    from flare_sparse.wire.codec import encode
    from flare_sparse.wire.plan import Plan

    request, endpoint = sent.request, sent.server
    plan = Plan(
        endpoint.layout,
        endpoint.run,
        base_mask=request.trainable,
        sequence=endpoint._sequence,
        round=request.round,
        kind="train",
    )
    return encode(sent.update.patch, plan, content="delta", trainable=sent.update.patch.mask).data


class Asked:
    """A site, and a server that may ask it anything."""

    def __init__(self, catalogue: Any, method: str = "fedavg", task: str = "Plain"):
        toy = catalogue.toy
        self.bench = toy.Bench(getattr(toy, task)())
        settings = {"rank": 4, "ranks": {"site-2": 2}} if method in ("flexlora", "hetlora", "lora_a2") else {}
        self.made = self.bench.method(method, **settings)
        self.site = self.bench.site(2)
        self.endpoint = SiteEndpoint(self.site, self.made, catalogue.RUN, "float32")
        self.server = ServerEndpoint(self.bench.layout, catalogue.RUN, "float32", Ledger())
        self.trained = 0
        train = self.site.train

        def counted(*arguments: Any, **named: Any) -> torch.Tensor:
            self.trained += 1
            return train(*arguments, **named)

        self.site.train = counted

    def message(self, model: Patch, trainable: Mask, t: int = 1) -> np.ndarray:
        return self.server.ask({"site-2": Assignment(Request("train", t, model, trainable))}).messages["site-2"]


def test_row_28_a_site_refuses_what_it_cannot_check(catalogue: Any) -> None:
    """A mask that it does not hold, weights that are no numbers, a question that was changed: no step is trained."""
    asked = Asked(catalogue)
    everything = Mask.full(asked.bench.layout.size)
    good = asked.message(Patch.from_vector(asked.bench.weights, everything), everything)
    changed = good.copy()
    changed[-12] ^= 1
    parts = catalogue.Parts.of(good)
    part = Mask(torch.arange(everything.size) % 2 == 0)
    asked.server._held["site-2"] = SiteBase(part, 0)
    leaning = asked.message(Patch.from_vector(asked.bench.weights, part), part)
    nan = replace(parts, values=np.full(1, np.nan, "<f4").tobytes() + parts.values[4:]).sealed()
    for code, bad in (("E_CRC", changed), ("E_FINITE", nan), ("E_NOT_HELD", leaning)):
        with pytest.raises((RejectedMessage, MissingBase), match=code):
            asked.endpoint.receive(bad)
    assert asked.trained == 0
    asked.endpoint.answer(asked.endpoint.receive(good))
    assert asked.trained == 1


@pytest.mark.parametrize("method", ["flexlora", "hetlora"])
def test_row_28_a_site_refuses_a_rank_beyond_its_own(catalogue: Any, method: str) -> None:
    """The rank stands in the site's copy of the job; with lora_a2 the site chooses by it and no question says another."""
    asked = Asked(catalogue, method, "Adapted")
    beyond = asked.made.held(3)
    request = asked.endpoint.receive(asked.message(Patch.from_vector(asked.bench.weights, beyond), beyond))
    with pytest.raises(RejectedMessage, match="E_MASK"):
        asked.endpoint.answer(request)
    assert asked.trained == 0
    within = asked.made.held(2)
    asked.endpoint.answer(
        asked.endpoint.receive(asked.message(Patch.from_vector(asked.bench.weights, within), within, 2))
    )
    assert asked.trained == 1


def test_row_29_a_server_that_goes_back(catalogue: Any, tmp_path: Path) -> None:
    """A site that is running refuses an earlier question; one that was started anew goes back with the server."""
    asked = Asked(catalogue)
    everything = Mask.full(asked.bench.layout.size)
    asked.endpoint.store = Store(tmp_path / "site", {})
    messages = [asked.message(Patch.from_vector(asked.bench.weights, everything), everything, t) for t in (1, 2)]
    answers = []
    for message in messages:
        request = asked.endpoint.receive(message)
        answers.append(asked.endpoint.encode(request, asked.endpoint.answer(request)).data.tobytes())
    for message in messages:
        with pytest.raises(RejectedMessage, match="E_REPLAY"):
            asked.endpoint.receive(message)
    anew = SiteEndpoint(asked.bench.site(2), asked.made, catalogue.RUN, "float32", Store(tmp_path / "site", {}))
    request = anew.receive(messages[1])
    assert anew.encode(request, anew.answer(request)).data.tobytes() == answers[1]
    of_another_run = SiteEndpoint(asked.bench.site(2), asked.made, "f" * 16, "float32")
    with pytest.raises(RejectedMessage, match="E_RUN"):
        of_another_run.receive(messages[0])
