"""Who may import whom. A row of ORDER imports only rows before it: read from the source, so nothing is run."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import flare_sparse
import flare_sparse.methods
from flare_sparse.methods import METHODS, Method

PACKAGE = Path(next(iter(flare_sparse.__path__)))
ORDER = (
    ("errors", "version", "seeds"),
    ("params",),
    ("mask",),
    ("exchange", "task", "structure", "checkpoint"),
    ("models",),
    ("data",),
    ("tasks",),
    ("aggregation", "training", "wire"),
    ("capabilities", "encryption", "scores"),
    ("scores.scbf",),
    ("methods.method",),
    ("methods.support",),
    ("methods",),
    ("endpoints",),
    ("federation",),
    ("local",),
    ("config",),
    ("assemble",),
    ("runs", "policy"),
    ("report",),
    ("flare",),
    ("flare.site",),
    ("flare.launch",),
    ("cli",),
)
RANK = {part: rank for rank, row in enumerate(ORDER) for part in row}
DOMAIN = {"models", "data", "tasks"}
DOMAIN_MAY_USE = {"errors", "params", "structure", "task"}
USES_DOMAIN = {"config", "flare", "cli"}
USES_FLARE = {"flare", "cli"}


def modules() -> dict[str, Path]:
    """Dotted name below the package, by source file; a package has the name of its folder."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(name: str) -> Iterator[str]:
    """Absolute dotted names that a module imports, anywhere in it; ours without the package's name."""
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


def ours(name: str) -> set[str]:
    """Modules of the package that a module imports."""
    return {target for target in imported(name) if target in MODULES and target != name}


def part(name: str) -> str:
    """The entry of ``ORDER`` that a module belongs to: the longest one that its name begins with."""
    pieces = name.split(".")
    prefixes = (".".join(pieces[:length]) for length in range(len(pieces), 0, -1))
    return next((prefix for prefix in prefixes if prefix in RANK), pieces[0])


INSIDE = [name for name in MODULES if name]


def test_every_module_has_its_row() -> None:
    assert sorted({part(name) for name in INSIDE} - set(RANK)) == []


@pytest.mark.parametrize("name", INSIDE)
def test_a_row_imports_only_rows_before_it(name: str) -> None:
    upward = [f"{name} imports {t}" for t in ours(name) if part(t) != part(name) and RANK[part(t)] >= RANK[part(name)]]
    assert upward == []


@pytest.mark.parametrize("name", [name for name in INSIDE if name.split(".")[0] in DOMAIN])
def test_models_data_and_tasks_know_nothing_of_federation(name: str) -> None:
    assert {target.split(".")[0] for target in ours(name)} <= DOMAIN_MAY_USE | DOMAIN


@pytest.mark.parametrize("name", [name for name in INSIDE if name.split(".")[0] not in DOMAIN | USES_DOMAIN])
def test_no_method_or_core_module_knows_a_model_a_data_set_or_a_ready_task(name: str) -> None:
    assert {target.split(".")[0] for target in ours(name)} & DOMAIN == set()


@pytest.mark.parametrize("name", [name for name in INSIDE if name.split(".")[0] not in USES_FLARE])
def test_only_the_shell_imports_nvflare(name: str) -> None:
    assert [target for target in imported(name) if target.split(".")[0] == "nvflare"] == []


def test_there_is_no_import_cycle() -> None:
    graph = {name: ours(name) - {package_of(name)} for name in INSIDE}
    assert len(list(TopologicalSorter(graph).static_order())) == len(INSIDE)


def package_of(name: str) -> str:
    """The package that a module lies in: it is being imported when the module is."""
    return name.rpartition(".")[0]


def test_no_module_imports_its_own_package() -> None:
    assert [name for name in INSIDE if package_of(name) and package_of(name) in ours(name)] == []


def test_every_method_of_the_package_is_registered_under_its_name() -> None:
    names = [f"flare_sparse.methods.{info.name}" for info in pkgutil.iter_modules(flare_sparse.methods.__path__)]
    defined = {
        member
        for module in map(importlib.import_module, names)
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Method) and not inspect.isabstract(member) and member.__module__ == module.__name__
    }
    assert {cls.name: cls for cls in defined} == METHODS


def test_a_process_of_flare_starts_without_the_heavy_libraries() -> None:
    """MONAI alone takes seconds and 300 MB in every process of a job; what needs it imports it then."""
    code = (
        "import sys, flare_sparse.flare.controller, flare_sparse.flare.executor, flare_sparse.flare.session\n"
        "print(*{'monai', 'transformers', 'peft', 'tenseal', 'matplotlib', 'selenium', 'onnx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
