"""Count what the structure of the package is judged by, on any checkout: ``python benchmarks/structure/count.py``.

Read from the source; no code of the package runs.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_PARAMETERS = 8
COMPILED = {"_compile", "_inline"}
"""Decorators of ``compute/kernels/loops.py``."""
ABSTRACT = {"ABC", "Protocol", "BaseModel", "Enum", "TypedDict", "NamedTuple", "Exception"}


def count_members(tree: ast.Module, name: str) -> int:
    """Return the number of public attributes, fields, methods and properties that a class of a module defines."""
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return len([name for name in names if not name.startswith("_")])


def is_abstract(node: ast.ClassDef) -> bool:
    """Return whether a class cannot be built itself: a protocol, or one with an abstract method."""
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
    marks = {
        ast.unparse(mark) for part in node.body if isinstance(part, ast.FunctionDef) for mark in part.decorator_list
    }
    return bool(bases & ABSTRACT) or "abstractmethod" in marks


def list_concrete_heirs(trees: dict[Path, ast.Module], room: str) -> list[str]:
    """Return the classes of a room that inherit from a concrete class of the package, as ``Heir(Base)``."""
    classes = {n.name: n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    return sorted(
        f"{node.name}({base})"
        for path, tree in trees.items()
        if room in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in (ast.unparse(base).partition("[")[0] for base in node.bases)
        if base in classes and not is_abstract(classes[base])
    )


def iterate_functions(trees: dict[Path, ast.Module]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function of the package that Python calls.

    Loops that numba compiles are left out: it compiles for arrays and numbers, so that each is a parameter of its own.
    """
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not (
                {ast.unparse(decorator) for decorator in node.decorator_list} & COMPILED
            ):
                yield node


def count_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters of a function, without self, cls and the context of torch's functions."""
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return len([argument for argument in every if argument.arg not in ("self", "cls", "ctx")])


def count_lines(source: str, tree: ast.Module) -> Counter[str]:
    """Return the number of lines of code, of docstrings and comments, and of blank lines."""
    text, lines = set(), source.splitlines()
    for node in ast.walk(tree):
        # A string as a statement is a docstring, of a module, class, function or attribute.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not lines[token.start[0] - 1][: token.start[1]].strip():
            text.add(token.start[0])
    blank = {number for number, line in enumerate(lines, 1) if not line.strip()} - text
    return Counter(code=len(lines) - len(text) - len(blank), text=len(text), blank=len(blank))


def count_package(package: Path) -> dict[str, Any]:
    """Return all counts of a package folder."""
    sources = {path.relative_to(package): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    method = trees[Path("methods/method.py")]
    rooms: dict[str, Counter[str]] = {}
    for path, source in sources.items():
        room = path.parts[0] if len(path.parts) > 1 else "(top)"
        rooms.setdefault(room, Counter()).update(count_lines(source, trees[path]))
    members = {name: count_members(method, name) for name in ("Method", "MethodConfig")}
    functions = list(iterate_functions(trees))
    attributes = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.AnnAssign | ast.Assign)]
    return {
        "members": {**members, "total": sum(members.values())},
        "blockers": sum("blocker" in node.name for node in functions)
        + sum(
            "_blocker" in ast.unparse(n.target if isinstance(n, ast.AnnAssign) else n.targets[0]) for n in attributes
        ),
        "concrete_heirs_in_training": list_concrete_heirs(trees, "training"),
        "functions_with_more_than_8_parameters": sum(count_parameters(node) > MAX_PARAMETERS for node in functions),
        "lines": {room: dict(counts) for room, counts in sorted(rooms.items())},
        "lines_total": dict(sum(rooms.values(), Counter())),
    }


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2], help="root of a checkout")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    counts = count_package(options.root / "custom" / "flare_sparse")
    if options.json:
        print(json.dumps(counts, indent=1))
        return
    for name, value in counts.items():
        if name == "lines":
            for room, line in value.items():
                print(f"  {room:12} code {line['code']:6}  text {line['text']:6}  blank {line['blank']:6}")
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
