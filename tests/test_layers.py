"""Which part may import which: a row of ORDER imports only rows before it. Read from the source; no code runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import flare_sparse
import flare_sparse.methods
from flare_sparse.methods.method import Method
from flare_sparse.methods.pooled_statistics import PooledStatistics
from flare_sparse.methods.registry import METHODS

PACKAGE = Path(next(iter(flare_sparse.__path__)))
TESTS = Path(__file__).parent
ORDER = (
    ("core.errors", "core.version", "core.seeds"),
    ("core.params", "core.reading"),
    ("core.mask",),
    ("core",),
    ("inputs", "cohorts"),
    ("wire", "compute"),
    ("privacy.dp",),
    ("privacy",),
    ("tasks.task",),
    ("tasks.models",),
    ("tasks.data",),
    ("tasks",),
    ("training", "methods.aggregation"),
    ("methods.scores",),
    ("methods.scores.scbf",),
    ("methods.method",),
    ("methods.support",),
    ("methods",),
    ("client",),
    ("rounds.link",),
    ("rounds.endpoints", "rounds.streams"),
    ("rounds.federation",),
    ("rounds",),
    ("config",),
    ("config.assemble",),
    ("config.study",),
    ("config.checks",),
    ("config.policy", "results.runs"),
    ("results.audit",),
    ("results.report",),
    ("results",),
    ("flare.workspace",),
    ("flare.payload",),
    ("flare.egress",),
    ("components",),
    ("flare",),
    ("flare.site",),
    ("flare.launch",),
    ("api",),
    ("cli",),
    ("__main__",),
)
RANK = {part: rank for rank, row in enumerate(ORDER) for part in row}
DOMAIN = "tasks"
INTERFACE = "tasks.task"
DOMAIN_MAY_USE = {"tasks", "core", "inputs", "cohorts", "compute"}
USES_DOMAIN = {"client", "config", "flare", "api", "cli"}
USES_FLARE = {"client", "components", "flare", "cli"}


def find_modules() -> dict[str, Path]:
    """Return the source file of every module, by dotted name below the package.

    A wheel also holds ``app_configs``, whose scripts are a user's: no part of the package imports them.
    """
    found = {}
    for path in sorted(set(PACKAGE.rglob("*.py")) - set((PACKAGE / "app_configs").rglob("*.py"))):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = find_modules()


@cache
def list_imports(name: str) -> list[str]:
    """Return the absolute dotted names that a module imports, anywhere in it; ours without the package's name."""
    return list(iterate_imports(name))


def iterate_imports(name: str) -> Iterator[str]:
    """Yield what :func:`list_imports` returns."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" and name else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("flare_sparse.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - (node.level - 1)] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])]).removeprefix("flare_sparse.")
            for alias in node.names:
                deeper = f"{base}.{alias.name}".strip(".")
                yield deeper if deeper in MODULES else base


def find_own_imports(name: str) -> set[str]:
    """Return the modules of the package that a module imports."""
    return {target for target in list_imports(name) if target in MODULES and target != name}


def find_part(name: str) -> str:
    """Return the entry of ``ORDER`` that a module belongs to: the longest one that its name begins with."""
    pieces = name.split(".")
    prefixes = (".".join(pieces[:length]) for length in range(len(pieces), 0, -1))
    return next((prefix for prefix in prefixes if prefix in RANK), pieces[0])


INSIDE = [name for name in MODULES if name]


def test_every_module_belongs_to_a_row_of_the_order() -> None:
    assert sorted({find_part(name) for name in INSIDE} - set(RANK)) == []


@pytest.mark.slow
def test_row_imports_only_rows_before_it() -> None:
    upward = [
        f"{name} imports {t}"
        for name in INSIDE
        for t in find_own_imports(name)
        if find_part(t) != find_part(name) and RANK[find_part(t)] >= RANK[find_part(name)]
    ]
    assert upward == []


def get_room(name: str) -> str:
    """Return the first piece of a module's name."""
    return name.split(".", maxsplit=1)[0]


def test_models_data_and_tasks_do_not_import_federation() -> None:
    inside = [name for name in INSIDE if get_room(name) == DOMAIN]
    assert [(name, t) for name in inside for t in find_own_imports(name) if get_room(t) not in DOMAIN_MAY_USE] == []


@pytest.mark.slow
def test_methods_and_core_do_not_import_models_data_or_tasks() -> None:
    outside = [name for name in INSIDE if get_room(name) not in USES_DOMAIN | {DOMAIN}]
    imports = [(name, t) for name in outside for t in find_own_imports(name) if get_room(t) == DOMAIN]
    assert [(name, t) for name, t in imports if t != INTERFACE] == []


@pytest.mark.slow
def test_only_the_shell_imports_nvflare() -> None:
    outside = [name for name in INSIDE if get_room(name) not in USES_FLARE]
    assert [(name, t) for name in outside for t in list_imports(name) if get_room(t) == "nvflare"] == []


@pytest.mark.slow
def test_imports_have_no_cycle() -> None:
    graph = {name: find_own_imports(name) - {get_package(name)} for name in INSIDE}
    assert len(list(TopologicalSorter(graph).static_order())) == len(INSIDE)


def get_package(name: str) -> str:
    """Return the package that a module lies in; Python imports it before the module."""
    return name.rpartition(".")[0]


def test_no_module_imports_its_own_package() -> None:
    assert [name for name in INSIDE if get_package(name) and get_package(name) in find_own_imports(name)] == []


def test_every_method_of_the_package_is_registered_under_its_name() -> None:
    names = [f"flare_sparse.methods.{info.name}" for info in pkgutil.iter_modules(flare_sparse.methods.__path__)]
    defined = {
        member
        for module in map(importlib.import_module, names)
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Method) and member.__module__ == module.__name__ and member is not PooledStatistics
        # Other tests derive methods of their own, and a run one whose sites send statistics of their inputs first.
        if not any(
            heir.__module__.startswith("flare_sparse.") and not issubclass(heir, PooledStatistics)
            for heir in member.__subclasses__()
        )
    }
    assert {cls.name: cls for cls in defined} == METHODS


@pytest.mark.slow
def test_process_of_flare_starts_without_the_heavy_libraries() -> None:
    """MONAI alone takes seconds and 300 MB in every process of a job; what needs it imports it then."""
    code = (
        "import sys, flare_sparse.flare.controller, flare_sparse.flare.executor, flare_sparse.flare.session\n"
        "heavy = {'monai', 'transformers', 'peft', 'tenseal', 'matplotlib', 'selenium', 'onnx', 'sklearn'}\n"
        "print(*heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_folder_of_tests_mirrors_a_folder_of_the_package() -> None:
    beside = {"integration", "catalogue", "support", "golden"}
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    mirrored = {folder for folder in folders if not beside & set(folder.parts)}
    assert [str(folder) for folder in sorted(mirrored) if not (PACKAGE / folder).is_dir()] == []


@pytest.mark.parametrize("name", METHODS)
def test_concrete_methods_are_final(name: str) -> None:
    assert getattr(METHODS[name], "__final__", False)
