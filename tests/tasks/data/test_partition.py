"""Partitions of a data set into sites: disjoint, complete, of the right sizes, reproducible and terminating."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.data.partition import (
    PARTITIONS,
    AgePartition,
    DirichletPartition,
    FewClassesPartition,
    IidPartition,
    NaturalPartition,
    Partition,
    compute_sizes,
    find_renamed_sites,
    partition_cohort,
)
from flare_sparse.tasks.task import Cohort


def examples(labels: Sequence[object], ages: Sequence[float] | None = None) -> Cohort:
    ids = tuple(f"e{i}" for i in range(len(labels)))
    columns = {"site": np.array(labels), "label": np.array(labels), "age": np.array(ages or range(len(ids)))}
    return Cohort(ids, columns)


def sizes(partition: Partition) -> list[int]:
    return [len(ids) for ids in partition.values()]


def complete(partition: Partition, cohort: Cohort) -> bool:
    """Every example is at exactly one site."""
    return sorted(i for ids in partition.values() for i in ids) == sorted(cohort.ids)


# few_classes drops the examples that no site takes.
COMPLETE = set(PARTITIONS) - {"few_classes", "shared"}
LABELS = st.lists(st.integers(0, 3), min_size=40, max_size=120)


@pytest.mark.slow
@given(labels=LABELS, kind=st.sampled_from(sorted(COMPLETE)), sites=st.integers(1, 8), seed=st.integers(0, 99))
def test_partition_is_disjoint_complete_and_reproducible(labels: list[int], kind: str, sites: int, seed: int) -> None:
    cohort = examples(labels)
    chosen = {} if kind == "age" else {"seed": seed}
    count = None if kind == "natural" else sites
    first, second = (PARTITIONS[kind](**chosen).divide(cohort, count) for _ in range(2))
    assert first == second
    assert complete(first, cohort)
    assert min(sizes(first)) >= 1


@settings(deadline=None)
@given(
    labels=LABELS,
    alpha=st.sampled_from([1e-300, 1e-6, 0.01, 0.3, 1.0, 1e6]),
    sites=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_dirichlet_is_balanced_and_ends_even_with_one_hot_proportions(
    labels: list[int], alpha: float, sites: int, seed: int
) -> None:
    cohort = examples(labels)
    partition = DirichletPartition(alpha=alpha, seed=seed).divide(cohort, sites)
    assert complete(partition, cohort)
    assert max(sizes(partition)) - min(sizes(partition)) <= 1
    assert min(sizes(partition)) >= 5


def test_smaller_dirichlet_alpha_mixes_classes_less() -> None:
    cohort = examples([i % 4 for i in range(400)])
    labels = dict(zip(cohort.ids, cohort.columns["label"], strict=True))

    def largest_share(alpha: float) -> float:
        parts = DirichletPartition(alpha=alpha, seed=1).divide(cohort, 4).values()
        return float(np.mean([np.bincount([labels[i] for i in ids]).max() / len(ids) for ids in parts]))

    assert largest_share(1e6) < 0.35
    assert largest_share(0.05) > 0.6


def test_dirichlet_refuses_too_few_examples_per_site() -> None:
    with pytest.raises(DataError, match="19 examples are too few for 4 sites with 5 each; request fewer sites"):
        DirichletPartition().divide(examples([0] * 19), 4)


@given(total=st.integers(1, 500), sites=st.integers(1, 30), kind=st.sampled_from(["uniform", "skewed"]))
def test_sizes_sum_to_total_and_never_increase(total: int, sites: int, kind: str) -> None:
    if total < sites:
        with pytest.raises(DataError, match=f"{total} examples cannot fill {sites} sites"):
            compute_sizes(total, sites, kind)  # type: ignore[arg-type]
        return
    counts = compute_sizes(total, sites, kind)  # type: ignore[arg-type]
    assert sum(counts) == total
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1


def test_uniform_sizes_are_equal_and_skewed_sizes_fall_geometrically() -> None:
    assert compute_sizes(1000, 8) == [125] * 8
    assert compute_sizes(1000, 8, "skewed") == [317, 222, 156, 109, 77, 54, 38, 27]


@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_age_ranges_of_sites_do_not_overlap(kind: str) -> None:
    ages = np.random.default_rng(0).permutation(100) / 2
    cohort = examples([0] * 100, ages.tolist())
    partition = AgePartition(sizes=kind).divide(cohort, 5)  # type: ignore[arg-type]
    ranges = [[cohort.columns["age"][int(i[1:])] for i in ids] for ids in partition.values()]
    assert all(max(a) < min(b) for a, b in pairwise(ranges))
    assert sizes(partition) == compute_sizes(100, 5, kind)  # type: ignore[arg-type]


def test_every_iid_site_covers_the_whole_population() -> None:
    partition = IidPartition(seed=3).divide(examples([0] * 200), 4)
    numbers = [[int(i[1:]) for i in ids] for ids in partition.values()]
    assert max(min(n) for n in numbers) < 20
    assert min(max(n) for n in numbers) > 180
    assert IidPartition(seed=4).divide(examples([0] * 200), 4) != partition


def test_natural_partition_uses_sanitized_site_names() -> None:
    partition = NaturalPartition().divide(examples(["B", "A", "B", "C d"]))
    assert partition == {"A": ("e1",), "B": ("e0", "e2"), "C-d": ("e3",)}


def test_natural_partition_keeps_the_largest_sites() -> None:
    assert list(NaturalPartition().divide(examples(["B", "A", "B", "C", "C"]), 2)) == ["B", "C"]
    with pytest.raises(DataError, match="4 sites were requested, but column 'site' has 3"):
        NaturalPartition().divide(examples(["B", "A", "B", "C"]), 4)


def test_natural_site_is_split_further_at_random() -> None:
    cohort = examples(["IXI-HH"] * 10 + ["NSK"] * 3)
    partition = NaturalPartition(split={"IXI-HH": 4}, seed=1).divide(cohort)
    assert {name: len(ids) for name, ids in partition.items()} == {
        "IXI-HH-1": 3,
        "IXI-HH-2": 3,
        "IXI-HH-3": 2,
        "IXI-HH-4": 2,
        "NSK": 3,
    }
    assert complete(partition, cohort)
    assert NaturalPartition(split={"IXI-HH": 4}, seed=2).divide(cohort) != partition


@pytest.mark.parametrize(
    ("labels", "settings_", "message"),
    [
        (["A", ""], {}, "column 'site' has no value for 1 of 2 examples"),
        (
            ["A", "B"],
            {"column": "sites"},
            "no column 'sites'. Did you mean 'site'? Found: site, label, age",
        ),
        (["A", "B"], {"split": {"AA": 2}}, "split: 'AA' is not in column 'site'. Did you mean 'A'?"),
        (["A", "A"], {"split": {"A": 3}}, "2 examples cannot fill 3 sites"),
        (["A b", "A-b"], {}, "sites 'A b', 'A-b' would all be named 'A-b'"),
        (["Hôpital", "Hopital"], {}, "sites 'Hopital', 'Hôpital' would all be named 'Hopital'"),
        (["京都A", "B"], {}, "site '京都A': '京' cannot be written with the letters A to Z"),
        (["...", "B"], {}, "site '...' has no letter or digit"),
    ],
)
def test_natural_partition_explains_unusable_settings(
    labels: list[str], settings_: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        NaturalPartition(**settings_).divide(examples(labels))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_site_names_reserved_by_flare_are_prefixed() -> None:
    assert list(NaturalPartition().divide(examples(["server", "1.0"]))) == ["1-0", "site-server"]


@pytest.mark.parametrize(
    ("name", "flare_name"),
    [("Hôpital Saint-Étienne", "Hopital-Saint-Etienne"), ("Gießen", "Giessen"), ("Łódź", "Lodz"), ("A_1", "A_1")],
)
def test_accents_are_dropped_from_site_names_and_listed(name: str, flare_name: str) -> None:
    cohort = examples([name, "B"])
    assert list(NaturalPartition().divide(cohort)) == sorted([flare_name, "B"])
    assert find_renamed_sites(cohort) == ({} if name == flare_name else {name: flare_name})


def test_partition_by_range_refuses_text() -> None:
    with pytest.raises(DataError, match=r"column 'site': 'A' \(row 1\) is no number"):
        AgePartition(column="site").divide(examples(["A", "B"]), 2)


@given(st.integers(2, 12), st.integers(1, 3), st.integers(0, 5))
def test_few_classes_partition_keeps_classes_and_size_limits(sites: int, classes: int, seed: int) -> None:
    members = Cohort(tuple(f"e{i}" for i in range(800)), {"label": np.arange(800) % 8})
    wanted = {"classes": classes, "min_examples": 8, "max_examples": 40, "seed": seed}
    parts = FewClassesPartition(**wanted).divide(members, sites)
    assert parts == FewClassesPartition(**wanted).divide(members, sites)
    taken = [i for part in parts.values() for i in part]
    assert len(set(taken)) == len(taken)
    for part in parts.values():
        counts = np.bincount([int(i[1:]) % 8 for i in part], minlength=8)
        assert 8 <= len(part) <= 40
        assert np.count_nonzero(counts) == classes
        assert counts[counts > 0].max() - counts[counts > 0].min() <= 1


def test_few_classes_partition_reproduces_metagater_cifar10_sizes() -> None:
    """50 sites of 221 to 2792 examples out of 60,000."""
    members = Cohort(tuple(map(str, range(60_000))), {"label": np.arange(60_000) % 10})
    sizes = [
        len(part) for part in FewClassesPartition(min_examples=221, max_examples=2792).divide(members, 50).values()
    ]
    assert 221 <= min(sizes) < 400
    assert 2000 < max(sizes) <= 2792


@pytest.mark.parametrize(
    ("sites", "wanted", "message"),
    [
        (3, {"min_examples": 40, "max_examples": 30}, "min_examples <= max_examples"),
        (3, {"classes": 9}, "9 of 8 classes"),
        (30, {"min_examples": 40, "max_examples": 50}, "too few for 30 sites"),
    ],
)
def test_few_classes_partition_explains_unusable_settings(sites: int, wanted: dict[str, int], message: str) -> None:
    members = Cohort(tuple(map(str, range(800))), {"label": np.arange(800) % 8})
    with pytest.raises(DataError, match=message):
        FewClassesPartition(**wanted).divide(members, sites)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("natural", {"column": "label", "split": {"0": 2}}),
        ("iid", {}),
        ("age", {"column": "label"}),
        ("dirichlet", {"min_examples": 1}),
        ("few_classes", {"classes": 1, "min_examples": 2, "max_examples": 4}),
    ],
)
def test_examples_of_a_subject_are_at_one_site(kind: str, options: dict[str, Any]) -> None:
    """Every subject has two sessions; their labels may differ, and those of the first one count."""
    names = [f"sub-{subject}_ses-{session}" for subject in range(20) for session in (1, 2)]
    labels = np.array([str((subject + session) % 2) for subject in range(20) for session in (0, 1)])
    cohort = Cohort(tuple(names), {"label": labels}, tuple(name.partition("_")[0] for name in names))
    parts = partition_cohort(PARTITIONS[kind](**options), cohort, 3)
    owners = [{name.partition("_")[0] for name in part} for part in parts.values()]
    assert len(owners) == 3
    assert sum(map(len, owners)) == len(set().union(*owners))
    assert sum(map(len, parts.values())) == 2 * sum(map(len, owners))


def test_subject_may_have_been_at_two_sites_that_the_data_names() -> None:
    cohort = Cohort(("a_1", "a_2", "b_1"), {"site": np.array(["x", "y", "y"])}, ("a", "a", "b"))
    assert partition_cohort(NaturalPartition(), cohort, None) == {"x": ("a_1",), "y": ("a_2", "b_1")}
