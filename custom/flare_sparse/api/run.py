"""A run: a result folder and what can be asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from ..cohorts.split import Part
from ..compute import Compute
from ..compute.kernels.threads import limit_kernel_threads
from ..config.assemble import open_site
from ..config.policy.policy import find_policy_file, read_policy
from ..config.study import Study
from ..config.user_code import trust_code as trust
from ..config.withdrawals import open_data
from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, UntrustedCode, require_extra
from ..core.observer import SILENT, Observer
from ..core.seeds import limit_threads
from ..results.audit.attacks import REFERENCES, audit_run
from ..results.report.card import write_card
from ..results.runs.continuation import EXPIRED, expire_checkpoints
from ..results.runs.evaluation import ADAPTED, adapt_to_site, choose_evaluation_file, evaluate_cohort, evaluate_matrix
from ..results.runs.folder import RunFolder
from ..results.runs.load import load_model, load_study
from ..results.runs.received import explain_damage, parse_record
from ..results.runs.record import APPENDED_FILES, SUMMARY
from ..results.runs.results import CROSS_SITE_FILE, EVALUATIONS, RunResult

UNFINISHED = f"{{folder}}: no {SUMMARY}; expected the result folder of a finished flare-sparse run"


@dataclass(frozen=True)
class Run:
    """A finished or interrupted run.

    Attributes:
        path: result folder.
        observer: hears of problems with the sites' data.
        trust_code: whether the user's code in the folder may be executed; that of a run of this process may.

    Examples:
        >>> import flare_sparse
        >>> _ = flare_sparse.run("study.yaml", out="out", start="new", observer=SILENT)
        >>> run = Run.load("out")
        >>> sorted(run.summary["final"]["metrics"]), run.model().training
        (['bias', 'mae', 'r2', 'rmse', 'test_examples'], False)
        >>> sorted(run.evaluate()["results"])
        ['A', 'B']
    """

    path: Path
    observer: Observer = SILENT
    trust_code: bool = False

    @classmethod
    def load(cls, folder: str | Path, observer: Observer = SILENT, *, trust_code: bool = False) -> Run:
        """Return the run in a result folder. Nothing in the folder is executed, unless ``trust_code`` says so.

        Raises:
            ConfigError: the folder holds no run.
        """
        run = cls(Path(folder), observer, trust_code)
        if not (run.path / APPENDED_FILES[0]).is_file():
            raise ConfigError(f"{folder}: no {APPENDED_FILES[0]}; expected the result folder of flare-sparse run")
        try:
            days = run.study.config.federation.checkpoint_days
        except UntrustedCode as error:
            observer.note(str(error))
            return run
        if expire_checkpoints(run.path, days):
            observer.note(EXPIRED.format(folder=folder))
        return run

    @cached_property
    @explain_damage
    def study(self) -> Study:
        """The run's settings, task and code, from the result folder.

        Raises:
            ConfigError: there is no configuration, or it is invalid.
            UntrustedCode: it names code, and the run is not trusted.
        """
        return load_study(self.path, trust_code=self.trust_code)

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended with a result."""
        return (self.path / SUMMARY).is_file()

    @property
    @explain_damage
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``: final metrics by site, bytes by direction, contributions, digest of the model.

        Raises:
            ConfigError: the run has not finished.
        """
        if not self.is_finished:
            raise ConfigError(UNFINISHED.format(folder=self.path))
        return dict(parse_record((self.path / SUMMARY).read_text(encoding="utf-8")))

    @property
    @explain_damage
    def rounds(self) -> list[dict[str, Any]]:
        """Lines of ``rounds.jsonl``: every round that is committed so far."""
        return [parse_record(line) for line in (self.path / APPENDED_FILES[0]).read_text("utf-8").splitlines()]

    @explain_damage
    def model(self, name: str = "final", *, compute: Compute = "dense") -> nn.Module:
        """Return the trained network in evaluation mode; see :func:`flare_sparse.results.runs.load.load_model`.

        Args:
            name: ``final``; ``best``, of the round with the best metric on validation examples; or a site's name.
            compute: ``auto`` or ``sparse``: compute with sparse kernels on the CPU, for inference only.

        Raises:
            ConfigError: the run has no such model, or ``sparse`` is asked for without numba.
        """
        return load_model(self.path, name, compute=compute, trust_code=self.trust_code)

    @explain_damage
    def report(self, out: Path | None = None, *, baselines: bool = True, pictures: bool = True) -> list[Path]:
        """Write figures, tables and a page; see :func:`flare_sparse.api.report.write_reports`.

        Returns:
            The files written.
        """
        from .report import write_reports

        if self.trust_code:
            trust(self.path)
        return write_reports([self.path], out, baselines=baselines, pictures=pictures, observer=self.observer)

    @explain_damage
    def evaluate(
        self,
        data: str | Path | None = None,
        *,
        model: str = "final",
        split: Part = "all",
        name: str | None = None,
        resamples: int = 1000,
        overwrite: bool = False,
    ) -> dict[str, Any]:
        """Evaluate a model of the run on data at hand and keep the record in ``evaluations/`` of the result folder.

        Args:
            data: the folder or file that a site file would name; None: every model at every simulated site's test
                examples.
            model: ``final``, ``best``, or the name of a site for its own model; only with ``data``.
            split: all examples, or those of one part of the run's split; only with ``data``.
            name: name of the cohort; None: that of the data.
            resamples: resamples of the bootstrap intervals; 0: no intervals.
            overwrite: replace an earlier evaluation of this name.

        Returns:
            The record.

        Raises:
            ConfigError: the run has not finished or has no such model, or there is such an evaluation.
            DataError: the data cannot be loaded or has no examples, or the model cannot be applied to it.
        """
        if not self.is_finished:
            raise ConfigError(UNFINISHED.format(folder=self.path))
        with limit_threads(self.study.config.torch_threads):
            if data is None:
                file = self.path / EVALUATIONS / CROSS_SITE_FILE
                record = evaluate_matrix(self.path, self.study, self.observer)
            else:
                cohort = name or Path(data).resolve().name.split(".")[0]
                site = open_data(self.path, Path(data), cohort)
                file = choose_evaluation_file(self.path, cohort, model, overwrite=overwrite)
                record = evaluate_cohort(self.path, self.study, site, split, model, resamples)
        file.parent.mkdir(exist_ok=True)
        write_json(file, record)
        self.write_card()
        return record

    @explain_damage
    def adapt(self, data: str | Path) -> dict[str, Any]:
        """Adapt the final model to a site that took no part, and keep model and figures in ``adapted/SITE``.

        Args:
            data: the folder or file that the site's file would name; 80 % of its examples adapt the model, which is
                evaluated on the others, before and after.

        Returns:
            The figures, as in ``adaptation.json``; the site is named after the data.

        Raises:
            ConfigError: the run has no model here, or its method does not adapt.
            DataError: the data cannot be loaded or has no training examples.
        """
        site, config = Path(data).resolve().name.split(".")[0], self.study.config
        with limit_threads(config.torch_threads), limit_kernel_threads(config.federation.threads):
            opened = open_site(self.study.assembly, open_data(self.path, Path(data), site))
            return adapt_to_site(self.study.assembly, opened, self.path, (self.path / ADAPTED / site).resolve())

    @explain_damage
    def audit(self, references: int = REFERENCES) -> dict[str, Any]:
        """Attack the final model and keep the record in ``audit.json``; a second call continues an interrupted one.

        Args:
            references: number of reference models, each of which takes as long as the run; 0: no attack with them.

        Returns:
            The record.

        Raises:
            ConfigError: scikit-learn or the data of a site is not on this machine, or the run has no common model.
        """
        with require_extra("audit", "audit"):
            import sklearn  # noqa: F401
        if self.study.config.simulator is None:
            raise ConfigError(
                f"{self.path}: an audit needs the data of all sites, but config.yaml has no simulator section"
            )
        result = RunResult.read(self.path)
        sites = self.study.prepare_sites(self.path, self.observer)
        record = audit_run(result, sites, references, self.observer.say)
        self.write_card()
        return record

    @explain_damage
    def evidence(
        self,
        out: Path | None = None,
        *,
        policies: Mapping[str, str] | None = None,
        egress: Mapping[str, Path] | None = None,
        kit: Path | None = None,
    ) -> Path:
        """Write an annex for an impact assessment, which a person completes; return the file.

        Args:
            out: file that ends with .md or .pdf; None: ``dpia.md`` in the result folder.
            policies: policy in force at a site, its file or a preset's name, by site.
            egress: folder of a site's egress log, as the site hands it out, by site.
            kit: startup kit of a participant, to check who signed the job; None: that of the run's POC federation.

        Raises:
            ConfigError: the folder was changed after the run, the file has another ending, or there is no log.
            EgressError: an egress log was changed.
        """
        from ..flare.launch.approval import read_approval
        from ..results.evidence.dpia import FILE, write_dpia

        terms = {site: read_policy(find_policy_file(Path(given))) for site, given in (policies or {}).items()}
        # Written again: evaluations and audits after the run belong to the card, whose digest the annex states.
        self.write_card()
        result, file = RunResult.read(self.path), out or self.path / FILE
        write_dpia(result, read_approval(self.path, kit), terms, egress or {}, file)
        return file

    @explain_damage
    def write_card(self) -> Path:
        """Write the model card from the record, with the evaluations and audits made so far; return the file."""
        return write_card(RunResult.read(self.path))


def complete_run(study: Study, folder: RunFolder) -> Run:
    """Complete the record of a run that has ended, and return the run."""
    folder.keep_study(study)
    run = Run(folder.path)
    run.write_card()
    # Last: until here a run that was cut short can be resumed; a finished run cannot.
    folder.complete(study.config.federation)
    return run
