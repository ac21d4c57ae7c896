"""A network as ONNX, checked against itself."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from ..errors import ConfigError

TOLERANCE = 1e-4
"""Largest difference, relative to the largest output."""


def export_onnx(model: nn.Module, inputs: Tensor, path: Path) -> float:
    """Write ``path`` and compare it with the network on these inputs and on noise of the same shape.

    Args:
        model: in evaluation mode; takes one tensor.
        inputs: ``(B, ...)`` as the network sees them; the file takes any ``B``.
        path: of the ONNX file.

    Returns:
        The largest absolute difference.

    Raises:
        ConfigError: the network cannot be exported, or what was written computes something else; no file is left then.
    """
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
        furthest = max(_difference(model, session, x) for x in (inputs, torch.randn_like(inputs), inputs[:1]))
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"--onnx: this network cannot be exported: {str(error)[:300]}") from error
    if furthest > TOLERANCE:
        part.unlink()
        raise ConfigError(f"--onnx: the exported network differs by {furthest:.2g}; nothing was written")
    part.replace(path)
    return furthest


def _difference(model: nn.Module, session: onnxruntime.InferenceSession, x: Tensor) -> float:
    with torch.no_grad():
        mine = model(x)
    theirs = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    return float((mine - theirs).abs().max() / mine.abs().max().clamp_min(1.0))
