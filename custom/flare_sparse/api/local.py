"""The environment ``local``: a study runs in this process, through the real wire but without FLARE."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.assemble import Assembly, check_kernels, open_script_budget, open_script_trainer, open_site
from ..config.study import Study
from ..config.user_classes import find_script
from ..core.errors import ConfigError, format_site_error
from ..core.observer import SILENT, Observer
from ..core.seeds import limit_threads
from ..core.steps import STEP_FILE, STEP_FOLDER, StepFile
from ..methods.method import describe_site_model
from ..privacy.dp.account import PRIVACY_FOLDER, PrivacyAccount
from ..results.runs.folder import ERRORS, RunFolder
from ..results.runs.local import run_assembly
from ..results.runs.model_files import save_site_model
from ..results.runs.record import RecordWriter
from ..rounds.endpoints.egress import EGRESS_FOLDER, EgressLog
from ..rounds.federation.records import RoundRecord
from ..rounds.local.run import Course
from ..tasks.script import ScriptConfig, ScriptTask
from ..tasks.task import SiteData
from ..training import Site
from ..wire.ledger import Ledger
from .run import Run, complete_run

if TYPE_CHECKING:
    from ..flare.script_process import ScriptProcess

SCRIPTS = "scripts"
"""Folder below the result folder with the working folder and the output of each site's training script."""


def run(study: Study, folder: RunFolder, observer: Observer = SILENT) -> Run:
    """Run a study in this process and write its record.

    Raises:
        ConfigError: a setting cannot be used in this process.
        RoundFailed: too few sites can train.
    """
    config, assembly = study.config, study.assembly
    check_kernels(assembly.method)
    checkpoints = folder.open_checkpoints(study)
    _refuse_launcher(study)
    data = study.prepare_sites(folder.path, observer)
    scripts: list[ScriptProcess] = []
    # The number of threads decides the order of float sums, so data is loaded under the job's own number, as in FLARE.
    with limit_threads(config.torch_threads):
        sites = {name: _open_site(study, own, folder.path, scripts) for name, own in data.items()}
    folder.clear()
    notes: dict[str, list[str]] = {}
    for name, opened in sites.items():
        if isinstance(opened, Site) and not scripts:
            # Their number alone: the record is published with the model, and the names are those of subjects.
            notes[name] = [text.partition(":")[0] for text in opened.trainer.examples.warnings]
            for finding in opened.trainer.examples.find_warnings(name):
                observer.warn(str(finding))
    ledger = Ledger()
    record = RecordWriter(folder.path, config, assembly, ledger)

    def commit(committed: RoundRecord) -> None:
        observer.see_round(record.commit(committed))

    errors = _SiteErrors(folder.path / ERRORS, observer)
    try:
        outcome, _ = run_assembly(
            config,
            assembly,
            sites,
            course=Course(
                stores=lambda end: study.open_checkpoints(checkpoints, end),
                resume=folder.resume,
                notes=notes,
                egress=lambda site: EgressLog(
                    folder.path / EGRESS_FOLDER / site, config.name, permit=config.permit, is_durable=False
                ),
                on_round=commit,
                on_site_error=errors.report,
            ),
            ledger=ledger,
        )
    finally:
        shutil.rmtree(folder.path / STEP_FOLDER, ignore_errors=True)
        for script in scripts:
            script.close()
    record.finish(outcome)
    if describe_site_model(assembly.method.config):
        for name in outcome.rounds[-1].sites_contributed:
            site = sites[name]
            assert isinstance(site, Site), f"{name} contributed, so its data was loaded"
            save_site_model(folder.path, site)
    return complete_run(study, folder)


class _SiteErrors:
    """Reports of the sites that failed: a file for each, and a line of text for each new error.

    Args:
        folder: receives the files; those of an earlier run are deleted.
        observer: hears the lines.
    """

    def __init__(self, folder: Path, observer: Observer):
        self._folder, self._observer = folder, observer
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
        self._observer.say(f"site {site} failed: {first}{where}; see {file}")


def _refuse_launcher(study: Study) -> None:
    """Refuse a script that FLARE must start, and one that is not there, before any site is opened."""
    settings = study.config.task.config
    if not isinstance(settings, ScriptConfig):
        return
    if settings.launch:
        raise ConfigError(
            f"task.launch: {settings.launch!r} starts processes through FLARE; use --env sim, or --set task.launch=''"
        )
    find_script(study.config, study.folder)


def open_script(
    study: Study, assembly: Assembly, data: SiteData, folder: Path, account: Path, limit_s: float | None = None
) -> tuple[Site, ScriptProcess]:
    """Build a site whose script trains in a process of its own, which its first request starts.

    Args:
        study: the study.
        assembly: parts of its job.
        data: location of the site's data.
        folder: working folder of the script.
        account: folder of the site's secret and privacy ledger.
        limit_s: seconds that the script has for a request; None: no limit.
    """
    # FLARE takes seconds to import; a job without a script does not need it here.
    from ..flare.script_process import ScriptProcess

    assert isinstance(assembly.task, ScriptTask), "only a script's task has a script"
    script, threads = find_script(study.config, study.folder), study.config.federation.threads
    budget = open_script_budget(assembly, account)
    process = ScriptProcess(script, assembly.task.config.args, data, folder, [study.folder], threads, budget, limit_s)
    return open_script_trainer(assembly, data, process, budget), process


def _open_site(study: Study, data: SiteData, root: Path, scripts: list[ScriptProcess]) -> Site | Exception:
    """Load a site's data and build the site; return the error of a site that fails: the others continue.

    Args:
        study: the study.
        data: location of the site's data.
        root: result folder, which receives the site's secret and privacy ledger, and how far its training is.
        scripts: receives the process of the site's training script, if it has one.
    """
    account = root / PRIVACY_FOLDER / data.site
    try:
        # A task of its own for each site, as in FLARE: a user task may keep what it has loaded.
        assembly = replace(study.assembly, task=study.load_task())
        if isinstance(assembly.task, ScriptTask):
            site, process = open_script(study, assembly, data, root / SCRIPTS / data.site, account)
            scripts.append(process)
        else:
            site = open_site(assembly, data, None if assembly.privacy is None else PrivacyAccount(account))
    except Exception as error:  # noqa: BLE001 - whatever a task's load raises, as at a site of FLARE
        return error
    progress = root / STEP_FOLDER / data.site
    progress.mkdir(parents=True, exist_ok=True)
    site.step_file = StepFile(progress / STEP_FILE, data.site)
    return site
