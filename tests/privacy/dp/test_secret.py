"""A site's random numbers: of the right distribution, the same for the same key, and not to be guessed."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from flare_sparse.core.errors import CheckpointError
from flare_sparse.privacy.dp.secret import derive_key, draw_normal, draw_uniform, read_secret

SECRET = bytes(range(32))


def test_secret_is_created_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "site" / "secret.key"
    secret = read_secret(file)
    assert len(secret) == 32
    assert read_secret(file) == secret
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert read_secret(tmp_path / "other.key") != secret


def test_cut_secret_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret.key"
    file.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="expected 32 bytes, found 5; restore it, or delete it"):
        read_secret(file)


def test_key_depends_on_the_secret_and_every_label() -> None:
    keys = [
        derive_key(SECRET, "noise", 1),
        derive_key(SECRET, "noise", 2),
        derive_key(SECRET, "noise1"),
        derive_key(bytes(32), "noise", 1),
        derive_key(SECRET, "nois", "e", 1),
    ]
    assert len(set(keys)) == len(keys)
    assert derive_key(SECRET, "noise", 1) == keys[0]


def test_normal_numbers_have_mean_zero_variance_one_and_gaussian_tails() -> None:
    numbers = draw_normal(SECRET, 200_001)
    assert (numbers.dtype, numbers.numel()) == (torch.float64, 200_001)
    assert abs(float(numbers.mean())) < 0.01
    assert abs(float(numbers.var()) - 1) < 0.01
    for bound, share in ((1.0, 0.31731), (2.0, 0.04550), (3.0, 0.00270)):
        assert float((numbers.abs() > bound).double().mean()) == pytest.approx(share, rel=0.1)
    # Pairs of one radius: their product must not show it.
    half = (numbers.numel() + 1) // 2
    pairs = numbers[: half - 1] * numbers[half:]
    assert abs(float(pairs.mean())) < 0.01


def test_uniform_numbers_never_reach_zero_or_one() -> None:
    numbers = draw_uniform(SECRET, 100_000)
    assert 0 < float(numbers.min()) < 1e-4
    assert 1 - 1e-4 < float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.005)


def test_same_key_gives_the_same_numbers_and_another_key_independent_ones() -> None:
    assert torch.equal(draw_normal(SECRET, 1000), draw_normal(SECRET, 1000))
    assert torch.equal(draw_uniform(SECRET, 100), draw_uniform(SECRET, 1000)[:100])
    other = draw_normal(bytes(32), 1000)
    assert abs(float(torch.corrcoef(torch.stack([draw_normal(SECRET, 1000), other]))[0, 1])) < 0.15
