"""Attacks between sites on planted features."""

from __future__ import annotations

import numpy as np
import pytest

from flare_sparse.results.audit.membership import SIGNIFICANCE, attack_between_sites

SITES = np.repeat([f"site-{i}" for i in range(8)], 40)
IS_MEMBER = np.tile(np.arange(40) < 30, 8)


def test_all_56_attacks_succeed_on_a_feature_that_tells_members() -> None:
    noise = np.random.default_rng(0).normal(size=(320, 1))
    features = np.column_stack([10.0 * IS_MEMBER, -1.0 * IS_MEMBER, noise])
    pairs = list(attack_between_sites(features, IS_MEMBER, SITES))
    assert len(pairs) == len({(p.attacker, p.target) for p in pairs}) == 56
    assert all(p.attacker != p.target for p in pairs)
    assert {p.accuracy for p in pairs} == {1.0}
    # One table of 40 examples of 30 members has these margins: 1 / (40 choose 10).
    assert [p.p_value for p in pairs] == pytest.approx([1 / 847660528] * 56)
    assert all(p.p_value < SIGNIFICANCE for p in pairs)


def test_few_attacks_succeed_on_features_without_information() -> None:
    features = np.random.default_rng(1).normal(size=(320, 3))
    pairs = list(attack_between_sites(features, IS_MEMBER, SITES))
    assert np.mean([p.accuracy for p in pairs]) == pytest.approx(0.5, abs=0.05)
    # Fisher's test is conservative: at most 5 % by chance, and attacks of one site are not independent.
    assert sum(p.p_value < SIGNIFICANCE for p in pairs) <= 6


def test_feature_that_differs_in_sign_between_sites_does_not_transfer() -> None:
    sign = np.where(SITES < "site-4", 1.0, -1.0)
    features = (sign * (10.0 * IS_MEMBER - 5))[:, None]
    by_pair = {(p.attacker, p.target): p.accuracy for p in attack_between_sites(features, IS_MEMBER, SITES)}
    assert by_pair["site-0", "site-1"] == 1.0
    assert by_pair["site-0", "site-5"] == 0.0


def test_site_without_test_examples_takes_no_part() -> None:
    is_member = IS_MEMBER | (SITES == "site-7")
    pairs = list(attack_between_sites(np.ones((320, 1)), is_member, SITES))
    assert len(pairs) == 42
    assert {site for p in pairs for site in (p.attacker, p.target)} == set(np.unique(SITES)) - {"site-7"}
