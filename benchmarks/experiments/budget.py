"""A run at 1/30, 1/100 and 1/300 of FedAvg's bytes, by one setting: nine cohorts, and settings chosen by the others.

    python benchmarks/experiments/budget.py ../shared/data [--only openneuro] [--seeds 11] [--out runs/budget]
    python benchmarks/experiments/budget.py ../shared/data --tune [--seeds 11]
    python benchmarks/experiments/budget.py --report [--docs] [--picture FILE] [--out runs/budget]

An arm is FedAvg's configuration of a cohort with another method section: ``topk_ef`` with ``budget``, whose other
settings are an arm's own; NeuroSFL with ``budget``; or what others do: FedAvg in few bits with as many rounds as the
bytes pay for, FedAvg whose messages SZ3 (``pip install pysz``) shortens to their share, and top-k without a memory at
FL4Health's 20 bytes an entry, two coordinates in int64 and a float32. Each seed tests another fifth
of the subjects of every site, and 15 % of the others are for validation. At each share a cohort's top-k is the
arm with the smallest mean ratio to FedAvg's error on the validation subjects of the *other* cohorts, of all seeds.
Metrics are those of the model as the sites hold it after the last message; every message counts.

Sites train by SGD with momentum. ``--tune`` trains FedAvg at every rate and weight decay of ``RATES`` and ``DECAYS``,
and with the settings of ``Cohort.adam``; by the errors on the validation subjects ``Cohort.rate`` and ``Cohort.decay``
were chosen, which all arms have.

Each run writes one file; finished runs are not repeated, and several processes may share the work. A share that pays
for no message has no run. ``--report`` prints the tables, ``--docs`` writes them to docs/results/bytes.md and
``--picture`` draws them.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
import yaml
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from page_tables import write_section
from pysz import sz, szAlgorithm, szConfig, szErrorBoundMode
from runs import claim, compare_scores, predict_at_site

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import prepare_site_data
from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.needs import Need
from flare_sparse.core.params import Layout
from flare_sparse.results.report.figures import render_png
from flare_sparse.results.runs.bootstrap import AUC, Difference, compare_predictors
from flare_sparse.results.runs.local import run_assembly
from flare_sparse.rounds.federation.rounds import QuorumMissed
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, build_site
from flare_sparse.wire.envelope import HEADER_BYTES
from flare_sparse.wire.formats import FORMATS
from flare_sparse.wire.number_format import CodedValues, Coding, NumberFormat, add_residual, take_reference

SHARES = (30, 100, 300)
CHOSEN_AT = 100
FEDAVG, TOP_K = "FedAvg", "top-k, chosen by the others"
WORDS = 1000
"""Most frequent words of a text, of which each is an input."""


@dataclass(frozen=True)
class Cohort:
    """A cohort with the settings of FedAvg.

    Attributes:
        title: name on the page.
        file: the data below the folder; empty: texts as counts of words.
        task, partition: as in a configuration.
        adam: settings of ``training`` that ``--tune`` compares with.
        rate, decay: learning rate and weight decay of SGD, chosen by ``--tune``.
        sites: number of sites, where they are drawn.
        rounds: of FedAvg.
        unit: of the mean error; ``AUC``: the error is 1 - AUC; empty: the share of wrong classes.
    """

    title: str
    file: str
    task: dict[str, Any]
    partition: dict[str, Any]
    adam: dict[str, Any]
    rate: float
    decay: float = 0.0
    sites: int | None = None
    rounds: int = 30
    unit: str = ""

    @property
    def decays(self) -> tuple[float, ...]:
        """Weight decays that ``--tune`` tries."""
        return DECAYS[1:] if self.unit == "years" else DECAYS[:2]

    def build_training(self, rate: float, decay: float) -> dict[str, Any]:
        """Return the settings of ``training`` by SGD."""
        kept = {name: self.adam[name] for name in ("epochs", "batch_size")}
        own = {"optimizer": "sgd", "momentum": 0.9, "lr": rate, "weight_decay": decay}
        return kept | own | {"schedule": {"kind": "cosine"}}


def _describe_age(title: str, file: str, center: float, spread: float, rate: float, decay: float) -> Cohort:
    task = {
        "name": "table", "kind": "regression", "target": "age", "target_scale": [center, spread],
        "features": ["destrieux", "sex"], "id": "subject", "scaling": "federated", "clip": 3, "missing": "impute",
        "model": {"name": "mlp", "hidden": [256]},
    }  # fmt: skip
    adam = {"epochs": 2, "batch_size": 64, "optimizer": "adamw", "lr": 3e-3, "weight_decay": 3}
    adam["schedule"] = {"kind": "cosine"}
    return Cohort(title, f"brain_morphometry/{file}", task, SCANNERS, adam, rate, decay, unit="years")


SCANNERS = {"kind": "natural", "column": "site"}
DRAWN = {"kind": "dirichlet", "column": "label", "alpha": 0.5}
ADAM = {"epochs": 1, "batch_size": 32, "optimizer": "adam", "lr": 1e-3}
IMAGES = {"name": "image_classification", "model": {"name": "image_mlp", "hidden": [100]}}
COHORTS = {
    "openneuro": _describe_age("OpenNeuro, 6 sites", "destrieux_openneuro.csv.gz", 26, 13, 0.1, 0.01),
    "abide1": _describe_age("ABIDE I, 20 sites", "destrieux_abide1.csv.gz", 17, 8, 0.1, 0.003),
    "fcon1000": _describe_age("1000 FCP, 23 sites", "destrieux_fcon1000.csv.gz", 28, 13, 0.3, 0.01),
    "brain_t1": Cohort(
        "T1w volumes, 5 sites",
        "brain_t1",
        {
            "name": "brain_age", "model": {"name": "voxel_mlp", "hidden": [64]}, "downsample": 3,
            "normalization": "brain_first",
        },
        {"kind": "natural", "split": {"IXI-HH": 4}},
        {
            "epochs": 1, "batch_size": 16, "optimizer": "adamw", "lr": 1e-3, "weight_decay": 1.0,
            "schedule": {"kind": "cosine"},
        },
        0.1,
        0.03,
        unit="years",
    ),
    "eicu": Cohort(
        "eICU, 5 regions",
        "eicu_demo/mortality.npz",
        {
            "name": "table", "kind": "binary", "target": "died_in_hospital", "features": ["meds_24h_{0..419}"],
            "id": "stay", "group": "patient", "rows": {"has_medications": 1}, "skip_bad_subjects": True,
            "missing_codes": {"died_in_hospital": -1}, "scaling": "none", "model": {"name": "mlp", "hidden": [64, 32]},
        },
        {"kind": "natural", "column": "region", "missing": "unknown"},
        {"epochs": 1, "batch_size": 32, "optimizer": "sgd", "lr": 0.3},
        0.1,
        unit="AUC",
    ),
    "pneumonia": Cohort(
        "PneumoniaMNIST, 4 drawn sites", "pneumoniamnist/pneumoniamnist.npz", {**IMAGES, "images_per_split": 2500},
        DRAWN, ADAM, 0.1, sites=4,
    ),
    "mnist": Cohort(
        "MNIST, 10 drawn sites", "mnist/mnist_small.npz", {**IMAGES, "classes": 10, "images_per_split": 3000},
        DRAWN, ADAM, 0.03, sites=10,
    ),
    "cifar10": Cohort(
        "CIFAR-10 by a CNN, 10 drawn sites", "cifar10/cifar10_jpeg.npz",
        {
            "name": "image_classification", "image": [3, 32, 32], "classes": 10, "images_per_split": 2000,
            "model": {"name": "image_cnn", "channels": [16, 32]},
        },
        DRAWN, ADAM, 0.1, sites=10,
    ),
    "banking77": Cohort(
        "BANKING77's words, 10 drawn sites",
        "",
        {
            "name": "table", "kind": "classes", "target": "label", "classes": [str(number) for number in range(77)],
            "features": [f"word_{{0..{WORDS - 1}}}"], "scaling": "none", "model": {"name": "mlp", "hidden": [64]},
        },
        DRAWN,
        {**ADAM, "lr": 3e-3},
        0.3,
        sites=10,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """What replaces FedAvg.

    Attributes:
        bits: of a value with its part of a scale; 32: float32.
        values: number format.
        method: settings of ``topk_ef`` beside ``budget``, or of the method that they name; None: FedAvg.
        rounds: rounds for each of FedAvg's; 0: as many as the bytes pay for.
        entry_bytes: bytes of an entry of another package's messages; 0: those of the messages count.
        training: of the sites: the cohort's SGD or Adam, or SGD with this rate and weight decay.
    """

    bits: float = 1.25
    values: str = "int1"
    method: Mapping[str, Any] | None = field(default_factory=dict)
    rounds: float = 1.0
    entry_bytes: int = 0
    training: Literal["sgd", "adam"] | tuple[float, float] = "sgd"


NEUROSFL = {"name": "neurosfl", "scores": "weighted_snip"}
ARMS = {
    FEDAVG: Arm(32, "float32", None),
    "2 bits, no decay": Arm(2.25, "int2", {"decay": 1.0}),
    "1 bit, no decay": Arm(method={"decay": 1.0}),
    "1 bit": Arm(),
    "1 bit, 2 x rounds": Arm(rounds=2),
    "1 bit, 3 x rounds": Arm(rounds=3),
    "FedAvg, 2 x rounds": Arm(32, "float32", None, 2),
    "Adam": Arm(32, "float32", None, training="adam"),
    "1 bit, 2 x rounds, Adam": Arm(rounds=2, training="adam"),
    "NeuroSFL 90 %": Arm(32, "float32", NEUROSFL | {"sparsity": 0.9}),
    "NeuroSFL in 4 bits": Arm(4.25, "int4", NEUROSFL | {"score_share": 0.001}),
    "FedAvg in 4 bits, fewer rounds": Arm(4.25, "int4", None, 0),
    "FedAvg in 2 bits, fewer rounds": Arm(2.25, "int2", None, 0),
    "FedAvg in 1 bit, fewer rounds": Arm(1.25, "int1", None, 0),
    "FedAvg, SZ3": Arm(32, "sz3", None),
    "top-k without memory": Arm(32, "float32", {"decay": 0.0}, entry_bytes=20),
}
RATES, DECAYS = (0.01, 0.03, 0.1, 0.3), (0.0, 0.003, 0.01, 0.03, 0.1)
TUNED = {f"rate {rate}, decay {decay}": (rate, decay) for rate, decay in product(RATES, DECAYS)}
ARMS |= {label: Arm(32, "float32", None, training=pair) for label, pair in TUNED.items()}
MORE = "FedAvg, 2 x rounds"
FIXED = (FEDAVG, MORE, "Adam", "NeuroSFL 90 %")
"""Arms whose bytes no setting chooses."""
TOP_KS = [
    label
    for label, arm in ARMS.items()
    if arm.values.startswith("int") and arm.method is not None and "name" not in arm.method and arm.training == "sgd"
]
RIVALS = [label for label in ARMS if label not in (*FIXED, *TOP_KS, *TUNED)]
_Key = tuple[str, str, int, int]
"""Cohort, arm, share and seed of a run."""


@dataclass(frozen=True, kw_only=True)
class ErrorBounded(NumberFormat):
    """SZ3 (Liang et al. 2022) with the smallest absolute error bound whose message has ``share`` of the dense bytes.

    A section has its length (uint64), the buffers, which are exact (float32), and SZ3's bytes.
    """

    share: float
    sends_differences: bool = True
    takes: Need | None = Need.EXACT_MODEL
    rounding: float = 1.0

    def compute_min_bytes(self, scalars: int) -> int:
        return 8

    def measure(self, buffer: np.ndarray, scalars: int, layout: Layout) -> int:
        return int.from_bytes(buffer[:8].tobytes(), "little")

    def seal(self, patch: Patch, coding: Coding, out: np.ndarray | None = None) -> CodedValues:
        is_exact, reference = (
            patch.mask.find_buffers(coding.layout), take_reference(patch.mask, coding.base_vector)
        )  # fmt: skip
        new_residual, target = add_residual(patch, coding.residual)
        exact = patch.values[is_exact].numpy()
        allowed = self.share * 4 * len(is_exact) - HEADER_BYTES - 8 - 4 * len(exact)
        packed, decoded = self._compress((target - reference)[~is_exact].numpy(), allowed)
        head = np.array([8 + 4 * len(exact) + len(packed)], np.uint64)
        section = np.concatenate([part.view(np.uint8) for part in (head, exact, packed)])
        reference[~is_exact] += torch.from_numpy(decoded)
        reference[is_exact] = patch.values[is_exact]
        target -= reference
        target[is_exact] = 0
        return CodedValues(section, patch.mask.put(target, new_residual), reference)

    def open(self, section: np.ndarray, mask: Mask, layout: Layout, base_vector: torch.Tensor | None) -> torch.Tensor:
        is_exact, values = mask.find_buffers(layout), take_reference(mask, base_vector)
        end = 8 + 4 * int(is_exact.sum())
        count = len(is_exact) - int(is_exact.sum())
        if count:
            values[~is_exact] += torch.from_numpy(sz.decompress(section[end:].copy(), np.float32, (count,))[0])
        values[is_exact] = torch.from_numpy(section[8:end].copy().view(np.float32))
        return values

    def _compress(self, values: np.ndarray, allowed: float) -> tuple[np.ndarray, np.ndarray]:
        if not values.size:
            return np.empty(0, np.uint8), values
        largest, low, high = float(np.abs(values).max()), 0.0, 1.0
        config = szConfig()
        config.errorBoundMode, config.cmprAlgo = szErrorBoundMode.ABS, szAlgorithm.NOPRED
        packed = np.empty(0, np.uint8)
        for _ in range(9):
            middle = (low + high) / 2
            config.absErrorBound = max(middle * largest, 1e-30)
            found, _ratio = sz.compress(values, config)
            if len(found) <= allowed:
                packed, high = found, middle
            else:
                low = middle
        if not len(packed):
            config.absErrorBound = max(2 * largest, 1e-30)
            packed, _ratio = sz.compress(values, config)
        return packed, sz.decompress(packed, np.float32, values.shape)[0]


for _code, _share in enumerate(SHARES, start=200):
    FORMATS[f"sz3_{_share}"] = ErrorBounded(code=_code, share=1 / _share)


def write_words(data: Path, file: Path) -> None:
    """Write every third text of BANKING77 as the words that it has, each by its inverse document frequency."""
    with gzip.open(data / "banking77" / "banking77.csv.gz", "rt", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))[::3]
    texts = [set(re.findall(r"[a-z']+", row["text"].lower())) for row in rows]
    counts = Counter(word for text in texts for word in text)
    words = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    weights = np.array([math.log(len(texts) / counts[word]) / 2 for word in words], np.float32)
    bags = np.array([[word in text for word in words] for text in texts]) * weights
    np.savez(file, word=bags, label=np.array([int(row["label"]) for row in rows]))


def write_configuration(name: str, arm: Arm, share: int, seed: int, data: Path, out: Path) -> dict[str, Any]:
    """Return the content of a run's configuration."""
    cohort = COHORTS[name]
    path = data / cohort.file if cohort.file else out / "words.npz"
    if not cohort.file and not path.exists():
        write_words(data, path)
    rounds = max(1, round(cohort.rounds * (arm.rounds or 32 / arm.bits / share)))
    if isinstance(arm.training, tuple):
        training = cohort.build_training(*arm.training)
    else:
        training = cohort.adam if arm.training == "adam" else cohort.build_training(cohort.rate, cohort.decay)
    method: dict[str, Any] = {"name": "fedavg", "rounds": rounds, "training": training, "evaluate_every": 1000}
    own = cohort.rounds / rounds / share
    if arm.entry_bytes:
        method |= {"name": "topk_ef", "fraction": own * 4 / arm.entry_bytes, "down": own * 4 / arm.entry_bytes}
    elif arm.method is not None:
        method |= {} if "sparsity" in arm.method else {"name": "topk_ef", "budget": own}
    method |= arm.method or {}
    wire = {
        "values": f"sz3_{share}" if arm.values == "sz3" else arm.values,
        "initial_model": "sent" if arm == ARMS[FEDAVG] else "built",
    }
    split = {"folds": 5, "fold": seed - 10, "validation": 0.15}
    simulator = {"data": {"path": str(path.resolve()), "partition": cohort.partition}}
    return {
        "name": "budget", "seed": seed, "method": method, "wire": wire, "task": {**cohort.task, "split": split},
        "simulator": simulator | ({"sites": cohort.sites} if cohort.sites else {}), "federation": {"threads": 1},
    }  # fmt: skip


_Loaded = dict[tuple[str, int], dict[str, Examples]]


def run(key: _Key, data: Path, out: Path, loaded: _Loaded) -> dict[str, Any]:
    """Return bytes, seconds and the errors of every validation and test subject of a run."""
    name, label, share, seed = key
    file = out / f"{name}.{label}.{share}.{seed}.yaml".replace(" ", "_")
    file.write_text(yaml.safe_dump(write_configuration(name, ARMS[label], share, seed, data, out)), encoding="utf-8")
    config = load_config(file)
    assembly = assemble(config)
    if (name, seed) not in loaded:
        located = prepare_site_data(config, assembly.task, Path())
        loaded[name, seed] = {site: open_site(assembly, own).trainer.examples for site, own in located.items()}
    opened = {
        site: LocalTask.open(site, assembly.task, examples, assembly.layout, seed)
        for site, examples in loaded[name, seed].items()
    }
    sites = {site: build_site(task) for site, task in opened.items()}
    start = time.monotonic()
    _, ledger = run_assembly(config, assembly, sites)
    row: dict[str, Any] = {"seconds": time.monotonic() - start, "size": assembly.layout.size}
    entry = ARMS[label].entry_bytes
    sent = sum(entry * line.scalars_sent if entry else line.payload_bytes for line in ledger.lines)
    row |= {"bytes": sent, "validation": {}, "test": {}}
    for (site, own), part in product(sites.items(), ("validation", "test")):
        examples = getattr(own.trainer.examples, part)
        if examples is None or not len(examples):
            continue
        predictions, targets = predict_at_site(assembly.task, own, examples)
        ids = list(getattr(own.trainer.examples, f"{part}_ids"))
        row[part][site] = {"ids": ids, **_score(COHORTS[name], predictions, targets)}
    return row


def _score(cohort: Cohort, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, list[float]]:
    if cohort.unit == "AUC":
        return {"score": predictions[:, -1].tolist(), "label": targets.tolist()}
    if cohort.unit:
        return {"error": (predictions[:, 0] - targets).abs().tolist()}
    return {"error": (predictions.argmax(1) != targets.long()).float().tolist()}


def list_keys(cohorts: list[str], arms: list[str], shares: list[int], seeds: list[int]) -> Iterator[_Key]:
    """Yield all runs; those that choose come first."""
    first = [(label, 1) for label in arms if label in (*FIXED, *TUNED)]
    chosen = [(label, share) for label in arms for share in shares if label not in (*FIXED, *TUNED)]
    order = sorted(chosen, key=lambda pair: (pair[1] != CHOSEN_AT, pair[0] in RIVALS))
    for seed, (label, share), name in product(seeds, (*first, *order), cohorts):
        if label in TUNED and TUNED[label][1] not in COHORTS[name].decays:
            continue
        if ARMS[label].rounds or COHORTS[name].rounds * 32 / ARMS[label].bits / share >= 0.9:
            yield name, label, share, seed


def compare(name: str, rows: Mapping[_Key, Any], label: str, share: int, part: str, seeds: list[int]) -> Difference:
    """Return the error of an arm minus FedAvg's over the subjects of all seeds, with its 95 % interval."""
    key = (name, label, share, part, *seeds)
    if key not in _COMPARED:
        _COMPARED[key] = _compare(name, rows, label, share, part, seeds)
    return _COMPARED[key]


_COMPARED: dict[tuple[Any, ...], Difference] = {}
"""Comparisons of this process, whose intervals take seconds."""


def _compare(name: str, rows: Mapping[_Key, Any], label: str, share: int, part: str, seeds: list[int]) -> Difference:
    pairs = [(rows[name, label, share, seed][part], rows[name, FEDAVG, 1, seed][part]) for seed in seeds]
    sites = np.array([site for _, other in pairs for site, own in other.items() for _ in own["ids"]])

    def collect(which: int, column: str) -> np.ndarray:
        return np.concatenate([pair[which][site][column] for pair in pairs for site in pair[1]])

    if COHORTS[name].unit != "AUC":
        return compare_scores(collect(0, "error"), collect(1, "error"), sites, is_lower_better=True)
    subjects = np.arange(len(sites))
    own, other = (collect(which, "score") for which in (0, 1))
    found = compare_predictors(AUC, own, other, collect(1, "label")[:, None], sites, subjects, resamples=2000)
    assert found is not None, "both classes occur"
    return Difference(1 - found.first, 1 - found.second, -found.value, -found.high, -found.low, found.verdict)


def choose(name: str, rows: Mapping[_Key, Any], share: int) -> str:
    """Return the arm of top-k that the other cohorts choose at a share, of those that every seed has."""
    seeds = sorted({seed for *_, seed in rows})
    # At the smallest share the messages of small models pay for no entry.
    fitting = [cohort for cohort in COHORTS if any((cohort, label, share, seeds[0]) in rows for label in TOP_KS)]
    known = [label for label in TOP_KS if all((c, label, share, seed) in rows for c in fitting for seed in seeds)]
    others = [cohort for cohort in fitting if cohort != name]

    def measure(label: str) -> float:
        found = [compare(cohort, rows, label, share, "validation", seeds) for cohort in others]
        return float(np.mean([difference.first / difference.second for difference in found]))

    return min(known, key=measure)


@dataclass(frozen=True)
class Result:
    """A line of the table: an arm at a share on a cohort, against FedAvg with the same seeds."""

    cohort: str
    arm: str
    label: str
    share: int
    seeds: int
    fewer: float
    difference: Difference

    @property
    def percent(self) -> tuple[float, float, float]:
        """Difference and its interval in percent of FedAvg's error."""
        found = self.difference
        return tuple(100 * value / found.second for value in (found.value, found.low, found.high))  # type: ignore[return-value]


def collect_results(rows: Mapping[_Key, Any]) -> list[Result]:
    """Return all lines of the table that have runs."""
    results = []
    for name in COHORTS:
        chosen = [(TOP_K, choose(name, rows, share), share) for share in SHARES]
        others = [(label, label, share) for label in (*RIVALS, *FIXED[1:]) for share in (1, *SHARES)]
        for arm, label, share in (*chosen, *others):
            seeds = sorted(seed for c, a, s, seed in rows if (c, a, s) == (name, label, share))
            if seeds := [seed for seed in seeds if (name, FEDAVG, 1, seed) in rows]:
                sent = [
                    sum(rows[name, a, s, seed]["bytes"] for seed in seeds) for a, s in ((FEDAVG, 1), (label, share))
                ]
                difference = compare(name, rows, label, share, "test", seeds)
                results.append(Result(name, arm, label, share, len(seeds), sent[0] / sent[1], difference))
    return results


def format_tables(rows: Mapping[_Key, Any]) -> str:
    """Return the tables of top-k by cohort, of all other arms, and of the choice."""
    results = collect_results(rows)
    lines = [
        "| top-k minus FedAvg, in % of its error | FedAvg's error | " + " | ".join(f"1/{s}" for s in SHARES) + " |"
    ]
    lines.append("| --- " * (len(SHARES) + 2) + "|")
    for name, cohort in COHORTS.items():
        own = {result.share: result for result in results if (result.arm, result.cohort) == (TOP_K, name)}
        cells = []
        for share in SHARES:
            if share not in own:
                cells.append("no entry fits")
                continue
            text = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*own[share].percent)
            cells.append(f"{text}, {ARMS[own[share].label].rounds:g} x")
        one = own[CHOSEN_AT]
        error = f"{one.difference.second:.3g} {cohort.unit if cohort.unit != 'AUC' else '(1 - AUC)'}"
        lines.append(f"| {cohort.title} | {error.strip()} | {' | '.join(cells)} |")
    lines += ["", "| minus FedAvg, in % of its error | " + " | ".join(COHORTS) + " |"]
    lines.append("| --- " * (len(COHORTS) + 1) + "|")
    for arm, share in product((*FIXED[1:], *RIVALS), (1, *SHARES)):
        found = {result.cohort: result for result in results if (result.arm, result.share) == (arm, share)}
        if not found:
            continue
        fewer = sorted(result.fewer for result in found.values())
        ends = dict.fromkeys(f"{value:.{int(value < 1)}f}" for value in (fewer[0], fewer[-1]))
        title = f"{arm}, {f'1/{share}, ' * (share > 1)}{' to '.join(ends)} times fewer bytes"
        cells = []
        for name in COHORTS:
            value, low, high = found[name].percent if name in found else (math.nan,) * 3
            mark = "" if low <= 0 <= high else "*"
            cells.append(f"{value:+.0f}{mark}" if name in found else "")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    seeds = sorted({seed for *_, seed in rows})
    lines += ["", "| validation, 1/100, in % of FedAvg's error | " + " | ".join(TOP_KS) + " |"]
    lines.append("| --- " * (len(TOP_KS) + 1) + "|")
    for name, cohort in COHORTS.items():
        cells = []
        for label in TOP_KS:
            own_seeds = [seed for seed in seeds if (name, label, CHOSEN_AT, seed) in rows]
            if own_seeds:
                difference = compare(name, rows, label, CHOSEN_AT, "validation", own_seeds)
                cells.append(f"{100 * difference.value / difference.second:+.1f}")
            else:
                cells.append("")
        lines.append(f"| {cohort.title} | {' | '.join(cells)} |")
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |") + "\n"


def format_tuning(rows: Mapping[_Key, Any]) -> str:
    """Return the table of FedAvg's errors on validation subjects, by rate with the best weight decay."""
    lines = ["| FedAvg, validation | Adam | " + " | ".join(f"SGD, {rate}" for rate in RATES) + " | weight decay |"]
    lines.append("| --- " * (len(RATES) + 3) + "|")
    for name, cohort in COHORTS.items():
        errors: dict[str, list[float]] = {}
        for own, label, share, seed in rows:
            if own == name and label in ("Adam", *TUNED):
                found = compare(name, rows, label, share, "validation", [seed])
                errors.setdefault(label, []).append(found.first)
        if not set(errors) & set(TUNED):
            continue
        cells = [f"{fmean(errors['Adam']):.3g}"]
        for rate in RATES:
            means = [
                fmean(errors[label]) for label, (own_rate, _) in TUNED.items() if own_rate == rate and label in errors
            ]
            cells.append(f"{min(means):.3g}" if means and min(means) < 1e3 else "diverges")
        lines.append(f"| {cohort.title} | {' | '.join(cells)} | {cohort.decay:g} |")
    return "\n".join(lines) + "\n"


def draw_results(results: list[Result]) -> Figure:
    """Draw the error difference of top-k from FedAvg with its interval, one point a cohort, by bytes."""
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for number, (name, cohort) in enumerate(COHORTS.items()):
        own = [result for result in results if (result.cohort, result.arm) == (name, TOP_K)]
        places = [SHARES.index(result.share) + (number - (len(COHORTS) - 1) / 2) * 0.085 for result in own]
        values, lows, highs = np.array([result.percent for result in own]).T
        bars = np.abs(np.array([lows, highs]) - values)
        # The style has eight colours.
        look = {"fmt": "o", "color": f"C{number}"} if number < 8 else {"fmt": "s", "color": "0.1"}
        axis.errorbar(places, values, bars, markersize=5, label=cohort.title, **look)
    axis.axhline(0, color="0.3", linewidth=0.8)
    axis.axhspan(-3, 3, color="0.9", zorder=0)
    axis.set_yscale("symlog", linthresh=10)
    axis.set_yticks([-10, -3, 0, 3, 10, 30, 100], ["-10", "-3", "0", "3", "10", "30", "100"])
    axis.set_xticks(range(len(SHARES)), [f"1/{share}" for share in SHARES])
    axis.set_xlabel("bytes, of FedAvg's")
    axis.set_ylabel("error minus FedAvg's, % of it")
    axis.grid(axis="x", visible=False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def read_rows(folder: Path) -> dict[_Key, Any]:
    """Return the finished runs."""
    rows = {}
    for file in folder.glob("*/*.json"):
        label, share, seed = file.stem.rsplit("_", 2)
        rows[file.parent.name, label.replace("_", " "), int(share), int(seed)] = json.loads(file.read_text())
    return rows


def main() -> int:
    compared = [*FIXED, *TOP_KS, *RIVALS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="folder with the cohorts")
    parser.add_argument("--only", choices=COHORTS, nargs="+", default=list(COHORTS))
    parser.add_argument("--arms", choices=compared, nargs="+", default=compared)
    parser.add_argument("--tune", action="store_true", help="run FedAvg with every rate and weight decay instead")
    parser.add_argument("--shares", type=int, choices=SHARES, nargs="+", default=list(SHARES))
    parser.add_argument("--seeds", type=int, choices=range(11, 16), nargs="+", default=[11, 12, 13])
    parser.add_argument("--out", type=Path, default=Path("runs/budget"))
    parser.add_argument("--report", action="store_true", help="print the tables of the files in --out")
    parser.add_argument("--docs", action="store_true", help="write them to docs/results/bytes.md")
    parser.add_argument("--picture", type=Path, help="PNG of the differences")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loaded = _Loaded()
    arms = ["Adam", *TUNED] if arguments.tune else arguments.arms
    keys = list_keys(arguments.only, arms, arguments.shares, arguments.seeds) if arguments.data else ()
    for key in keys:
        name, label, share, seed = key
        file = arguments.out / name / f"{label}_{share}_{seed}.json".replace(" ", "_")
        file.parent.mkdir(parents=True, exist_ok=True)
        with claim(file) as is_claimed:
            if is_claimed:
                try:
                    row = run(key, arguments.data, arguments.out, loaded)
                except (ConfigError, QuorumMissed) as error:
                    print(*key, error, flush=True)
                    continue
                write_json(file, row)
                print(*key, f"{row['bytes'] / 1e3:.0f} kB, {row['seconds']:.0f} s", flush=True)
    rows = read_rows(arguments.out)
    if arguments.report:
        print(format_tuning(rows), format_tables(rows), sep="\n")
    if arguments.docs:
        write_section("bytes", "budget_tuning", format_tuning(rows))
        write_section("bytes", "budget", format_tables(rows))
    if arguments.picture:
        arguments.picture.write_bytes(render_png(draw_results, collect_results(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
