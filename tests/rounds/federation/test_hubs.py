"""Hubs: the bits of the flat run, drop-outs and lost hubs, quorum, what a hub holds, and what it sends."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_federation import RUN, LocalFederation

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import ConfigError, FlareSparseError, MissingBase, RejectedMessage, RoundFailed
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.privacy.secure_aggregation.limits import SumRules
from flare_sparse.privacy.secure_aggregation.messages import HEADER_BYTES, Step, pack_message, unpack_message
from flare_sparse.privacy.secure_aggregation.pads import SumId
from flare_sparse.privacy.secure_aggregation.rings import SectionFormat
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.endpoints.sums import build_ring, compute_shares
from flare_sparse.rounds.federation import Hub, HubReply, HubRules, Outcome, RoundRules, SiteLinks, SumQuestions
from flare_sparse.rounds.federation.parcels import MAX_SECTION_BYTES, SiteReply, pack_reply, unpack_reply
from flare_sparse.rounds.federation.tree import sum_link_bytes
from flare_sparse.rounds.local.run import Transport, run_locally
from flare_sparse.wire.collection import Parcel, pack_collection, unpack_collection

SGD = {"optimizer": "sgd", "lr": 0.01}
CLEAR, MASKED = SumRules(8.0, is_padded=False), SumRules(8.0)


def build_hubs(hubs: int = 3, sites: int = 4, min_sites: int = 1) -> dict[str, HubRules]:
    """Return hubs of consecutive sites: hub-1 has site-1 to site-4, and so on."""
    names = {f"hub-{h + 1}": tuple(f"site-{h * sites + s + 1}" for s in range(sites)) for h in range(hubs)}
    return {hub: HubRules(of_hub, min_sites) for hub, of_hub in names.items()}


def build(
    sums: SumRules, hubs: dict[str, HubRules] | None, name: str = "fedavg", sites: int = 12, **options: Any
) -> LocalFederation:
    round_rules = options.pop("rules", RoundRules(min_sites=3))
    settings = {"rounds": 2, "training": SGD, **options.pop("settings", {})}
    return LocalFederation(name, sites=sites, rules=round_rules, sum_rules=sums, hubs=hubs, **settings, **options)


def assert_equal_runs(tree: LocalFederation, flat: LocalFederation) -> tuple[Outcome, Outcome]:
    """Run both and check that model, metrics and outcome of every site are equal, bit for bit."""
    of_tree, of_flat = tree.run(handshake=tree.build_tree().shake_hands), flat.run()
    assert torch.equal(of_tree.weights, of_flat.weights)
    assert of_tree.mask == of_flat.mask
    assert [record.outcomes for record in tree.records] == [record.outcomes for record in flat.records]
    assert [record.evaluation for record in tree.records] == [record.evaluation for record in flat.records]
    assert of_tree.examples == of_flat.examples
    return of_tree, of_flat


@pytest.mark.slow
@pytest.mark.parametrize("rules", [CLEAR, MASKED], ids=["fixed_point", "masked"])
@pytest.mark.parametrize("name", ["fedavg", "neurosfl", "fedsparsify"])
def test_three_hubs_of_four_sites_end_in_the_bits_of_the_flat_run(name: str, rules: SumRules) -> None:
    assert_equal_runs(build(rules, build_hubs(), name), build(rules, None, name))


@pytest.mark.slow
def test_any_grouping_of_the_sites_ends_in_the_same_bits() -> None:
    """Hubs of unequal size, and sites that reach the server directly."""
    uneven = {"west": HubRules(("site-7",)), "east": HubRules(("site-12", "site-3", "site-5", "site-1", "site-9"))}
    assert_equal_runs(build(CLEAR, uneven), build(CLEAR, None))


@pytest.mark.slow
def test_pads_cancel_so_that_masked_and_fixed_point_runs_are_equal() -> None:
    assert torch.equal(build(MASKED, build_hubs()).run().weights, build(CLEAR, None).run().weights)


@pytest.mark.long
@pytest.mark.parametrize(("rules", "step"), [(CLEAR, Step.TERMS), (MASKED, Step.VALUES), (MASKED, Step.SHARES)])
def test_site_that_drops_out_under_a_hub_costs_what_it_costs_without(rules: SumRules, step: Step) -> None:
    federations = [build(rules, hubs) for hubs in (build_hubs(), None)]
    for federation in federations:
        federation.is_sum_lost = lambda site, current: site == "site-6" and current >= step
    assert_equal_runs(federations[0], federations[1])
    assert federations[0].records[0].timed_out == ["site-6"]


@pytest.mark.slow
def test_silent_site_and_site_that_lost_its_base_are_those_of_the_flat_run() -> None:
    federations = [build(CLEAR, hubs, settings={"rounds": 3}) for hubs in (build_hubs(), None)]
    for federation in federations:
        federation.is_silent = lambda site, attempt: site == "site-2" and attempt.round == 2
        federation.restarts = {(2, "site-5")}
    assert_equal_runs(federations[0], federations[1])
    assert [event.site for record in federations[0].records for event in record.events] == ["site-5"]


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["exchange", "sum"])
def test_lost_hub_loses_its_sites_and_the_round_is_that_of_the_others(topic: str) -> None:
    tree = build(CLEAR, build_hubs(), settings={"rounds": 1})
    tree.change_collection = lambda hub, current, answer: None if (hub, current) == ("hub-2", topic) else answer
    outcome = tree.run()
    assert tree.records[0].timed_out == [f"site-{n}" for n in range(5, 9)]
    flat = build(CLEAR, None, settings={"rounds": 1})
    if topic == "exchange":
        flat.is_silent = lambda site, attempt: site in ("site-5", "site-6", "site-7", "site-8") and attempt.round == 1
    else:
        flat.is_sum_lost = lambda site, step: site in ("site-5", "site-6", "site-7", "site-8")
    assert torch.equal(outcome.weights, flat.run().weights)


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["exchange", "sum"])
def test_collection_to_a_hub_that_is_not_there_is_not_counted(topic: str) -> None:
    """A collection that a hub receives and does not answer was sent, one to no hub was not."""
    sent = {}
    for name in ("is_hub_gone", "change_collection"):
        tree = build(CLEAR, build_hubs(), settings={"rounds": 1})
        if name == "is_hub_gone":
            tree.is_hub_gone = lambda hub, current: (hub, current) == ("hub-2", topic)
        else:
            tree.change_collection = lambda hub, current, answer: None if (hub, current) == ("hub-2", topic) else answer
        tree.run()
        assert tree.records[0].timed_out == [f"site-{n}" for n in range(5, 9)]
        lines = [line for line in tree.ledger.lines if line.direction == "down" and line.round == 1]
        sent[name] = {hub: sum(line.site == hub for line in lines) for hub in ("hub-1", "hub-2")}
    # The request and the question of the sum; a hub without replies has nothing to be asked for in the sum.
    assert sent["is_hub_gone"] == {"hub-1": 2, "hub-2": 0 if topic == "exchange" else 1}
    assert sent["change_collection"] == {"hub-1": 2, "hub-2": 1 if topic == "exchange" else 2}


def test_run_with_hubs_resumes_after_a_kill_and_ends_in_the_bits_of_the_flat_run(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def open_store(end: str) -> Store:
        return Store(tmp_path / end, {})

    killed = build(CLEAR, build_hubs(2, 2), "neurosfl", 4, stores=open_store)

    def kill(hub: str, topic: str, answer: Any) -> Any:
        if (hub, topic) == ("hub-2", "sum") and killed.server._state.sequence == 3:
            raise Killed
        return answer

    killed.change_collection = kill
    with pytest.raises(Killed):
        killed.run()
    resumed = build(CLEAR, build_hubs(2, 2), "neurosfl", 4, stores=open_store).run(resume=True)
    assert torch.equal(resumed.weights, build(CLEAR, None, "neurosfl", 4).run().weights)


def test_lost_hub_ends_the_run_below_the_quorum_of_the_server() -> None:
    tree = build(CLEAR, build_hubs(), rules=RoundRules(min_sites=9, retries=1))
    tree.change_collection = lambda hub, topic, answer: None if (hub, topic) == ("hub-2", "exchange") else answer
    with pytest.raises(RoundFailed, match=r"8 of 12 sites contributed .* 9 are needed"):
        tree.run()


@pytest.mark.slow
def test_masked_attempt_without_a_whole_hub_fails_and_the_next_one_ends() -> None:
    """8 of 12 sites are fewer than t = 9: the pads of the lost hub cannot be removed, so the sites begin again."""
    tree = build(MASKED, build_hubs(), settings={"rounds": 1})

    def lose(hub: str, topic: str, answer: Any) -> Any:
        has_section = unpack_collection(answer, hub)[0].get("section") is not None
        is_lost = has_section or tree.server._state.sequence > 1
        return None if hub == "hub-2" and is_lost else answer

    tree.change_collection = lose
    tree.run()
    record = tree.records[0]
    assert record.attempts == 2
    assert record.sites_contributed == sorted(f"site-{n}" for n in (1, 2, 3, 4, 9, 10, 11, 12))


def test_hub_below_its_quorum_passes_no_values_on() -> None:
    tree = build(CLEAR, build_hubs(min_sites=4), settings={"rounds": 1})
    tree.is_sum_lost = lambda site, step: site == "site-5"
    tree.run()
    record = tree.records[0]
    assert record.rejected == dict.fromkeys(["site-6", "site-7", "site-8"], "E_QUORUM")
    assert record.timed_out == ["site-5"]
    assert len(record.sites_contributed) == 8


def read_sections(federation: LocalFederation) -> list[bytes]:
    """Return the values of all messages of sites in a sum, as they reached their hub."""
    steps = (Step.VALUES, Step.TERMS)
    return [message.tobytes()[HEADER_BYTES + 16 :] for _, step, message in federation.sum_messages if step in steps]


@pytest.mark.slow
def test_hub_holds_values_of_single_sites_in_fixed_point_runs_and_only_padded_ones_in_masked_runs() -> None:
    trained: dict[str, Patch] = {}

    def record(upload: Any) -> Any:
        if upload.attempt.round == 1:
            trained.setdefault(upload.site, upload.update.patch)
        return upload

    def encode(federation: LocalFederation, site: str) -> bytes:
        mask, method = trained[site].mask, federation.method
        delta = trained[site].values.double() - mask.take(federation.bench.weights).double()
        examples = {name: part.num_examples for name, part in federation.sites.items()}
        share = compute_shares(examples, list(examples), method.get_sum_weights("train"))[site]
        return build_ring("weights", mask, method.layout, CLEAR).encode(delta.numpy(), share).tobytes()

    for rules, is_readable in ((CLEAR, True), (MASKED, False)):
        federation = build(rules, build_hubs(), settings={"rounds": 1})
        federation.change_message = record
        federation.run()
        sections = read_sections(federation)
        assert len(sections) == 12
        assert all((encode(federation, site) in sections) == is_readable for site in trained)


def test_server_receives_one_message_with_values_of_each_hub() -> None:
    tree = build(CLEAR, build_hubs(), settings={"rounds": 1})
    tree.run()
    answers = [unpack_collection(answer, hub)[1] for hub, topic, answer in tree.collections if topic == "sum"]
    assert [len(parcels) for parcels in answers] == [1, 1, 1]
    assert [parcels[0].sites for parcels in answers] == [tuple(sorted(r.sites)) for r in build_hubs().values()]
    sections = read_sections(tree)
    # The messages of hubs are as long as those of sites, and hold none of theirs.
    assert {parcels[0].message.size for parcels in answers} == {HEADER_BYTES + 16 + len(sections[0])}
    assert not any(parcels[0].message.tobytes()[HEADER_BYTES + 16 :] in sections for parcels in answers)


@pytest.mark.slow
def test_ledger_lists_the_servers_links_and_the_links_of_each_hub() -> None:
    hubs = build_hubs()
    tree, flat = build(CLEAR, hubs), build(CLEAR, None)
    assert_equal_runs(tree, flat)
    of_tree, of_flat = sum_link_bytes(tree.ledger.lines, hubs), sum_link_bytes(flat.ledger.lines, {})
    # The hubs' links carry what the server's carry without them.
    for direction in ("down", "up"):
        assert sum(of_tree[hub][direction] for hub in hubs) == of_flat["server"][direction]
    received = [answer.size for _, topic, answer in tree.collections if topic != "hello"]
    assert of_tree["server"]["up"] == sum(received)
    values = [line for line in tree.ledger.lines if line.site in hubs and line.direction == "up" and line.scalars_sent]
    assert [(line.site, line.round) for line in values] == [(hub, t) for t in (1, 2) for hub in hubs]
    assert {line.scalars_sent for line in values} == {tree.bench.weights.numel()}
    ring = build_ring("weights", Mask.full(tree.bench.weights.numel()), tree.method.layout, CLEAR)
    assert {line.floor_bytes for line in values} == {ring.section_bytes}


def test_hub_of_a_run_needs_sites_of_the_run() -> None:
    bench = build(CLEAR, None).bench
    with pytest.raises(ConfigError, match=r"federation\.hubs: site-4: no such site in this run"):
        run_locally(
            bench.method("fedavg", rounds=1),
            bench.weights,
            bench.sites(3),
            bench.task.metric,
            transport=Transport(sum_rules=CLEAR, hubs=build_hubs(1, 4)),
        )


SUM_ID = SumId(RUN, "train", 1, 1)
SECTION = SectionFormat(8, 16)
SELECTION = "ab" * 16


def answer_sum(replies: dict[str, Any], min_sites: int = 1) -> list[Parcel]:
    """Return the parcels with which a hub of two sites answers a step of a sum, given the replies of its sites."""
    links = SiteLinks(lambda attempt: {}, lambda questions: replies, lambda names: {})
    hub = Hub(HubRules(("site-1", "site-2"), min_sites), links)
    subject = {"topic": "sum", "seconds": None, "section": [8, 16], "selection": SELECTION}
    question = Parcel(("site-1", "site-2"), {}, pack_message(Step.TERMS, SUM_ID, b""))
    return unpack_collection(hub.answer(pack_collection(subject, [question])), "hub-1")[1]


def build_reply(section: np.ndarray, **changes: Any) -> np.ndarray:
    content = bytes.fromhex(changes.get("selection", SELECTION)) + section.tobytes()
    return pack_message(changes.get("step", Step.TERMS), changes.get("sum_id", SUM_ID), content)


def test_site_that_missed_a_round_needs_no_copy_of_the_request() -> None:
    received: list[Attempt] = []

    def record(attempt: Attempt) -> dict[str, Any]:
        received.append(attempt)
        return {}

    tree = build(CLEAR, build_hubs(1, 3), sites=3).build_tree()
    hub = Hub(HubRules(("site-1", "site-2", "site-3")), SiteLinks(record, lambda questions: {}, lambda names: {}))
    collections: list[Any] = []

    def carry(collection: Any, _seconds: float | None) -> Any:
        collections.append(collection)
        return lambda: hub.answer(collection)

    tree.links = {"hub-1": carry}
    message, acknowledged = np.arange(200, dtype=np.uint8), {"site-1": 4, "site-2": 2, "site-3": 4}
    tree._record_sent = lambda *arguments: None  # type: ignore[assignment, method-assign, return-value]
    tree._record_received = lambda *arguments: None  # type: ignore[method-assign]
    tree.exchange(Attempt(5, "train", 3, dict.fromkeys(acknowledged, message), acknowledged, 2.0))
    assert collections[0].tobytes().count(message.tobytes()) == 1
    assert (received[0].sequence, received[0].kind, received[0].round, received[0].seconds) == (5, "train", 3, 2.0)
    assert received[0].acknowledged == acknowledged
    assert all(part.tobytes() == message.tobytes() for part in received[0].messages.values())


def test_hub_adds_wide_and_narrow_integers_modulo_their_size() -> None:
    first = np.concatenate(
        [np.array([2**63 + 5], "<u8").view(np.uint8), np.array([2**32 - 1, 7], "<u4").view(np.uint8)]
    )
    second = np.concatenate([np.array([2**63 + 6], "<u8").view(np.uint8), np.array([3, 8], "<u4").view(np.uint8)])
    (parcel,) = answer_sum({"site-1": build_reply(first), "site-2": build_reply(second)})
    wide, narrow = SECTION.split(parcel.message[HEADER_BYTES + 16 :].copy())
    assert (wide.tolist(), narrow.tolist()) == ([11], [2, 15])
    assert parcel.sites == ("site-1", "site-2")


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("E_MASK", {"selection": "cd" * 16}),
        ("E_REPLAY", {"step": Step.VALUES}),
        ("E_REPLAY", {"sum_id": SumId(RUN, "train", 1, 2)}),
    ],
)
def test_hub_rejects_a_reply_of_another_sum_and_adds_the_others(code: str, changes: dict[str, Any]) -> None:
    zeros = np.zeros(16, np.uint8)
    parcels = answer_sum({"site-1": build_reply(zeros, **changes), "site-2": build_reply(zeros)})
    assert [(parcel.sites, parcel.note) for parcel in parcels] == [(("site-1",), {"code": code}), (("site-2",), {})]


def test_hub_rejects_a_reply_of_another_length_and_passes_codes_on() -> None:
    parcels = answer_sum({"site-1": build_reply(np.zeros(12, np.uint8)), "site-2": "E_RANGE"})
    assert [parcel.note for parcel in parcels] == [{"code": "E_LEN"}, {"code": "E_RANGE"}]


def test_hub_refuses_a_collection_for_sites_of_others_and_malformed_subjects() -> None:
    hub = Hub(HubRules(("site-1",)), SiteLinks(lambda attempt: {}, lambda questions: {}, lambda names: {}))
    message = np.zeros(4, np.uint8)
    exchange = {"topic": "exchange", "kind": "train", "round": 1, "sequence": 1, "seconds": None}
    for subject, parcels in (
        (exchange, [Parcel(("site-2",), {"acknowledged": 0}, message)]),
        ({**exchange, "topic": "other"}, [Parcel(("site-1",), {"acknowledged": 0}, message)]),
        ({**exchange, "round": -1}, [Parcel(("site-1",), {"acknowledged": 0}, message)]),
        ({**exchange, "seconds": "1"}, [Parcel(("site-1",), {"acknowledged": 0}, message)]),
        (exchange, [Parcel(("site-1",), {"acknowledged": True}, message)]),
        (exchange, [Parcel(("site-1",), {"acknowledged": 3, "late": 2}, message)]),
        (exchange, [Parcel(("site-1",), {"acknowledged": 3, "late": {"site-1": -2}}, message)]),
        (exchange, [Parcel(("site-1",), {"acknowledged": 0})]),
        ({"topic": "sum", "seconds": None, "section": [8, 12], "selection": "xy"}, [Parcel(("site-1",), {}, message)]),
        (
            {"topic": "sum", "seconds": None, "section": [16, 8], "selection": SELECTION},
            [Parcel(("site-1",), {}, message)],
        ),
    ):
        with pytest.raises(RejectedMessage):
            hub.answer(pack_collection(subject, parcels))


def test_server_ignores_a_hub_that_speaks_for_sites_of_another() -> None:
    tree = build(CLEAR, build_hubs(2, 2), sites=4, settings={"rounds": 1}, rules=RoundRules(min_sites=1))

    def speak(hub: str, topic: str, answer: Any) -> Any:
        subject, parcels = unpack_collection(answer, hub)
        if (hub, topic) != ("hub-2", "exchange"):
            return answer
        return pack_collection(subject, [*parcels, Parcel(("site-1",), {"code": "E_SITE"})])

    tree.change_collection = speak
    tree.run()
    assert tree.records[0].sites_contributed == ["site-1", "site-2"]
    assert tree.records[0].timed_out == ["site-3", "site-4"]


def test_server_rejects_a_sum_of_a_hub_that_has_other_entries() -> None:
    tree = build(CLEAR, build_hubs(2, 2), sites=4, settings={"rounds": 1}, rules=RoundRules(min_sites=1))

    def change(hub: str, topic: str, answer: Any) -> Any:
        subject, parcels = unpack_collection(answer, hub)
        if (hub, topic) != ("hub-2", "sum"):
            return answer
        step, _, payload = unpack_message(parcels[0].message, hub)
        forged = pack_message(step, SumId(RUN, "train", 1, 1), bytes(16) + payload[16:])
        return pack_collection(subject, [Parcel(parcels[0].sites, {}, forged)])

    tree.change_collection = change
    tree.run()
    assert tree.records[0].rejected == {"site-3": "E_MASK", "site-4": "E_MASK"}


@pytest.mark.slow
def test_only_steps_with_values_may_be_answered_for_several_sites() -> None:
    tree = build(MASKED, build_hubs(1, 4), sites=4, settings={"rounds": 1})

    def merge(hub: str, topic: str, answer: Any) -> Any:
        subject, parcels = unpack_collection(answer, hub)
        if topic != "sum" or subject["section"] is not None:
            return answer
        return pack_collection(subject, [Parcel(tuple(p.sites[0] for p in parcels), {}, parcels[0].message)])

    tree.change_collection = merge
    with pytest.raises(RoundFailed):
        tree.run()


def test_reply_of_a_site_survives_the_collection_and_text_of_a_site_does_not() -> None:
    lost = unpack_reply(pack_reply("site-1", MissingBase("E_NOT_HELD", "base", 1, 2, "site-1")))
    assert isinstance(lost, MissingBase)
    assert unpack_reply(pack_reply("site-1", "E_RANGE")) == "E_RANGE"
    assert unpack_reply(Parcel(("site-1",), {"code": "sub-01 has no age"})) == "E_SITE"


def test_reply_of_a_hub_to_the_step_that_it_answers_is_one_object_for_all_its_sites() -> None:
    tree = build(CLEAR, build_hubs(1, 2), sites=2, settings={"rounds": 1}, rules=RoundRules(min_sites=1))
    transport = tree.build_tree()
    answers = []
    original = transport.exchange_sum

    def record(questions: SumQuestions) -> Any:
        answers.append(dict(original(questions)))
        return answers[-1].items()

    tree.build_tree = lambda: transport  # type: ignore[method-assign]
    transport.exchange_sum = record  # type: ignore[method-assign]
    tree.run()
    (replies,) = answers
    assert isinstance(replies["site-1"], HubReply)
    assert replies["site-1"] is replies["site-2"]


MESSAGE = np.arange(8, dtype=np.uint8)
DEEP: Any = []
for _ in range(600):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("E_METRICS", {"metrics": {"mse": object()}}),
        ("E_METRICS", {"metrics": {1: 2.0}}),
        ("E_METRICS", {"metrics": DEEP}),
        ("E_METRICS", {"examples": 10**5000}),
        ("E_SIZE", {"metrics": {"mse": "x" * 2**16}}),
        ("E_SIZE", {"metrics": {"mse": "x" * (2**16 - 100)}}),
        ("E_DTYPE", {"message": None}),
        ("E_DTYPE", {"message": [1, 2]}),
        ("E_DTYPE", {"message": MESSAGE.astype(np.float32)}),
    ],
)
def test_reply_that_no_collection_can_hold_costs_its_site_alone(code: str, changes: dict[str, Any]) -> None:
    honest = SiteReply(MESSAGE, 3, {"mse": 0.5}, [])
    hostile = replace(honest, **changes)
    links = SiteLinks(lambda attempt: {"site-1": hostile, "site-2": honest}, lambda questions: {}, lambda names: {})
    subject = {"topic": "exchange", "kind": "train", "round": 1, "sequence": 1, "seconds": None}
    question = pack_collection(subject, [Parcel(("site-1", "site-2"), {"acknowledged": 0}, MESSAGE)])
    _, (first, second) = unpack_collection(Hub(HubRules(("site-1", "site-2")), links).answer(question), "hub-1")
    assert (first.note, first.message) == ({"code": code}, None)
    reply = unpack_reply(second)
    assert isinstance(reply, SiteReply)
    assert (reply.message.tobytes(), reply.examples, reply.metrics) == (MESSAGE.tobytes(), 3, {"mse": 0.5})


@pytest.mark.parametrize("examples", [None, True, 3.7, "3"])
@pytest.mark.parametrize("metrics", [None, {"mse": True}, {"mse": "0.5"}, {"mse": None}])
def test_hub_casts_no_numbers_of_a_site(examples: Any, metrics: Any) -> None:
    reply = unpack_reply(pack_reply("site-1", SiteReply(MESSAGE, examples, metrics, [])))
    assert isinstance(reply, SiteReply)
    assert (type(reply.examples), reply.examples, reply.metrics) == (type(examples), examples, metrics)


def test_malformed_report_or_code_of_a_site_costs_no_update_of_others() -> None:
    reply = unpack_reply(pack_reply("site-1", SiteReply(MESSAGE, 3, {}, [object()])))
    assert isinstance(reply, SiteReply)
    assert reply.events is None
    assert pack_reply("site-1", "x" * 2**17).note == {"code": "E_SITE"}
    parcels = answer_sum({"site-1": "x" * 2**17, "site-2": build_reply(np.zeros(16, np.uint8))})
    assert [parcel.note for parcel in parcels] == [{"code": "E_SITE"}, {}]


@pytest.mark.parametrize("hello", [object(), {"version": "x" * 2**16}, DEEP])
def test_hello_that_no_collection_can_hold_costs_its_site_alone(hello: Any) -> None:
    tree = build(CLEAR, build_hubs(1, 2), sites=2).build_tree()
    links = SiteLinks(lambda attempt: {}, lambda questions: {}, lambda names: {"site-1": hello, "site-2": {"a": 1}})
    hub = Hub(HubRules(("site-1", "site-2")), links)
    tree.links = {"hub-1": lambda collection, _: lambda: hub.answer(collection)}
    assert tree.shake_hands(["site-1", "site-2"]) == {"site-1": None, "site-2": {"a": 1}}


def forge_collection(*parts: bytes) -> np.ndarray:
    """Return a collection with any parts, and a correct checksum."""
    content = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    header = struct.pack("<4sHHQI", b"FSPB", 1, 0, len(content), zlib.crc32(content))
    return np.frombuffer(header + content, np.uint8)


@pytest.mark.parametrize(
    "answer",
    [
        forge_collection(b"{}", b"[" * 10**6, b"{}", b""),
        forge_collection(b"{}", b'["site-1"]', b'{"hello":' * 7000, b""),
        forge_collection(b"{}", b'["site-1"]', b'{"hello":' + b"9" * 60000 + b"}", b""),
        forge_collection(b"{}", b"[[]]", b"{}", b""),
        forge_collection(b"{}", b"[{}]", b"{}", b""),
        forge_collection(b"{}", b"[]", b"{}", b""),
        forge_collection(b"{}", b'["site-1","site-2"]', b"{}", b""),
        forge_collection(b"{}", b'["site-1"]', b"\xff\xfe", b""),
        forge_collection(b"{}", b'["site-1"]'),
        b"FSPB",
        {"topic": "hello"},
        np.zeros(3, np.float64),
    ],
)
def test_hostile_answer_of_a_hub_is_one_that_did_not_come(answer: Any) -> None:
    tree = build(CLEAR, build_hubs(1, 2), sites=2).build_tree()
    tree.links = {"hub-1": lambda collection, _: lambda: answer}
    assert tree.shake_hands(["site-1", "site-2"]) == {}


def test_abort_of_a_job_while_a_hub_works_is_not_taken_for_a_lost_hub() -> None:
    class Aborted(FlareSparseError):
        pass

    def abort() -> Any:
        raise Aborted("the job was aborted")

    tree = build(CLEAR, build_hubs(1, 2), sites=2).build_tree()
    tree.links = {"hub-1": lambda collection, _: abort}
    with pytest.raises(Aborted):
        tree.shake_hands(["site-1", "site-2"])


def test_section_is_no_longer_than_a_collection_can_hold() -> None:
    hub = Hub(HubRules(("site-1",)), SiteLinks(lambda attempt: {}, lambda questions: {}, lambda names: {}))
    subject = {"topic": "sum", "seconds": None, "section": [0, 2**32], "selection": SELECTION}
    question = Parcel(("site-1",), {}, pack_message(Step.TERMS, SUM_ID, b""))
    with pytest.raises(RejectedMessage, match="section"):
        hub.answer(pack_collection(subject, [question]))
    assert MAX_SECTION_BYTES + HEADER_BYTES + len(SELECTION) // 2 < 2**32
