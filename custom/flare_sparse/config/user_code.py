"""The user's own code: the modules and packages that a task or a training script needs, and their import."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ..core.errors import UntrustedCode
from ..core.seeds import PROCESS

_NOT_USER_CODE = {"flare_sparse", "nvflare", *sys.stdlib_module_names}
"""Modules that are not the user's, even if a file beside the configuration has their name."""
CODE_FOLDER = "code"
"""Folder in a result folder that holds the user's own code."""
_RECORDS = ("rounds.jsonl", "summary.json")
# Result folders: those that were opened as such, whatever they hold, and those whose code may be executed.
_received: set[Path] = set()
_trusted: set[Path] = set()
_trusts_all: list[bool] = []


def trust_code(folder: Path) -> None:
    """Let this process execute the code of a result folder: it is of the caller's own run, or the caller says so."""
    _trusted.add(folder.resolve())


@contextmanager
def trust_all_code() -> Iterator[None]:
    """Let this process execute the code of every result folder while the block runs."""
    _trusts_all.append(True)
    try:
        yield
    finally:
        _trusts_all.pop()


def mark_received(folder: Path) -> None:
    """Take a folder for a result folder, from which nothing is executed unless somebody trusts it."""
    _received.add(folder.resolve())


def check_trust(folders: Iterable[Path], module: str) -> None:
    """Refuse a module that the settings of a result folder name, as long as nobody trusts its code.

    Raises:
        UntrustedCode: nobody does; nothing was executed.
    """
    for folder in [] if _trusts_all else map(Path.resolve, folders):
        run = folder.parent if folder.name == CODE_FOLDER else folder
        is_run = run in _received or any((run / name).is_file() for name in _RECORDS)
        if is_run and run not in _trusted:
            raise UntrustedCode(
                f"{run}: the settings of this result folder name code, module {module!r}, and whoever made the folder "
                f"wrote it; nothing of it was executed. Read {run / CODE_FOLDER}; then say flare-sparse "
                "--trust-code COMMAND, in Python trust_code=True"
            )


def collect_user_code(
    folders: Sequence[Path], *, modules: Iterable[str] = (), files: Iterable[Path] = ()
) -> dict[str, Path]:
    """Return the user's files and packages that some modules and files need, by their import names.

    Imports are followed from file to file. A module that lies in none of the folders is one that is installed.

    Args:
        folders: folders of the user's code; the first one with a module of a name wins.
        modules: dotted names of modules, such as that of a task.
        files: further files, such as a script.

    Returns:
        A file ``helpers.py`` or the folder of a package, by its top-level name.
    """
    code: dict[str, Path] = {}
    names = [name for file in files for name in _iterate_imports(file)]
    names += [module.partition(".")[0] for module in modules]
    while names:
        name = names.pop()
        if name in code or name in _NOT_USER_CODE:
            continue
        path = next(filter(None, (find_module(folder, name) for folder in folders)), None)
        if path is None:
            continue
        code[name] = path
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            names += _iterate_imports(file)
    return dict(sorted(code.items()))


def find_module(folder: Path, name: str) -> Path | None:
    """Return the file or the package folder of a top-level module in a folder; None if there is none."""
    package = folder / name
    # A folder without __init__.py is a package, too, if it holds modules.
    if package.is_dir() and any(package.rglob("*.py")):
        return package
    file = folder / f"{name}.py"
    return file if file.is_file() else None


def import_user_module(module: str, folders: Sequence[Path]) -> ModuleType:
    """Import a module of the user's from one of some folders, else from ``sys.path``.

    A module of the same name that was imported from elsewhere, such as from the folder of another run, is replaced.

    Raises:
        UntrustedCode: one of the folders is a result folder that nobody trusts; an installed module is refused, too,
            because the folder chose it.
    """
    check_trust(folders, module)
    with PROCESS:
        code = collect_user_code(folders, modules=[module])
        for name, path in code.items():
            if name in sys.modules and not _lies_in(sys.modules[name], path):
                for cached in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
                    del sys.modules[cached]
        added = [str(folder.resolve()) for folder in folders if str(folder.resolve()) not in sys.path]
        # Appended for imports within functions, which come later; first in the path during this import, so that the
        # user's module is found before an installed one of the same name.
        sys.path.extend(added)
        first = [str(folder.resolve()) for folder in folders] if code else []
        sys.path[:0] = first
        try:
            importlib.invalidate_caches()
            return importlib.import_module(module)
        finally:
            del sys.path[: len(first)]


def _lies_in(module: ModuleType, path: Path) -> bool:
    """Return whether a module was imported from a file or a package folder."""
    locations = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return path.resolve() in [Path(location).resolve() for location in locations if location]


def _iterate_imports(file: Path) -> Iterator[str]:
    """Yield the top-level names that a file imports, anywhere in it; none from a file that cannot be parsed."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
