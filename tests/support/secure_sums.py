"""Sums of padded values in one process, with sites that drop out wherever a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from flare_sparse.core.errors import FlareSparseError
from flare_sparse.privacy.secure_aggregation.collector import SumCollector
from flare_sparse.privacy.secure_aggregation.identities import SiteIdentity, generate_kits
from flare_sparse.privacy.secure_aggregation.party import SumParty
from flare_sparse.privacy.secure_aggregation.rings import Ring, RingFormat
from flare_sparse.wire.steps import SumId

SUM_ID = SumId("00112233445566ff", "train", 3, 7)
NARROW = Ring(32, 64.0)


def get_identity(name: str) -> SiteIdentity:
    files = generate_kits([name])[name]
    return SiteIdentity.from_pem(name, files["client.crt"], files["client.key"], files["rootCA.pem"])


@cache
def get_identities() -> dict[str, SiteIdentity]:
    return {name: get_identity(name) for name in (f"site-{number}" for number in range(1, 9))}


def build_ring(count: int, wide: int = 0) -> RingFormat:
    """Return the format of ``count`` values, the first ``wide`` of them wide."""
    return RingFormat(np.arange(count) < wide, NARROW)


@dataclass
class Bench:
    """One sum.

    Attributes:
        ring: format of the values.
        parties: the sites.
        collector: the server.
        messages: everything that the server received, by site.
    """

    ring: RingFormat
    parties: dict[str, SumParty]
    collector: SumCollector
    messages: dict[str, list[bytes]]

    @classmethod
    def build(cls, sites: Sequence[str], ring: RingFormat, sum_id: SumId = SUM_ID) -> Bench:
        identities = get_identities()
        parties = {name: SumParty(sum_id, identities[name], 10) for name in sites}
        root = next(iter(identities.values())).root
        return cls(ring, parties, SumCollector(sum_id, ring, root), {name: [] for name in sites})

    def publish(self) -> None:
        for name, party in self.parties.items():
            self.collector.accept_keys(party.keys)
            self.messages[name].append(party.keys.to_bytes())

    def share(self, sites: Sequence[str]) -> None:
        members = self.collector.list_members()
        for name in sites:
            boxes = self.parties[name].share(members)
            self.messages[name] += boxes
            self.collector.accept_boxes(name, boxes)

    def pad(self, values: Mapping[str, np.ndarray]) -> None:
        for name, section in values.items():
            padded = self.parties[name].pad(self.collector.collect_boxes(name), section, self.ring)
            self.messages[name].append(padded.tobytes())
            self.collector.accept_values(name, padded)

    def reveal(self, sites: Sequence[str]) -> None:
        survivors = self.collector.list_survivors()
        for name in sites:
            shares = self.parties[name].reveal(survivors)
            self.messages[name] += shares
            self.collector.accept_shares(name, shares)

    def run(
        self,
        values: Mapping[str, np.ndarray],
        dropped: Callable[[str], str] = lambda site: "",
        order: Callable[[list[str]], list[str]] = list,
    ) -> np.ndarray:
        """Return the sum; ``dropped`` names the step before which a site drops out, ``order`` that of arrival."""
        late = {"": 3, "share": 0, "pad": 1, "reveal": 2}
        steps = {name: late[dropped(name)] for name in self.parties}
        self.publish()
        self.share(order([name for name in self.parties if steps[name] > 0]))
        self.pad({name: values[name] for name in order([name for name in self.parties if steps[name] > 1])})
        self.reveal(order([name for name in self.parties if steps[name] > 2]))
        return self.collector.compute_sum()


def refuses(action: Callable[[], object]) -> str:
    """Return the code with which an action fails; empty if it does not."""
    try:
        action()
    except FlareSparseError as error:
        return error.code
    return ""
