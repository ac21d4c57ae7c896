"""Aggregation of encrypted updates without decryption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.exchange import Contribution, EncryptedValues
from ...core.mask import Mask
from ...methods.aggregation.weighted import weigh_by_examples
from ...privacy.encryption import ServerCipher
from ...wire.ciphertexts import get_key_id


@dataclass(frozen=True)
class EncryptedModel:
    """The model as a server without the key holds it: its mask and the ciphertext of its values."""

    mask: Mask
    values: EncryptedValues


def aggregate_ciphertexts(cipher: ServerCipher, contributions: Sequence[Contribution]) -> EncryptedModel | None:
    """Return the mean of a round's encrypted updates, weighted by examples; None if no update is encrypted.

    Raises:
        ValueError: the updates have different masks, or some are encrypted and some are not.
    """
    # Sites in the order of their names, as in every sum: the order of arrival must not change the result.
    ordered = sorted(contributions, key=lambda contribution: contribution.site)
    ciphertexts = [contribution.patch.encrypted for contribution in ordered if contribution.patch.encrypted is not None]
    if not ciphertexts:
        return None
    mask = ordered[0].patch.mask
    # Ciphertexts are added slot by slot: with different masks the sum would mix different entries.
    if len(ciphertexts) != len(ordered) or any(contribution.patch.mask != mask for contribution in ordered):
        raise ValueError("encrypted updates can only be aggregated over one common mask")
    return EncryptedModel(mask, cipher.weighted_sum(ciphertexts, weigh_by_examples(ordered), mask.count))


def find_underweight_sites(cipher: ServerCipher, contributions: Sequence[Contribution]) -> list[str]:
    """Return the sites whose share of an encrypted sum is below the smallest factor that the cipher can apply."""
    encrypted = [contribution for contribution in contributions if contribution.patch.encrypted is not None]
    if not encrypted:
        return []
    shares = zip(encrypted, weigh_by_examples(encrypted), strict=True)
    return [contribution.site for contribution, share in shares if share < cipher.min_weight]


def find_sites_with_wrong_key(contributions: Sequence[Contribution], model: EncryptedModel | None) -> list[str]:
    """Return the sites whose update is encrypted with another key than the model.

    Before there is an encrypted model, the key of most updates is the right one; of equally frequent keys, the first.
    """
    keys = {
        contribution.site: get_key_id(contribution.patch.encrypted)
        for contribution in contributions
        if contribution.patch.encrypted is not None
    }
    if not keys:
        return []
    counts = Counter(keys.values())
    # max() returns the first of several equal counts; sorting makes it independent of the order of arrival.
    expected_key = get_key_id(model.values) if model else max(sorted(counts), key=counts.__getitem__)
    return sorted(site for site, key in keys.items() if key != expected_key)
