"""Records of a result folder that somebody else may have made: its texts are hostile, its values may be wrong."""

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import yaml
from jinja2 import UndefinedError

from ...core.errors import ConfigError, FlareSparseError, find_user_line

P = ParamSpec("P")
R = TypeVar("R")
# What a page, a document, a table or a terminal would take for more than text; a text without it means the same.
_MARKUP = str.maketrans({"<": "(", ">": ")", "[": "(", "]": ")", "`": "'", "|": "/"})
_FORMULA = re.compile(r"\s*[=+@-](?![\d.\s])")
_LONGEST = 4000


def parse_record(text: str) -> Any:
    """Return the content of a JSON text without what :func:`neutralize` replaces.

    Raises:
        ValueError: it is no JSON, or too deep.
    """
    try:
        return neutralize(json.loads(text))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return a record of a result folder; empty if there is none, or a damaged one."""
    try:
        content = parse_record(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def neutralize(value: Any) -> Any:
    """Return a value whose texts, keys too, are text for Markdown, HTML, a document, a spreadsheet and a terminal.

    >>> neutralize({"<img src=x>": ["a](javascript:b)", "=cmd()", "-5"]})
    {'(img src=x)': ['a)(javascript:b)', "'=cmd()", '-5']}
    """
    if isinstance(value, str):
        shown = "".join(" " if unicodedata.category(letter)[0] == "C" else letter for letter in value[:_LONGEST])
        return ("'" if _FORMULA.match(shown) else "") + shown.translate(_MARKUP)
    if isinstance(value, dict):
        return {neutralize(key): neutralize(item) for key, item in value.items()}
    return [neutralize(item) for item in value] if isinstance(value, list) else value


def check_links(folder: Path) -> None:
    """Refuse a result folder with a link that leads out of it, or with a pipe or a device.

    Whoever made the folder would decide what a command shows from there, overwrites there, or waits for. No command
    writes to ``workspace`` and ``poc``, which FLARE fills.

    Raises:
        ConfigError: there is one; nothing was read or written.
    """
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(root):
        for path in (Path(parent, name) for name in [*folders, *files]):
            leads_out = path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root)
            if leads_out or (not path.is_file() and not path.is_dir() and path.exists()):
                raise ConfigError(
                    f"{path}: {'leads out of the result folder' if leads_out else 'is no file'}; a command would read "
                    "or overwrite what whoever made the folder chose. Remove it, or put the file itself in its place"
                )
        folders[:] = [name for name in folders if parent != root or name not in ("workspace", "poc")]


def explain_damage(read: Callable[P, R]) -> Callable[P, R]:
    """Return a function of a run, its first argument, that raises ConfigError where the record is damaged."""

    @wraps(read)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        run: Any = args[0]
        with name_damage(run.path, OSError):
            return read(*args, **kwargs)

    return call


@contextmanager
def name_damage(folder: Path, *others: type[Exception]) -> Iterator[None]:
    """Raise ConfigError where the block fails at a damaged record of a result folder, or with one of other errors."""
    kinds: tuple[type[Exception], ...] = (
        *others, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, UndefinedError,
        ValueError, yaml.YAMLError,
    )  # fmt: skip
    try:
        yield
    except FlareSparseError:
        raise
    except kinds as error:
        frame = find_user_line(error)
        where = f" at {frame.filename}:{frame.lineno}" if frame else ""
        raise ConfigError(
            f"{folder}: the folder is damaged or was changed ({type(error).__name__}: {neutralize(str(error))}"
            f"{where}); expected an unchanged result folder of flare-sparse run, or data in the form that its task "
            "reads. Take another copy"
        ) from error
