"""Encryption: sites encrypt their updates and decrypt the model; the server aggregates without decryption."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ...core.errors import RejectedMessage
from ...core.exchange import Contribution, Patch, SealedValues, Update
from ...methods.aggregation.weighted import weigh_by_examples
from ...privacy.encryption import ServerCipher, SiteCipher
from ...wire.ciphertexts import get_key_id
from ...wire.codec import Decoded
from ...wire.formats import ValueType
from .stages import SealedModel, ServerStage, SiteStage

_SEALED = ("weights", "delta")
"""Contents that are encrypted; scores and metrics never are."""


class SiteEncryption(SiteStage):
    """Encrypts weights and deltas, and decrypts models.

    Args:
        cipher: has the key of the sites.
    """

    def __init__(self, cipher: SiteCipher):
        self.cipher, self.ciphertext_format = cipher, cipher.ciphertext_format
        self._last: tuple[str, SealedValues] | None = None

    def seal(self, update: Update, answer: str) -> Update:
        if update.content not in _SEALED:
            return update
        update = replace(update, patch=update.patch.copy_to_host())
        # Encryption is random: it is done once for each update, so that a message is a function of what it carries.
        key = f"{answer} {update.patch.digest}"
        if self._last is None or self._last[0] != key:
            self._last = key, self.cipher.encrypt(update.patch.values)
        return replace(update, patch=replace(update.patch, sealed=self._last[1]))

    def open(self, patch: Patch) -> Patch:
        if patch.sealed is None:
            return patch
        return Patch(self.cipher.decrypt(patch.sealed, patch.mask.count), patch.mask, patch.base)


class ServerEncryption(ServerStage):
    """Aggregates encrypted updates.

    Args:
        cipher: sums ciphertexts without a key.
    """

    def __init__(self, cipher: ServerCipher):
        self.cipher, self.ciphertext_format = cipher, cipher.ciphertext_format
        self.model: SealedModel | None = None

    def attach(self, patch: Patch) -> Patch:
        """Return a patch of the encrypted model with its ciphertext.

        The method's state contains NaN where the server cannot read a value. A patch with another mask keeps the NaNs:
        it has no ciphertext, and the codec refuses to send NaN.
        """
        if self.model is None or patch.mask != self.model.mask:
            return patch
        return Patch.from_sealed(self.model.values, patch.mask, patch.base)

    def check(self, message: Decoded, values: ValueType, site: str) -> None:
        ciphertext = message.patch.sealed
        if message.content not in _SEALED:
            super().check(message, values, site)
        elif ciphertext is None:
            raise RejectedMessage("E_SEALED", f"values of {message.content}", "ckks", message.values, site)
        else:
            self.cipher.check(ciphertext, message.patch.mask.count, site)

    def can_send(self, model: Patch, values: ValueType) -> bool:
        return True

    def aggregate(self, contributions: Sequence[Contribution]) -> None:
        """Replace the model with the mean of a round's encrypted updates, weighted by examples.

        Raises:
            ValueError: the updates have different masks, or some are encrypted and some are not.
        """
        # Sites in the order of their names, as in every sum: the order of arrival must not change the result.
        ordered = sorted(contributions, key=lambda contribution: contribution.site)
        ciphertexts = [c.patch.sealed for c in ordered if c.patch.sealed is not None]
        if not ciphertexts:
            return
        mask = ordered[0].patch.mask
        # Ciphertexts are added slot by slot: with different masks the sum would mix different entries.
        if len(ciphertexts) != len(ordered) or any(contribution.patch.mask != mask for contribution in ordered):
            raise ValueError("encrypted updates can only be aggregated over one common mask")
        total = self.cipher.weighted_sum(ciphertexts, weigh_by_examples(ordered), mask.count)
        self.model = SealedModel(mask, total)

    def find_underweight_sites(self, contributions: Sequence[Contribution]) -> list[str]:
        """Return the sites whose share of an encrypted sum is below the smallest factor that the cipher can apply."""
        encrypted = [contribution for contribution in contributions if contribution.patch.sealed is not None]
        shares = zip(encrypted, weigh_by_examples(encrypted) if encrypted else [], strict=True)
        return [contribution.site for contribution, share in shares if share < self.cipher.min_weight]

    def find_sites_with_wrong_key(self, contributions: Sequence[Contribution]) -> list[str]:
        """Return the sites whose update is encrypted with another key than the model.

        Before there is an encrypted model, the key of most updates is the right one; of equally frequent keys, the
        first.
        """
        keys = {c.site: get_key_id(c.patch.sealed) for c in contributions if c.patch.sealed is not None}
        if not keys:
            return []
        counts = Counter(keys.values())
        # max() returns the first of several equal counts; sorting makes it independent of the order of arrival.
        expected = get_key_id(self.model.values) if self.model else max(sorted(counts), key=counts.__getitem__)
        return sorted(site for site, key in keys.items() if key != expected)
