"""The memory and the time that training needs at a site, measured in steps on its own data."""

import tempfile
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..config.assemble import open_site
from ..config.study import Study
from ..core.errors import ConfigError
from ..core.mask import Mask
from ..tasks.script import ScriptTask
from ..training import Site
from .check import OneStep


class PeakMemory(TorchDispatchMode):
    """Counts the storages that the operations in its block allocate, whatever the device and its allocator.

    Attributes:
        peak: largest number of bytes that were allocated at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        # torch keeps one Python object for a storage as long as the storage lives: its end is that of the memory.
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def release(_: Any) -> None:
            del self._storages[key]
            self._now -= size

        self._storages[key] = weakref.ref(storage, release)
        self._now += size
        self.peak = max(self.peak, self._now)


def measure_step(study: Study) -> dict[str, Any]:
    """Return what a training step needs at the first site of a study, in bytes: ``weights``, ``step`` and ``total``.

    The step is a real one, on the study's device: activations, gradients, the optimiser's state, the minibatch, and
    what the method copies. The data set itself, Python and the libraries come on top. Differential privacy is left
    out. ``step_seconds`` is the time of a second such step, and ``training_seconds`` that of all steps of the run at
    this site; scores, evaluations and messages come on top.

    Raises:
        ConfigError: no data of a site is on this machine, or the training is a script's.
    """
    if study.config.simulator is None or isinstance(study.load_task(), ScriptTask):
        raise ConfigError(
            "--measure takes training steps: it needs data in a simulator section, and a task that is no script"
        )
    assembly = replace(study.assembly, privacy=None)
    with tempfile.TemporaryDirectory() as folder:
        data = next(iter(study.prepare_sites(Path(folder)).values()))
        opened = open_site(assembly, data)
        site = Site(opened.name, OneStep(opened.trainer), opened.site_settings)
        weights, config = assembly.weights.clone(), assembly.method.config.get_training(1)
        with PeakMemory() as memory:
            site.train(weights, Mask.full(weights.numel()), config, 1)
        began = time.perf_counter()
        site.train(weights, Mask.full(weights.numel()), config, 2)
        seconds = time.perf_counter() - began
        steps = config.count_steps(opened.num_examples)
    # A site holds the received model and the network at once.
    held = 2 * weights.numel() * weights.element_size()
    return {
        "site": site.name,
        "batch_size": config.batch_size,
        "weights": held,
        "step": memory.peak,
        "total": held + memory.peak,
        "step_seconds": seconds,
        "training_seconds": seconds * steps * assembly.method.config.rounds,
    }
