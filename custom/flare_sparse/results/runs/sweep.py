"""A sweep: runs of one configuration with several settings and seeds, compared on validation examples alone."""

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
        validation: the task's metric of the final model on validation examples, by seed of a finished run that has it.
        failed: why a run failed or lacks the metric, by seed.
        examples: validation examples of the final model, by seed.
        bytes: bytes of all messages of a finished run, on average; None without one.
    """

    settings: tuple[str, ...]
    validation: dict[int, float]
    failed: dict[int, str]
    examples: dict[int, float]
    bytes: float | None

    @property
    def mean(self) -> float | None:
        """Mean of the metric over the seeds; None without a finished run."""
        return mean(self.validation.values()) if self.validation else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds (n - 1); None for one seed."""
        return stdev(self.validation.values()) if len(self.validation) > 1 else None


def expand_grid(axes: Sequence[str], keep: Callable[[Sequence[str]], tuple[str, ...]] = tuple) -> list[tuple[str, ...]]:
    """Return all combinations of the values of some settings.

    >>> expand_grid(["method.training.lr=0.1,0.01", "method.rounds=5"])
    [('method.training.lr=0.1', 'method.rounds=5'), ('method.training.lr=0.01', 'method.rounds=5')]

    Args:
        axes: ``key=value,value``, commas within brackets belong to a value.
        keep: returns those of some settings that apply; combinations that differ in the others are one.

    Raises:
        ConfigError: an axis has no value, or is named twice, or must not differ between runs.
    """
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
    combinations = itertools.product(*([f"{key}={value}" for value in values] for key, values in parsed))
    return list(dict.fromkeys(map(keep, combinations)))


METHOD = "method.name"


def find_best_of_methods(ranked: Sequence[SettingsResult]) -> dict[str, SettingsResult]:
    """Return the best settings of each method, of those that have a result with every seed, the best method first."""
    best: dict[str, SettingsResult] = {}
    for result in ranked:
        names = [setting.partition("=")[2] for setting in result.settings if setting.startswith(f"{METHOD}=")]
        if names and result.validation and not result.failed:
            best.setdefault(names[0], result)
    return best


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
    metric = next(iter(results.values()))["metric"]
    name = f"{VALIDATION}{metric['name']}"
    lack = (
        f"no site reported {metric['name']} on validation examples; raise task.split.validation for all runs by --set"
    )
    ranked = []
    for settings in dict.fromkeys(trial.settings for trial in [*results, *failures]):
        summaries = {trial.seed: summary for trial, summary in results.items() if trial.settings == settings}
        metrics = {seed: summary["final"]["metrics"] for seed, summary in summaries.items()}
        values = {seed: own[name] for seed, own in metrics.items() if own.get(name) is not None}
        failed = {trial.seed: reason for trial, reason in failures.items() if trial.settings == settings}
        failed |= dict.fromkeys(metrics.keys() - values.keys(), lack)
        examples = {seed: own[count] for seed, own in metrics.items() if (count := get_count_name(name)) in own}
        sent = [sum(way["payload_bytes"] for way in summary["traffic"].values()) for summary in summaries.values()]
        failed = dict(sorted(failed.items()))
        ranked.append(SettingsResult(settings, values, failed, examples, mean(sent) if sent else None))
    if not any(result.validation for result in ranked):
        raise ConfigError(f"in all finished runs, {lack}")
    sign = -1 if metric["mode"] == "max" else 1
    return sorted(ranked, key=lambda each: (bool(each.failed), each.mean is None, sign * (each.mean or 0.0)))


def find_unequal_validation(results: Sequence[SettingsResult]) -> str:
    """Return a warning if settings were evaluated on different numbers of validation examples; empty otherwise."""
    for seed in sorted({seed for result in results for seed in result.examples}):
        counts = {r.examples[seed]: ", ".join(r.settings) for r in reversed(results) if seed in r.examples}
        if len(counts) > 1:
            shown = "; ".join(f"{count:g} with {settings}" for count, settings in sorted(counts.items()))
            return (
                f"the settings cannot be compared: they have different numbers of validation examples (seed {seed}: "
                f"{shown}), probably because a setting decides which examples are used"
            )
    return ""


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
