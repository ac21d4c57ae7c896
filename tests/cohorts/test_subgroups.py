"""Metrics by subgroup: what is computed, and which small groups stay at the site."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.cohorts.subgroups import (
    ERROR,
    SUBJECTS,
    label_values,
    make_plain,
    measure_subgroups,
    name_metric,
    parse_subgroup,
    split_metric,
    suppress_small,
)
from flare_sparse.core.names import clean_name
from flare_sparse.tasks.task import is_metric_name


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(1, 40), max_size=8), st.integers(2, 20))
def test_no_group_below_the_minimum_is_shown_or_follows_from_the_others(counts: dict[str, int], least: int) -> None:
    """The number of all subjects is known, so what is left out is known in total: it must be none, or enough."""
    metrics = {name_metric(SUBJECTS, "column", label): float(count) for label, count in counts.items()}
    shown = suppress_small(metrics, least)
    assert all(value >= least for value in shown.values())
    hidden = sum(counts.values()) - sum(shown.values())
    assert hidden == 0 or hidden >= least or not shown


def test_metrics_of_a_suppressed_group_go_with_its_count() -> None:
    metrics = {"mae": 5.0, "subjects in sex=F": 12.0, "mae in sex=F": 4.0, "error of mae in sex=F": 1.0}
    assert suppress_small(metrics, 12) == metrics
    assert suppress_small(metrics, 13) == {"mae": 5.0}
    # Metrics without a count never leave.
    assert suppress_small({"mae in sex=F": 4.0}, 0) == {}


def test_measured_groups_have_the_mean_of_their_examples_and_its_standard_error() -> None:
    generator = np.random.default_rng(1)
    errors, sex = generator.normal(5, 2, 400), np.array(["F", "M"])[generator.integers(2, size=400)]

    def measure(rows: np.ndarray) -> Mapping[str, float]:
        return {"mae": float(errors[rows].mean())}

    found = measure_subgroups(measure, {"sex": sex.tolist()}, np.arange(400), 10)
    for label in "FM":
        own = errors[sex == label]
        assert found[f"{SUBJECTS} in sex={label}"] == len(own)
        assert found[f"mae in sex={label}"] == pytest.approx(own.mean())
        assert found[f"{ERROR}mae in sex={label}"] == pytest.approx(own.std(ddof=1) / sqrt(len(own)), rel=0.15)


def test_examples_of_one_subject_count_once_and_are_drawn_together() -> None:
    """Ten subjects with eight equal examples each know no more than ten examples."""
    values = np.repeat(np.random.default_rng(2).normal(0, 1, 10), 8)
    subjects, labels = np.repeat(np.arange(10), 8), {"sex": ["F"] * 80}

    def measure(rows: np.ndarray) -> Mapping[str, float]:
        return {"mae": float(values[rows].mean())}

    found = measure_subgroups(measure, labels, subjects, 10)
    assert found["subjects in sex=F"] == 10
    assert found["error of mae in sex=F"] == pytest.approx(values[::8].std(ddof=1) / sqrt(10), rel=0.2)
    assert measure_subgroups(measure, labels, subjects, 11) == {}


def test_what_a_smaller_minimum_has_left_out_counts_for_a_larger_one() -> None:
    """A job's minimum of 10 has hidden 14 of 40 subjects; a policy of 25 must not show the 26 others."""
    metrics = {"subjects in all=subjects": 40.0, "subjects in age=40 to 60": 26.0, "mae in age=40 to 60": 5.0}
    assert suppress_small(metrics, 14) == metrics
    assert suppress_small(metrics, 25) == {"subjects in all=subjects": 40.0}


def test_metric_that_is_undefined_in_many_resamples_is_left_out() -> None:
    positive = np.arange(40) == 0

    def measure(rows: np.ndarray) -> Mapping[str, float]:
        return {"accuracy": 1.0} | ({"auc": 0.5} if positive[rows].any() else {})

    found = measure_subgroups(measure, {"sex": ["F"] * 40}, np.arange(40), 10)
    assert found.pop("subjects in all=subjects") == 40
    assert found == {"subjects in sex=F": 40.0, "accuracy in sex=F": 1.0, "error of accuracy in sex=F": 0.0}


def test_labels_are_values_or_bins_and_have_no_markup() -> None:
    assert label_values(np.array([59.9, 60.0, -0.5, np.inf]), 10.0) == ["50 to 60", "60 to 70", "-10 to 0", "missing"]
    assert label_values(np.array([260100023.0, 1.5]), None) == ["260100023", "1.5"]
    assert label_values(np.array(["007", "7", "NA"]), None) == ["007", "7", "NA"]
    assert label_values(np.array(["<b>GE</b>", "", "Siemens 3T"]), None) == [
        "\uff1cb\uff1eGE\uff1c/b\uff1e",
        "missing",
        "Siemens 3T",
    ]
    with pytest.raises(ValueError, match="bins need numbers"):
        label_values(np.array(["F"]), 10.0)
    for wrong in ("", "age:", "age:0", "age:ten", "age:10:5"):
        with pytest.raises(ValueError, match=r"expected the name of a column|the width of the bins is 0"):
            parse_subgroup(wrong)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60), min_size=1, max_size=6))
def test_no_metric_of_a_subgroup_vanishes_and_no_two_subgroups_become_one(names: list[str]) -> None:
    """Whatever signs a site's values have: each has a label of its own, which a metric's name may have, or an error."""
    values = np.array(names, dtype=object)
    written_alike = len({make_plain(clean_name(name)) or "missing" for name in names})
    if written_alike < len({clean_name(name) for name in names}):
        with pytest.raises(ValueError, match="would have one label"):
            label_values(values, None)
        return
    labels = label_values(values, None)
    assert len(set(labels)) == written_alike
    for column in ("x" * 100, "dose [mg/l] <b>"):
        for label in labels:
            name = f"error of {name_metric('m' * 64, column, label)}"
            assert is_metric_name(name)
            assert split_metric(name) == (f"error of {'m' * 64}", f"{make_plain(column)}={label}")
