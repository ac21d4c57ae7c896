"""Attribution of examples to sites on planted features."""

from __future__ import annotations

import numpy as np
import pytest

from flare_sparse.results.audit.attribution import attribute_examples, measure_attribution

SITES = np.repeat(["a", "b", "c", "d"], 30)


def test_feature_of_the_site_is_attributed_exactly() -> None:
    features = (SITES[:, None] == np.unique(SITES)).astype(float)
    result = attribute_examples(features, SITES, 100, seed=0)
    assert result is not None
    assert (result.accuracy, result.chance, result.sites, result.interval) == (1.0, 0.25, 4, (1.0, 1.0))


def test_features_without_information_are_at_chance() -> None:
    features = np.random.default_rng(0).normal(size=(120, 2))
    result = attribute_examples(features, SITES, 200, seed=0)
    assert result is not None
    assert result.interval is not None
    assert result.interval[0] < 0.25 < result.interval[1]


def test_accuracy_weighs_sites_equally() -> None:
    sites = np.array(["a"] * 9 + ["b"])
    result = measure_attribution(np.array(["a"] * 10), sites, 0)
    assert (result.accuracy, result.interval) == (0.5, None)


@pytest.mark.parametrize("sites", [["a"] * 20, ["a"] * 20 + ["b"] * 4])
def test_one_site_cannot_be_attributed(sites: list[str]) -> None:
    assert attribute_examples(np.ones((len(sites), 1)), np.array(sites), 10, seed=0) is None
