"""The examples in the core's docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import flare_sparse

SHELL = ("flare_sparse.flare", "flare_sparse.cli")
CORE = [
    info.name
    for info in pkgutil.walk_packages(flare_sparse.__path__, "flare_sparse.")
    if not info.name.startswith(SHELL)
]


@pytest.mark.parametrize("name", CORE)
def test_docstring_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
