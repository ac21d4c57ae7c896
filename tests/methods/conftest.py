"""Benches of small tasks, as fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from toy import Adapted, Bench, Plain, Toy

from flare_sparse.methods import METHODS, Method
from flare_sparse.methods.support.lora import LoRAMethod


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    """With adapters where a test is about a method, given by ``name``, that exchanges them."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    return Bench(Adapted() if issubclass(METHODS.get(name, Method), LoRAMethod) else Toy())


@pytest.fixture
def adapted() -> Bench:
    return Bench(Adapted())


@pytest.fixture
def plain() -> Bench:
    return Bench(Plain())


@pytest.fixture
def make_bench() -> Callable[[], Bench]:
    return Bench
