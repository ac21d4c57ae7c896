"""A hub whose sites answer as bytes: the tree ends in the bits of the run without hubs, and trusts no answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from local_federation import LocalFederation
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply

from flare_sparse.core.errors import MissingBase, RejectedMessage
from flare_sparse.flare.hubs.messages import (
    MAX_ANSWER_BYTES,
    RECEIVER,
    build_site_links,
    pack_answer,
    pack_failure,
    read_question,
)
from flare_sparse.flare.payload import (
    MISSING_BASE_HEADER,
    build_refusal,
    extract_sum,
    hello_to_shareable,
    message_to_shareable,
    shareable_to_message,
    sum_to_shareable,
)
from flare_sparse.privacy.secure_aggregation.limits import SumRules
from flare_sparse.privacy.secure_aggregation.rings import SectionFormat
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.federation import Hub, HubRules, SiteLinks, SiteReply, SumQuestions
from flare_sparse.rounds.federation.parcels import EXCHANGE, HELLO, SUM
from flare_sparse.wire.collection import Parcel, pack_collection

MESSAGE = np.arange(9, dtype=np.uint8)
Answer = Callable[[str, str, Shareable], Shareable]
"""What a site's FLARE task returns, from the site's name, the name of the task and its data."""


def build_links(answer: Answer, asked: list[Any] | None = None) -> SiteLinks:
    """Return the links of a hub whose sites run ``answer`` for each question."""

    def ask(contents: Mapping[str, bytes], seconds: float | None, max_answer_bytes: int) -> dict[str, bytes]:
        if asked is not None:
            asked.append((dict(contents), seconds, max_answer_bytes))
        answers = {}
        for site, content in contents.items():
            topic, task, data = read_question(content, "hub-1")
            answers[site] = pack_answer(topic, site, answer(site, task, data))
        return answers

    return build_site_links(ask)


def test_hellos_pass_and_anything_else_is_none() -> None:
    replies = {"site-1": hello_to_shareable({"version": "1"}), "site-2": make_reply(ReturnCode.EXECUTION_EXCEPTION)}
    links = build_links(lambda site, task, data: replies[site])
    assert links.handshake(["site-1", "site-2"]) == {"site-1": {"version": "1"}, "site-2": None}


def test_request_reaches_the_task_and_the_update_comes_back_as_it_is() -> None:
    seen: list[Any] = []

    def answer(site: str, task: str, data: Shareable) -> Shareable:
        message, meta = shareable_to_message(data, "server")
        seen.append((site, task, message.tolist(), meta))
        return message_to_shareable(MESSAGE, {"examples": 7, "metrics": {"mae": 0.5}, "events": [["x", 1]]})

    asked: list[Any] = []
    attempt = Attempt(4, "train", 2, dict.fromkeys(["site-1", "site-2"], MESSAGE), {"site-1": 3, "site-2": 1}, 60.0)
    replies = build_links(answer, asked).exchange(attempt)
    assert [entry[:3] for entry in seen] == [(site, "exchange", MESSAGE.tolist()) for site in ("site-1", "site-2")]
    assert [entry[3]["acknowledged"] for entry in seen] == [3, 1]
    assert [entry[3]["kind"] for entry in seen] == ["train", "train"]
    (reply, _) = replies.values()
    assert isinstance(reply, SiteReply)
    assert (reply.message.tolist(), reply.examples, reply.metrics, reply.events) == (
        MESSAGE.tolist(),
        7,
        {"mae": 0.5},
        [["x", 1]],
    )
    assert asked[0][1:] == (60.0, MAX_ANSWER_BYTES)


def test_sites_with_one_request_share_one_buffer() -> None:
    asked: list[Any] = []
    names = [f"site-{number}" for number in range(50)]
    attempt = Attempt(4, "train", 2, dict.fromkeys(names, MESSAGE), dict.fromkeys(names, 3), None)
    build_links(lambda site, task, data: build_refusal("E_DATA", ReturnCode.EXECUTION_EXCEPTION), asked).exchange(
        attempt
    )
    assert len({id(content) for content in asked[0][0].values()}) == 1


def test_question_to_a_site_names_no_other_site() -> None:
    asked: list[Any] = []
    names = ["north", "south"]
    links = build_links(lambda site, task, data: build_refusal("E_DATA", ReturnCode.EXECUTION_EXCEPTION), asked)
    links.handshake(names)
    links.exchange(Attempt(4, "train", 2, dict.fromkeys(names, MESSAGE), dict.fromkeys(names, 3), None))
    links.exchange_sum(SumQuestions(dict.fromkeys(names, MESSAGE), 5.0, SectionFormat(8, 1008), "00" * 16))
    contents = [content for contents, _, _ in asked for content in contents.values()]
    assert len(contents) == 6
    assert not [content for content in contents if b"north" in content or b"south" in content]


def test_refusal_is_passed_on_as_its_code_and_a_lost_base_as_such() -> None:
    lost = build_refusal("E_NOT_HELD", ReturnCode.EXECUTION_EXCEPTION)
    lost.set_header(MISSING_BASE_HEADER, True)
    results = {
        "site-1": build_refusal("E_POLICY", ReturnCode.EXECUTION_EXCEPTION),
        "site-2": lost,
        "site-3": make_reply(ReturnCode.OK),
        "site-4": make_reply("sub-01 died"),
    }
    attempt = Attempt(4, "train", 2, dict.fromkeys(results, MESSAGE), dict.fromkeys(results, 0), None)
    replies = dict(build_links(lambda site, task, data: results[site]).exchange(attempt))
    assert isinstance(replies.pop("site-2"), MissingBase)
    assert replies == {"site-1": "E_POLICY", "site-3": "E_KIND", "site-4": "E_SITE"}


def test_step_of_a_sum_returns_messages_and_codes_and_may_be_as_long_as_its_section() -> None:
    def answer(site: str, task: str, data: Shareable) -> Shareable:
        assert task == "sum"
        if site == "site-2":
            return build_refusal("E_RANGE", ReturnCode.EXECUTION_EXCEPTION)
        return sum_to_shareable(extract_sum(data)[::-1].copy())

    asked: list[Any] = []
    questions = SumQuestions(dict.fromkeys(["site-1", "site-2"], MESSAGE), 5.0, SectionFormat(8, 1008), "00" * 16)
    replies = build_links(answer, asked).exchange_sum(questions)
    assert np.asarray(replies["site-1"]).tolist() == MESSAGE[::-1].tolist()
    assert replies["site-2"] == "E_RANGE"
    assert asked[0][1:] == (5.0, MAX_ANSWER_BYTES + 1008)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"", "E_LEN"),
        (b"x" * 100, "E_VERSION"),
        (pack_collection({}, []).tobytes(), "E_KIND"),
        (pack_collection({}, [Parcel(("site-2",), {}, MESSAGE)]).tobytes(), "E_KIND"),
        (pack_collection({}, [Parcel(("site-1",), {}, MESSAGE)] * 2).tobytes(), "E_KIND"),
        (pack_failure("site-1", "E_SIZE"), "E_SIZE"),
        (pack_failure("site-1", "sub-01"), "E_SITE"),
    ],
)
def test_answer_that_is_none_costs_its_site_alone(answer: bytes, code: str) -> None:
    honest = pack_answer(SUM, "site-2", sum_to_shareable(MESSAGE))
    links = build_site_links(lambda contents, seconds, size: {"site-1": answer, "site-2": honest})
    replies = links.exchange_sum(SumQuestions(dict.fromkeys(["site-1", "site-2"], MESSAGE)))
    assert replies["site-1"] == code
    assert np.asarray(replies["site-2"]).tolist() == MESSAGE.tolist()


@pytest.mark.parametrize(
    "question",
    [
        b"",
        pack_collection({"topic": HELLO}, []).tobytes(),
        pack_collection({"topic": HELLO}, [Parcel(("site-1",))]).tobytes(),
        pack_collection({"topic": SUM}, [Parcel((RECEIVER,))]).tobytes(),
        pack_collection({"topic": EXCHANGE}, [Parcel((RECEIVER,))]).tobytes(),
        pack_collection({"topic": "shell"}, [Parcel((RECEIVER,), {}, MESSAGE)]).tobytes(),
        pack_collection({"topic": [1]}, [Parcel((RECEIVER,), {}, MESSAGE)]).tobytes(),
        pack_collection({"topic": SUM}, [Parcel((RECEIVER,), {}, MESSAGE)] * 2).tobytes(),
    ],
)
def test_site_makes_no_task_of_a_malformed_question(question: bytes) -> None:
    with pytest.raises(RejectedMessage):
        read_question(question, "hub-1")


def test_site_that_sends_something_else_than_an_update_has_a_code() -> None:
    values = DXO(DataKind.WEIGHTS, data={"a": np.zeros(3)}).to_shareable()
    attempt = Attempt(4, "train", 2, {"site-1": MESSAGE}, {"site-1": 0}, None)
    assert build_links(lambda site, task, data: values).exchange(attempt) == {"site-1": "E_KIND"}


@pytest.mark.slow
@pytest.mark.parametrize("rules", [SumRules(8.0, is_padded=False), SumRules(8.0)], ids=["fixed_point", "masked"])
def test_tree_over_these_messages_ends_in_the_bits_of_the_flat_run(
    rules: SumRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The in-process tree, with every question and answer as bytes between a hub and its sites."""
    hubs = {"hub-1": HubRules(("site-1", "site-2")), "hub-2": HubRules(("site-3", "site-4"))}
    settings: dict[str, Any] = {"rounds": 2, "training": {"optimizer": "sgd", "lr": 0.01}, "sum_rules": rules}
    flat = LocalFederation("neurosfl", sites=4, **settings)
    tree = LocalFederation("neurosfl", sites=4, hubs=hubs, **settings)

    def over_bytes(local: SiteLinks) -> SiteLinks:
        def answer(site: str, task: str, data: Shareable) -> Shareable:
            if task == "hello":
                return hello_to_shareable(local.handshake([site])[site])
            if task == "sum":
                reply = local.exchange_sum(SumQuestions({site: extract_sum(data)}))[site]
                return build_refusal(reply, ReturnCode.ERROR) if isinstance(reply, str) else sum_to_shareable(reply)
            message, meta = shareable_to_message(data, "server")
            attempt = Attempt(1, meta["kind"], meta["round"], {site: message}, {site: meta["acknowledged"]}, None)
            update = local.exchange(attempt)[site]
            assert isinstance(update, SiteReply)
            return message_to_shareable(
                update.message, {"examples": update.examples, "metrics": update.metrics, "events": update.events}
            )

        return build_links(answer)

    monkeypatch.setattr("local_federation.Hub", lambda rules, links: Hub(rules, over_bytes(links)))
    outcomes = tree.run(handshake=tree.build_tree().shake_hands), flat.run()
    assert torch.equal(outcomes[0].weights, outcomes[1].weights)
    assert [record.outcomes for record in tree.records] == [record.outcomes for record in flat.records]
