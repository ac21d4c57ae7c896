"""A site in a sum without pads: which questions it answers, and what it sends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from secure_sums import refuses
from toy import ToyBench

from flare_sparse.core.exchange import Patch, RequestId, Update
from flare_sparse.core.mask import Mask
from flare_sparse.methods.aggregation.weighted import weigh_by_examples
from flare_sparse.privacy.secure_aggregation.identities import generate_identity
from flare_sparse.privacy.secure_aggregation.limits import SumRules
from flare_sparse.privacy.secure_aggregation.messages import Step, pack_message, pack_share, unpack_message
from flare_sparse.privacy.secure_aggregation.pads import SumId
from flare_sparse.rounds.endpoints.site_sums import SiteSums
from flare_sparse.rounds.endpoints.sums import build_ring

RUN = "0" * 16
SUM_ID = SumId(RUN, "train", 1, 4)
CLEAR = SumRules(8.0, is_padded=False)
BENCH = ToyBench()
MODEL = BENCH.weights
MASK = Mask.full(MODEL.numel())


def build_site(rules: SumRules = CLEAR, *, has_update: bool = True) -> SiteSums:
    identity = generate_identity("site-1") if rules.is_padded else "site-1"
    site = SiteSums(identity, BENCH.layout, RUN, rules, lambda kind: weigh_by_examples)
    if has_update:
        update = Update(Patch(MODEL + 0.25, MASK), "weights", 10)
        site.withhold(update, RequestId("train", 1), MODEL)
    return site


def ask(share: float = 0.25, sum_id: SumId = SUM_ID) -> np.ndarray:
    return pack_message(Step.TERMS, sum_id, pack_share(share))


def test_site_sends_its_share_of_the_change_as_integers() -> None:
    step, _, payload = unpack_message(build_site().answer(ask()), "site-1")
    assert step == Step.TERMS
    assert payload[:16].hex() == MASK.fingerprint
    ring = build_ring("weights", MASK, BENCH.layout, CLEAR)
    values = ring.decode(np.frombuffer(payload[16:], np.uint8))
    change = (MODEL + 0.25).double() - MODEL.double()
    assert np.abs(values - 0.25 * change.numpy()).max() <= 0.5 / ring.narrow.scale
    assert torch.equal(MODEL, BENCH.weights)


def test_values_leave_once() -> None:
    site = build_site()
    site.answer(ask())
    assert refuses(lambda: site.answer(ask(sum_id=SumId(RUN, "train", 1, 5)))) == "E_REQUEST"


def test_masked_site_never_sends_values_without_pads() -> None:
    site = build_site(SumRules(8.0))
    assert refuses(lambda: site.answer(ask())) == "E_REQUEST"
    assert site._withheld is not None


def test_site_without_pads_has_no_keys_to_publish() -> None:
    assert refuses(lambda: build_site().answer(pack_message(Step.KEYS, SUM_ID, b""))) == "E_REQUEST"


def test_site_refuses_sums_of_another_update_and_shares_with_which_a_sum_could_wrap_around() -> None:
    for code, question in (
        ("E_WEIGHT", ask(1.0 + 2**-52)),
        ("E_WEIGHT", ask(0.0)),
        ("E_WEIGHT", ask(float("nan"))),
        ("E_REPLAY", ask(sum_id=SumId(RUN, "train", 2, 4))),
        ("E_REPLAY", ask(sum_id=SumId(RUN, "train", 1, 0))),
        ("E_REPLAY", ask(sum_id=SumId("1" * 16, "train", 1, 4))),
        ("E_LEN", pack_message(Step.TERMS, SUM_ID, bytes(7))),
    ):
        assert refuses(lambda question=question: build_site().answer(question)) == code
    assert refuses(lambda: build_site(has_update=False).answer(ask())) == "E_REQUEST"


def test_padded_sums_need_an_identity() -> None:
    with pytest.raises(ValueError, match="SiteIdentity"):
        SiteSums("site-1", BENCH.layout, RUN, SumRules(8.0), lambda kind: weigh_by_examples)
