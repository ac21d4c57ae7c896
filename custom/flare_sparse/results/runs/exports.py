"""A run's model for others to read: a small result folder, sparse matrices, or ONNX (docs/model-files.md)."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.study import Study
from ...core.errors import ConfigError, require_extra
from ...core.params import Layout
from ...wire.formats import ValueType
from .folder import RunFolder
from .load import FILES, read_run_model
from .model_files import SITE_MODELS, read_mask, save_model

TOLERANCE = 1e-4
"""Largest accepted difference, relative to the largest output (or to 1, if that is larger)."""


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


def export_onnx(model: nn.Module, inputs: Tensor, path: Path) -> float:
    """Export a network and compare the file with it, on ``inputs`` and on noise of the same shape.

    Args:
        model: network in evaluation mode that takes one tensor.
        inputs: the network's inputs ``(B, ...)``; the exported file takes any ``B``.
        path: ONNX file to write.

    Returns:
        The largest difference of the outputs, relative as in ``TOLERANCE``.

    Raises:
        ConfigError: onnx is not installed, the network cannot be exported, or the exported file computes other
            outputs; no file is written.
    """
    with require_extra("--format onnx", "onnx"):
        import onnx
        import onnxruntime
    part = path.with_name(f"{path.name}.part")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model, (inputs,), str(part), input_names=["input"], output_names=["output"],
                dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}}, dynamo=False,
            )  # fmt: skip
        onnx.checker.check_model(str(part))
        session = onnxruntime.InferenceSession(str(part), providers=["CPUExecutionProvider"])
        difference = max(_measure_difference(model, session, x) for x in (inputs, torch.randn_like(inputs), inputs[:1]))
    # The exporter, the checker and the runtime each have exceptions of their own, without a common class.
    except Exception as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"this network cannot be exported to ONNX: {str(error)[:300]}") from error
    if difference > TOLERANCE:
        part.unlink()
        raise ConfigError(f"the network exported to ONNX differs by {difference:.2g}; no file was written")
    part.replace(path)
    return difference


def _measure_difference(model: nn.Module, session: Any, x: Tensor) -> float:
    with torch.no_grad():
        expected = model(x)
    exported = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    return float((expected - exported).abs().max() / expected.abs().max().clamp_min(1.0))
