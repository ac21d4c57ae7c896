"""The examples in the docstrings are correct, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import random
from pathlib import Path
from typing import Any

import pytest

import flare_sparse
from flare_sparse import client
from flare_sparse.privacy.dp.scripts import PRIVACY_VARIABLE

SHELL = ("flare", "cli")
"""Packages that are not searched: importing them takes FLARE or a terminal."""
STUDY = """name: study
seed: 4
method: {name: neurosfl, sparsity: 0.5, rounds: 2}
task: {name: table, target: y, features: [a, b], kind: regression, model: {name: mlp, hidden: [20]}}
simulator: {data: {path: patients.csv, partition: {kind: natural}}}
"""
"""The file study.yaml of the examples; docs/reference/api.md shows it."""


def find_examples() -> dict[str, list[doctest.DocTest]]:
    """Return the doctests of every module of the core that has examples, by name of the module."""
    names = [info.name for info in pkgutil.walk_packages(flare_sparse.__path__, "flare_sparse.")]
    modules = [importlib.import_module(name) for name in names if name.split(".")[1] not in SHELL]
    found = {module.__name__: doctest.DocTestFinder().find(module) for module in modules}
    with_examples = {name: [test for test in tests if test.examples] for name, tests in found.items()}
    return {name: tests for name, tests in with_examples.items() if tests}


EXAMPLES = find_examples()


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study of the examples in the working folder: a table of two sites."""
    draw = random.Random(0)
    rows = [(draw.gauss(0, 1), draw.gauss(0, 1), "AB"[i % 2]) for i in range(60)]
    text = "".join(f"{a},{b},{site},{a - b}\n" for a, b, site in rows)
    (tmp_path / "patients.csv").write_text("a,b,site,y\n" + text)
    (tmp_path / "study.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    for variable in ("FLARE_SPARSE_DATA", PRIVACY_VARIABLE):
        monkeypatch.setenv(variable, "")


# Opacus' hooks on layers whose input needs no gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.usefixtures("study")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_give_the_stated_results(name: str) -> None:
    results = [doctest.DocTestRunner().run(test) for test in EXAMPLES[name]]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0


PUBLIC: dict[str, Any] = {name: getattr(flare_sparse, name) for name in flare_sparse.__all__}
PUBLIC |= {f"client.{name}": getattr(client, name) for name in client.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    tests = {test.name: test for tests in EXAMPLES.values() for test in tests}
    value = PUBLIC[name]
    examples = tests[f"{value.__module__}.{value.__qualname__}"].examples
    assert not any(doctest.SKIP in example.options for example in examples)


def test_page_of_the_api_shows_the_study_of_the_examples() -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "api.md"
    assert f"```yaml\n{STUDY}```" in page.read_text(encoding="utf-8")
