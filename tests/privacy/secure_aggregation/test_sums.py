"""A sum of padded values is that of the sites that took part, whoever drops out, and nothing else can be read."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_sums import NARROW, SUM_ID, Bench, build_ring, get_identities, refuses
from thoroughness import count_cases

from flare_sparse.core.errors import RejectedMessage, RequestRefused
from flare_sparse.privacy.secure_aggregation.collector import TooFewSites
from flare_sparse.privacy.secure_aggregation.identities import _issue
from flare_sparse.privacy.secure_aggregation.keys import SignedKeys, get_public_key
from flare_sparse.privacy.secure_aggregation.limits import compute_threshold
from flare_sparse.privacy.secure_aggregation.party import SumParty

NAMES = [f"site-{number}" for number in range(1, 9)]
STEPS = ["", "share", "pad", "reveal"]


def draw_values(sites: list[str], count: int = 6) -> dict[str, np.ndarray]:
    """Return multiples of 2^-20, which the ring holds exactly."""
    generator = np.random.default_rng(len(sites))
    return {name: generator.integers(-(2**20), 2**20, count) / 2**20 for name in sites}


def encode(values: dict[str, np.ndarray], bench: Bench) -> dict[str, np.ndarray]:
    return {name: bench.ring.encode(vector, 1.0) for name, vector in values.items()}


@pytest.mark.slow
@settings(max_examples=count_cases(40), deadline=None)
@given(
    count=st.integers(3, 8),
    steps=st.lists(st.sampled_from([*[""] * 6, *STEPS]), min_size=8, max_size=8),
    wide=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_sum_is_exact_for_every_pattern_of_drop_outs_or_fails(
    count: int, steps: list[str], wide: int, seed: int
) -> None:
    sites = NAMES[:count]
    bench = Bench.build(sites, build_ring(6, wide))
    values, dropped = draw_values(sites), dict(zip(NAMES, steps, strict=True))
    needed = compute_threshold(count)
    order = random.Random(seed)
    shared = [name for name in sites if dropped[name] != "share"]
    last = [name for name in sites if not dropped[name]]
    survivors = [name for name in sites if dropped[name] in ("", "reveal")]

    def shuffle(names: list[str]) -> list[str]:
        return order.sample(names, len(names))

    if len(shared) < count or len(last) < needed:
        with pytest.raises(TooFewSites):
            bench.run(encode(values, bench), dropped.__getitem__, shuffle)
        return
    total = bench.run(encode(values, bench), dropped.__getitem__, shuffle)
    assert total.tolist() == np.sum([values[name] for name in survivors], axis=0).tolist()
    assert bench.collector.survivors == survivors


@pytest.mark.parametrize("step", ["pad", "reveal"])
@pytest.mark.parametrize(("lost", "ends"), [(1, True), (2, True), (3, False)])
def test_of_eight_sites_two_may_drop_out_and_three_may_not(step: str, lost: int, ends: bool) -> None:
    bench = Bench.build(NAMES, build_ring(6))
    values, dropped = draw_values(NAMES), dict.fromkeys(NAMES[1 : 1 + lost], step)
    if not ends:
        with pytest.raises(TooFewSites, match=r"5 of 8 sites .*, 6 are needed"):
            bench.run(encode(values, bench), lambda site: dropped.get(site, ""))
        return
    total = bench.run(encode(values, bench), lambda site: dropped.get(site, ""))
    counted = [name for name in NAMES if dropped.get(name, "reveal") == "reveal"]
    assert total.tolist() == np.sum([values[name] for name in counted], axis=0).tolist()


def test_padded_values_look_random_and_differ_in_every_attempt() -> None:
    """The same values, padded twice: no byte more in common than chance has it, and none in common with the values."""
    messages = []
    for sequence in (7, 8):
        bench = Bench.build(NAMES[:3], build_ring(1000), replace(SUM_ID, sequence=sequence))
        section = bench.ring.encode(np.zeros(1000), 1.0)
        bench.publish()
        bench.share(NAMES[:3])
        bench.pad(dict.fromkeys(NAMES[:3], section))
        messages.append(np.frombuffer(bench.messages["site-1"][-1], np.uint8))
    first, second = messages
    assert (first == second).mean() < 0.02
    assert (first == 0).mean() < 0.02


def test_one_missing_reveal_less_than_the_threshold_leaves_the_sum_padded() -> None:
    bench = Bench.build(NAMES[:4], build_ring(6))
    values = draw_values(NAMES[:4])
    bench.publish()
    bench.share(NAMES[:4])
    bench.pad(encode(values, bench))
    bench.reveal(NAMES[:2])
    with pytest.raises(TooFewSites, match="2 of 4 sites revealed shares, 3 are needed"):
        bench.collector.compute_sum()
    exact = bench.ring.encode(sum(values.values()), 1.0)
    assert (bench.collector._total != exact).any()


def build_members(sites: list[str]) -> tuple[dict[str, SumParty], list[SignedKeys]]:
    parties = {name: SumParty(SUM_ID, get_identities()[name], 10) for name in sites}
    return parties, [party.keys for party in parties.values()]


@pytest.mark.parametrize("field", ["pad_key", "channel_key", "commitment", "num_examples"])
def test_every_site_refuses_keys_that_the_server_has_swapped(field: str) -> None:
    parties, members = build_members(NAMES[:4])
    swapped: Any = 10**6 if field == "num_examples" else get_public_key(bytes(range(32)))
    forged = [members[0], replace(members[1], **{field: swapped}), *members[2:]]
    for name in ("site-1", "site-3", "site-4"):
        assert refuses(lambda name=name: parties[name].share(forged)) == "E_SIGNATURE"
    assert refuses(lambda: parties["site-2"].share(forged)) == "E_REQUEST"


def test_keys_of_another_sum_another_root_or_another_site_are_refused() -> None:
    parties, members = build_members(NAMES[:3])
    earlier = SumParty(replace(SUM_ID, sequence=6), get_identities()["site-2"], 10).keys
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    certificate = _issue("site-2", key, _issue("another root", key, None, key), key)
    foreign = replace(get_identities()["site-2"], certificate=certificate.public_bytes(Encoding.DER), key=key)
    impostor = replace(get_identities()["site-3"], name="site-2")
    for keys in (
        earlier,
        SumParty(SUM_ID, foreign, 10).keys,
        SumParty(SUM_ID, impostor, 10).keys,
        replace(members[1], certificate=b"no certificate"),
    ):
        forged = [members[0], keys, members[2]]
        assert refuses(lambda forged=forged: parties["site-1"].share(forged)) == "E_SIGNATURE"


def test_site_refuses_a_set_without_itself_with_a_site_twice_or_too_small() -> None:
    _, members = build_members(NAMES[:4])
    for listed in (members[1:], [*members, members[1]], members[:2]):
        party = SumParty(SUM_ID, get_identities()["site-1"], 10)
        own = [party.keys if keys.name == "site-1" else keys for keys in listed]
        assert refuses(lambda party=party, own=own: party.share(own)) == "E_REQUEST"


def test_site_with_a_larger_minimum_refuses_a_smaller_sum() -> None:
    party = SumParty(SUM_ID, get_identities()["site-1"], 10, min_sites=5)
    _, others = build_members(NAMES[1:4])
    with pytest.raises(RequestRefused, match="the sum has 4 sites; this site takes part in sums of 5"):
        party.share([party.keys, *others])


@pytest.mark.parametrize("change", ["examples", "fewer", "keys"])
def test_no_values_leave_where_sites_are_shown_other_members(change: str) -> None:
    """A fourth site, an accomplice, signs two numbers of examples; or the server shows some sites one site less."""
    bench = Bench.build(NAMES[:4], build_ring(6))
    bench.publish()
    members = bench.collector.list_members()
    other = SumParty(SUM_ID, get_identities()["site-4"], 10 + (change == "examples")).keys
    shown = {"fewer": members[:3], "examples": [*members[:3], other], "keys": [*members[:3], other]}[change]
    for name in NAMES[:4]:
        listed = shown if name in NAMES[:2] else members
        receivers = [keys.name for keys in listed if keys.name != name]
        if name in [keys.name for keys in listed if keys == bench.parties[name].keys]:
            bench.collector._boxes[name] = dict(zip(receivers, bench.parties[name].share(listed), strict=True))
    boxes = {sender: sent["site-1"] for sender, sent in bench.collector._boxes.items() if "site-1" in sent}
    if change == "fewer":
        boxes.pop("site-4")
    section = bench.ring.encode(np.zeros(6), 1.0)
    assert refuses(lambda: bench.parties["site-1"].pad(boxes, section, bench.ring)) == "E_SHARE"


def test_values_leave_only_with_the_boxes_of_all_members() -> None:
    bench = Bench.build(NAMES[:4], build_ring(6))
    bench.publish()
    bench.share(NAMES[:4])
    boxes = bench.collector.collect_boxes("site-1")
    del boxes["site-4"]
    assert refuses(lambda: bench.parties["site-1"].pad(boxes, bench.ring.encode(np.zeros(6), 1.0), bench.ring)) == (
        "E_REQUEST"
    )


def test_box_for_another_site_or_with_a_flipped_bit_is_refused() -> None:
    for change in ("other", "flip"):
        bench = Bench.build(NAMES[:3], build_ring(6))
        bench.publish()
        bench.share(NAMES[:3])
        boxes = bench.collector.collect_boxes("site-1")
        forged = bytes([boxes["site-2"][0] ^ 1]) + boxes["site-2"][1:]
        boxes["site-2"] = bench.collector.collect_boxes("site-3")["site-2"] if change == "other" else forged
        with pytest.raises(RejectedMessage, match="E_SHARE"):
            bench.parties["site-1"].pad(boxes, bench.ring.encode(np.zeros(6), 1.0), bench.ring)


def prepare_reveal() -> Bench:
    bench = Bench.build(NAMES[:4], build_ring(6))
    bench.publish()
    bench.share(NAMES[:4])
    bench.pad(encode(draw_values(NAMES[:4]), bench))
    return bench


def test_site_reveals_once_so_never_both_secrets_of_another() -> None:
    bench = prepare_reveal()
    party = bench.parties["site-1"]
    party.reveal(NAMES[:4])
    for survivors in (NAMES[:3], NAMES[:4]):
        with pytest.raises(RequestRefused, match="twice"):
            party.reveal(survivors)


def test_site_reveals_one_share_of_each_site_of_the_kind_that_its_survival_asks_for() -> None:
    bench = prepare_reveal()
    seeds = {name: bench.parties[name].reveal(NAMES[:4]) for name in NAMES[:2]}
    pads = bench.parties["site-3"].reveal(NAMES[:3])
    assert {len(shares) for shares in (*seeds.values(), pads)} == {4}
    shares = bench.parties["site-3"]._shares
    assert shares is not None
    assert pads == [*(shares[name][0] for name in NAMES[:3]), shares["site-4"][1]]


@pytest.mark.parametrize(
    "survivors", [["site-2", "site-3", "site-4"], ["site-1", "site-2"], [*NAMES[:4], "site-1"], [*NAMES[:5]]]
)
def test_site_refuses_survivors_without_itself_too_few_twice_or_foreign(survivors: list[str]) -> None:
    assert refuses(lambda: prepare_reveal().parties["site-1"].reveal(survivors)) == "E_REQUEST"


def test_steps_out_of_order_are_refused() -> None:
    bench = Bench.build(NAMES[:3], build_ring(6))
    party, section = bench.parties["site-1"], bench.ring.encode(np.zeros(6), 1.0)
    assert refuses(lambda: party.pad({}, section, bench.ring)) == "E_REQUEST"
    assert refuses(lambda: party.reveal(NAMES[:3])) == "E_REQUEST"
    bench.publish()
    bench.share(NAMES[:3])
    assert refuses(lambda: party.share(bench.collector.list_members())) == "E_REQUEST"
    bench.pad({"site-1": section})
    boxes = bench.collector.collect_boxes("site-1")
    assert refuses(lambda: party.pad(boxes, section, bench.ring)) == "E_REQUEST"


def test_collector_takes_shares_of_survivors_alone_one_of_each_site() -> None:
    bench = prepare_reveal()
    shares = bench.parties["site-1"].reveal(NAMES[:4])
    for name, sent in (("site-9", shares), ("site-1", shares[:-1]), ("site-1", [*shares[:-1], b""])):
        with pytest.raises(RejectedMessage, match="E_REPLAY" if name == "site-9" else "E_LEN"):
            bench.collector.accept_shares(name, sent)


def test_server_notices_a_wrong_share() -> None:
    bench = prepare_reveal()
    bench.reveal(NAMES[:3])
    shares = bench.parties["site-4"].reveal(NAMES[:4])
    shares[0] = bytes([shares[0][0] ^ 1]) + shares[0][1:]
    bench.collector.accept_shares("site-4", shares)
    with pytest.raises(TooFewSites, match="secret of site-1"):
        bench.collector.compute_sum()


@given(sites=st.integers(3, 200), data=st.data())
def test_split_answers_open_no_site_with_less_than_a_third_colluding(sites: int, data: st.DataObject) -> None:
    """The server tells some honest sites that a site survived, and the others that it did not; colluding sites give
    shares of both secrets. To open the site it needs the threshold of each kind.
    """
    colluding = data.draw(st.integers(0, (sites - 1) // 3))
    first = data.draw(st.integers(0, sites - colluding))
    second = sites - colluding - first
    assert min(first, second) + colluding < compute_threshold(sites)


def test_collector_rejects_values_twice_from_strangers_or_of_another_length() -> None:
    bench = prepare_reveal()
    section = np.zeros(bench.ring.section_bytes, np.uint8)
    for name, sent, code in (("site-1", section, "E_REPLAY"), ("site-9", section, "E_REPLAY")):
        assert refuses(lambda name=name, sent=sent: bench.collector.accept_values(name, sent)) == code
    assert refuses(lambda: bench.collector.accept_values("site-2", section[:-1])) == "E_LEN"


@given(data=st.binary(max_size=400))
def test_keys_from_arbitrary_bytes_are_parsed_or_rejected(data: bytes) -> None:
    code = refuses(lambda: SignedKeys.from_bytes("site-1", data))
    assert code == "E_LEN" or SignedKeys.from_bytes("site-1", data).to_bytes() == data


def test_signed_keys_survive_the_wire() -> None:
    _, members = build_members(NAMES[:3])
    assert [SignedKeys.from_bytes(keys.name, keys.to_bytes()) for keys in members] == members


def test_narrow_ring_of_the_tests_holds_their_values_exactly() -> None:
    assert NARROW.scale == 2**24
