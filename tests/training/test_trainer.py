"""A wrapper changes one thing and leaves the rest to the trainer inside it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import torch
from toy import ToyBench

import flare_sparse.training
from flare_sparse.core.errors import FlareSparseError
from flare_sparse.core.settings import Settings
from flare_sparse.rounds.local.dry_run import DryTrainer
from flare_sparse.training.sample_usage import SampleUsage
from flare_sparse.training.trainer import Trainer, Wrapper

NAMES = [f"flare_sparse.training.{info.name}" for info in pkgutil.iter_modules(flare_sparse.training.__path__)]
CLASSES = {
    member
    for name in NAMES
    for _, member in inspect.getmembers(importlib.import_module(name), inspect.isclass)
    if member.__module__ == name
}


def test_no_class_inherits_from_a_concrete_one() -> None:
    bases = {base for member in CLASSES | {DryTrainer} for base in member.__bases__}
    own = {base for base in bases if base.__module__.startswith("flare_sparse")}
    assert own == {Trainer, Wrapper, FlareSparseError, Settings}
    assert {member.__name__ for member in CLASSES if issubclass(member, Wrapper)} == {
        "Wrapper", "SparseComputeTrainer", "PrivateTrainer", "SilentTrainer", "PersonalTrainer",
        "NarrowedTrainer",
    }  # fmt: skip


def test_no_wrapper_imports_another() -> None:
    modules = {member.__module__ for member in CLASSES if issubclass(member, Wrapper) and member is not Wrapper}
    for module in modules:
        imported = {
            member.__module__
            for _, member in inspect.getmembers(importlib.import_module(module), inspect.isclass)
            if issubclass(member, Wrapper) and member is not Wrapper
        }
        assert imported == {module}


def test_wrapper_delegates_what_it_does_not_change() -> None:
    bench = ToyBench()
    inner = DryTrainer("site-1", bench.layout, examples=20)
    wrapper = Wrapper(Wrapper(inner))
    wrapper.memory["kept"] = torch.ones(1)
    assert inner.memory.keys() == {"kept"}
    assert (wrapper.layout, wrapper.num_examples, wrapper.can_train) == (bench.layout, 20, True)
    next(wrapper.compute_gradients(bench.weights, 8, 2, 1))
    assert wrapper.usage == inner.usage == SampleUsage(16, 2)
