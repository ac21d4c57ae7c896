"""A site answers requests for the entries that its own copy of the method could ask for, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from toy import ToyBench

from flare_sparse.core.errors import RequestRefused
from flare_sparse.core.exchange import Patch, Request
from flare_sparse.core.mask import Mask
from flare_sparse.methods.method import SCORE
from flare_sparse.methods.support.averaging import FINETUNE
from flare_sparse.rounds.endpoints.plans import plan_request
from flare_sparse.rounds.endpoints.request_log import RequestLog
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.link import Vector
from flare_sparse.wire.codec import encode

RUN = "0" * 16


class HostileServer:
    """Sends requests with masks of its own choice to one site."""

    def __init__(self, method: str, *, max_starts: int | None = None, **settings: Any):
        bench = ToyBench()
        self.layout, self.method = bench.layout, bench.method(method, **settings)
        self.log = RequestLog(RUN, self.method.count_requests, attempts=1, max_starts=max_starts)
        self.endpoint = SiteEndpoint(bench.site(1), self.method, RUN, "float32", requests=self.log)
        self.base: Vector | None = None
        self.sequence = 0

    def send(self, kind: str, t: int, live: Mask, trainable: Mask | None = None) -> Request:
        """Return the request as the site accepts it."""
        self.sequence += 1
        trainable = trainable or live
        patch = Patch.from_vector(torch.ones(self.layout.size) * live.bits, live)
        plan = plan_request(self.layout, RUN, self.base, sequence=self.sequence, round=t, kind=kind)
        self.base = Vector.of(patch)
        plan = replace(plan, target=self.base.name, request=f"{self.sequence:016x}")
        return self.endpoint.receive(encode(patch, plan, trainable=trainable).data)


def select(size: int, *, start: int, count: int) -> Mask:
    """Return the mask of ``count`` entries from ``start``."""
    positions = torch.arange(size)
    return Mask((positions >= start) & (positions < start + count))


@pytest.mark.parametrize("method", ["fedavg", "topk_ef", "fedavg_one_step", "per_fedavg", "fedavg_ft"])
def test_method_that_trains_all_entries_refuses_a_mask(method: str) -> None:
    server = HostileServer(method, rounds=4)
    size = server.layout.size
    server.send("train", 1, Mask.full(size))
    with pytest.raises(RequestRefused, match=f"asks for 1 entries; by this site's copy of the job there are {size}"):
        server.send("train", 2, Mask.full(size), select(size, start=0, count=1))


def test_entries_that_are_zero_in_the_model_are_not_trained() -> None:
    server = HostileServer("dispfl", rounds=4)
    size = server.layout.size
    live = select(size, start=0, count=size // 2)
    server.send("train", 1, live)
    with pytest.raises(RequestRefused, match="entries that are zero in the model"):
        server.send("train", 2, live, Mask.full(size))


def test_mask_of_each_round_has_the_size_of_the_schedule() -> None:
    """FedSparsify: 100 %, then as many as Eq. 1 leaves; one entry less isolates the one that was left out."""
    server = HostileServer("fedsparsify", rounds=4, sparsity=0.9)
    size = server.layout.size
    counts = [server.method.bound_trainable("train", t)[0] for t in (1, 2, 3, 4, 5)]
    assert counts[0] == size
    assert counts == sorted(counts, reverse=True)
    assert counts[4] == size - int(0.9 * server.method._prunable.count)
    server.send("train", 1, Mask.full(size))
    server.send("train", 2, select(size, start=0, count=counts[1]))
    with pytest.raises(RequestRefused, match=f"asks for {counts[2] - 1} entries"):
        server.send("train", 3, select(size, start=0, count=counts[2] - 1))


def test_mask_that_shifts_is_a_new_start_of_a_method_that_prunes_for_good() -> None:
    server = HostileServer("fedsparsify", max_starts=2, rounds=6, sparsity=0.9)
    size = server.layout.size
    third, fourth, fifth = (server.method.bound_trainable("train", t)[0] for t in (3, 4, 5))
    server.send("train", 3, select(size, start=0, count=third))
    server.send("train", 4, select(size, start=size - fourth, count=fourth))
    assert server.log._record.start == 2
    with pytest.raises(RequestRefused, match="max_starts 2"):
        server.send("train", 5, select(size, start=0, count=fifth))


def test_second_mask_of_scores_is_refused() -> None:
    """What is summed over all entries and over all but one differs by the score of that one."""
    server = HostileServer("neurosfl", rounds=4, sparsity=0.5)
    layout, size = server.layout, server.layout.size
    whole = Mask.from_preset(layout, "conv_linear_weights")
    bits = whole.bits.clone()
    bits[whole.indices[1]] = False
    part = Mask(bits)
    full = Mask.full(size)
    server.send(SCORE, 0, full)
    with pytest.raises(RequestRefused, match="entries; by this site's copy of the job"):
        server.send(SCORE, 0, full, full - (whole - part) - select(size, start=0, count=size // 2))


@pytest.mark.parametrize("name", ["fedsparsify", "neurosfl"])
def test_fine_tuning_after_an_early_stop_is_answered(name: str) -> None:
    """After 3 of 10 rounds the schedule of FedSparsify has more entries than it leaves at its end."""
    server = HostileServer(name, rounds=10, sparsity=0.9, finetune={"epochs": 1})
    method, size = server.method, server.layout.size
    _, live = method.bound_trainable("train", 4)
    assert live > method.bound_trainable("train", 11)[0] or name == "neurosfl"
    state = method.init(torch.ones(size), ["site-1"])
    mask = select(size, start=0, count=live)
    masks = {"masks": (mask,)} if name == "neurosfl" else {"mask": mask}
    # The federation asks for the last request in the round after the last one.
    last = replace(state, round=11, weights=torch.ones(size) * mask.bits, **masks)
    request = method.ask_final(last, ["site-1"])["site-1"].request
    assert server.send(request.kind, request.round, request.trainable).kind == FINETUNE
    few = select(size, start=0, count=method.bound_trainable(FINETUNE, 11)[0] - 1)
    with pytest.raises(RequestRefused, match=f"asks for {few.count} entries"):
        server.send(FINETUNE, 11, few)
