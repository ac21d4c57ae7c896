"""Sums of ciphertexts equal sums of values, and ciphertexts from outside are checked before they are used."""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
import pytest
import tenseal as ts
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases

from flare_sparse.core.errors import ConfigError, RejectedMessage
from flare_sparse.core.exchange import SealedValues
from flare_sparse.privacy.encryption import PRECISION, KeyContexts, ServerCipher, SiteCipher
from flare_sparse.wire.ciphertexts import get_key_id, join_ciphertexts, measure_ciphertexts, split_ciphertexts

SLOTS = 4096


@cache
def get_contexts() -> KeyContexts:
    return KeyContexts.generate()


@cache
def get_server() -> ServerCipher:
    return ServerCipher(get_contexts().server)


@cache
def get_site() -> SiteCipher:
    return SiteCipher(get_contexts().client)


@cache
def get_foreign_site() -> SiteCipher:
    """Return the cipher of a site of another project: same parameters, another key."""
    return SiteCipher(KeyContexts.generate().client)


def draw_values(seed: int, count: int, scale: float) -> torch.Tensor:
    return (torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * scale


@pytest.mark.slow
@settings(max_examples=count_cases(40), deadline=None)
@given(
    count=st.sampled_from([1, 2, 100, SLOTS - 1, SLOTS, SLOTS + 1, 3 * SLOTS + 7]),
    examples=st.lists(st.integers(1, 10_000), min_size=1, max_size=6),
    magnitude=st.floats(-6, 5),
    seed=st.integers(0, 2**31),
)
def test_decrypted_sum_equals_sum_of_values_within_precision(
    count: int, examples: list[int], magnitude: float, seed: int
) -> None:
    """The error is at most PRECISION before the rounding to float32, which a sum in the clear has as well."""
    values = [draw_values(seed + k, count, 10**magnitude) for k in range(len(examples))]
    weights = [n / sum(examples) for n in examples]
    updates = [get_site().encrypt(v) for v in values]
    for update in updates:
        get_server().check(update, count, "site-1")
    decrypted = get_site().decrypt(get_server().weighted_sum(updates, weights, count), count)
    exact = sum((w * v.double() for w, v in zip(weights, values, strict=True)), torch.zeros(count).double())
    rounding = 2.0**-24 * exact.abs()
    assert bool(((decrypted.double() - exact).abs() <= PRECISION + rounding).all())


@pytest.mark.parametrize("value", [2.0**18, -(2.0**18)])
def test_largest_values_do_not_wrap_around(value: float) -> None:
    """A vector of equal values is the worst case: one coefficient of the polynomial holds all of it."""
    update = get_site().encrypt(torch.full((SLOTS,), value))
    decrypted = get_site().decrypt(get_server().weighted_sum([update, update], [0.5, 0.5], SLOTS), SLOTS)
    assert torch.equal(decrypted, torch.full((SLOTS,), value))


def test_rescaling_error_does_not_accumulate_over_rounds() -> None:
    """CKKS divides by a prime that is only close to its scale; uncorrected, ten rounds would move 1000 by 0.007."""
    values = torch.full((64,), 1000.0)
    for _ in range(10):
        update = get_site().encrypt(values)
        values = get_site().decrypt(get_server().weighted_sum([update], [1.0], 64), 64)
    assert float((values - 1000).abs().max()) <= 10 * PRECISION + 1000 * 2**-23


def test_encrypting_the_same_values_twice_gives_different_ciphertexts() -> None:
    first, second = get_site().encrypt(torch.zeros(10)), get_site().encrypt(torch.zeros(10))
    assert not torch.equal(first.data, second.data)


def test_server_context_cannot_decrypt() -> None:
    context = ts.context_from(get_contexts().server)
    assert not context.has_secret_key()
    (data,) = split_ciphertexts(get_site().encrypt(torch.ones(3)), get_server().ciphertext_format, 3)
    vector = get_server()._scheme.parse_ciphertext(data, 3)
    with pytest.raises(ValueError, match="secret_key"):
        vector.decrypt()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_encrypt_refuses_non_finite_values(bad: float) -> None:
    with pytest.raises(RejectedMessage, match="E_FINITE"):
        get_site().encrypt(torch.tensor([1.0, bad]))


def test_encrypt_refuses_values_that_could_wrap_around() -> None:
    with pytest.raises(RejectedMessage, match="E_RANGE"):
        get_site().encrypt(torch.tensor([1.0, 2.0**18 * 1.01]))


def test_context_of_the_other_end_or_malformed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"contains the secret key.*server_context"):
        ServerCipher(get_contexts().client)
    with pytest.raises(ConfigError, match=r"no secret key.*client_context"):
        SiteCipher(get_contexts().server)
    with pytest.raises(ConfigError, match="not a TenSEAL context"):
        ServerCipher(b"nonsense")


def test_context_that_allows_no_multiplication_is_refused() -> None:
    context = ts.context(
        ts.SCHEME_TYPE.CKKS,
        poly_modulus_degree=8192,
        coeff_mod_bit_sizes=[60, 40],
        encryption_type=ts.ENCRYPTION_TYPE.SYMMETRIC,
    )
    context.global_scale = 2**40
    with pytest.raises(ConfigError, match="three coeff_mod_bit_sizes"):
        SiteCipher(context.serialize(save_secret_key=True))


def test_foreign_key_is_refused_even_under_a_forged_key_id() -> None:
    foreign = get_foreign_site().encrypt(torch.ones(5))
    with pytest.raises(RejectedMessage, match="E_KEY"):
        get_site().decrypt(foreign, 5)
    forged = join_ciphertexts(
        get_server().ciphertext_format.parameters,
        get_site().key_id,
        split_ciphertexts(foreign, get_server().ciphertext_format, 5),
    )
    with pytest.raises(RejectedMessage, match=r"E_CIPHERTEXT.*noise"):
        get_site().decrypt(forged, 5)
    poisoned = get_server().weighted_sum([get_site().encrypt(torch.ones(5)), forged], [0.5, 0.5], 5)
    with pytest.raises(RejectedMessage, match=r"E_CIPHERTEXT.*noise"):
        get_site().decrypt(poisoned, 5)


def test_key_id_is_equal_at_every_site_and_differs_between_projects() -> None:
    assert SiteCipher(get_contexts().client).key_id == get_site().key_id != get_foreign_site().key_id
    assert get_key_id(get_site().encrypt(torch.ones(1))) == get_site().key_id


def test_server_refuses_a_sum_as_an_update() -> None:
    """Its multiplication is consumed; summed with fresh updates it would be decoded at another scale."""
    summed = get_server().weighted_sum([get_site().encrypt(torch.ones(5))], [1.0], 5)
    with pytest.raises(RejectedMessage, match=r"E_CIPHERTEXT.*level"):
        get_server().check(summed, 5, "site-1")


def test_number_of_values_is_set_by_the_receiver() -> None:
    """TenSEAL repeats values to fill a ciphertext; the sender's number of values is not transmitted."""
    encrypted = get_site().encrypt(torch.tensor([1.0, 2.0]))
    assert get_site().decrypt(encrypted, 1).tolist() == [1]
    assert get_site().decrypt(encrypted, 3).tolist() == [1, 2, 1]


def build_bomb(size: int) -> bytes:
    """Return a short ciphertext that SEAL would decompress to ``size`` bytes."""
    (data,) = split_ciphertexts(get_site().encrypt(torch.ones(1)), get_site().ciphertext_format, 1)
    content = zstandard.ZstdCompressor(level=19).compress(bytes(size))
    return data[:8] + struct.pack("<Q", 16 + len(content)) + content


@pytest.mark.slow
def test_decompression_bomb_is_refused_before_it_expands() -> None:
    data = build_bomb(1 << 28)
    assert len(data) < 40_000
    with pytest.raises(RejectedMessage, match=r"E_SIZE.*decompressed"):
        get_server().check(
            join_ciphertexts(get_server().ciphertext_format.parameters, get_site().key_id, [data]), 1, "site-1"
        )


@pytest.mark.slow
@settings(max_examples=count_cases(150), deadline=None)
@given(data=st.data())
def test_changed_ciphertext_is_refused_or_decrypts_without_another_error(data: st.DataObject) -> None:
    (ciphertext,) = split_ciphertexts(encrypt_ones(), get_site().ciphertext_format, 4)
    raw = bytearray(ciphertext)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.one_of(st.integers(0, 160), st.integers(0, len(raw) - 1)))
        raw[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([None, None, None, 0, 10, 100, len(raw) - 1]))
    changed = join_ciphertexts(get_site().ciphertext_format.parameters, get_site().key_id, [bytes(raw)[:cut]])
    codes = set()
    try:
        get_server().check(changed, 4, "site-1")
        get_site().decrypt(changed, 4)
    except RejectedMessage as error:
        codes.add(error.code)
    assert codes <= {"E_CIPHERTEXT", "E_SIZE"}


@cache
def encrypt_ones() -> SealedValues:
    return get_site().encrypt(torch.ones(4))


def test_measure_refuses_wrong_lengths_and_parameters() -> None:
    ciphertext_format, good = get_site().ciphertext_format, get_site().encrypt(torch.ones(SLOTS + 1)).data.numpy()
    assert measure_ciphertexts(good, SLOTS + 1, ciphertext_format) == good.size
    longer = good.copy()
    longer[24:28] = np.frombuffer(struct.pack("<I", ciphertext_format.max_bytes + 1), np.uint8)
    with pytest.raises(RejectedMessage, match="E_SIZE"):
        measure_ciphertexts(longer, SLOTS + 1, ciphertext_format)
    with pytest.raises(RejectedMessage, match="E_LEN"):
        measure_ciphertexts(good[:25], SLOTS + 1, ciphertext_format)
    other = good.copy()
    other[0] ^= 1
    with pytest.raises(RejectedMessage, match="E_CONTEXT"):
        measure_ciphertexts(other, SLOTS + 1, ciphertext_format)
    assert bytes(ciphertext_format.parameters) == get_server().ciphertext_format.parameters


def test_fresh_ciphertext_is_close_to_but_within_its_maximum_length() -> None:
    """Random residues do not compress: every fresh ciphertext has about the same length."""
    lengths = [
        len(data)
        for data in split_ciphertexts(
            get_site().encrypt(draw_values(1, 8 * SLOTS, 1e5)), get_site().ciphertext_format, 8 * SLOTS
        )
    ]
    assert max(lengths) <= get_site().ciphertext_format.max_bytes
    assert min(lengths) > get_site().ciphertext_format.max_bytes * 0.85
