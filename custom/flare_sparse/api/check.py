"""The list of checks of a study: its settings, every site's data, and one short round of the run itself.

What fails here is what fails in a run: sites are opened, and a round is run, by the functions that run it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..config.assemble import Assembly, open_site, open_site_privacy, plan_sampling
from ..config.checks import find_problems
from ..config.loading import build_method
from ..config.policy.check import find_policy_conflicts
from ..config.policy.policy import find_policy_file, read_policy
from ..config.study import Study, prepare_site_data
from ..config.user_classes import find_script
from ..core.errors import ConfigError, DataError, PolicyRefusal
from ..core.findings import Finding, attempt, merge_findings
from ..core.mask import Mask
from ..core.observer import Observer
from ..core.params import Layout
from ..core.seeds import limit_threads, seed_torch
from ..privacy.dp.account import PrivacyAccount
from ..privacy.dp.forecast import Forecast
from ..results.runs.local import run_assembly
from ..rounds.federation.records import Outcome
from ..rounds.local.run import Course
from ..tasks.adaptation import AdaptableTask
from ..tasks.script import ScriptTask
from ..tasks.task import Examples, SiteData, Task, load_examples
from ..training import Site
from ..training.compute import can_use_kernels
from ..training.trainer import Trainer, Training, Wrapper
from .check_columns import describe_columns
from .check_script import find_extra_training, find_launcher, train_once


@dataclass
class OpenedSite:
    """A site as a run opens it, or the error that keeps it from taking part; None: there is no model."""

    data: SiteData
    site: Site | Exception | None
    examples: Examples | None = None
    trainer: OneStep | None = None


class OneStep(Wrapper):
    """Takes one step of each training, and one minibatch of each mean of gradients.

    Attributes:
        distances: L2 distance that each step moved the parameters.
    """

    def __init__(self, inner: Trainer, distances: list[float] | None = None):
        super().__init__(inner)
        self.distances: list[float] = [] if distances is None else distances

    def train(self, training: Training) -> Tensor:
        trained = self._inner.train(replace(training, steps=1))
        moved = trained - training.trainable.take(training.start)
        # Buffers, such as running statistics, move in the forward pass even if nothing is learned.
        count = int(training.trainable.bits[: self.layout.num_parameters].sum())
        self.distances.append(float(torch.linalg.vector_norm(moved[:count])))
        return trained

    def compute_gradients(
        self, weights: Tensor, batch_size: int, batches: int | None, t: int, *, batch_statistics: bool = True
    ) -> Iterator[tuple[Tensor, float]]:
        return self._inner.compute_gradients(weights, batch_size, 1, t, batch_statistics=batch_statistics)

    def narrow(self, live: Mask) -> Trainer:
        return OneStep(self._inner.narrow(live), self.distances)


def check_study(study: Study, site_policy: Path | None = None) -> Iterator[Finding]:
    """Yield the findings about a study, see :meth:`flare_sparse.Study.check`."""
    with limit_threads(study.config.torch_threads):
        yield from _check(study, site_policy)


def _check(study: Study, site_policy: Path | None) -> Iterator[Finding]:
    config = study.config
    yield Finding("PASS", "federation", config.federation.note)
    tried_task = attempt("task", study.load_task, lambda task: type(task).__name__)
    yield tried_task.finding
    if (task := tried_task.result) is None:
        return
    if config.task.has_own_code or config.method.has_own_code:
        yield attempt("own code", lambda: study.user_code, _describe_code).finding
    tried_layout = attempt(
        "model", seed_torch(0)(lambda: Layout.from_module(task.model())), lambda own: f"{own.size:,} scalars"
    )
    yield tried_layout.finding
    if tried_layout.result is not None and isinstance(task, AdaptableTask) and (base := task.describe_base()):
        yield Finding("PASS", "base model", base)
    assembly = None
    if tried_layout.result is not None:
        tried_assembly = attempt("method", lambda: study.assembly, lambda own: own.method.describe() or own.method.name)
        yield tried_assembly.finding
        assembly = tried_assembly.result
    training = config.method.config.training
    if training.compute == "sparse":
        check = partial(can_use_kernels, training.compute, training.select_hardware().device)
        found = attempt("sparse kernels", check, lambda _: "available").finding
        if found.severity == "FAIL" and config.simulator is None:
            found = Finding("WARN", found.place, f"on this machine, which is no site: {found.text}")
        yield found
    with tempfile.TemporaryDirectory() as folder:
        yield from _check_sites(study, task, assembly, Path(folder), site_policy)


def _check_sites(
    study: Study, task: Task, assembly: Assembly | None, folder: Path, site_policy: Path | None
) -> Iterator[Finding]:
    data: Mapping[str, SiteData] = {}
    if study.config.simulator is None:
        yield Finding(
            "SKIP",
            "sites",
            "there is no simulator section; flare-sparse check CONFIG --site KIT reads the data at each site",
        )
    else:
        problems = _DataWarnings()
        locate = partial(prepare_site_data, study.config, task, folder, problems)
        tried_data = attempt("sites", locate, ", ".join)
        yield from (Finding("WARN", "sites", text) for text in problems.texts)
        yield tried_data.finding
        data = tried_data.result or {}
    opened: list[OpenedSite] = []
    if isinstance(task, ScriptTask):
        yield from _check_script(study, task, data)
    elif data:
        opened = [_open(study, task, assembly, own) for own in data.values()]
        yield from _check_examples(task, assembly, opened)
        if assembly is None:
            yield from _describe_sites(task, opened, None, set())
        else:
            yield from _check_round(study, assembly, opened)
    if assembly is not None:
        yield from _check_privacy(assembly, opened)
        if site_policy is not None:
            yield attempt("site policy", lambda: _check_policy(study, assembly, opened, site_policy)).finding


class _DataWarnings(Observer):
    """Keeps what may be wrong with the sites' data."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


def _open(study: Study, task: Task, assembly: Assembly | None, data: SiteData) -> OpenedSite:
    """Open a site as a run does, without differential privacy, which charges no one for a check."""
    try:
        if assembly is None:
            return OpenedSite(data, None, load_examples(task, data, study.config.seed))
        # A task of its own for each site, as in a run.
        site = open_site(replace(assembly, task=study.load_task(), privacy=None), data)
    except Exception as error:  # noqa: BLE001 - whatever a task's load raises, as in a run
        return OpenedSite(data, error)
    trainer = OneStep(site.trainer)
    return OpenedSite(data, Site(site.name, trainer, site.site_settings), trainer.examples, trainer)


def _check_examples(task: Task, assembly: Assembly | None, opened: list[OpenedSite]) -> Iterator[Finding]:
    """Yield what each column contains, and what is wrong with the examples of the sites."""
    found: list[Finding] = []
    for one in opened:
        if isinstance(one.site, Exception):
            found.append(Finding.from_error(f"data of {one.data.site}", one.site))
        elif one.examples is not None:
            problems = find_problems(assembly, one.examples, one.data) if assembly else ()
            found += problems or one.examples.find_warnings(one.data.site)
    described = {one.data.site: attempt("", partial(task.describe_columns, one.data)).result for one in opened}
    yield from describe_columns({site: columns for site, columns in described.items() if columns})
    yield from merge_findings(found)


def _check_round(study: Study, assembly: Assembly, opened: list[OpenedSite]) -> Iterator[Finding]:
    """Run one round with one step of each training, and yield what each site did and why others did not."""
    choice = study.config.method
    one_round = replace(choice, config=choice.config.model_copy(update={"rounds": 1}))
    config = study.config.model_copy(update={"method": one_round})
    errors: dict[str, Exception] = {}

    def note(site: str, error: Exception) -> None:
        errors.setdefault(site, error)

    sites = {one.data.site: one.site for one in opened if one.site is not None}

    def run() -> Outcome:
        short = replace(assembly, method=build_method(config, assembly.layout))
        return run_assembly(config, short, sites, course=Course(on_site_error=note))[0]

    tried_outcome = attempt("first round", run, lambda _: "one step at each site, and the metrics of the result")
    outcome = tried_outcome.result
    found = [Finding.from_error(f"round at {site}", error) for site, error in errors.items()]
    for record in outcome.rounds if outcome else ():
        for site, reason in {**record.rejected, **record.excluded}.items():
            if site not in errors:
                text = f"the server does not count its update: {reason} (docs/troubleshooting.md lists the codes)"
                found.append(Finding("FAIL", f"round at {site}", text, reason.partition(":")[0]))
    found = [_add_remedy(finding) for finding in found if isinstance(sites[finding.place.split()[-1]], Site)]
    yield from _describe_sites(assembly.task, opened, outcome, {finding.place for finding in found})
    yield from merge_findings(found)
    yield tried_outcome.finding


def _add_remedy(finding: Finding) -> Finding:
    diverged = finding.code in ("E_FINITE", "E_RANGE")
    return replace(finding, text=f"{finding.text}; lower method.training.lr") if diverged else finding


def _describe_sites(
    task: Task, opened: list[OpenedSite], outcome: Outcome | None, failed: set[str]
) -> Iterator[Finding]:
    """Yield a PASS for each site: its examples, how far one step moves the model, and the first main metric."""
    metric, still = task.metric, []
    evaluations = [*(record.evaluation for record in outcome.rounds), outcome.evaluation] if outcome else []
    for one in opened:
        if (examples := one.examples) is None or f"round at {one.data.site}" in failed:
            continue
        distances = one.trainer.distances if one.trainer else []
        counts = f"{examples.n_train} training, {examples.n_validation} validation, {examples.n_test} test examples"
        parts = [counts, *([f"{examples.skipped} skipped"] if examples.skipped else [])]
        if distances:
            parts.append(f"one step moves the model by {distances[0]:.3g}")
            if distances[0] == 0:
                still.append(one.data.site)
        values = [evaluated.sites.get(one.data.site, {}).get(metric.name) for evaluated in evaluations]
        if known := [value for value in values if value is not None]:
            parts.append(f"first {metric.name} {known[0]:.4g} {metric.unit}".rstrip())
        elif examples.n_test and outcome:
            text = f"{metric.name} is undefined for its test examples"
            yield Finding("WARN", f"metrics of {one.data.site}", text)
        yield Finding("PASS", f"site {one.data.site}", "; ".join(parts))
    known_examples = [one.examples for one in opened if one.examples is not None]
    if known_examples and not any(examples.n_test for examples in known_examples):
        yield Finding("WARN", "test examples", "no site has test examples: no model can be compared")
    if still:
        yield Finding(
            "WARN",
            f"training at {', '.join(still)}",
            "the step does not change the model: no gradient reaches a parameter. Look for detach(), .item(), "
            "torch.no_grad() or an argmax in loss(), for frozen parameters, and for a constant loss",
        )


def _check_script(study: Study, task: ScriptTask, data: Mapping[str, SiteData]) -> Iterator[Finding]:
    """Yield whether the data of every site exists, what is in it only the script knows; and run the script once."""
    paths: dict[Path, list[str]] = {}
    for name, own in data.items():
        paths.setdefault(own.path, []).append(name)
    for path, names in paths.items():
        yield attempt(f"data of {', '.join(names)}", partial(_check_path, path)).finding
    try:
        excess = find_extra_training(find_script(study.config, study.folder))
    except ConfigError:
        # The check of the own code has said so.
        return
    if excess:
        yield Finding("WARN", "privacy", excess)
    if task.config.launch:
        tried_program = attempt("launcher", partial(find_launcher, task.config.launch))
        yield tried_program.finding
        if tried_program.result is not None:
            text = "no script is launched here through FLARE; flare-sparse run CONFIG --set method.rounds=1 does"
            yield Finding("SKIP", "training", text)
    elif site := next((site for site in data.values() if site.path.exists()), None):
        yield _train_script(study, site)


def _train_script(study: Study, site: SiteData) -> Finding:
    """Return what a site's script does in one request."""
    from ..flare.script_process import ScriptTooSlow

    place = f"training at {site.site}"
    try:
        text, has_moved = train_once(study, site)
    except ScriptTooSlow as error:
        return Finding("WARN", place, str(error))
    except Exception as error:  # noqa: BLE001 - the network and the script are the user's
        return Finding.from_error(place, error)
    return Finding("PASS" if has_moved else "WARN", place, text)


def _check_privacy(assembly: Assembly, opened: list[OpenedSite]) -> Iterator[Finding]:
    """Yield what the job charges each site's subjects."""
    if (privacy := assembly.privacy) is None:
        return
    for one in opened:
        if one.examples is None or not one.examples.n_train:
            continue

        def forecast(examples: Examples = one.examples) -> Forecast:
            open_site_privacy(assembly, examples, PrivacyAccount())
            return Forecast.compute(privacy, plan_sampling(assembly.method, examples.count_train_subjects()))

        yield attempt(f"privacy of {one.data.site}", forecast).finding


def _check_policy(study: Study, assembly: Assembly, opened: list[OpenedSite], name_or_file: Path) -> str:
    """Check the job against a policy.

    Raises:
        ConfigError: there is no such policy, or its file is malformed.
        PolicyRefusal: the policy would refuse the job; every reason is listed.
    """
    policy = read_policy(find_policy_file(name_or_file))
    loaded = {one.data.site: one.examples for one in opened if one.examples is not None}
    counts = {name: examples.n_train for name, examples in loaded.items()}
    subjects = {name: examples.count_train_subjects() for name, examples in loaded.items()}
    if reasons := find_policy_conflicts(policy, study.config, assembly, counts, subjects):
        raise PolicyRefusal(
            "\n".join([f"{name_or_file} would refuse this job:", *(f"  {reason}" for reason in reasons)])
        )
    caveat = "" if counts else "; without data the numbers of examples were not checked"
    return f"{name_or_file} lets this job through{caveat}"


def _check_path(path: Path) -> str:
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    return str(path)


def _describe_code(code: tuple[Path, ...]) -> str:
    return f"{', '.join(path.name for path in code) or 'installed'}; travels with the job"
