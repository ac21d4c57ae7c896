"""``flare-sparse check``: everything that can be wrong before a run, found in seconds and said at once."""

from __future__ import annotations

import math
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

from ..assemble import assemble
from ..config import RunConfig, build_method, load_config, load_task
from ..errors import FlareSparseError, PolicyRefusal
from ..mask import Mask
from ..methods import Method
from ..params import Layout
from ..task import Examples, Task
from ..training import Site
from ..training.loop import TrainingDiverged
from .console import exit_code
from .console import out as console
from .sites import simulated_sites

T = TypeVar("T")


def check(
    config: Annotated[Path, typer.Argument(help="Configuration file.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, as often as needed.")] = None,
    site_policy: Annotated[
        Path | None, typer.Option(help="a site's policy, a file or open, careful, strict: would this job pass there?")
    ] = None,
) -> None:
    """Check a configuration, its data, the model and one training step; nothing is sent anywhere.

    [dim]flare-sparse check app_configs/neurosfl_brain_age.yaml --set method.sparsity=0.95[/]

    [dim]flare-sparse check app_configs/neurosfl_brain_age.yaml --site-policy careful[/]
    """
    report = Report()
    settings = report.passes("configuration", lambda: load_config(config, overrides or ()), _named)
    if settings is None:
        raise typer.Exit(report.code)
    report.passes("federation", lambda: settings.federation.note, str)
    task = report.passes("task", lambda: load_task(settings, config.parent), lambda made: type(made).__name__)
    if task is not None:
        layout = report.passes("model", lambda: _layout(task), lambda made: f"{made.size:,} scalars")
        with tempfile.TemporaryDirectory() as folder:
            examples = _data(report, settings, task, Path(folder))
            if layout is not None:
                report.passes("method", lambda: _method(settings, layout), _noted)
            if layout is not None and examples:
                report.passes("one training step", lambda: _step(settings, task, layout, examples), _moved)
            if layout is not None and site_policy is not None:
                report.passes("site policy", lambda: _policy(settings, task, examples, site_policy), str)
    raise typer.Exit(report.code)


class Report:
    """PASS, SKIP and FAIL lines; ``code`` is how the command ends: that of the first failure."""

    def __init__(self) -> None:
        self.code = 0

    def passes(self, what: str, attempt: Callable[[], T], detail: Callable[[T], str]) -> T | None:
        """What ``attempt`` returns, or None when it fails; a task's own code may fail in any way."""
        try:
            result = attempt()
        except FlareSparseError as error:
            self.code = self.code or exit_code(error)
            self._line("[bold red]FAIL[/]", what, f"{error.code}\n{error}")
            return None
        except Exception as error:  # noqa: BLE001
            self.code = self.code or 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._line("[bold red]FAIL[/]", what, f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
            return None
        self._line("[bold green]PASS[/]", what, detail(result))
        return result

    def skips(self, what: str, why: str) -> None:
        """What this configuration leaves no way to look at."""
        self._line("[bold yellow]SKIP[/]", what, why)

    @staticmethod
    def _line(verdict: str, what: str, detail: str) -> None:
        console.print(verdict, end=" ")
        console.print(f"{what}: {detail}", markup=False)


def _named(settings: RunConfig) -> str:
    return f"{settings.name}, method {settings.method.name}, task {settings.task.name}"


def _layout(task: Task) -> Layout:
    return Layout.from_module(task.model())


def _data(report: Report, settings: RunConfig, task: Task, folder: Path) -> dict[str, Examples]:
    """The examples of every simulated site that can be read; none where every site has its own data."""
    if settings.simulator is None:
        report.skips(
            "sites", "no simulator section: at each site, flare-sparse site preflight KIT --job CONFIG reads its data"
        )
        return {}
    sites = report.passes("sites", lambda: simulated_sites(settings, task, folder), ", ".join)
    read = {
        name: report.passes(f"data of {name}", partial(task.load, data, settings.seed), _counted)
        for name, data in (sites or {}).items()
    }
    return {name: examples for name, examples in read.items() if examples is not None}


def _method(settings: RunConfig, layout: Layout) -> Method[Any]:
    return build_method(settings, layout)


def _noted(method: Method[Any]) -> str:
    return method.note or method.name


def _counted(examples: Examples) -> str:
    skipped = f", {examples.skipped} skipped" if examples.skipped else ""
    return f"{examples.n_train} training and {examples.n_test} test examples{skipped}"


def _step(settings: RunConfig, task: Task, layout: Layout, examples: dict[str, Examples]) -> float:
    """Distance that one optimiser step at the first site moves the model."""
    name = min(examples)
    training = settings.method.config.training
    site = Site(name, task, examples[name], layout, settings.seed)
    module = task.model()
    start = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))
    moved = site.train(start, Mask.full(layout.size), training, 1, steps=1) - start
    distance = float(torch.linalg.vector_norm(moved))
    if not math.isfinite(distance):
        raise TrainingDiverged(f"one step at {name} ends in numbers that are not finite; lower method.training.lr")
    return distance


def _policy(settings: RunConfig, task: Task, examples: dict[str, Examples], said: Path) -> str:
    """The job held against a policy.

    Raises:
        ConfigError: there is no such file, or it is malformed.
        PolicyRefusal: the job would be refused; every reason is listed.
    """
    from ..policy.check import find_policy_conflicts  # FLARE takes seconds to import
    from ..policy.policy import policy_file, read_policy

    policy = read_policy(policy_file(said))
    counts = {name: own.n_train for name, own in examples.items()}
    if reasons := find_policy_conflicts(policy, settings, assemble(settings, task), counts):
        raise PolicyRefusal("\n".join([f"{said} would refuse this job:", *(f"  {reason}" for reason in reasons)]))
    unread = "" if examples else ", as far as that shows without data: how many examples an answer is of is not judged"
    return f"{said} lets this job through{unread}"


def _moved(distance: float) -> str:
    return f"the model moved by {distance:.3g}"
