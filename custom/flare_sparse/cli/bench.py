"""``flare-sparse bench``: time the inference of a run's model, dense and sparse."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..core.errors import ConfigError
from .console import out as console

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCHES = (1, 8)
THREADS = (1, 2)


def bench(
    run: Annotated[Path, typer.Argument(help="Result folder of a run", show_default=False)],
    data: Annotated[
        Path | None, typer.Option(help="Data of the inputs; default: that of the run's first simulated site")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each variant is timed; the fastest counts")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Time predictions of a run's model: torch's dense layers, ONNX Runtime, and sparse kernels.

    Batches of 1 and 8 examples, 1 and 2 threads; the variants are timed in turn. Needs the extra fast; ONNX Runtime is
    timed if the extra onnx is installed and can compute the network.

    [dim]flare-sparse bench runs/neurosfl_brain_age[/]
    """
    import torch

    from ..results.runs.load import load_study, load_trained_model
    from ..training.compute import explain_missing_kernels
    from .inputs import load_inputs

    if obstacle := explain_missing_kernels(torch.device("cpu")):
        raise ConfigError(f"bench: there are no sparse kernels to time: {obstacle}")
    study = load_study(run)
    model = load_trained_model(study)
    lines = time_model(model, load_inputs("bench", study, data, max(BATCHES)), repeats)
    if as_json:
        typer.echo(json.dumps(lines, indent=2))
        return
    table = Table("batch", "threads", "dense torch s", "dense ONNX s", "sparse s", "dense / sparse", box=None)
    for line in lines:
        onnx = line["onnx_s"]
        table.add_row(
            str(line["batch"]), str(line["threads"]), f"{line['dense_s']:.4f}", "-" if onnx is None else f"{onnx:.4f}",
            f"{line['sparse_s']:.4f}", f"{line['ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"largest difference of the outputs: {max(line['difference'] for line in lines):.1e}")
    for reason in dict.fromkeys(line["onnx_missing"] for line in lines if line["onnx_missing"]):
        console.print(f"- ONNX Runtime was not timed: {reason}", markup=False)


def time_model(model: nn.Module, examples: Tensor, repeats: int) -> list[dict[str, Any]]:
    """Return the fastest seconds of each variant, by batch and number of threads.

    Args:
        model: network in evaluation mode.
        examples: inputs ``(n, ...)``; they are repeated to fill a batch.
        repeats: times that each variant is timed.

    Raises:
        ConfigError: the network's output is not one tensor.
    """
    import torch

    from ..compute.kernels.network import compile_network
    from ..core.seeds import limit_threads

    compiled, lines = compile_network(model), []
    for batch in BATCHES:
        inputs = examples[torch.arange(batch) % len(examples)].contiguous()
        for threads in THREADS:
            with limit_threads(threads), torch.no_grad():
                expected, found = model(inputs), compiled(inputs)
                if not isinstance(expected, torch.Tensor):
                    raise ConfigError(
                        f"bench: expected a network whose output is one tensor, found {type(expected).__name__}; time "
                        "it in Python, with load_model(run) and load_model(run, compute='auto')"
                    )
                compiled(inputs)
                run_onnx, onnx_missing = _open_onnx(model, inputs, threads)
                seconds = _time_in_turn([partial(model, inputs), run_onnx, partial(compiled, inputs)], repeats)
            dense, onnx, sparse = seconds
            lines.append(
                {
                    "batch": batch,
                    "threads": threads,
                    "dense_s": dense,
                    "onnx_s": onnx,
                    "onnx_missing": onnx_missing,
                    "sparse_s": sparse,
                    "ratio": dense / sparse,
                    "difference": float((found - expected).abs().max() / expected.abs().max().clamp_min(1)),
                }
            )
    return lines


def _time_in_turn(variants: list[Callable[[], object] | None], repeats: int) -> tuple[Any, ...]:
    """Return the fastest seconds of each variant, timed one after the other; None for a variant that is missing."""
    fastest = [float("inf")] * len(variants)
    for _ in range(repeats):
        for index, variant in enumerate(variants):
            if variant is not None:
                start = time.perf_counter()
                variant()
                fastest[index] = min(fastest[index], time.perf_counter() - start)
    return tuple(None if variant is None else best for variant, best in zip(variants, fastest, strict=True))


def _open_onnx(model: nn.Module, inputs: Tensor, threads: int) -> tuple[Callable[[], object] | None, str]:
    """Return a function that runs the model in ONNX Runtime, or None and why there is none."""
    try:
        import onnxruntime

        from ..results.runs.onnx_export import export_onnx
    except ImportError as error:
        return None, f"{error.name} is not installed (pip install 'flare-sparse[onnx]')"
    feed = {"input": inputs.numpy()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        try:
            export_onnx(model, inputs, file)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            session.run(None, feed)
        except ConfigError as error:
            return None, str(error)
        # The runtime's own exceptions have no common class.
        except Exception as error:  # noqa: BLE001
            return None, str(error)[:300]
    return lambda: session.run(None, feed), ""
