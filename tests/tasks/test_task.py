"""What a user task hands over is checked where it enters: metrics, cohorts and examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from toy import Toy

from flare_sparse.core.errors import ConfigError, DataError, MetricsError, TaskFailed
from flare_sparse.tasks.table import TableTask
from flare_sparse.tasks.task import Cohort, Examples, Metric, SiteData, load_examples

DATA = TensorDataset(torch.zeros(4, 12), torch.zeros(4, 1))


class Reporting(Toy):
    """A task whose metrics a test sets."""

    result: Any = None

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return self.result


def evaluate(result: Any, metric: Metric | None = None) -> dict[str, float]:
    task = Reporting()
    task.result = result
    if metric is not None:
        task.metric = metric  # type: ignore[misc]
    return task.evaluate(task.model(), DATA)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mae", "", "minimise"), "mode is 'minimise'; expected 'min'"),
        (("mae", "", "MAX"), "mode is 'MAX'; expected 'min'"),
        (("", "", "min"), "name is ''; expected the key of the main metric"),
        (("test_examples", "", "min"), "are reserved"),
        (("validation_mae", "", "min"), "are reserved"),
    ],
)
def test_unusable_metric_is_refused_where_it_is_written(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Metric(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"mse": 1.0, "f1": float("nan")}, "Reporting.metrics(): 'f1' is nan; expected a finite number"),
        ({"mse": float("-inf")}, "'mse' is -inf; expected a finite number"),
        ({"mse": torch.tensor(1.0)}, "'mse' is Tensor; expected a finite number, such as float(value)"),
        ({"mse": "1"}, "'mse' is '1'; expected a finite number"),
        ({"mse": None}, "'mse' is None; expected a finite number"),
        ({1: 1.0}, "the name 1 is int; expected text"),
        (
            {"mse": 1.0, "validation_mse": 1.0},
            "the name 'validation_mse' is str; expected text that does not start with 'validation_', which is reserved",
        ),
        ({"mae": 1.0}, "has no 'mse', by which rounds and models are compared; it has mae"),
        ({}, "it has nothing"),
        (1.0, "returned float; expected a dict"),
    ],
)
def test_unusable_result_of_metrics_names_its_key(result: Any, message: str) -> None:
    with pytest.raises(MetricsError) as caught:
        evaluate(result)
    assert message in str(caught.value)
    assert caught.value.code == "E_METRICS"


def test_model_that_predicts_nan_is_not_right_where_the_first_class_is_the_target() -> None:
    task = TableTask({"kind": "classes", "target": "y", "features": ["x"], "classes": ["a", "b", "c"]})
    model, rows = task.model(), TensorDataset(torch.ones(5, 1), torch.zeros(5, 1))
    assert set(task.evaluate(model, rows)) == {"accuracy", "balanced_accuracy"}
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(MetricsError, match=r"TableTask\.predict\(\) returned NaN for 5 of 5 examples: the model has"):
        task.evaluate(model, rows)


def test_numbers_of_numpy_become_plain_floats() -> None:
    metrics = evaluate({"mse": np.float32(0.5), "n": np.int64(3), "exact": 1})
    assert metrics == {"mse": 0.5, "n": 3.0, "exact": 1.0}
    assert {type(value) for value in metrics.values()} == {float}


def test_metric_that_may_be_undefined_may_be_omitted() -> None:
    assert evaluate({"brier": 0.1}, Metric("auc", "", "max", may_be_undefined=True)) == {"brier": 0.1}


@pytest.mark.parametrize(
    ("ids", "columns", "message"),
    [
        (("a", "b", "a"), {}, "1 identifiers occur more than once: 'a'"),
        ((1, 2), {}, "identifier 1 is int; expected text, such as str(1)"),
        (("a", "b"), {"age": np.zeros(3)}, "column 'age' has 3 values for 2 examples"),
    ],
)
def test_unusable_cohort_is_refused(ids: Any, columns: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        Cohort(ids, columns)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        ((DATA, DATA), "Loading.load() returned tuple; expected flare_sparse.tasks.task.Examples"),
        (None, "Loading.load() returned NoneType"),
    ],
)
def test_load_that_returns_no_examples_is_explained(tmp_path: Any, loaded: Any, message: str) -> None:
    class Loading(Toy):
        def load(self, data: SiteData, seed: int) -> Any:
            return loaded

    with pytest.raises(DataError) as caught:
        load_examples(Loading(), SiteData("a", tmp_path), 0)
    assert message in str(caught.value)


def test_own_exception_of_load_names_site_file_and_line(tmp_path: Any) -> None:
    class Loading(Toy):
        def load(self, data: SiteData, seed: int) -> Any:
            return np.load(data.path / "missing.npy")

    with pytest.raises(TaskFailed) as caught:
        load_examples(Loading(), SiteData("Bern", tmp_path), 0)
    assert caught.value.code == "E_SITE"
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"site Bern: Loading.load({tmp_path}) failed: FileNotFoundError: ")
    assert f"{__file__}:" in second
    assert second.endswith('in load: return np.load(data.path / "missing.npy")')


def test_task_that_ignores_the_share_for_validation_is_refused() -> None:
    class Ignoring(Toy):
        def load(self, data: SiteData, seed: int) -> Examples:
            return Examples(DATA, DATA)

    site = SiteData("site-1", Path("here"))
    assert load_examples(Ignoring(), site, 1).n_validation == 0
    with pytest.raises(DataError, match=r"no validation examples, but task\.split\.validation is 0\.1"):
        load_examples(Ignoring({"split": {"validation": 0.1}}), site, 1)
