"""Export of a network to ONNX, with a check of the exported file against the network."""

import warnings
from pathlib import Path

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from ...core.errors import ConfigError

TOLERANCE = 1e-4
"""Largest accepted difference, relative to the largest output (or to 1, if that is larger)."""


def export_onnx(model: nn.Module, inputs: Tensor, path: Path) -> float:
    """Export a network and compare the file with it, on ``inputs`` and on noise of the same shape.

    Args:
        model: network in evaluation mode that takes one tensor.
        inputs: the network's inputs ``(B, ...)``; the exported file takes any ``B``.
        path: ONNX file to write.

    Returns:
        The largest difference of the outputs, relative as in ``TOLERANCE``.

    Raises:
        ConfigError: the network cannot be exported, or the exported file computes other outputs; no file is written.
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


def _measure_difference(model: nn.Module, session: onnxruntime.InferenceSession, x: Tensor) -> float:
    with torch.no_grad():
        expected = model(x)
    exported = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    return float((expected - exported).abs().max() / expected.abs().max().clamp_min(1.0))
