"""What a job's messages say of people, from the record of a site's release."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare_sparse.cohorts.split import SplitConfig
from flare_sparse.core.errors import PolicyRefusal
from flare_sparse.privacy.release import Numbers, Rule, SiteRelease, list_folds, update_record


def test_metrics_of_a_model_that_left_leave_again_whatever_the_rows_are(tmp_path: Path) -> None:
    release = SiteRelease(tmp_path, Rule(10), Numbers(160, 40, 0), "task")
    first = release.publish_metrics({"auc": 0.874, "test_examples": 40.0}, {"auc": 40}, "model")
    assert first == {"auc": 0.75, "test_examples": 40.0}
    assert release.publish_metrics({"auc": 0.1, "mae": 9.0}, {"auc": 40, "mae": 40}, "model")["auc"] == 0.75
    assert release.publish_metrics({"auc": 0.1}, {"auc": 40}, "another model") == {"auc": 0.0}


def test_damaged_record_lets_no_number_leave(tmp_path: Path) -> None:
    (tmp_path / "release.json").write_text("{")
    with pytest.raises(PolicyRefusal, match="the release cannot be read or written"):
        update_record(tmp_path, lambda record: record)  # type: ignore[arg-type, return-value]


def test_parts_of_a_split_are_whole_folds() -> None:
    train, test, validation = list_folds(SplitConfig(test=0.2, validation=0.4, stable=True), 5)
    assert (train, test, validation) == ({"4", "5"}, {"1"}, {"2", "3"})
    assert list_folds(SplitConfig(folds=5, fold=5, validation=0.2, stable=True), 5) == ({"2", "3", "4"}, {"5"}, {"1"})
    with pytest.raises(PolicyRefusal, match="multiples of 1/5"):
        list_folds(SplitConfig(test=0.25), 5)
