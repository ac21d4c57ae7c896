"""A run's model in few bytes, for others to read: a small result folder (docs/model-files.md)."""

from pathlib import Path

from ...config.study import Study
from ...wire.formats import ValueType
from .folder import RunFolder
from .load import FILES, read_run_model
from .model_files import SITE_MODELS, read_mask, save_model


def save_small_run(study: Study, name: str, folder: Path, values: ValueType | None = None) -> None:
    """Write the smallest folder from which :func:`load_model` reads a model: its live entries, settings and code.

    Args:
        study: of a finished run.
        name: which of the run's models, as ``read_run_model`` accepts it.
        folder: folder to write; created if missing.
        values: number format of the values; None: the shortest exact one.

    Raises:
        ConfigError: the run has no such model.
    """
    weights, assembly = read_run_model(study.folder, study.assembly, name), study.assembly
    file = folder / FILES.get(name, f"{SITE_MODELS}/{name}.safetensors")
    file.parent.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).keep_study(study)
    if name in FILES:
        # Tensors that stay at the sites are no part of the run's model.
        whole = assembly.network.unflatten(weights)
        live = read_mask(study.folder / FILES[name], assembly.layout)
        save_model(file, assembly.layout, assembly.layout.flatten(whole), live, values)
    else:
        save_model(file, assembly.network, weights, None, values)
