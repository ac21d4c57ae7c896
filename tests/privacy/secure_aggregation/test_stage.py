"""A site in a sum: which questions about keys it answers. Whole sums are in tests/rounds/federation/test_sums.py."""

from __future__ import annotations

import numpy as np
from secure_sums import get_identity, refuses
from toy import ToyBench

from flare_sparse.core.exchange import Patch, RequestId, Update
from flare_sparse.core.mask import Mask
from flare_sparse.methods.aggregation.weighted import weigh_by_examples
from flare_sparse.privacy.secure_aggregation.stage import SiteSums, SumRules
from flare_sparse.rounds.endpoints.request_log import RequestLog
from flare_sparse.wire.stage import StageRun
from flare_sparse.wire.steps import Step, SumId, pack_message, unpack_message

RUN = "0" * 16
SUM_ID = SumId(RUN, "train", 1, 4)
BENCH = ToyBench()
IDENTITY = get_identity("site-1")


def build_site(*, has_update: bool = True) -> SiteSums:
    run = StageRun(BENCH.layout, RUN, lambda kind: weigh_by_examples)
    site = SiteSums(IDENTITY, run, SumRules(8.0), RequestLog(RUN, lambda kind, t: 1, attempts=1).admit_sum)
    if has_update:
        update = Update(Patch(BENCH.weights + 0.25, Mask.full(BENCH.weights.numel())), "weights", 10)
        site.seal(update, RequestId("train", 1), BENCH.weights, lambda: "")
    return site


def ask(sum_id: SumId = SUM_ID, step: Step = Step.KEYS, payload: bytes = b"") -> np.ndarray:
    return pack_message(step, sum_id, payload)


def test_site_publishes_keys_once_for_an_update_and_none_without_one() -> None:
    site = build_site()
    assert unpack_message(site.answer(ask()), "site-1")[2]
    assert refuses(lambda: site.answer(ask())) == "E_REPLAY"
    assert unpack_message(build_site(has_update=False).answer(ask()), "site-1")[2] == b""


def test_site_refuses_sums_of_another_update_and_steps_out_of_order() -> None:
    for code, question in (
        ("E_REPLAY", ask(SumId(RUN, "train", 2, 4))),
        ("E_REPLAY", ask(SumId(RUN, "train", 1, 0))),
        ("E_REPLAY", ask(SumId("1" * 16, "train", 1, 4))),
        ("E_LEN", ask(payload=bytes(7))),
        ("E_REQUEST", ask(step=Step.SHARES)),
        ("E_REQUEST", ask(step=Step.VALUES)),
        ("E_REQUEST", ask(step=Step.REVEAL)),
    ):
        assert refuses(lambda question=question: build_site().answer(question)) == code
    site = build_site()
    site.answer(ask())
    assert refuses(lambda: site.answer(ask(step=Step.VALUES))) == "E_REQUEST"


def test_nothing_is_withheld_before_an_update_nor_after_it_was_discarded() -> None:
    patch, site = Patch(BENCH.weights + 0.25, Mask.full(BENCH.weights.numel())), build_site()
    assert site.holds(patch)
    assert not site.holds(Patch(BENCH.weights, patch.mask))
    site.discard()
    for other in (site, build_site(has_update=False)):
        assert not other.holds(patch)
        assert other.message_bytes == 0
