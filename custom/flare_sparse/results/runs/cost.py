"""What a prediction of a run's model costs: multiply-accumulates, and examples a second on this machine."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...compute.structure.compact import compact_model
from ...config.study import Study
from ...core.errors import ConfigError, FlareSparseError
from ...tasks.task import SiteData, load_examples
from ...training.compute import can_use_kernels
from .load import compile_model

BATCH = 4
"""Examples that are computed together where time is measured."""
_REPEATS, _SECONDS = 5, 2.0
"""Timed runs, and the time after which no further one starts: a volume may take seconds."""


def load_inputs(study: Study, site: SiteData, count: int) -> Tensor:
    """Return inputs of at most ``count`` test examples of a site.

    Raises:
        ConfigError: the network takes more than one tensor.
    """
    task = study.assembly.task
    batch = next(task.iterate_batches(load_examples(task, site, study.config.seed).test, count))
    inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
    if not isinstance(inputs, Tensor):
        raise ConfigError(f"expected a network whose input is one tensor, found {type(inputs).__name__}")
    return inputs


def measure_cost(model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    """Return multiply-accumulates of one example and examples a second, of each way to compute a model.

    Args:
        model: network in evaluation mode, with zeros for entries that are off.
        inputs: examples ``(n, ...)``; they are repeated to fill a batch.

    Returns:
        ``dense``: every weight. ``sparse``: weights that are not zero; its time is that of this package's kernels, and
        missing without them. ``compact``: the network without units that compute nothing; missing where no unit can
        be cut. Each with ``macs``, ``examples_per_second`` or both; beside them ``threads``.
    """
    one, batch = inputs[:1], inputs[torch.arange(BATCH) % len(inputs)].contiguous()
    macs = count_macs(model, one)
    total = macs.pop("")
    shares = {name: (model.get_submodule(name).get_parameter("weight") == 0).float().mean() for name in macs}
    off = sum(round(count * float(shares[name])) for name, count in macs.items())
    cost: dict[str, Any] = {"threads": torch.get_num_threads(), "batch": BATCH}
    cost["dense"] = {"macs": total, "examples_per_second": _time(model, batch)}
    cost["sparse"] = {"macs": total - off}
    if can_use_kernels("auto", torch.device("cpu")):
        cost["sparse"]["examples_per_second"] = _time(compile_model(model, "auto", torch.device("cpu")), batch)
    try:
        compact = compact_model(model)
        cost["compact"] = {"macs": count_macs(compact, one)[""], "examples_per_second": _time(compact, batch)}
    except FlareSparseError as error:
        cost["not_compact"] = str(error)
    return cost


def count_macs(model: nn.Module, inputs: Tensor) -> dict[str, int]:
    """Return multiply-accumulates by module with a weight of its own, and in all under ``""``; by torch's counter.

    Convolutions and products of matrices count; an addition of a bias, a norm or an activation does not.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(inputs)
    # torch counts a multiplication and an addition as two.
    found = {name: sum(parts.values()) // 2 for name, parts in counter.get_flop_counts().items()}
    root = type(model).__name__
    by_module = {name.removeprefix(f"{root}."): count for name, count in found.items() if name.startswith(f"{root}.")}
    own = {name: n for name, n in by_module.items() if model.get_submodule(name)._parameters.get("weight") is not None}
    return {**own, "": counter.get_total_flops() // 2}


def _time(model: nn.Module, batch: Tensor) -> float:
    """Return examples a second of the fastest of some runs."""
    seconds = []
    with torch.no_grad():
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            model(batch)
            seconds.append(time.perf_counter() - start)
            if sum(seconds) > _SECONDS:
                break
    return len(batch) / min(seconds)
