"""A sweep: runs of one configuration with several settings and seeds, compared on validation examples alone."""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, stdev
from typing import Any

from ...core.errors import ConfigError
from ...tasks.task import VALIDATION, get_count_name

_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        settings: overrides of the configuration, ``key=value``.
        seed: seed of the run.
    """

    settings: tuple[str, ...]
    seed: int

    @property
    def label(self) -> str:
        """Settings and seed, as display text."""
        return ", ".join([*self._short_settings, f"seed {self.seed}"])

    @property
    def _short_settings(self) -> list[str]:
        pairs = [setting.partition("=") for setting in self.settings]
        return [f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs]

    @property
    def folder(self) -> str:
        """Name of the result folder: readable, and different for different settings."""
        text = "_".join(self._short_settings)
        digest = hashlib.sha256("\n".join(self.settings).encode()).hexdigest()[:6]
        return f"{re.sub(r'[^A-Za-z0-9=._-]+', '-', text)[:60]}_{digest}_seed-{self.seed}"


@dataclass(frozen=True)
class SettingsResult:
    """The runs of a sweep that differ by their seed only.

    Attributes:
        settings: their overrides.
        values: the task's metric of the final model on validation examples, by seed of a finished run that has it.
        failures: why a run failed or lacks the metric, by seed.
        examples: validation examples of the final model, by seed.
        sent: bytes of all messages of a finished run, on average; None without one.
    """

    settings: tuple[str, ...]
    values: dict[int, float]
    failures: dict[int, str]
    examples: dict[int, float]
    sent: float | None

    @property
    def mean(self) -> float | None:
        """Mean of the metric over the seeds; None without a finished run."""
        return mean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds (n - 1); None for one seed."""
        return stdev(self.values.values()) if len(self.values) > 1 else None


class Search:
    """Chooses the settings of a sweep, with Optuna: all combinations of some values, or those that look best.

    What was found is kept in a database of Optuna, one study for each search space. A search over the same space goes
    on where an earlier one stopped.

    >>> axes = ["method.training.lr=0.1,0.01", "method.rounds=5"]
    >>> Search(axes, "sqlite:///:memory:").propose(2)
    [('method.training.lr=0.1', 'method.rounds=5'), ('method.training.lr=0.01', 'method.rounds=5')]

    Args:
        axes: ``key=value,value``, commas within brackets belong to a value; with ``trials`` also ``key=LOW..HIGH``, and
            ``key=LOW..HIGH,log`` for a logarithmic scale. A range of two whole numbers has whole numbers.
        storage: address of the database.
        trials: number of settings that the TPE sampler chooses; None: all combinations are tried.
        seed: seed of the sampler.
        keep: returns those of some settings that apply; combinations that differ in the others are one.

    Attributes:
        count: number of settings.

    Raises:
        ConfigError: an axis has no value, or is named twice, or Optuna is not installed.
    """

    def __init__(
        self,
        axes: Sequence[str],
        storage: str,
        *,
        trials: int | None = None,
        seed: int = 0,
        keep: Callable[[Sequence[str]], tuple[str, ...]] = tuple,
    ):
        self._keep = keep
        parsed = [_parse_axis(text) for text in axes]
        keys = [key for key, _ in parsed]
        if "seed" in keys:
            raise ConfigError("seed: use --seeds N, which runs every setting with the same N seeds")
        if split := [key for key in keys if f"{key}.".startswith("task.split.")]:
            raise ConfigError(
                f"{split[0]}: settings are compared on the same validation subjects; set it for all runs by --set"
            )
        if len(set(keys)) < len(keys):
            raise ConfigError(f"{next(key for key in keys if keys.count(key) > 1)} is named twice; give it once")
        try:
            import optuna
        except ImportError as error:
            raise ConfigError("sweep needs Optuna: pip install 'flare-sparse[sweep]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._seed = optuna, seed
        self._space = {key: self._build_distribution(key, values, trials) for key, values in parsed}
        name = hashlib.sha256(json.dumps([list(axes), trials is None]).encode()).hexdigest()[:12]
        self._study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
        tried = [trial.params for trial in self._study.get_trials(deepcopy=False)]
        if trials is None:
            values = itertools.product(*(self._space[key].choices for key in keys))
            tried += [dict(zip(keys, combination, strict=True)) for combination in values]
        self._known = {self._describe(params): params for params in tried}
        self.count = len(self._known) if trials is None else trials
        self._is_grid = trials is None
        self._proposed = 0

    @property
    def known(self) -> list[tuple[str, ...]]:
        """Settings that the search has proposed, now or earlier, and all combinations of a search without a sampler."""
        return list(self._known)

    def propose(self, count: int) -> list[tuple[str, ...]]:
        """Return the next settings, those of an earlier search first; none when the search is over.

        At most ``count`` are returned, or all combinations at once: none depends on the result of another.
        """
        count = self.count if self._is_grid else count
        while len(self._known) < min(self._proposed + count, self.count):
            # By the number of trials: a search that goes on proposes what one that was not interrupted would have.
            seed = self._seed + len(self._study.get_trials(deepcopy=False))
            self._study.sampler = self._optuna.samplers.TPESampler(seed=seed)
            trial = self._study.ask(self._space)
            if (settings := self._describe(trial.params)) in self._known:
                # A small space of values: what was tried is not tried again.
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                self.count -= 1
            self._known.setdefault(settings, trial.params)
        proposed = self.known[self._proposed : min(self._proposed + count, self.count)]
        self._proposed += len(proposed)
        return proposed

    def note(self, result: SettingsResult, mode: str) -> None:
        """Note the mean metric of some settings for the sampler; settings with a failed run have none.

        Args:
            result: the runs of the settings.
            mode: ``min`` or ``max``.
        """
        states, params = self._optuna.trial.TrialState, self._known[result.settings]
        loss = None if result.failures or result.mean is None else (-1 if mode == "max" else 1) * result.mean
        state = states.FAIL if loss is None else states.COMPLETE
        trials = [trial for trial in self._study.get_trials(deepcopy=False) if trial.params == params]
        if running := [trial.number for trial in trials if trial.state == states.RUNNING]:
            self._study.tell(running[0], loss, state)
        elif not any(trial.state == states.COMPLETE for trial in trials):
            self._study.add_trial(
                self._optuna.trial.create_trial(state=state, params=params, distributions=self._space, value=loss)
            )

    def _describe(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        return self._keep([f"{key}={params[key]}" for key in self._space])

    def _build_distribution(self, key: str, values: list[str], trials: int | None) -> Any:
        low, dots, high = values[0].partition("..")
        if not dots:
            return self._optuna.distributions.CategoricalDistribution(values)
        try:
            if trials is None or values[1:] not in ([], ["log"]):
                raise ValueError
            kind = "Int" if low.strip().isdecimal() and high.strip().isdecimal() else "Float"
            ends = [(int if kind == "Int" else float)(end) for end in (low, high)]
            return getattr(self._optuna.distributions, f"{kind}Distribution")(*ends, log=len(values) > 1)
        except ValueError as error:
            raise ConfigError(
                f"{key}={','.join(values)}: expected LOW..HIGH or LOW..HIGH,log, with LOW below HIGH (above 0 "
                "for log), and --trials N"
            ) from error


def expand_seeds(settings: Iterable[tuple[str, ...]], seeds: Sequence[int]) -> list[Trial]:
    """Return a trial for each of the settings and each seed."""
    return [Trial(own, seed) for own in settings for seed in seeds]


METHOD = "method.name"


def split_by_method(axes: Sequence[str]) -> list[list[str]]:
    """Return the axes of a search for each method that an axis names, so that each has a budget of its own.

    >>> split_by_method(["method.name=fedavg,neurosfl", "method.training.lr=0.1..1"])
    [['method.name=fedavg', 'method.training.lr=0.1..1'], ['method.name=neurosfl', 'method.training.lr=0.1..1']]
    """
    parsed = dict(map(_parse_axis, axes))
    if METHOD not in parsed:
        return [list(axes)]
    return [
        [f"{METHOD}={name}" if _parse_axis(axis)[0] == METHOD else axis for axis in axes] for name in parsed[METHOD]
    ]


def find_best_of_methods(ranked: Sequence[SettingsResult]) -> dict[str, SettingsResult]:
    """Return the best settings of each method, of those that have a result with every seed, the best method first."""
    best: dict[str, SettingsResult] = {}
    for result in ranked:
        names = [setting.partition("=")[2] for setting in result.settings if setting.startswith(f"{METHOD}=")]
        if names and result.values and not result.failures:
            best.setdefault(names[0], result)
    return best


def run_search(
    searches: Sequence[Search],
    seeds: Sequence[int],
    run: Callable[[list[Trial]], Mapping[Trial, str]],
    read: Callable[[Trial], Mapping[str, Any]],
    *,
    at_a_time: int = 1,
) -> tuple[list[SettingsResult], dict[str, Any]]:
    """Run the settings of a search, and return them, best first, and the task's metric.

    Args:
        searches: choose the settings, one after another.
        seeds: each of the settings runs with these.
        run: runs trials, or what is left of them, and returns why the failed ones failed.
        read: returns the summary of a finished trial.
        at_a_time: runs that go on at the same time. A sampler learns from them before it chooses the next ones.

    Raises:
        ConfigError: no run finished.
    """
    results: dict[Trial, Mapping[str, Any]] = {}
    failures: dict[Trial, str] = {}
    batches = (
        (search, settings)
        for search in searches
        for settings in iter(partial(search.propose, max(1, at_a_time // len(seeds))), [])
    )
    for search, settings in batches:
        batch = expand_seeds(settings, seeds)
        failed = run(batch)
        finished = {trial: read(trial) for trial in batch if trial not in failed}
        for result in _group_runs(finished, failed):
            search.note(result, next((summary["metric"]["mode"] for summary in finished.values()), "min"))
        results |= finished
        failures |= failed
    if not results:
        first, reason = next(iter(failures.items()))
        raise ConfigError(f"no run of the sweep finished; {first.label}: {reason}")
    return rank_settings(results, failures), dict(next(iter(results.values()))["metric"])


def rank_settings(results: Mapping[Trial, Mapping[str, Any]], failures: Mapping[Trial, str]) -> list[SettingsResult]:
    """Return the settings of a sweep, best first by the mean metric on validation examples.

    Settings of which a run failed, or has no metric on validation examples, come last: the mean over the other seeds
    would be too good.

    Args:
        results: summary of each finished run, at least one.
        failures: why a run failed, for each other trial.

    Raises:
        ConfigError: no run has the metric on validation examples.
    """
    ranked = _group_runs(results, failures)
    metric = next(iter(results.values()))["metric"]
    if not any(result.values for result in ranked):
        raise ConfigError(f"in all finished runs, {_explain_lack(metric['name'])}")
    sign = -1 if metric["mode"] == "max" else 1

    def rank(result: SettingsResult) -> tuple[bool, bool, float]:
        return bool(result.failures), result.mean is None, sign * (result.mean or 0.0)

    return sorted(ranked, key=rank)


def _group_runs(results: Mapping[Trial, Mapping[str, Any]], failures: Mapping[Trial, str]) -> list[SettingsResult]:
    """Return the runs by their settings; see :func:`rank_settings`."""
    groups: dict[tuple[str, ...], dict[int, Mapping[str, Any]]] = {}
    for trial, summary in results.items():
        groups.setdefault(trial.settings, {})[trial.seed] = summary
    failed: dict[tuple[str, ...], dict[int, str]] = {}
    for trial, reason in failures.items():
        groups.setdefault(trial.settings, {})
        failed.setdefault(trial.settings, {})[trial.seed] = reason
    grouped = []
    for settings, summaries in groups.items():
        metrics = {seed: summary["final"]["metrics"] for seed, summary in summaries.items()}
        metric = next((summary["metric"]["name"] for summary in summaries.values()), "")
        name = f"{VALIDATION}{metric}"
        count = get_count_name(name)
        values = {seed: own[name] for seed, own in metrics.items() if own.get(name) is not None}
        lacking = {seed: _explain_lack(metric) for seed in metrics.keys() - values.keys()}
        reasons = dict(sorted({**failed.get(settings, {}), **lacking}.items()))
        examples = {seed: own[count] for seed, own in metrics.items() if count in own}
        sent = [sum(way["payload_bytes"] for way in s["traffic"].values()) for s in summaries.values()]
        grouped.append(SettingsResult(settings, values, reasons, examples, mean(sent) if sent else None))
    return grouped


def find_unequal_validation(results: Sequence[SettingsResult]) -> str:
    """Return a warning about settings that were evaluated on other validation examples; empty if there are none."""
    by_seed: dict[int, dict[float, str]] = {}
    for result in results:
        for seed, count in result.examples.items():
            by_seed.setdefault(seed, {}).setdefault(count, ", ".join(result.settings))
    unequal = [(seed, counts) for seed, counts in sorted(by_seed.items()) if len(counts) > 1]
    if not unequal:
        return ""
    seed, counts = unequal[0]
    shown = "; ".join(f"{count:g} with {settings}" for count, settings in sorted(counts.items()))
    return (
        f"the settings cannot be compared: they have different numbers of validation examples (seed {seed}: {shown}), "
        "probably because a setting decides which examples are used"
    )


def _explain_lack(metric: str) -> str:
    return f"no site reported {metric} on validation examples; raise task.split.validation for all runs by --set"


def _parse_axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    parts, depth = [""], 0
    for character in values:
        depth += _BRACKETS.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    if not key or not equals or not all(part.strip() for part in parts):
        raise ConfigError(f"{text!r}: expected KEY.PATH=VALUE,VALUE, such as method.sparsity=0.8,0.9")
    return key, [part.strip() for part in parts]
