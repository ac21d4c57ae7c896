"""References and expressions in the configuration of a MONAI bundle, resolved as text: nothing of it is executed.

MONAI passes every ``$`` expression to ``eval()`` and builds whatever ``_target_`` names (its advisory
GHSA-x6pr-233j-x5cw). A site gets a bundle with a job, so here ``@id``, ``%id``, ``$@id``, and sums and products of
numbers, lists and references are all that is understood; anything else is an error.

Not MONAI's ``ConfigParser``, even without ``instantiate`` and ``eval_expr``: while it parses, a macro such as
``%/etc/app.json::password`` reads any JSON or YAML file of the site. It has no limits of depth and size. It also leaves
expressions such as ``$@lr * 2`` unresolved, so the evaluator below would stay.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, final

from ...core.errors import ConfigError, abbreviate

MAX_VALUES = 20_000
"""Most values of a resolved item: a few references to references stand for more than fit into memory."""
MAX_DEPTH = 64
"""Most levels of nested items and references; a reference to itself has no end."""
MAX_NUMBER = 1_000_000
"""Largest size, count or kernel; the networks of the package have the same limit."""
MAX_EXPRESSION = 500
"""Most characters of an expression."""
DROPPED = ("device", "sw_device", "output_transform", "params")
"""Arguments that are left out unread: the site chooses where it computes, and the package connects the parts."""
_ID = re.compile(r"[@%]([A-Za-z_]\w*(?:(?:::|#)\w+)*)")
# int() reads neither every digit of Unicode nor thousands of digits.
_INDEX = re.compile(r"[0-9]{1,9}")
_NOTES = ("_desc_", "_disabled_", "_mode_")
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_REMEDY = (
    "expressions of a bundle may have numbers, lists, references such as @lr, and + - * / only; write its value, or "
    "use a task of your own for a bundle with code (docs/bundles.md)"
)


@final
class References:
    """Items of a bundle's configuration.

    Args:
        content: the parsed file, such as ``configs/train.json``.
        source: name of the file, for errors.
    """

    def __init__(self, content: Mapping[str, Any], source: str):
        self.source = source
        self._content = content
        self._values = 0

    def find(self, *ids: str) -> str | None:
        """Return the first of some ids that the file has, such as ``train::inferer``; None if it has none."""
        return next((name for name in ids if self._look_up(name) is not None), None)

    def resolve(self, name: str) -> Any:
        """Return an item with all references and expressions replaced by what they stand for.

        Raises:
            ConfigError: a reference or an expression cannot be resolved; the text names the file and the item.
        """
        self._values = 0
        return self._resolve(self._look_up(name), name, 0)

    def refuse(self, path: str, problem: str) -> ConfigError:
        """Return the error of an item."""
        return ConfigError(f"{self.source}: {path}: {problem}")

    def _look_up(self, name: str) -> Any:
        """Return an item by its id, as it is written; None if there is none."""
        value: Any = self._content
        for part in name.replace("#", "::").split("::"):
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, list) and _INDEX.fullmatch(part) and int(part) < len(value):
                value = value[int(part)]
            else:
                return None
        return value

    def _resolve(self, value: Any, path: str, depth: int) -> Any:
        self._values += 1
        if depth > MAX_DEPTH or self._values > MAX_VALUES:
            raise self.refuse(path, f"references lead to more than {MAX_DEPTH} levels or {MAX_VALUES} values")
        if isinstance(value, Mapping):
            return self._resolve_mapping(value, path, depth)
        if isinstance(value, list):
            parts = [self._resolve(part, f"{path}::{index}", depth + 1) for index, part in enumerate(value)]
            return [part for part in parts if not is_disabled(part)]
        if isinstance(value, str) and value[:1] in ("@", "%", "$"):
            return self._resolve_text(value, path, depth)
        if not isinstance(value, (str, bool, int, float, type(None))):
            raise self.refuse(path, f"found {type(value).__name__}; expected a number, text, a list or a section")
        return self._check_number(value, path)

    def _resolve_mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        is_component = "_target_" in value
        result = {}
        for key, part in value.items():
            if not isinstance(key, str) or (key.startswith("_") and key not in ("_target_", *_NOTES)):
                raise self.refuse(f"{path}::{key}", "not supported; remove it")
            if not (is_component and key in DROPPED):
                result[key] = self._resolve(part, f"{path}::{key}", depth + 1)
        if result.get("_mode_", "default") != "default":
            raise self.refuse(f"{path}::_mode_", f"found {result['_mode_']!r}; expected default, or leave it out")
        return result

    def _resolve_text(self, text: str, path: str, depth: int) -> Any:
        if match := _ID.fullmatch(text):
            return self._follow(match[1], path, depth)
        if not text.startswith("$"):
            raise self.refuse(
                path,
                f"found {abbreviate(text)}; expected the id of an item of this file, such as @train::preprocessing; "
                "write its value",
            )
        names: dict[str, str] = {}

        def insert_variable(match: re.Match[str]) -> str:
            variable = f"reference_{len(names)}"
            names[variable] = match[1]
            return variable

        try:
            if len(text) > MAX_EXPRESSION:
                raise ValueError
            tree = ast.parse(_ID.sub(insert_variable, text[1:]).strip(), mode="eval")
            return self._compute(tree.body, names, path, depth)
        # What is refused is refused for one reason: it is none of the allowed forms.
        except (SyntaxError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError) as error:
            raise self.refuse(path, f"found the expression {abbreviate(text)}; {_REMEDY}") from error

    def _compute(self, node: ast.expr, names: Mapping[str, str], path: str, depth: int) -> Any:
        """Return the value of an expression.

        Raises:
            ValueError, TypeError, ArithmeticError: it is none of the allowed forms, or a result is out of range.
        """
        match node:
            case ast.Constant(value=str() | bool() | int() | float() | None):
                value: Any = node.value
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                value = [self._compute(part, names, path, depth) for part in parts]
            case ast.Name(id=variable) if variable in names:
                value = self._follow(names[variable], path, depth)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = _apply(ast.Sub(), 0, self._compute(operand, names, path, depth))
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                value = _apply(sign, *(self._compute(part, names, path, depth) for part in (left, right)))
            # "$@network_def.to(@device)": where a network computes is the site's choice.
            case ast.Call(func=ast.Attribute(value=owner, attr="to")):
                value = self._compute(owner, names, path, depth)
            case _:
                raise ValueError
        return self._check_number(value, path)

    def _follow(self, name: str, path: str, depth: int) -> Any:
        value = self._look_up(name)
        if value is None:
            raise self.refuse(path, f"there is no item {name!r} in this file; add it, or write its value")
        return self._resolve(value, name, depth + 1)

    def _check_number(self, value: Any, path: str) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and not (math.isfinite(value) and abs(value) <= MAX_NUMBER):
            raise self.refuse(path, f"found {value}; expected a number of at most {MAX_NUMBER:,}")
        return value


def is_disabled(value: Any) -> bool:
    """Return whether a component is switched off by ``_disabled_: true``."""
    return isinstance(value, Mapping) and value.get("_disabled_") in (True, "true", "True")


def _apply(sign: ast.operator, left: Any, right: Any) -> Any:
    """Return a sum of lists, or the result of an operation on two numbers.

    Raises:
        TypeError: they are neither.
    """
    if isinstance(sign, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    # Of text and lists, a product with a number may not fit into memory.
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in (left, right)):
        raise TypeError
    return _OPERATORS[type(sign)](left, right)
