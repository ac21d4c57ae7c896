"""Bad input, section 2: well-formed messages that come at the wrong time or from the wrong end."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReservedKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import MissingBase, RejectedMessage
from flare_sparse.core.exchange import Assignment, Patch, Request
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, compute_digest
from flare_sparse.flare.controller import decode_reply
from flare_sparse.flare.payload import TASK, message_to_shareable
from flare_sparse.rounds.endpoints.server import ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.link import Vector
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.ledger import Ledger

every_encoding = pytest.mark.parametrize("encoding", list(ENCODINGS))


@pytest.mark.slow
@every_encoding
@pytest.mark.row(21)
def test_updates_of_another_round_are_rejected(wire: Any, encoding: str) -> None:
    kept = []

    def send_first_message(sent: Any) -> Any:
        return replace(sent, message=kept[0])

    wire.assert_rejects(
        ("E_ROUND", lambda sent: kept.append(sent.message) or sent.with_header(round=0)),
        ("E_ROUND", send_first_message),
        ("E_ROUND", lambda sent: sent.with_header(round=sent.request.round + 1)),
    )


@pytest.mark.slow
@every_encoding
@pytest.mark.row(22)
def test_update_over_another_mask_is_rejected(wire: Any, encoding: str) -> None:
    """Shared and shrink require the base mask: a site with another one is sent the full model once, in the same round.

    The other encodings name their entries and no base mask; entries that were not requested are row 6.
    """
    requires_base = encoding in ("shared", "shrink")
    wire.assert_rejects(
        *[("E_NOT_HELD" if requires_base else "E_CANON", lambda sent: sent.with_header(base="a" * 16)) for _ in "12"]
    )
    if requires_base:
        rounds: list[int] = []

        def name_another_mask_once(t: int, sent: Any) -> Any:
            rounds.append(t)
            return sent.with_header(base="a" * 16) if rounds.count(t) == 1 else sent

        outcome, _ = wire.run(name_another_mask_once)
        assert rounds == [1, 1, 2, 2]
        assert [record.attempts for record in outcome.rounds] == [1, 1, 1]
        assert compute_digest(outcome.weights) == wire.compute_honest_digest()


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["fedavg", "topk_ef", "scbf"])
@pytest.mark.row(22)
def test_site_without_the_base_does_not_change_messages_of_others(catalogue: Any, name: str, values: Any) -> None:
    """The residual of a short format is not spent on the site that lost its mask, and others get no full model."""

    def report_missing_base(sent: Any) -> Any:
        raise MissingBase("E_NOT_HELD", "known", "a mask", "nothing")

    catalogue.MethodWire(name, values).assert_rejects(*[("E_NOT_HELD", report_missing_base)] * 3)


@pytest.mark.slow
@every_encoding
@pytest.mark.row(23)
def test_update_over_another_base_is_rejected(wire: Any, encoding: str) -> None:
    """Another frozen base model, another request, a base that no update may have, another run."""
    other = Layout(wire.layout.tensors, base_model_digest="0" * 64)
    wire.assert_rejects(
        ("E_LAYOUT", lambda sent: sent.with_header(layout=bytes.fromhex(other.fingerprint))),
        ("E_REPLAY", lambda sent: sent.with_header(sequence=sent.parts.header.sequence - 1)),
        ("E_REPLAY", lambda sent: sent.with_header(target="1" * 16)),
        ("E_REPLAY", lambda sent: sent.with_header(request="1" * 16)),
        ("E_NOT_HELD", lambda sent: sent.with_header(patch_base=1, base="1" * 16)),
        ("E_RUN", lambda sent: sent.with_header(run=bytes(7) + b"\1")),
    )


@pytest.mark.slow
@every_encoding
@pytest.mark.row(24)
def test_repeated_update_is_rejected(wire: Any, encoding: str) -> None:
    """The bytes of round 1 come again in round 2, and in round 3 with a corrected round; only round 1 counts them."""
    messages: dict[int, np.ndarray] = {}

    def repeat_first(t: int, sent: Any) -> Any:
        messages[t] = sent.message.copy()
        if t == 1:
            return sent
        first = replace(sent, message=messages[1])
        return first if t == 2 else first.with_header(round=t)

    outcome, _ = wire.run(repeat_first, rounds=3)
    assert [record.rejected for record in outcome.rounds] == [{}, {"site-2": "E_ROUND"}, {"site-2": "E_REPLAY"}, {}]
    silent, _ = wire.run(lambda t, sent: sent if t == 1 else None, rounds=3)
    assert compute_digest(outcome.weights) == compute_digest(silent.weights)


@pytest.mark.slow
@every_encoding
@pytest.mark.row(25)
def test_second_update_in_a_round_is_rejected(wire: Any, encoding: str) -> None:
    """The endpoint keeps the first; FLARE drops the second."""

    def send_twice(t: int, sent: Any) -> Any:
        first = sent.decode()
        with pytest.raises(RejectedMessage, match="E_REPLAY"):
            replace(sent, message=sent.parts.to_message(), examples=10**6).decode()
        return first

    outcome, _ = wire.run(send_twice)
    assert compute_digest(outcome.weights) == wire.compute_honest_digest()


def build_result(site: str, result: Shareable | None = None) -> Shareable:
    """Return a result as FLARE's server passes it on: with the client to which the connection's token belongs."""
    result = Shareable() if result is None else result
    result.set_header(ServerCommandKey.FL_CLIENT, Client(site, "token"))
    return result


@pytest.mark.row(26)
def test_result_for_another_sites_task_is_dropped() -> None:
    """FLARE drops a result for a task that is not the sender's, whatever name the sender claims."""
    received: list[str] = []
    task = Task(TASK, Shareable(), result_received_cb=lambda client_task, fl_ctx: received.append(client_task.id))
    theirs = ClientTask(Client("site-1", "one"), task)
    server = WFCommServer()
    server._client_task_map[theirs.id] = theirs
    server.process_submission(Client("site-2", "two"), TASK, theirs.id, build_result("site-2"), FLContext())
    assert received == []
    assert theirs.result is None


@every_encoding
@pytest.mark.row(26)
def test_sender_is_named_by_its_token_and_must_have_been_asked(wire: Any, encoding: str) -> None:
    """The site's name is the one that FLARE knows by the token, not the one in the sender's own context."""

    def claim_site_1(sent: Any) -> Any:
        result = message_to_shareable(sent.message, {"examples": "many", "metrics": {}})
        result.set_peer_props({ReservedKey.IDENTITY_NAME: "site-1"})
        reply: Any = decode_reply(sent.server, "site-2", result, logging.getLogger())
        assert (reply.code, reply.site) == ("E_WEIGHT", "site-2")
        with pytest.raises(RejectedMessage, match="E_REPLAY"):
            sent.server.decode("stranger", sent.message, sent.examples, sent.metrics)
        return replace(sent, examples="many")

    wire.assert_rejects(("E_WEIGHT", claim_site_1), ("E_WEIGHT", claim_site_1))


@pytest.mark.slow
@every_encoding
@pytest.mark.row(27)
def test_content_other_than_requested_is_rejected(wire: Any, encoding: str) -> None:
    wire.assert_rejects(
        ("E_KIND", lambda sent: sent.with_header(content=0)),
        ("E_KIND", lambda sent: sent.with_header(content=2)),
        ("E_KIND", lambda sent: sent.with_header(kind="evaluate")),
        ("E_KIND", lambda sent: replace(sent, message=build_request(sent))),
    )


def build_request(sent: Any) -> np.ndarray:
    """Return the update in the form of a request, with a trainable mask."""
    from flare_sparse.wire.codec import encode
    from flare_sparse.wire.plan import Plan

    request, endpoint = sent.request, sent.server
    plan = Plan(
        endpoint.layout,
        endpoint.run,
        base="b" * 16,
        base_mask=request.trainable,
        target=endpoint._round.sent[sent.site].target.name,
        request=endpoint._round.sent[sent.site].name,
        sequence=endpoint._sequence,
        round=request.round,
        kind="train",
    )
    return encode(sent.update.patch, plan, content="delta", trainable=sent.update.patch.mask).data


class RequestBench:
    """One site, and a server that can send it any request."""

    def __init__(self, catalogue: Any, method: str = "fedavg", task: str = "Plain"):
        toy = catalogue.toy
        self.bench = toy.ToyBench(getattr(toy, task)())
        settings = {"rank": 4, "ranks": {"site-2": 2}} if method in ("flexlora", "hetlora", "lora_a2") else {}
        self.method = self.bench.method(method, **settings)
        self.site = self.bench.site(2)
        self.endpoint = SiteEndpoint(self.site, self.method, catalogue.RUN, "float32")
        self.server = ServerEndpoint(self.bench.layout, catalogue.RUN, "float32", Ledger())
        self.trained = 0
        train = self.site.train_entries

        def counted(*arguments: Any, **named: Any) -> torch.Tensor:
            self.trained += 1
            return train(*arguments, **named)

        self.site.train_entries = counted

    def message(self, model: Patch, trainable: Mask, t: int = 1) -> np.ndarray:
        return self.server.encode_requests({"site-2": Assignment(Request("train", t, model, trainable))}).messages[
            "site-2"
        ]


@pytest.mark.row(28)
def test_site_rejects_bad_requests_before_it_trains(catalogue: Any) -> None:
    """A base mask that it does not hold, NaN among the weights, a changed message: no step is trained."""
    site = RequestBench(catalogue)
    full = Mask.full(site.bench.layout.size)
    good = site.message(Patch.from_vector(site.bench.weights, full), full)
    changed = good.copy()
    changed[-12] ^= 1
    parts = catalogue.Parts.from_message(good)
    part = Mask(torch.arange(full.size) % 2 == 0)
    vector = Vector("b" * 16, part)
    site.server._link = replace(site.server._link, held={"site-2": vector.name}, vectors={vector.name: vector})
    partial = site.message(Patch.from_vector(site.bench.weights, part), part)
    nan = replace(parts, values=np.full(1, np.nan, "<f4").tobytes() + parts.values[4:]).to_message()
    for code, bad in (("E_CRC", changed), ("E_FINITE", nan), ("E_NOT_HELD", partial)):
        with pytest.raises((RejectedMessage, MissingBase), match=code):
            site.endpoint.receive(bad)
    assert site.trained == 0
    site.endpoint.answer(site.endpoint.receive(good))
    assert site.trained == 1


@pytest.mark.parametrize("method", ["flexlora", "hetlora"])
@pytest.mark.row(28)
def test_site_rejects_a_rank_above_its_own(catalogue: Any, method: str) -> None:
    """The rank is in the site's copy of the job. In lora_a2 the site chooses by it; no request names a rank."""
    site = RequestBench(catalogue, method, "Adapted")
    beyond = site.method.select_first_ranks(3)
    request = site.endpoint.receive(site.message(Patch.from_vector(site.bench.weights, beyond), beyond))
    with pytest.raises(RejectedMessage, match="E_MASK"):
        site.endpoint.answer(request)
    assert site.trained == 0
    within = site.method.select_first_ranks(2)
    site.endpoint.answer(site.endpoint.receive(site.message(Patch.from_vector(site.bench.weights, within), within, 2)))
    assert site.trained == 1


@pytest.mark.row(29)
def test_running_site_rejects_earlier_requests(catalogue: Any, tmp_path: Path) -> None:
    """A restarted site resumes from its checkpoint before the server's request."""
    site = RequestBench(catalogue)
    full = Mask.full(site.bench.layout.size)
    site.endpoint.store = Store(tmp_path / "site", {})
    messages = [site.message(Patch.from_vector(site.bench.weights, full), full, t) for t in (1, 2)]
    answers = []
    for message in messages:
        request = site.endpoint.receive(message)
        answers.append(site.endpoint.encode(request, site.endpoint.answer(request)).data.tobytes())
    for message in messages:
        with pytest.raises(RejectedMessage, match="E_REPLAY"):
            site.endpoint.receive(message)
    anew = SiteEndpoint(site.bench.site(2), site.method, catalogue.RUN, "float32", Store(tmp_path / "site", {}))
    request = anew.receive(messages[1])
    assert anew.encode(request, anew.answer(request)).data.tobytes() == answers[1]
    of_another_run = SiteEndpoint(site.bench.site(2), site.method, "f" * 16, "float32")
    with pytest.raises(RejectedMessage, match="E_RUN"):
        of_another_run.receive(messages[0])
