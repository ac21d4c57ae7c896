"""Configurations that travel with the package: found by name, and copied as the start of a study."""

from pathlib import Path

_INSTALLED, _SOURCE = Path(__file__).parents[1] / "app_configs", Path(__file__).parents[3] / "app_configs"
CONFIGURATIONS = _INSTALLED if _INSTALLED.is_dir() else _SOURCE
"""Folder of the configurations: in the wheel below the package, in the repository beside it."""
STARTERS = {
    "table": ("starters/table/study.yaml",),
    "segmentation": ("neurosfl_segmentation.yaml",),
    "brain_age": ("neurosfl_brain_age.yaml",),
    "script": ("starters/script/study.yaml", "starters/script/client.py", "starters/script/model.py"),
    "bundle": ("neurosfl_bundle.yaml", "unet_bundle"),
    "method": ("starters/method/study.yaml", "starters/method/random_masks.py"),
    "component": ("starters/component/job.py", "starters/script/client.py", "starters/script/model.py"),
}
"""Files of the study that ``flare-sparse init`` writes, by kind; the first one is the one to run."""


def list_configurations() -> list[str]:
    """Return the names of the configurations, as :func:`find_configuration` accepts them."""
    return sorted(file.stem for file in CONFIGURATIONS.glob("*.yaml"))


def find_configuration(file: Path) -> Path:
    """Return a file as it is if it exists, or else the configuration of this name, such as ``neurosfl_brain_age``.

    Pages name it as in the repository, ``app_configs/neurosfl_brain_age.yaml``.
    """
    name = file.stem if file.parent == Path(CONFIGURATIONS.name) else str(file)
    named = CONFIGURATIONS / f"{name}.yaml"
    return named if "/" not in name and not file.exists() and named.is_file() else file
