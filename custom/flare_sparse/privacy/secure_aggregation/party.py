"""One site's part in one sum: keys, shares, padded values, reveal. Each step is taken once, in this order."""

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ...core.errors import RequestRefused
from ...wire.steps import SumId
from .identities import SiteIdentity
from .keys import (
    SHARE_BYTES,
    TAG_BYTES,
    SignedKeys,
    agree,
    commit_to,
    decrypt_shares,
    derive_key,
    draw_pad,
    encrypt_shares,
    get_public_key,
    split_secret,
)
from .limits import FEWEST_SITES, compute_threshold, count_needed
from .rings import MAX_SITES, RingFormat

BOX_BYTES = 2 * SHARE_BYTES + TAG_BYTES
"""Length of the box with one site's shares for another."""


def compute_sign(name: str, other: str) -> int:
    """Return the sign with which ``name`` adds the pad that it shares with ``other``; the other adds the opposite."""
    return 1 if name < other else -1


class SumParty:
    """A site in one sum. A site that restarts has forgotten it, and has dropped out.

    Args:
        sum_id: id of the sum.
        identity: signs the keys and checks those of the others.
        num_examples: number of training examples of the site.
        min_sites: fewest sites of a sum that this site takes part in.
        model_digest: digest of the model that the values were computed from; a sum has one model.

    Attributes:
        keys: what the site publishes.
    """

    def __init__(
        self,
        sum_id: SumId,
        identity: SiteIdentity,
        num_examples: int,
        min_sites: int = FEWEST_SITES,
        model_digest: str = "",
    ):
        self.sum_id, self.identity, self.min_sites = sum_id, identity, max(min_sites, FEWEST_SITES)
        self.model_digest = model_digest
        # New for every attempt and never derived from a seed of the run: a pad that is used twice reveals the
        # difference of the two messages.
        self._channel_key, self._pad_key, self._seed = (secrets.token_bytes(32) for _ in range(3))
        public = get_public_key(self._channel_key), get_public_key(self._pad_key), commit_to(self._seed)
        self.keys = SignedKeys(identity.name, num_examples, *public).sign(identity, sum_id)
        # What is known after a step: the keys of all sites that published some and the digest of these, this site's
        # share of its own seed and key of pads, and such shares of every site.
        self._members: dict[str, SignedKeys] | None = None
        self._digest = ""
        self._own_share: tuple[bytes, bytes] | None = None
        self._shares: dict[str, tuple[bytes, bytes]] | None = None
        self._has_revealed = False

    @property
    def name(self) -> str:
        """Name of this site."""
        return self.identity.name

    def share(self, members: Sequence[SignedKeys]) -> list[bytes]:
        """Return a box of ``BOX_BYTES`` bytes for every other site, in the order of their names.

        Args:
            members: keys of all sites, as the server relays them; not trusted.

        Raises:
            RejectedMessage: some keys are not signed by their site for this sum.
            RequestRefused: the sites are too few or too many, one of them comes twice, or this one is not among them.
        """
        by_name = {keys.name: keys for keys in members}
        if self._members is not None:
            raise RequestRefused("this site has already shared the secrets of this sum")
        if len(by_name) != len(members) or by_name.get(self.name) != self.keys:
            raise RequestRefused("the keys of the sum are not one of each site, with those that this site published")
        if not self.min_sites <= len(members) <= MAX_SITES:
            raise RequestRefused(
                f"the sum has {len(members)} sites; this site takes part in sums of {self.min_sites} to {MAX_SITES}"
            )
        for keys in members:
            keys.verify(self.identity.root, self.sum_id)
        threshold = compute_threshold(len(members), self.min_sites)
        parts = (split_secret(secret, len(members), threshold) for secret in (self._seed, self._pad_key))
        self._members = dict(sorted(by_name.items()))
        self._digest = digest_members(self._members.values(), self.sum_id)
        shares = dict(zip(self._members, zip(*parts, strict=True), strict=True))
        self._own_share = shares.pop(self.name)
        return [
            encrypt_shares(self._agree_channel(by_name[name], self.name, name), seed + pad)
            for name, (seed, pad) in shares.items()
        ]

    def pad(self, boxes: Mapping[str, bytes], values: np.ndarray, ring: RingFormat) -> np.ndarray:
        """Return the section of this site's values with all pads added.

        Args:
            boxes: box for this site of every other member, by sender; not trusted.
            values: uint8 ``(ring.section_bytes,)``, the section of the values.
            ring: format of the section.

        Raises:
            RejectedMessage: a box is not one of its sender for this site, or its sender has another model or other
                members.
            RequestRefused: they are not those of all other members.
        """
        members, own_share = self._members, self._own_share
        if members is None or own_share is None or self._shares is not None:
            raise RequestRefused("the values of this sum are asked for out of order")
        # Require all of them: each box shows that its sender knows the same members, so that all weigh and pad alike.
        if boxes.keys() != members.keys() - {self.name}:
            raise RequestRefused("the boxes are not those of all other sites that published keys")
        opened = {
            name: decrypt_shares(self._agree_channel(members[name], name, self.name), box, name)
            for name, box in boxes.items()
        }
        total = values.copy()
        own_pad = draw_pad(derive_key(self._seed, "own pad", self.sum_id, self.name), total.size)
        ring.add(total, own_pad)
        for name in sorted(boxes):
            key = agree_pad(self._pad_key, members[name].pad_key, self.sum_id, self.name, name)
            ring.add(total, draw_pad(key, total.size), compute_sign(self.name, name))
        self._shares = {name: (content[:SHARE_BYTES], content[SHARE_BYTES:]) for name, content in opened.items()}
        self._shares[self.name] = own_share
        return total

    def reveal(self, survivors: Sequence[str]) -> list[bytes]:
        """Return one share of every site of the sum, in the order of names: of the seed of a survivor, else of its key.

        Args:
            survivors: sites whose padded values the server has; not trusted.

        Raises:
            RequestRefused: this site has revealed before, is not among the survivors, or they are too few.
        """
        shares = self.require_shares(survivors)
        self._has_revealed = True
        return [seed if name in survivors else pad for name, (seed, pad) in sorted(shares.items())]

    def require_shares(self, survivors: Sequence[str]) -> Mapping[str, tuple[bytes, bytes]]:
        """Return the shares that this site holds, if it may reveal them for these survivors.

        Raises:
            RequestRefused: as :meth:`reveal`.
        """
        shares, members = self._shares, self._members
        # Reveal once and never again: the seed and the key of one site together open its values.
        if shares is None or members is None or self._has_revealed:
            raise RequestRefused("the shares of this sum are asked for out of order, or twice")
        if len(set(survivors)) != len(survivors) or self.name not in survivors or not set(survivors) <= shares.keys():
            raise RequestRefused("the survivors are not sites of this sum, each once, with this one among them")
        if len(survivors) < (needed := count_needed(len(members), self.min_sites)):
            raise RequestRefused(
                f"{len(survivors)} of {len(members)} sites are left in the sum; this site requires {needed}"
            )
        return shares

    def _agree_channel(self, keys: SignedKeys, sender: str, receiver: str) -> bytes:
        # The model is part of the key and never travels: a server that sends one site a model of its own, and the
        # others one with known answers, would read that site's answer in the sum (Pasquini et al. 2022, section 7).
        # Boxes of sites with different models do not open, so no values leave; nor do those of sites with different
        # members, whose values would have other factors in one sum than in the next.
        purpose = f"shares {self.model_digest} {self._digest}"
        return agree(self._channel_key, keys.channel_key, purpose, self.sum_id, (sender, receiver))


def digest_members(members: Iterable[SignedKeys], sum_id: SumId) -> str:
    """Return the SHA-256, 64 hex digits, of all that the members of a sum have signed, in the order of names."""
    digest = hashlib.sha256()
    for keys in members:
        signed = keys.encode_signed(sum_id)
        digest.update(len(signed).to_bytes(4, "little") + signed)
    return digest.hexdigest()


def agree_pad(private_key: bytes, public_key: bytes, sum_id: SumId, name: str, other: str) -> bytes:
    """Return the key of the pad that two sites share, from the private key of one and the public key of the other."""
    first, second = sorted((name, other))
    return agree(private_key, public_key, "pad", sum_id, (first, second))
