"""``flare-sparse check``: find in seconds, and report together, what would stop a run."""

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
from .console import get_exit_code
from .console import out as console
from .options import ConfigFile, Overrides
from .sites import prepare_site_data

T = TypeVar("T")


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    site_policy: Annotated[
        Path | None,
        typer.Option(help="Check the job against a site's policy, too: a file, or one of open, careful, strict"),
    ] = None,
) -> None:
    """Check a configuration: its settings, the sites' data, the model and one training step.

    Every problem gets a FAIL line with its cause and the way out. Nothing leaves this machine.

    [dim]flare-sparse check app_configs/neurosfl_brain_age.yaml --set method.sparsity=0.95[/]

    [dim]flare-sparse check app_configs/neurosfl_brain_age.yaml --site-policy careful[/]
    """
    report = Report()
    settings = report.attempt("configuration", lambda: load_config(config, overrides or ()), _describe_settings)
    if settings is None:
        raise typer.Exit(report.code)
    report.attempt("federation", lambda: settings.federation.note, str)
    task = report.attempt("task", lambda: load_task(settings, config.parent), lambda task: type(task).__name__)
    if task is not None:
        layout = report.attempt("model", lambda: _build_layout(task), lambda layout: f"{layout.size:,} scalars")
        with tempfile.TemporaryDirectory() as folder:
            examples = _load_examples(report, settings, task, Path(folder))
            if layout is not None:
                report.attempt("method", lambda: build_method(settings, layout), _describe_method)
            if layout is not None and examples:
                report.attempt(
                    "one training step", lambda: _take_step(settings, task, layout, examples), _describe_step
                )
            if layout is not None and site_policy is not None:
                report.attempt("site policy", lambda: _check_policy(settings, task, examples, site_policy), str)
    raise typer.Exit(report.code)


class Report:
    """PASS, SKIP and FAIL lines; ``code`` is the exit code of the first failure, or 0."""

    def __init__(self) -> None:
        self.code = 0

    def attempt(self, check: str, action: Callable[[], T], describe: Callable[[T], str]) -> T | None:
        """Return the result of ``action`` and print a PASS line, or print a FAIL line and return None."""
        try:
            result = action()
        except FlareSparseError as error:
            self.code = self.code or get_exit_code(error)
            self._print_line("[bold red]FAIL[/]", check, f"{error.code}\n{error}")
            return None
        # A user task's own code may raise anything; the other checks still run.
        except Exception as error:  # noqa: BLE001
            self.code = self.code or 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._print_line(
                "[bold red]FAIL[/]", check, f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            )
            return None
        self._print_line("[bold green]PASS[/]", check, describe(result))
        return result

    def skip(self, check: str, reason: str) -> None:
        """Print that this configuration leaves no way to check something."""
        self._print_line("[bold yellow]SKIP[/]", check, reason)

    @staticmethod
    def _print_line(verdict: str, check: str, detail: str) -> None:
        console.print(verdict, end=" ")
        console.print(f"{check}: {detail}", markup=False)


def _describe_settings(settings: RunConfig) -> str:
    return f"{settings.name}, method {settings.method.name}, task {settings.task.name}"


def _build_layout(task: Task) -> Layout:
    return Layout.from_module(task.model())


def _load_examples(report: Report, settings: RunConfig, task: Task, folder: Path) -> dict[str, Examples]:
    """Load the examples of every simulated site; empty without a ``simulator`` section."""
    if settings.simulator is None:
        report.skip(
            "sites",
            "there is no simulator section; flare-sparse site preflight KIT --job CONFIG reads the data at each site",
        )
        return {}
    sites = report.attempt("sites", lambda: prepare_site_data(settings, task, folder), ", ".join)
    examples = {
        name: report.attempt(f"data of {name}", partial(task.load, data, settings.seed), _describe_examples)
        for name, data in (sites or {}).items()
    }
    return {name: loaded for name, loaded in examples.items() if loaded is not None}


def _describe_method(method: Method[Any, Any]) -> str:
    return method.note or method.name


def _describe_examples(examples: Examples) -> str:
    skipped = f", {examples.skipped} skipped" if examples.skipped else ""
    return f"{examples.n_train} training and {examples.n_test} test examples{skipped}"


def _take_step(settings: RunConfig, task: Task, layout: Layout, examples: dict[str, Examples]) -> float:
    """Return the L2 distance that one optimiser step at the first site moves the model.

    Raises:
        TrainingDiverged: the step ends in values that are not finite.
    """
    name = min(examples)
    training = settings.method.config.training
    site = Site(name, task, examples[name], layout, settings.seed)
    module = task.model()
    start = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))
    moved = site.train(start, Mask.full(layout.size), training, 1, steps=1) - start
    distance = float(torch.linalg.vector_norm(moved))
    if not math.isfinite(distance):
        raise TrainingDiverged(
            f"one training step at {name} ends in values that are not finite; lower method.training.lr"
        )
    return distance


def _check_policy(settings: RunConfig, task: Task, examples: dict[str, Examples], name_or_file: Path) -> str:
    """Check the job against a policy.

    Raises:
        ConfigError: there is no such policy, or its file is malformed.
        PolicyRefusal: the policy would refuse the job; every reason is listed.
    """
    from ..policy.check import find_policy_conflicts
    from ..policy.policy import find_policy_file, read_policy

    policy = read_policy(find_policy_file(name_or_file))
    counts = {site: loaded.n_train for site, loaded in examples.items()}
    if reasons := find_policy_conflicts(policy, settings, assemble(settings, task), counts):
        raise PolicyRefusal(
            "\n".join([f"{name_or_file} would refuse this job:", *(f"  {reason}" for reason in reasons)])
        )
    caveat = "" if examples else "; without data the numbers of examples were not checked"
    return f"{name_or_file} lets this job through{caveat}"


def _describe_step(distance: float) -> str:
    return f"the model moved by {distance:.3g}"
