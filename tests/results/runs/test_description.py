"""What federated statistics warn of before a study runs."""

from __future__ import annotations

from typing import Any

from flare_sparse.results.runs.description import find_warnings


def number(mean: float, stddev: float) -> dict[str, Any]:
    return {"count": 50, "mean": mean, "stddev": stddev}


def share(mean: float) -> dict[str, Any]:
    return number(mean, 0.0)


def test_site_with_one_class_and_scanners_that_differ_are_named() -> None:
    columns = {
        "sick=0": {"A": share(0.6), "B": share(0.5)},
        "sick=1": {"A": share(0.4), "B": share(0.5), "C": share(1.0)},
        "scanner=Prisma": {"A": share(1.0), "B": share(1.0)},
        "scanner=Aera": {"C": share(1.0)},
        "sex=F": {"A": share(0.5), "B": share(0.45), "C": share(0.6)},
        "sex=M": {"A": share(0.5), "B": share(0.55), "C": share(0.4)},
    }
    assert find_warnings(columns, ["A", "B", "C"]) == [
        "sick: C has 1 alone; at all sites it is 0 or 1. A model can learn the site in its place",
        (
            "scanner: A has Prisma alone, B has Prisma alone, C has Aera alone; at all sites it is Aera or Prisma. A "
            "model can learn the site in its place"
        ),
    ]


def test_uneven_labels_and_missing_values_are_named() -> None:
    columns = {
        "stage=I": {"A": share(0.8), "B": share(0.2)},
        "stage=II": {"A": share(0.2), "B": share(0.8)},
        "dose=missing": {"A": share(0.5)},
        "dose": {"A": number(3.0, 1.0), "B": number(3.1, 1.0)},
    }
    assert find_warnings(columns, ["A", "B"]) == [
        "stage is I in 20% of the rows of B and in 80% of A: a common model may learn the site in its place",
        (
            "dose has no value in few or none of the rows of B and in 50% of A: a common model may learn the site in "
            "its place"
        ),
    ]


def test_nothing_is_said_about_a_share_that_a_site_did_not_send() -> None:
    columns = {
        "sex=F": {"B": share(0.58)},
        "sex=M": {"A": share(0.5), "B": share(0.42)},
        "lab=missing": {"B": share(0.4)},
        "lab": {"B": number(0, 1)},
        "tesla": {"A": number(3.5, 0), "B": number(3.5, 0)},
    }
    assert find_warnings(columns, ["A", "B"], ["sex", "dose"]) == [
        "dose: no site reported it: too few rows have a value",
        "lab: A reported none, or too few rows",
        "tesla: 3.5 in all rows: a column that does not vary tells a model nothing",
    ]


def test_column_in_another_unit_is_named_once_and_a_shift_is_none() -> None:
    columns = {
        "height": {"A": number(170, 9), "B": number(172, 9), "C": number(1.7, 0.09)},
        "age": {"A": number(30, 5), "B": number(70, 5), "C": number(50, 5)},
        "dose": {"A": number(3, 1), "C": number(3, 1)},
    }
    assert find_warnings(columns, ["A", "B", "C"]) == [
        "height: the mean of C is 1.7, and 171 at the other sites: is it in another unit?",
        "dose: B reported none, or too few rows",
    ]
