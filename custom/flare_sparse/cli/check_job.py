"""The check of a job: its settings, its model and every site, with a line for each and a verdict."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..config.assemble import assemble, plan_sampling
from ..config.loading import build_method, load_config
from ..config.schema import RunConfig
from ..config.sites import prepare_site_data
from ..config.user_tasks import find_script, list_user_code, load_task
from ..core.errors import ConfigError, DataError, FlareSparseError, PolicyRefusal, describe_exception
from ..core.params import Layout
from ..core.seeds import limit_threads
from ..methods.method import Method
from ..privacy.dp.forecast import Forecast
from ..tasks.adaptation import AdaptableTask
from ..tasks.script import ScriptTask
from ..tasks.task import SiteData, Task
from ..training.compute import can_use_kernels, explain_missing_kernels
from ..training.personal import select_personal
from .check_columns import build_columns_table
from .check_script import ScriptTooSlow, find_extra_training, find_launcher, train_once
from .check_sites import Finding, SiteCheck, build_sites_table, find_federation_problems, merge_findings
from .console import get_exit_code
from .console import out as console
from .screen import Screen

T = TypeVar("T")


def check_job(config: Path, overrides: Sequence[str], site_policy: Path | None) -> int:
    """Print a line for everything that was checked, and the verdict; return the exit code of ``flare-sparse check``."""
    report = Report()
    settings = report.attempt("configuration", lambda: load_config(config, overrides), _describe_settings)
    if settings is not None:
        with limit_threads(settings.torch_threads):
            _check_settings(report, settings, config, site_policy)
    report.print_verdict()
    return report.code


class Report:
    """PASS, SKIP, WARN and FAIL lines, and a verdict; ``code`` is the exit code of the first failure, or 0."""

    def __init__(self) -> None:
        self.code, self.passed = 0, 0
        self.failures: list[str] = []
        self.warnings: list[str] = []

    def attempt(self, check: str, action: Callable[[], T], describe: Callable[[T], str]) -> T | None:
        """Return the result of ``action`` and print a PASS line, or print a FAIL line and return None."""
        try:
            result = action()
        # A user task's own code may raise anything; the other checks still run.
        except Exception as error:  # noqa: BLE001
            self.fail(check, error)
            return None
        self.passed += 1
        self._print_line("[bold green]PASS[/]", check, describe(result))
        return result

    def fail(self, check: str, error: Exception) -> None:
        """Print a FAIL line with the error's code and text, or with the user's line that raised it."""
        self.code = self.code or (get_exit_code(error) if isinstance(error, FlareSparseError) else 1)
        text = f"{error.code}\n{error}" if isinstance(error, FlareSparseError) else describe_exception(error)
        self.failures.append(check)
        self._print_line("[bold red]FAIL[/]", check, text)

    def report_finding(self, finding: Finding) -> None:
        """Print a problem of a site or of the federation as a FAIL or a WARN line."""
        if finding.error is not None:
            self.fail(finding.check, finding.error)
        else:
            self.warn(finding.check, finding.warning)

    def warn(self, check: str, text: str) -> None:
        """Print a WARN line about something that a run survives."""
        self.warnings.append(check)
        self._print_line("[bold yellow]WARN[/]", check, text)

    def skip(self, check: str, reason: str) -> None:
        """Print that this configuration leaves no way to check something."""
        self._print_line("[bold yellow]SKIP[/]", check, reason)

    def print_verdict(self) -> None:
        """Print how many checks failed, and which."""
        warnings = f"; {len(self.warnings)} to look at: {', '.join(self.warnings)}" if self.warnings else ""
        if self.failures:
            failed = f"{len(self.failures)} of {self.passed + len(self.failures)} checks failed"
            console.print(f"[bold red]NOT READY[/] {failed}: {', '.join(self.failures)}{warnings}")
        else:
            console.print(f"[bold green]READY[/] {self.passed} checks passed{warnings}")

    @staticmethod
    def _print_line(verdict: str, check: str, detail: str) -> None:
        console.print(verdict, end=" ")
        console.print(f"{check}: {detail}", markup=False)


def _check_settings(report: Report, settings: RunConfig, file: Path, site_policy: Path | None) -> None:
    """Check everything that follows from valid settings."""
    report.attempt("federation", lambda: settings.federation.note, str)
    task = report.attempt("task", lambda: load_task(settings, file.parent), lambda task: type(task).__name__)
    if task is None:
        return
    if settings.task.has_own_code or settings.method.has_own_code:
        report.attempt("own code", lambda: list_user_code(settings, file.parent), _describe_code)
    layout = report.attempt("model", lambda: _build_layout(task), lambda layout: f"{layout.size:,} scalars")
    if layout is not None and isinstance(task, AdaptableTask) and (base := task.describe_base()):
        report.attempt("base model", lambda: base, str)
    with tempfile.TemporaryDirectory() as folder:
        data = _locate_sites(report, settings, task, Path(folder))
        if layout is not None:
            report.attempt("method", lambda: _build_method(settings, layout), _describe_method)
        if settings.method.config.training.compute == "sparse":
            _check_kernels(report, settings)
        sites = _check_sites(report, settings, file, task, layout, data)
        if settings.privacy is not None and layout is not None:
            _check_privacy(report, settings, task, sites)
        if layout is not None and site_policy is not None:
            counts = {site.name: site.examples.n_train for site in sites if site.examples is not None}
            subjects = _count_subjects(sites)
            report.attempt("site policy", lambda: _check_policy(settings, task, counts, subjects, site_policy), str)


def _check_kernels(report: Report, settings: RunConfig) -> None:
    """Check that simulated sites have the sparse kernels; of real sites, on other machines, only warn."""
    training = settings.method.config.training
    obstacle = explain_missing_kernels(training.select_hardware().device)
    if obstacle and settings.simulator is None:
        report.warn(
            "sparse kernels", f"on this machine {obstacle}; method.training.compute: sparse needs them at sites"
        )
    else:
        check = partial(can_use_kernels, training.compute, training.select_hardware().device)
        report.attempt("sparse kernels", check, lambda _: "available")


def _count_subjects(sites: list[SiteCheck]) -> dict[str, int]:
    """Return the number of training subjects of each site whose examples can be loaded."""
    return {site.name: site.examples.count_train_subjects() for site in sites if site.examples is not None}


def _check_privacy(report: Report, settings: RunConfig, task: Task, sites: list[SiteCheck]) -> None:
    """Check that the network has a gradient for every subject, and show what the job charges each site's subjects."""
    assembly = report.attempt("privacy", lambda: assemble(settings, task), lambda _: "every subject has a gradient")
    if assembly is None or assembly.privacy is None:
        return
    for name, count in _count_subjects(sites).items():
        if count:
            plan = plan_sampling(assembly.method, count)
            report.attempt(f"privacy of {name}", partial(Forecast.compute, assembly.privacy, plan), str)


def _describe_settings(settings: RunConfig) -> str:
    return f"{settings.name}, method {settings.method.name}, task {settings.task.name}"


def _describe_code(code: tuple[Path, ...]) -> str:
    return f"{', '.join(path.name for path in code) or 'installed'}; travels with the job"


def _build_method(settings: RunConfig, network: Layout) -> Method[Any, Any]:
    """Return the method over the tensors that it exchanges."""
    return build_method(settings, network.drop(select_personal(network, settings.method.config.personal)))


def _build_layout(task: Task) -> Layout:
    return Layout.from_module(task.model())


def _locate_sites(report: Report, settings: RunConfig, task: Task, folder: Path) -> dict[str, SiteData]:
    """Return the data of every simulated site; empty without a ``simulator`` section."""
    if settings.simulator is None:
        report.skip(
            "sites",
            "there is no simulator section; flare-sparse site preflight KIT --job CONFIG reads the data at each site",
        )
        return {}
    problems = _SiteProblems(report)
    return report.attempt("sites", lambda: prepare_site_data(settings, task, folder, problems), ", ".join) or {}


class _SiteProblems(Screen):
    """Adds what may be wrong with the sites' data to a report."""

    def __init__(self, report: Report):
        super().__init__()
        self._report = report

    def warn(self, text: str) -> None:
        self._report.warn("sites", text)


def _check_sites(
    report: Report, settings: RunConfig, file: Path, task: Task, layout: Layout | None, data: dict[str, SiteData]
) -> list[SiteCheck]:
    """Check every site, print the table of all of them, and then every problem."""
    if not data:
        return []
    if isinstance(task, ScriptTask):
        _check_script(report, settings, file, task, data)
        return []
    sites = [SiteCheck.run(settings, task, layout, site) for site in data.values()]
    console.print(build_sites_table(sites, task.metric))
    if columns := {site.name: site.columns for site in sites if site.columns}:
        console.print(build_columns_table(columns))
    findings = merge_findings([finding for site in sites for finding in site.findings])
    for finding in [*findings, *find_federation_problems(settings, sites)]:
        report.report_finding(finding)
    report.passed += sum(not any(finding.error for finding in site.findings) for site in sites)
    return sites


def _check_script(report: Report, settings: RunConfig, file: Path, task: ScriptTask, data: dict[str, SiteData]) -> None:
    """Check that the data of every site exists, what is in it only the script knows; and run the script once."""
    for path, sites in _group_by_path(data).items():
        report.attempt(f"data of {', '.join(sites)}", partial(_check_path, path), str)
    try:
        excess = find_extra_training(find_script(settings, file.parent))
    except ConfigError:
        # The check of the own code has said so.
        return
    if excess:
        report.warn("privacy", excess)
    if task.config.launch:
        found = report.attempt("launcher", partial(find_launcher, task.config.launch), str)
        if found is not None:
            remedy = "flare-sparse run CONFIG --set method.rounds=1 does"
            report.skip("training", f"no script is launched here through FLARE; {remedy}")
        return
    site = next((site for site in data.values() if site.path.exists()), None)
    if site is None:
        return
    try:
        text = train_once(settings, file, task, site)
    except ScriptTooSlow as error:
        report.warn(f"training at {site.site}", str(error))
    except Exception as error:  # noqa: BLE001 - the network and the script are the user's
        report.fail(f"training at {site.site}", error)
    else:
        report.attempt(f"training at {site.site}", lambda: text, str)


def _group_by_path(data: dict[str, SiteData]) -> dict[Path, list[str]]:
    groups: dict[Path, list[str]] = {}
    for name, site in data.items():
        groups.setdefault(site.path, []).append(name)
    return groups


def _check_path(path: Path) -> str:
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    return str(path)


def _describe_method(method: Method[Any, Any]) -> str:
    return method.describe() or method.name


def _check_policy(
    settings: RunConfig, task: Task, counts: dict[str, int], subjects: dict[str, int], name_or_file: Path
) -> str:
    """Check the job against a policy.

    Raises:
        ConfigError: there is no such policy, or its file is malformed.
        PolicyRefusal: the policy would refuse the job; every reason is listed.
    """
    from ..config.policy.check import find_policy_conflicts
    from ..config.policy.policy import find_policy_file, read_policy

    policy = read_policy(find_policy_file(name_or_file))
    if reasons := find_policy_conflicts(policy, settings, assemble(settings, task), counts, subjects):
        raise PolicyRefusal(
            "\n".join([f"{name_or_file} would refuse this job:", *(f"  {reason}" for reason in reasons)])
        )
    caveat = "" if counts else "; without data the numbers of examples were not checked"
    return f"{name_or_file} lets this job through{caveat}"
