"""The sum of ciphertexts is the sum of the values, and nothing that comes from outside is believed."""

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

from flare_sparse.encryption import PRECISION, KeyContexts, ServerCipher, SiteCipher
from flare_sparse.errors import ConfigError, RejectedMessage
from flare_sparse.exchange import EncryptedValues
from flare_sparse.wire.ciphertexts import get_key_id, join_ciphertexts, measure_ciphertexts, split_ciphertexts

SLOTS = 4096


@cache
def contexts() -> KeyContexts:
    return KeyContexts.generate()


@cache
def server() -> ServerCipher:
    return ServerCipher(contexts().server)


@cache
def site() -> SiteCipher:
    return SiteCipher(contexts().client)


@cache
def stranger() -> SiteCipher:
    """A site of another project: the same parameters, another key."""
    return SiteCipher(KeyContexts.generate().client)


def numbers(seed: int, count: int, scale: float) -> torch.Tensor:
    return (torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * scale


@settings(max_examples=40, deadline=None)
@given(
    count=st.sampled_from([1, 2, 100, SLOTS - 1, SLOTS, SLOTS + 1, 3 * SLOTS + 7]),
    examples=st.lists(st.integers(1, 10_000), min_size=1, max_size=6),
    magnitude=st.floats(-6, 5),
    seed=st.integers(0, 2**31),
)
def test_the_sum_equals_that_of_the_values(count: int, examples: list[int], magnitude: float, seed: int) -> None:
    """Within PRECISION of the exact sum, before the one rounding to float32 that a plain sum has, too."""
    values = [numbers(seed + k, count, 10**magnitude) for k in range(len(examples))]
    weights = [n / sum(examples) for n in examples]
    answers = [site().encrypt(v) for v in values]
    for answer in answers:
        server().check(answer, count, "site-1")
    found = site().decrypt(server().weighted_sum(answers, weights, count), count)
    exact = sum((w * v.double() for w, v in zip(weights, values, strict=True)), torch.zeros(count).double())
    rounding = 2.0**-24 * exact.abs()
    assert bool(((found.double() - exact).abs() <= PRECISION + rounding).all())


@pytest.mark.parametrize("value", [2.0**18, -(2.0**18)])
def test_the_largest_values_do_not_wrap_around(value: float) -> None:
    """A vector of one value is the worst case: all of it stands in one coefficient of the polynomial."""
    answer = site().encrypt(torch.full((SLOTS,), value))
    found = site().decrypt(server().weighted_sum([answer, answer], [0.5, 0.5], SLOTS), SLOTS)
    assert torch.equal(found, torch.full((SLOTS,), value))


def test_the_bias_of_the_multiplication_does_not_add_up() -> None:
    """CKKS divides by a prime that is only nearly its scale; uncorrected, ten rounds would move 1000 by 0.007."""
    values = torch.full((64,), 1000.0)
    for _ in range(10):
        answer = site().encrypt(values)
        values = site().decrypt(server().weighted_sum([answer], [1.0], 64), 64)
    assert float((values - 1000).abs().max()) <= 10 * PRECISION + 1000 * 2**-23


def test_two_encryptions_of_the_same_values_have_no_ciphertext_in_common() -> None:
    first, second = site().encrypt(torch.zeros(10)), site().encrypt(torch.zeros(10))
    assert not torch.equal(first.data, second.data)


def test_the_servers_context_decrypts_nothing() -> None:
    context = ts.context_from(contexts().server)
    assert not context.has_secret_key()
    (data,) = split_ciphertexts(site().encrypt(torch.ones(3)), server().ciphertext_format, 3)
    vector = server()._scheme.read(data, 3)
    with pytest.raises(ValueError, match="secret_key"):
        vector.decrypt()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_encrypted(bad: float) -> None:
    with pytest.raises(RejectedMessage, match="E_FINITE"):
        site().encrypt(torch.tensor([1.0, bad]))


def test_what_could_wrap_around_is_never_encrypted() -> None:
    with pytest.raises(RejectedMessage, match="E_RANGE"):
        site().encrypt(torch.tensor([1.0, 2.0**18 * 1.01]))


def test_a_context_in_the_wrong_hands_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds the secret key.*server_context"):
        ServerCipher(contexts().client)
    with pytest.raises(ConfigError, match=r"no secret key.*client_context"):
        SiteCipher(contexts().server)
    with pytest.raises(ConfigError, match="not a TenSEAL context"):
        ServerCipher(b"nonsense")


def test_a_context_without_room_for_the_one_multiplication_is_refused() -> None:
    context = ts.context(
        ts.SCHEME_TYPE.CKKS,
        poly_modulus_degree=8192,
        coeff_mod_bit_sizes=[60, 40],
        encryption_type=ts.ENCRYPTION_TYPE.SYMMETRIC,
    )
    context.global_scale = 2**40
    with pytest.raises(ConfigError, match="three coeff_mod_bit_sizes"):
        SiteCipher(context.serialize(save_secret_key=True))


def test_another_key_is_named_and_a_forged_name_does_not_help() -> None:
    foreign = stranger().encrypt(torch.ones(5))
    with pytest.raises(RejectedMessage, match="E_KEY"):
        site().decrypt(foreign, 5)
    forged = join_ciphertexts(
        server().ciphertext_format.parameters, site().key, split_ciphertexts(foreign, server().ciphertext_format, 5)
    )
    with pytest.raises(RejectedMessage, match=r"E_CIPHERTEXT.*noise"):
        site().decrypt(forged, 5)
    poisoned = server().weighted_sum([site().encrypt(torch.ones(5)), forged], [0.5, 0.5], 5)
    with pytest.raises(RejectedMessage, match=r"E_CIPHERTEXT.*noise"):
        site().decrypt(poisoned, 5)


def test_the_name_of_a_key_is_the_same_at_every_site() -> None:
    assert SiteCipher(contexts().client).key == site().key != stranger().key
    assert get_key_id(site().encrypt(torch.ones(1))) == site().key


def test_a_sum_is_no_answer() -> None:
    """Its multiplication is used up; added to fresh answers it would be read at another scale."""
    summed = server().weighted_sum([site().encrypt(torch.ones(5))], [1.0], 5)
    with pytest.raises(RejectedMessage, match=r"E_CIPHERTEXT.*level"):
        server().check(summed, 5, "site-1")


def test_how_many_values_there_are_is_the_receivers_own_knowledge() -> None:
    """TenSEAL repeats values to fill a ciphertext; a sender's number of them is not even read."""
    sealed = site().encrypt(torch.tensor([1.0, 2.0]))
    assert site().decrypt(sealed, 1).tolist() == [1]
    assert site().decrypt(sealed, 3).tolist() == [1, 2, 1]


def bomb(size: int) -> bytes:
    """A ciphertext of few bytes that SEAL would inflate to ``size``."""
    (data,) = split_ciphertexts(site().encrypt(torch.ones(1)), site().ciphertext_format, 1)
    content = zstandard.ZstdCompressor(level=19).compress(bytes(size))
    return data[:8] + struct.pack("<Q", 16 + len(content)) + content


def test_a_small_ciphertext_that_inflates_is_refused_before_it_does() -> None:
    data = bomb(1 << 28)
    assert len(data) < 40_000
    with pytest.raises(RejectedMessage, match=r"E_SIZE.*inflated"):
        server().check(join_ciphertexts(server().ciphertext_format.parameters, site().key, [data]), 1, "site-1")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_changed_ciphertext_is_refused_or_is_noise_and_nothing_else_is_raised(data: st.DataObject) -> None:
    (whole,) = split_ciphertexts(_sealed_ones(), site().ciphertext_format, 4)
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.one_of(st.integers(0, 160), st.integers(0, len(raw) - 1)))
        raw[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([None, None, None, 0, 10, 100, len(raw) - 1]))
    changed = join_ciphertexts(site().ciphertext_format.parameters, site().key, [bytes(raw)[:cut]])
    codes = set()
    try:
        server().check(changed, 4, "site-1")
        site().decrypt(changed, 4)
    except RejectedMessage as error:
        codes.add(error.code)
    assert codes <= {"E_CIPHERTEXT", "E_SIZE"}


@cache
def _sealed_ones() -> EncryptedValues:
    return site().encrypt(torch.ones(4))


def test_lengths_are_held_against_what_a_ciphertext_can_have() -> None:
    ciphertext_format, good = site().ciphertext_format, site().encrypt(torch.ones(SLOTS + 1)).data.numpy()
    assert measure_ciphertexts(good, SLOTS + 1, ciphertext_format) == good.size
    longer = good.copy()
    longer[24:28] = np.frombuffer(struct.pack("<I", ciphertext_format.most_bytes + 1), np.uint8)
    with pytest.raises(RejectedMessage, match="E_SIZE"):
        measure_ciphertexts(longer, SLOTS + 1, ciphertext_format)
    with pytest.raises(RejectedMessage, match="E_LEN"):
        measure_ciphertexts(good[:25], SLOTS + 1, ciphertext_format)
    other = good.copy()
    other[0] ^= 1
    with pytest.raises(RejectedMessage, match="E_CONTEXT"):
        measure_ciphertexts(other, SLOTS + 1, ciphertext_format)
    assert bytes(ciphertext_format.parameters) == server().ciphertext_format.parameters


def test_the_largest_ciphertext_fits_its_bound() -> None:
    """Random residues compress worst: what a fresh ciphertext has is what any has, within the slack."""
    lengths = [
        len(data)
        for data in split_ciphertexts(site().encrypt(numbers(1, 8 * SLOTS, 1e5)), site().ciphertext_format, 8 * SLOTS)
    ]
    assert max(lengths) <= site().ciphertext_format.most_bytes
    assert min(lengths) > site().ciphertext_format.most_bytes * 0.85
