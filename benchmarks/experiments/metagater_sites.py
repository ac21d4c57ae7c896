"""Sites of ``metagater.py``: CIFAR-10 with two classes per site, and the scan sites of three cohorts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from flare_sparse.tasks.data.partition import partition_by_site, partition_few_classes
from flare_sparse.tasks.data.tables import read_table
from flare_sparse.tasks.task import Examples, SiteData, Task

EXTRA_TESTS = 200


def load_sites(task: Task, sizes: Mapping[str, int], data: Path, seed: int) -> tuple[dict[str, Examples], list[str]]:
    """Return the examples of all sites, and the names of the target sites.

    Args:
        task: loads the examples.
        sizes: numbers of sites, of targets and of their examples.
        data: folder with cifar10/ and brain_morphometry/.
        seed: seed of the partition, of the targets and of the split at each site.
    """
    load = load_brain_sites if "smallest_target" in sizes else load_cifar_sites
    return load(task, dict(sizes), data, seed)


def load_cifar_sites(task: Task, sizes: dict[str, int], data: Path, seed: int) -> tuple[dict[str, Examples], list[str]]:
    """Return sites of two classes each, and the names of the target sites.

    A site tests on 20 % of its own images. A target tests on up to ``EXTRA_TESTS`` images of its classes that no site
    holds as well, because the test images of a target of 30 are too few.
    """
    path, targets = data / "cifar10" / "cifar10_jpeg.npz", sizes.pop("targets")
    cohort = task.cohort(path)
    parts = partition_few_classes(cohort, sizes.pop("sites") + targets, **sizes, seed=seed)
    chosen = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()[:targets]
    held_out = sorted(sorted(parts)[i] for i in chosen)
    label = dict(zip(cohort.ids, cohort.columns["label"].tolist(), strict=True))
    taken = {name for ids in parts.values() for name in ids}
    examples = {name: task.load(SiteData(name, path, ids), seed) for name, ids in parts.items()}
    for name in held_out:
        own, classes = examples[name], {label[i] for i in parts[name]}
        free = [i for i in cohort.ids if label[i] in classes and i not in taken]
        picked = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed)).tolist()[:EXTRA_TESTS]
        more = task.load(SiteData(name, path, tuple(free[i] for i in picked)), seed) if picked else None
        tests = [own.test, *([more.train, more.test] if more else [])]
        examples[name] = Examples(own.train, ConcatDataset(tests))
    return examples, held_out


def load_brain_sites(task: Task, sizes: dict[str, int], data: Path, seed: int) -> tuple[dict[str, Examples], list[str]]:
    """Return the 49 scan sites of three cohorts; some of those with many subjects are targets."""
    folder = data / "brain_morphometry"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "destrieux.npz"
        join_tables(sorted(folder.glob("destrieux_*.csv.gz")), path)
        parts = partition_by_site(task.cohort(path))
        examples = {name: task.load(SiteData(name, path, ids), seed) for name, ids in parts.items()}
    large = [name for name, ids in sorted(parts.items()) if len(ids) >= sizes["smallest_target"]]
    drawn = torch.randperm(len(large), generator=torch.Generator().manual_seed(seed))[: sizes["targets"]]
    return examples, sorted(large[i] for i in drawn.tolist())


def join_tables(files: list[Path], path: Path) -> None:
    """Write the rows of all tables in their common columns; subjects and sites get their cohort as prefix."""
    tables = {file.name.removesuffix(".csv.gz").removeprefix("destrieux_"): read_table(file).columns for file in files}
    shared = set.intersection(*(set(columns) for columns in tables.values()))
    out = {name: np.concatenate([columns[name] for columns in tables.values()]) for name in sorted(shared)}
    for name in ("subject", "site"):
        texts = [[f"{cohort}-{value}" for value in columns[name]] for cohort, columns in tables.items()]
        out[name] = np.array([text for part in texts for text in part])
    np.savez(path, **out)
