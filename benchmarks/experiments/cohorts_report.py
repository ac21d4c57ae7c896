"""Write docs/results/age.md from the files of ``cohorts.py``, which calls this with ``--docs``.

The text above the tables is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from page_tables import write_section
from runs import compare_scores

from flare_sparse.results.runs.bootstrap import Difference, compute_r2_within_sites

ROOT = Path(__file__).resolve().parents[2]
TITLES = {
    "fcon1000": "1000 Functional Connectomes",
    "openneuro": "OpenNeuro",
    "abide1": "ABIDE I",
}
NAMES = ("fcon1000", "fcon1000_left_out", "openneuro", "openneuro_left_out", "abide1", "abide1_left_out")
"""Names of the tables, which are files of their own."""
LABELS = {
    "site_mean": "site mean",
    "ridge_pooled": "ridge, pooled",
    "ridge_local": "ridge, each site alone",
    "pooled network": "network, pooled",
    "local network": "network, each site alone",
    "FedAvg": "FedAvg",
    "FedAvg, personalised": "FedAvg, own",
    "FedAvg, personalised, ComBat": "FedAvg, own, ComBat",
    "NeuroSFL 90 %, personalised": "NeuroSFL 90 %, own",
    "FedSparsify 90 %, personalised": "FedSparsify 90 %, own",
}
"""Arms in the order of the tables, by their names in the files."""
REFERENCES = ("local network", "ridge_local")
Key = tuple[str, str]
Rows = dict[str, dict[int, dict[Key, tuple[float, float]]]]
"""Prediction and target of every subject, by arm and seed."""


def update_docs(folder: Path) -> None:
    """Write the tables of docs/results/age.md from the files in ``folder``."""
    sections = [section for name in TITLES for section in format_cohort(folder / name, name)]
    write_section("age", "cohorts", "".join(sections), dict(enumerate(NAMES, start=1)))


def format_cohort(folder: Path, name: str) -> Iterable[str]:
    """Yield the tables of a cohort."""
    files = sorted(folder.glob("*.json"))
    folds = [file for file in files if not file.stem.startswith("left-out")]
    if folds:
        yield format_folds(folds, name)
    left_out = [file for file in files if file.stem.startswith("left-out")]
    if left_out:
        yield format_left_out(left_out, name)


def read_folds(files: Iterable[Path]) -> tuple[Rows, dict[str, list[int]], set[int]]:
    """Return the predictions of all arms, the bytes of their runs, and the folds."""
    rows: Rows = {}
    sent: dict[str, list[int]] = {}
    folds = set()
    names = {label.replace(" ", "_"): label for label in (*LABELS, "baselines")}
    for file in files:
        stem, seed, fold = file.stem.rsplit("_", 2)
        row = json.loads(file.read_text(encoding="utf-8"))
        folds.add(int(fold))
        sent.setdefault(names[stem], []).append(row["bytes"])
        for site, values in row["sites"].items():
            for key in values.keys() - {"ids", "targets"}:
                own = rows.setdefault(names[stem] if key == "run" else key, {}).setdefault(int(seed), {})
                pairs = zip(values["ids"], values[key], values["targets"], strict=True)
                own |= {(site, subject): (prediction, target) for subject, prediction, target in pairs}
    return rows, sent, folds


def average_errors(seeds: Mapping[int, Mapping[Key, tuple[float, float]]]) -> dict[Key, float]:
    """Return the mean absolute error of each subject over the seeds that tested it."""
    errors: dict[Key, list[float]] = {}
    for subjects in seeds.values():
        for key, (prediction, target) in subjects.items():
            errors.setdefault(key, []).append(abs(prediction - target))
    return {key: float(np.mean(values)) for key, values in errors.items()}


def compare(first: Mapping[Key, float], second: Mapping[Key, float]) -> Difference:
    """Return the paired difference of two arms over the subjects that both tested."""
    keys = sorted(first.keys() & second.keys())
    own, other = (np.array([errors[key] for key in keys]) for errors in (first, second))
    return compare_scores(own, other, np.array([key[0] for key in keys]), is_lower_better=True)


def format_folds(files: list[Path], name: str) -> str:
    """Return the table of all arms."""
    rows, sent, folds = read_folds(files)
    errors = {label: average_errors(rows[label]) for label in LABELS if label in rows}
    subjects = set.intersection(*(set(own) for own in errors.values()))
    errors = {label: {key: own[key] for key in subjects} for label, own in errors.items()}
    sites, seeds = sorted({key[0] for key in subjects}), sorted({s for own in rows.values() for s in own})
    count, listed = len(folds), ", ".join(map(str, seeds))
    lines = [
        f"\n## {TITLES[name]}: {len(sites)} sites, {len(subjects)} subjects\n",
        f"`python benchmarks/experiments/cohorts.py ../shared/data --only {name}`: {count} folds, seeds {listed}.\n",
        "| | MAE, years | minus network alone | minus ridge alone | sites that gain | worst site | R2 | MB |",
        "| --- |" + " --- |" * 7,
    ]
    for label, own in errors.items():
        total = compare(own, dict.fromkeys(own, 0.0))
        cells = [f"{total.value:.2f} ({total.low:.2f}-{total.high:.2f})"]
        cells += [format_difference(compare(own, errors[other])) if other != label else "" for other in REFERENCES]
        gain = compare(own, errors["ridge_local"])
        cells.append("" if label == "ridge_local" else f"{gain.sites_that_gain or 0:.0%}")
        by_site = total.by_site
        worst = max(by_site, key=lambda site: by_site[site])
        cells += [f"{by_site[worst]:.0f}", f"{compute_r2(rows[label], subjects):.2f}"]
        megabytes = np.mean(sent.get(label, [0])) / 1e6
        cells.append(f"{megabytes:.0f}" if megabytes else "")
        lines.append(f"| {LABELS[label]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def compute_r2(seeds: Mapping[int, Mapping[Key, tuple[float, float]]], subjects: set[Key]) -> float:
    """Return R2 within sites, the mean over seeds."""
    values = []
    for own in seeds.values():
        keys = sorted(own.keys() & subjects)
        predictions, targets = (np.array([[own[key][part]] for key in keys]) for part in (0, 1))
        values.append(compute_r2_within_sites(predictions, targets, np.array([key[0] for key in keys])) or 0.0)
    return float(np.mean(values))


def format_difference(difference: Difference) -> str:
    """Return value and interval, bold where the interval excludes 0."""
    text = f"{difference.value:+.2f} ({difference.low:+.2f}/{difference.high:+.2f})"
    return text if difference.verdict == "undecided" else f"**{text}**"


BASELINES = ("site mean", "ridge alone", "network alone")
"""What a site can do by itself."""


def format_left_out(files: list[Path], name: str) -> str:
    """Return the table of sites that took no part in training."""
    collected: dict[str, dict[Key, list[float]]] = {}
    names = {label.replace(" ", "_"): label for label in LABELS}
    for file in files:
        label = next(label for stem, label in names.items() if f"_{stem}_" in file.stem and "personalised" in stem)
        for site, values in json.loads(file.read_text(encoding="utf-8"))["sites"].items():
            for key in values.keys() - {"ids", "targets"}:
                # The same in the files of all arms.
                own = collected.setdefault(label if key == "run" else key, {})
                for subject, prediction, target in zip(values["ids"], values[key], values["targets"], strict=True):
                    own.setdefault((site, subject), []).append(abs(prediction - target))
    means = {label: {key: float(np.mean(values)) for key, values in own.items()} for label, own in collected.items()}
    sites = sorted({key[0] for own in means.values() for key in own})
    lines = [
        f"\n### A site that took no part: {len(sites)} of {TITLES[name]}\n",
        f"`python benchmarks/experiments/cohorts.py ../shared/data --only {name} --left-out`\n",
        "| | MAE, years | minus network alone | minus ridge alone | sites that gain over both |",
        "| --- | --- | --- | --- | --- |",
    ]
    for label in [*BASELINES, *(label for label in LABELS if label in means)]:
        averages = means[label]
        total = compare(averages, dict.fromkeys(averages, 0.0))
        differences = [compare(averages, means[other]) for other in ("network alone", "ridge alone")]
        gains = [sum(d.by_site[site] < 0 for d in differences) == 2 for site in total.by_site]
        cells = [f"{total.value:.2f} ({total.low:.2f}-{total.high:.2f})", *map(format_difference, differences)]
        lines.append(f"| {LABELS.get(label, label)} | " + " | ".join(cells) + f" | {np.mean(gains):.0%} |")
    return "\n".join(lines) + "\n"
