"""The server's part in one sum: it relays keys and shares, adds values and removes the pads that remain."""

from collections.abc import Mapping, Sequence

import numpy as np

from ...core.errors import RejectedMessage
from ...wire.steps import SumId
from .identities import RootCertificate
from .keys import SHARE_BYTES, SignedKeys, commit_to, derive_key, draw_pad, get_public_key, recover_secret
from .limits import FEWEST_SITES, count_needed
from .party import BOX_BYTES, agree_pad, compute_sign
from .rings import MAX_SITES, RingFormat


class TooFewSites(Exception):
    """A sum has too few sites left to be read, or more than its ring allows; the attempt has failed."""


class SumCollector:
    """One sum of padded values at the server. It holds padded values and, after the last step, the sum.

    Args:
        sum_id: id of the sum.
        ring: format of the padded values.
        root: root certificate, to reject keys that all sites would refuse; None: they are not checked here.
        min_sites: fewest sites of the sum.
    """

    def __init__(
        self, sum_id: SumId, ring: RingFormat, root: RootCertificate | None = None, min_sites: int = FEWEST_SITES
    ):
        self.sum_id, self.ring, self.root = sum_id, ring, root
        self.min_sites = max(min_sites, FEWEST_SITES)
        self.members: dict[str, SignedKeys] = {}
        self._boxes: dict[str, dict[str, bytes]] = {}
        self._total = np.zeros(ring.section_bytes, np.uint8)
        self._summed: set[str] = set()
        self._revealed: dict[str, list[bytes]] = {}

    @property
    def examples(self) -> dict[str, int]:
        """Signed number of examples of each site that published keys."""
        return {name: keys.num_examples for name, keys in self.members.items()}

    @property
    def sharers(self) -> list[str]:
        """Sites that have shared their secrets, in the order of names."""
        return sorted(self._boxes)

    @property
    def survivors(self) -> list[str]:
        """Sites whose values are in the sum, in the order of names."""
        return sorted(self._summed)

    def accept_keys(self, keys: SignedKeys) -> None:
        """Add the keys of a site.

        Raises:
            RejectedMessage: they are not signed by the site.
        """
        if self.root is not None:
            keys.verify(self.root, self.sum_id)
        self.members[keys.name] = keys

    def list_members(self) -> list[SignedKeys]:
        """Return the keys of all sites, in the order of names.

        Raises:
            TooFewSites: fewer than the sum needs.
        """
        # The sites are named by the keys that arrived: the others have no part in this sum.
        if not self.min_sites <= len(self.members) <= MAX_SITES:
            raise TooFewSites(f"{len(self.members)} sites published keys, {self.min_sites} to {MAX_SITES} are needed")
        return [keys for _, keys in sorted(self.members.items())]

    def accept_boxes(self, name: str, boxes: Sequence[bytes]) -> None:
        """Add the boxes of a site for all others, in the order of names.

        Raises:
            RejectedMessage: their number or a length is wrong.
        """
        receivers = [member for member in sorted(self.members) if member != name]
        if len(boxes) != len(receivers) or any(len(box) != BOX_BYTES for box in boxes):
            raise RejectedMessage("E_LEN", "boxes", f"{len(receivers)} of {BOX_BYTES} bytes", len(boxes), name)
        self._boxes[name] = dict(zip(receivers, boxes, strict=True))

    def collect_boxes(self, receiver: str) -> dict[str, bytes]:
        """Return the boxes for a site, by sender.

        Raises:
            TooFewSites: a site has not shared its secrets.
        """
        if missing := sorted(self.members.keys() - self._boxes.keys()):
            raise TooFewSites(f"{', '.join(missing)} published keys and did not share the secrets of their pads")
        return {sender: boxes[receiver] for sender, boxes in sorted(self._boxes.items()) if sender != receiver}

    def accept_values(self, name: str, section: np.ndarray) -> None:
        """Add the padded values of a site, uint8, which are not trusted.

        Raises:
            RejectedMessage: the length is wrong, or the site has no part in the sum or is in it already.
        """
        if section.dtype != np.uint8 or section.shape != self._total.shape:
            raise RejectedMessage("E_LEN", "values", self.ring.section_bytes, section.shape, name)
        if name not in self._boxes or name in self._summed:
            raise RejectedMessage("E_REPLAY", "values", "those of a site of the sum, once", name, name)
        # In the ring every order of additions ends in the same bits, so that values are added as they arrive.
        self.ring.add(self._total, section)
        self._summed.add(name)

    def list_survivors(self) -> list[str]:
        """Return the sites whose values are in the sum, in the order of names.

        Raises:
            TooFewSites: fewer than the sum needs.
        """
        self._require_enough(len(self._summed), "sent values")
        return self.survivors

    def accept_shares(self, name: str, shares: Sequence[bytes]) -> None:
        """Add the shares that a site reveals, one of each site of the sum.

        Raises:
            RejectedMessage: their number or a length is wrong, or the site is no survivor.
        """
        if name not in self._summed:
            raise RejectedMessage("E_REPLAY", "shares", "those of a survivor", name, name)
        if len(shares) != len(self._boxes) or any(len(share) != SHARE_BYTES for share in shares):
            raise RejectedMessage("E_LEN", "shares", f"{len(self._boxes)} of {SHARE_BYTES} bytes", len(shares), name)
        self._revealed[name] = list(shares)

    def compute_sum(self) -> np.ndarray:
        """Return the numbers, float64 ``(n,)``, of the sum over the survivors.

        Raises:
            TooFewSites: too few sites revealed shares, or some revealed wrong ones.
        """
        self._require_enough(len(self._revealed), "revealed shares")
        total = self._total.copy()
        for index, name in enumerate(self.sharers):
            secret = self._recover(index, name)
            if name in self._summed:
                pad = draw_pad(derive_key(secret, "own pad", self.sum_id, name), total.size)
                self.ring.add(total, pad, -1)
                continue
            for survivor in self.survivors:
                key = agree_pad(secret, self.members[survivor].pad_key, self.sum_id, name, survivor)
                self.ring.add(total, draw_pad(key, total.size), -compute_sign(survivor, name))
        return self.ring.decode(total)

    def _recover(self, index: int, name: str) -> bytes:
        """Return the seed of a survivor or the key of pads of a site that dropped out, and check it."""
        numbers = {member: number for number, member in enumerate(sorted(self.members))}
        shares: Mapping[int, bytes] = {numbers[site]: listed[index] for site, listed in self._revealed.items()}
        secret = recover_secret(shares)
        keys = self.members[name]
        if secret is not None:
            is_seed = name in self._summed
            known = keys.commitment if is_seed else keys.pad_key
            if (commit_to(secret) if is_seed else get_public_key(secret)) == known:
                return secret
        raise TooFewSites(
            f"the revealed shares do not recover the secret of {name}: a site has sent wrong ones, or the policy of "
            f"{name} requires more sites (min_sum_sites)"
        )

    def _require_enough(self, sites: int, action: str) -> None:
        """Fail the sum if too few sites are left.

        Raises:
            TooFewSites: fewer sites than the sum needs are left.
        """
        needed = count_needed(len(self.members), self.min_sites)
        if sites < needed:
            raise TooFewSites(f"{sites} of {len(self.members)} sites {action}, {needed} are needed")
