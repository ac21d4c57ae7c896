"""The vector that a site holds: which patches it takes, and the digest by which sites compare their models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toy import ToyBench

from flare_sparse.core.errors import RejectedMessage
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.rounds.endpoints.plans import plan_request
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.link import Vector
from flare_sparse.wire.codec import encode

RUN = "0" * 16


class Sender:
    """Sends patches to one site, as the server does.

    Args:
        bench: has the layout.
    """

    def __init__(self, bench: ToyBench):
        self.layout = bench.layout
        # A method that allows any mask.
        self.endpoint = SiteEndpoint(bench.site(1), bench.method("dispfl", rounds=9), RUN, "float32")
        self.base: Vector | None = None
        self.sequence, self.vector = 0, torch.zeros(self.layout.size)

    def send(self, patch: Patch) -> torch.Tensor:
        """Return the site's vector after it has received a patch."""
        self.sequence += 1
        mask = self.base.mask if patch.base == "previous" and self.base else patch.mask
        self.vector = patch.write_into(self.vector.clone()) if patch.base == "previous" else patch.to_vector()
        target = Vector.of(Patch.from_vector(self.vector, mask))
        plan = plan_request(self.layout, RUN, self.base, sequence=self.sequence, round=self.sequence, kind="train")
        plan = replace(plan, target=target.name, request=target.name)
        self.endpoint.receive(encode(patch, plan, trainable=mask).data)
        self.base = target
        return self.endpoint.site.weights


def test_patches_over_zeros_and_over_the_previous_model() -> None:
    bench = ToyBench()
    size, draw = bench.layout.size, torch.Generator().manual_seed(1)
    # Not below 0, as the running variances among them.
    values = torch.rand(size, generator=draw)
    wide, narrow = Mask(torch.arange(size) % 2 == 0), Mask(torch.arange(size) % 4 == 0)
    sender = Sender(bench)
    assert torch.equal(sender.send(Patch.from_vector(values, wide)), values * wide.bits)
    expected = values * wide.bits + narrow.bits
    assert torch.equal(sender.send(Patch.from_vector(values + 1, narrow, "previous"))[wide.bits], expected[wide.bits])
    assert sender.endpoint.site.live_patch.mask == wide
    assert torch.equal(sender.endpoint.site.live_patch.values, wide.take(sender.endpoint.site.weights))
    assert torch.equal(sender.send(Patch.from_vector(values, narrow)), values * narrow.bits)
    assert sender.endpoint.site.live_patch.mask == narrow
    assert torch.equal(sender.endpoint.site.live_patch.values, narrow.take(sender.endpoint.site.weights))


def test_patch_over_the_previous_model_with_entries_outside_it_is_rejected() -> None:
    bench = ToyBench()
    size, sender = bench.layout.size, Sender(ToyBench())
    mask = Mask(torch.arange(size) % 2 == 0)
    sender.send(Patch.from_vector(torch.ones(size), mask))
    with pytest.raises(RejectedMessage) as caught:
        sender.send(Patch.from_vector(torch.ones(size), ~mask, "previous"))
    assert (caught.value.code, caught.value.field) == ("E_MASK", "selection")
    assert torch.equal(sender.endpoint.site.weights, mask.bits.float())


def test_equal_models_have_equal_digests_whatever_patches_they_came_in() -> None:
    size, draw = ToyBench().layout.size, torch.Generator().manual_seed(1)
    mask = Mask(torch.rand(size, generator=draw) < 0.5)
    part = Mask(mask.bits & (torch.arange(size) % 3 == 0))
    # Not below 0, as the running variances among them.
    old, new = (torch.rand(size, generator=draw) for _ in range(2))
    latest = torch.where(part.bits, new, old)
    first, second, third = Sender(ToyBench()), Sender(ToyBench()), Sender(ToyBench())
    first.send(Patch.from_vector(old, mask))
    first.send(Patch.from_vector(new, part, "previous"))
    second.send(Patch.from_vector(latest, mask))
    third.send(Patch.from_vector(old, mask))
    digests = [sender.endpoint.compute_model_digest() for sender in (first, second, third)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 64
    assert Patch.from_vector(latest, part).digest != digests[0]
