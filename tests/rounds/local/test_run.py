"""A site that fails in a local run is treated as a site of FLARE: the run continues, and a code is what is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from torch.utils.data import TensorDataset
from toy import Toy, ToyBench

from flare_sparse.core.errors import DataError, MissingBase, RoundFailed, format_site_error
from flare_sparse.flare import executor
from flare_sparse.flare.payload import MISSING_BASE_HEADER, get_refusal_code
from flare_sparse.rounds.local.dry_run import DryTrainer, dry_run
from flare_sparse.rounds.local.run import Course, run_locally
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, Site, Training, build_site

SECRET = "subject 4711"


class Failing(Toy):
    """A task whose loss fails at a site."""

    def __init__(self, error: Exception | float):
        super().__init__()
        self.error = error

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        if isinstance(self.error, Exception):
            raise self.error
        return super().loss(model, batch) * self.error


FAILURES = {
    "diverges": (Failing(float("nan")), "E_DIVERGED"),
    "data": (Failing(DataError(SECRET)), "E_DATA"),
    "memory": (Failing(MemoryError()), "E_MEMORY"),
    "other": (Failing(KeyError(SECRET)), "E_SITE"),
}


def build_failing_site(bench: ToyBench, task: Toy) -> Site:
    x = torch.randn(8, 12)
    return build_site(
        LocalTask.open(
            "site-1", task, Examples(TensorDataset(x, x[:, :1]), TensorDataset(x, x[:, :1])), bench.layout, 1
        )
    )


@pytest.mark.parametrize("failure", FAILURES)
def test_failing_site_is_rejected_with_the_code_of_the_executor(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, (task, code) = ToyBench(), FAILURES[failure]
    sites: dict[str, Any] = {**bench.sites(), "site-1": build_failing_site(bench, task)}
    errors: list[tuple[str, Exception]] = []
    outcome, _ = run_locally(
        bench.method("fedavg", rounds=1),
        bench.weights,
        sites,
        bench.task.metric,
        course=Course(on_site_error=lambda *error: errors.append(error)),
    )
    assert outcome.rounds[0].rejected == {"site-1": code}
    assert outcome.rounds[0].sites_contributed == ["site-2", "site-3"]
    assert [site for site, _ in errors] == ["site-1"]
    assert refuse(errors[0][1], monkeypatch) == (code, False)


def refuse(error: Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[str, bool]:
    """Return the code that FLARE's executor answers with when a site raises ``error``, and whether it lost its base."""

    def fail(_: Any) -> Any:
        raise error

    monkeypatch.setattr(executor, "get_site_session", fail)
    monkeypatch.setattr(executor, "write_site_error", lambda *report: None)
    monkeypatch.setattr(executor.SparseExecutor, "log_error", lambda *line: None)
    reply = executor.SparseExecutor("fedavg", "toy", {}).execute("exchange", Shareable(), None, Signal())  # type: ignore[arg-type]
    assert SECRET not in str(reply)
    return get_refusal_code(reply), reply.get_header(MISSING_BASE_HEADER)


def test_executor_reports_a_lost_base_as_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refuse(MissingBase("E_NOT_HELD", "base", 1, 2), monkeypatch) == ("E_NOT_HELD", True)


@pytest.mark.parametrize(("error", "code"), [(DataError(SECRET), "E_DATA"), (KeyError(SECRET), "E_SITE")])
def test_site_that_cannot_load_its_data_is_rejected_in_every_round(error: Exception, code: str) -> None:
    bench = ToyBench()
    sites: dict[str, Any] = {**bench.sites(), "site-2": error}
    reports: set[str] = set()
    outcome, _ = run_locally(
        bench.method("fedavg", rounds=2),
        bench.weights,
        sites,
        bench.task.metric,
        course=Course(on_site_error=lambda _, error: reports.add(format_site_error(error))),
    )
    assert len(reports) == 1, "one report for all rounds"
    without = {name: site for name, site in bench.sites().items() if name != "site-2"}
    alone, _ = run_locally(bench.method("fedavg", rounds=2), bench.weights, without, bench.task.metric)
    assert [record.rejected for record in outcome.rounds] == [{"site-2": code}] * 3
    assert torch.equal(outcome.weights, alone.weights)


def test_run_in_which_every_site_fails_names_the_codes() -> None:
    bench = ToyBench()
    sites = {"site-1": DataError(SECRET), "site-2": ValueError(SECRET)}
    with pytest.raises(RoundFailed, match=r"site-1 E_DATA, site-2 E_SITE; timed out: none\. No round") as failed:
        run_locally(
            bench.method("fedavg"),
            bench.weights,
            sites,
            bench.task.metric,
            course=Course(on_site_error=lambda *_: None),
        )
    assert SECRET not in str(failed.value)


def test_dry_run_raises_the_error_of_a_site() -> None:
    """A dry site has no data, so the error is one of the settings."""

    class Broken(DryTrainer):
        def train(self, training: Training) -> torch.Tensor:
            raise ValueError("no such layer")

    bench = ToyBench()
    sites = {"site-1": Site("site-1", Broken("site-1", bench.layout))}
    with pytest.raises(ValueError, match="no such layer"):
        dry_run(bench.method("fedavg"), bench.weights, sites)
