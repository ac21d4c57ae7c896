"""Benches of small tasks, as fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from toy import Adapted, Plain, Toy, ToyBench

from flare_sparse.methods.method import Method
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.support.lora import LoRAMethod


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> ToyBench:
    """With adapters where a test is about a method, given by ``name``, that exchanges them."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    return ToyBench(Adapted() if issubclass(METHODS.get(name, Method), LoRAMethod) else Toy())


@pytest.fixture
def adapted() -> ToyBench:
    return ToyBench(Adapted())


@pytest.fixture
def plain() -> ToyBench:
    return ToyBench(Plain())


@pytest.fixture
def make_bench() -> Callable[[], ToyBench]:
    return ToyBench
