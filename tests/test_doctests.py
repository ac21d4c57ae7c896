"""The examples in the docstrings of the core are correct."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import flare_sparse

SHELL = ("flare_sparse.flare", "flare_sparse.cli")
"""Packages that are not searched: importing them takes FLARE or a terminal."""


def find_examples() -> dict[str, list[doctest.DocTest]]:
    """Return the doctests of every module of the core that has examples, by name of the module."""
    names = [info.name for info in pkgutil.walk_packages(flare_sparse.__path__, "flare_sparse.")]
    modules = [importlib.import_module(name) for name in names if not name.startswith(SHELL)]
    found = {module.__name__: doctest.DocTestFinder().find(module) for module in modules}
    with_examples = {name: [test for test in tests if test.examples] for name, tests in found.items()}
    return {name: tests for name, tests in with_examples.items() if tests}


EXAMPLES = find_examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_give_the_stated_results(name: str) -> None:
    results = [doctest.DocTestRunner().run(test) for test in EXAMPLES[name]]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0
