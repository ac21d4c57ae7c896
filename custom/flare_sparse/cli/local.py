"""``--env local``: run a configuration in this process, through the real wire but without FLARE."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..config.assemble import Assembly, assemble, check_kernels, open_checkpoints, open_script_site, open_site
from ..config.schema import RunConfig
from ..config.user_tasks import find_script, list_user_code, load_task
from ..core.errors import ConfigError, format_site_error
from ..core.seeds import limit_threads
from ..methods.method import describe_site_model
from ..privacy.dp.account import PRIVACY_FOLDER, PrivacyAccount
from ..results.report.card import write_card
from ..results.runs.continuation import keep_final_checkpoints
from ..results.runs.folder import RunFolder, build_run_facts, write_layer_compute
from ..results.runs.local import run_assembly
from ..results.runs.model_files import save_site_model
from ..results.runs.progress import ProgressFormatter
from ..results.runs.results import RunResult
from ..rounds.federation import RoundRecord
from ..tasks.script import ScriptConfig, ScriptTask
from ..tasks.task import SiteData
from ..training import Site
from ..wire.ledger import Ledger
from .console import out as stdout
from .keys import decrypt_record, prepare_key_contexts
from .resume import prepare_checkpoints
from .sites import prepare_site_data
from .user_modules import copy_user_code

if TYPE_CHECKING:
    from ..flare.script_process import ScriptProcess

SCRIPTS = "scripts"
"""Folder below the result folder with the working folder and the output of each site's training script."""
ERRORS = "site_errors"
"""Folder below the result folder with a report for each site that failed."""


def run_config_locally(
    config: RunConfig,
    file: Path,
    out: Path,
    *,
    resume: bool = False,
    step_back: int = 0,
    console: Console = stdout,
    on_line: Callable[[dict[str, Any]], None] = lambda line: None,
) -> dict[str, Any]:
    """Run a configuration in this process and write its record.

    Args:
        config: the configuration, with a ``simulator`` section.
        file: where it was read from; a user task's module lies beside it.
        out: result folder.
        resume: continue from the checkpoints in ``out``.
        step_back: number of commits to discard before; see :func:`prepare_checkpoints`.
        console: receives one line per round.
        on_line: called with each line of ``rounds.jsonl``.

    Returns:
        The summary of the run.
    """
    assembly = assemble(config, load_task(config, file.parent))
    check_kernels(assembly.method)
    checkpoints = prepare_checkpoints(config, assembly, out, resume=resume, step_back=step_back)
    contexts = prepare_key_contexts(config, out, resume=resume)
    data = prepare_site_data(config, assembly.task, out)
    runners = _build_script_runners(config, file, data, out / SCRIPTS)
    # The number of threads decides the order of float sums, so data is loaded under the job's own number, as in FLARE.
    with limit_threads(config.torch_threads):
        # A task of its own for each site, as in FLARE: a user task may keep what it has loaded.
        sites = {
            name: _open_site(replace(assembly, task=load_task(config, file.parent)), site_data, runners.get(name), out)
            for name, site_data in data.items()
        }
    facts = build_run_facts(config, assembly)
    ledger, formatter = Ledger(), ProgressFormatter()
    folder = RunFolder(out, facts, assembly.layout, ledger)

    def commit(record: RoundRecord) -> None:
        line = folder.commit(record)
        on_line(line)
        for text in formatter.format_with_events(line):
            console.print(text, markup=False)

    try:
        outcome = run_assembly(
            config,
            assembly,
            sites,
            on_round=commit,
            on_updates=folder.record_updates,
            ledger=ledger,
            stores=lambda end: open_checkpoints(config.job, assembly, checkpoints, end),
            resume=resume,
            contexts=contexts,
            sum_rules=config.sum_rules,
            hubs=config.hubs,
            on_site_error=_SiteErrors(out / ERRORS, console).report,
        )[0]
    finally:
        for runner in runners.values():
            runner.close()
    summary = folder.finish(outcome)
    if describe_site_model(assembly.method.config):
        for name in outcome.rounds[-1].sites_contributed:
            site = sites[name]
            assert isinstance(site, Site), f"{name} contributed, so its data was loaded"
            save_site_model(out, site)
    write_layer_compute(out, {name: site.layer_compute for name, site in sites.items() if isinstance(site, Site)})
    if contexts:
        summary = decrypt_record(config, assembly.task, out, contexts.client)
    copy_user_code(list_user_code(config, file.parent), out)
    write_card(RunResult.read(out))
    # Last: until here --resume can continue a run that was cut short; a finished run cannot be resumed.
    keep_final_checkpoints(checkpoints)
    return summary


class _SiteErrors:
    """Reports of the sites that failed: a file for each, and a line of the console for each new error.

    Args:
        folder: receives the files; those of an earlier run are deleted.
        console: receives the lines.
    """

    def __init__(self, folder: Path, console: Console):
        self._folder, self._console = folder, console
        self._reports: dict[str, str] = {}
        shutil.rmtree(folder, ignore_errors=True)

    def report(self, site: str, error: Exception) -> None:
        """Write the report of a site's error, unless it is the same as in the round before."""
        report = format_site_error(error)
        if self._reports.get(site) == report:
            return
        self._reports[site] = report
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{site}.txt"
        file.write_text(report)
        first, *others = report.splitlines()
        # The line of the user's module, where the error has one.
        where = f" {others[0].strip()}" if others and others[0].startswith("  at ") else ""
        self._console.print(f"site {site} failed: {first}{where}; see {file}", markup=False)


def _build_script_runners(
    config: RunConfig, file: Path, data: Mapping[str, SiteData], folder: Path
) -> dict[str, ScriptProcess]:
    """Return a process for the training script of each site, by site; empty for a job without a script."""
    settings = config.task.config
    if not isinstance(settings, ScriptConfig):
        return {}
    if settings.launch:
        raise ConfigError(
            f"task.launch: {settings.launch!r} starts processes through FLARE; use --env sim, or --set task.launch=''"
        )
    # FLARE takes seconds to import; a job without a script does not need it here.
    from ..flare.script_process import ScriptProcess

    script, threads = find_script(config, file.parent), config.federation.threads
    return {
        name: ScriptProcess(script, settings.args, site_data, folder / name, [file.parent], threads)
        for name, site_data in data.items()
    }


def _open_site(assembly: Assembly, data: SiteData, script: ScriptProcess | None, root: Path) -> Site | Exception:
    """Load a site's data and build the site; return the error of a site that fails: the others continue.

    Args:
        assembly: parts of the job.
        data: location of the site's data.
        script: process of the site's training script; None: the task trains.
        root: result folder, which receives the site's secret and privacy ledger.
    """
    try:
        if script is not None:
            assert isinstance(assembly.task, ScriptTask), "only a script's task has a script"
            return open_script_site(assembly, data, script, assembly.task.config.weigh_by)
        account = None if assembly.privacy is None else PrivacyAccount(root / PRIVACY_FOLDER / data.site)
        return open_site(assembly, data, account)
    except Exception as error:  # noqa: BLE001 - whatever a task's load raises, as at a site of FLARE
        return error
