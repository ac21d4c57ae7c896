"""A run's model in few bytes, for others to read: a small result folder, or sparse matrices (docs/model-files.md)."""

from pathlib import Path

from torch import nn

from ...config.study import Study
from ...core.errors import require_extra
from ...core.params import Layout
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


def save_csr(network: nn.Module, folder: Path) -> None:
    """Write each float tensor of a network as a sparse matrix: ``scipy.sparse.load_npz(folder / "NAME.npz")``.

    A row of the matrix has the entries of one index of the tensor's first axis; a vector is one row.

    Raises:
        ConfigError: scipy is not installed.
    """
    with require_extra("--format csr", "segmentation"):
        from scipy.sparse import csr_array, save_npz
    folder.mkdir(parents=True, exist_ok=True)
    state = network.state_dict()
    for spec in Layout.from_module(network).tensors:
        tensor = state[spec.name].detach()
        matrix = tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
        save_npz(folder / f"{spec.name}.npz", csr_array(matrix.numpy()))
