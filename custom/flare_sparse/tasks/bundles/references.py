"""References and expressions in the configuration of a MONAI bundle, resolved as text: nothing of it is executed.

MONAI passes every ``$`` expression to ``eval()`` and builds whatever ``_target_`` names (its advisory
GHSA-x6pr-233j-x5cw). A site gets a bundle with a job, so here an expression is parsed, and only the syntax of
:meth:`References._compute` is understood; anything else is a refusal that names the item.

Not MONAI's ``ConfigParser``, even without ``instantiate`` and ``eval_expr``: while it parses, a macro such as
``%/etc/app.json::password`` reads any JSON or YAML file of the site. It has no limits of depth and size. It also leaves
expressions such as ``$@lr * 2`` unresolved, so the evaluator below would stay.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch

from ...core.errors import ConfigError, abbreviate

MAX_VALUES = 20_000
"""Most values of a resolved item: a few references to references stand for more than fit into memory."""
MAX_DEPTH = 64
"""Most levels of nested items and references; a reference to itself has no end."""
MAX_NUMBER = 1_000_000
"""Largest size, count or kernel; the networks of the package have the same limit."""
MAX_EXPRESSION = 500
"""Most characters of an expression."""
MAX_REPEATED = 1_000
"""Most entries of a list that an expression repeats, such as ``[1] * 8``."""
DROPPED = ("device", "sw_device", "output_transform", "params")
"""Arguments that are left out unread: the site chooses where it computes, and the package connects the parts."""
_ID = re.compile(r"[@%]([A-Za-z_]\w*(?:(?:::|#)\w+)*)")
# int() reads neither every digit of Unicode nor thousands of digits.
_INDEX = re.compile(r"[0-9]{1,9}")
_NOTES = ("_desc_", "_disabled_", "_mode_")
_SCALARS = (str, bool, int, float, type(None))
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_TYPES = "bool uint8 int8 int16 int32 int64 float16 float32 float64"
CONSTANTS: dict[str, Any] = {
    **{f"{module}.pi": math.pi for module in ("math", "np", "numpy", "torch")},
    **{f"torch.{name}": getattr(torch, name) for name in (*_TYPES.split(), "int", "long", "float")},
    **{f"{module}.{name}": np.dtype(name).type for module in ("np", "numpy") for name in _TYPES.split()},
    **{
        f"monai.utils.{kind}.{value.upper()}": value
        for kind, values in (
            ("CommonKeys", "image label pred"),
            ("InterpolateMode", "nearest linear bilinear bicubic trilinear area"),
            ("GridSampleMode", "nearest bilinear bicubic"),
            ("GridSamplePadMode", "zeros border reflection"),
        )
        for value in values.split()
    },
}
"""Values of dotted names, which are looked up as text: no attribute of any object is read."""
_REMEDY = (
    "expressions of a bundle may have numbers, lists, references such as @lr, arithmetic, comparisons, A if B else C "
    "and len(); write its value, or use a task of your own for a bundle with code (docs/bundles.md)"
)


class Refusal(ConfigError):
    """An item of a bundle that cannot be used.

    Args:
        source: name of the file.
        path: id of the item.
        problem: what is wrong with it, and the remedy.
    """

    def __init__(self, source: str, path: str, problem: str):
        super().__init__(f"{source}: {path}: {problem}")
        self.path, self.problem = path, problem


@contextmanager
def open_references(
    content: Mapping[str, Any], source: str, is_known: Callable[[str], bool] = lambda target: True
) -> Iterator[References]:
    """Yield the items of a bundle's configuration; raise all of its refusals at the end.

    Args:
        content: the parsed file, such as ``configs/train.json``.
        source: name of the file, for errors.
        is_known: whether a bundle may name a class; the arguments of others are left unread.

    Raises:
        ConfigError: an item cannot be used; the text names the file and each of these items once.
    """
    references = References(content, source, is_known)
    with references.collect():
        yield references
    refusals = list(references.refusals.values())
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        lines = "\n".join(f"  {refusal.path}: {refusal.problem}" for refusal in refusals)
        raise ConfigError(f"{source}: {len(refusals)} items of this bundle cannot be used:\n{lines}")


@final
class References:
    """Items of a bundle's configuration; :func:`open_references` builds them.

    Attributes:
        source: name of the file, for errors.
        refusals: refused items, by last part of the id and problem: two parts may refer to one item.
    """

    def __init__(self, content: Mapping[str, Any], source: str, is_known: Callable[[str], bool]):
        self.source = source
        self.refusals: dict[tuple[str, str], Refusal] = {}
        self._content, self._is_known = content, is_known
        self._num_values = 0

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep a refusal, so that the next item is read."""
        try:
            yield
        except Refusal as refusal:
            self.refusals.setdefault((refusal.path.rpartition("::")[2], refusal.problem), refusal)

    def find(self, *ids: str) -> str | None:
        """Return the first of some ids that the file has, such as ``train::inferer``; None if it has none."""
        return next((name for name in ids if self.look_up(name) is not None), None)

    def resolve(self, name: str) -> Any:
        """Return an item with all references and expressions replaced by what they stand for.

        Entries of it that are refused are kept in ``refusals`` and left out.

        Raises:
            ConfigError: the item is refused, or too large; the text names the file and the item.
        """
        self._num_values = 0
        return self._resolve(self.look_up(name), name, 0)

    def refuse(self, path: str, problem: str) -> Refusal:
        """Return the error of an item."""
        return Refusal(self.source, path, problem)

    def look_up(self, name: str) -> Any:
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
        self._num_values += 1
        if depth > MAX_DEPTH or self._num_values > MAX_VALUES:
            # No refusal of an item: whatever is read next would meet the limit, too.
            raise ConfigError(
                f"{self.source}: {path}: references lead to more than {MAX_DEPTH} levels or {MAX_VALUES} values"
            )
        if isinstance(value, Mapping):
            return self._resolve_mapping(value, path, depth)
        if isinstance(value, list):
            parts = []
            for index, part in enumerate(value):
                with self.collect():
                    parts.append(self._resolve(part, f"{path}::{index}", depth + 1))
            return [part for part in parts if not is_disabled(part)]
        if isinstance(value, str) and value[:1] in ("@", "%", "$"):
            return self._resolve_text(value, path, depth)
        if not isinstance(value, _SCALARS):
            raise self.refuse(path, f"found {type(value).__name__}; expected a number, text, a list or a section")
        return self._check_number(value, path)

    def _resolve_mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        """Return a section without the entries that are not read; of an unknown class, its name alone."""
        target = value.get("_target_")
        if is_disabled(value) or (isinstance(target, str) and not self._is_known(target)):
            return {key: value[key] for key in ("_target_", "_disabled_") if key in value}
        result: dict[str, Any] = {}
        for key, part in value.items():
            if target is not None and key in DROPPED:
                continue
            with self.collect():
                if not isinstance(key, str) or (key.startswith("_") and key not in ("_target_", *_NOTES)):
                    raise self.refuse(f"{path}::{key}", "not supported; remove it")
                result[key] = self._resolve(part, f"{path}::{key}", depth + 1)
        if result.get("_mode_", "default") != "default":
            raise self.refuse(f"{path}::_mode_", f"found {result['_mode_']!r}; expected default, or leave it out")
        return result

    def _resolve_text(self, text: str, path: str, depth: int) -> Any:
        """Return the value of an id (``@...``), or of an expression (``$...``) whose ids become variables."""
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
        except (SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, RecursionError) as error:
            raise self.refuse(path, f"found the expression {abbreviate(text)}; {_REMEDY}") from error

    def _compute(self, node: ast.expr, names: Mapping[str, str], path: str, depth: int) -> Any:
        """Return the value of an expression.

        Raises:
            ValueError, TypeError, LookupError, ArithmeticError: it is none of the allowed forms, or a result is out of
                range.
        """

        def compute(part: ast.expr) -> Any:
            return self._compute(part, names, path, depth)

        match node:
            case ast.Constant(value=str() | bool() | int() | float() | None):
                value: Any = node.value
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                value = [compute(part) for part in parts]
            case ast.Dict(keys=keys, values=parts):
                pairs = zip(keys, parts, strict=True)
                value = {_check_key(compute(key) if key else None): compute(part) for key, part in pairs}
            case ast.Name(id=variable) if variable in names:
                value = self._follow(names[variable], path, depth)
            case ast.Attribute():
                value = CONSTANTS[ast.unparse(node)]
            case ast.Call(func=ast.Name(id="len"), args=[part], keywords=[]):
                value = len(compute(part))
            # "$@network_def.to(@device)": where a network computes is the site's choice.
            case ast.Call(func=ast.Attribute(value=owner, attr="to")):
                value = compute(owner)
            case _:
                value = _compute_operation(node, compute)
        return self._check_number(value, path)

    def _follow(self, name: str, path: str, depth: int) -> Any:
        value = self.look_up(name)
        if value is None:
            raise self.refuse(path, f"there is no item {name!r} in this file; add it, or write its value")
        return self._resolve(value, name.replace("#", "::"), depth + 1)

    def _check_number(self, value: Any, path: str) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and not (math.isfinite(value) and abs(value) <= MAX_NUMBER):
            raise self.refuse(path, f"found {value}; expected a number of at most {MAX_NUMBER:,}")
        return value


def is_disabled(value: Any) -> bool:
    """Return whether a component is switched off by ``_disabled_: true``."""
    return isinstance(value, Mapping) and value.get("_disabled_") in (True, "true", "True")


def _check_key(key: Any) -> str:
    """Return a key of a section that an expression gives.

    Raises:
        TypeError: it is no text, or one that MONAI reads as an instruction.
    """
    if not isinstance(key, str) or key.startswith("_"):
        raise TypeError
    return key


def _compute_operation(node: ast.expr, compute: Callable[[ast.expr], Any]) -> Any:
    """Return the value of an operation, a comparison or a condition; ``compute`` returns that of a part.

    Raises:
        ValueError, TypeError, LookupError, ArithmeticError: it is none of them, or its parts do not fit.
    """
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _calculate(ast.Sub(), 0, compute(operand))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not compute(operand)
        case ast.BinOp(left=left, op=sign, right=right):
            return _calculate(sign, compute(left), compute(right))
        case ast.BoolOp(op=word, values=[first, *others]):
            value = compute(first)
            for part in others:
                value = compute(part) if bool(value) is isinstance(word, ast.And) else value
            return value
        case ast.Compare(left=left, ops=signs, comparators=parts):
            sides = [compute(part) for part in (left, *parts)]
            return all(_COMPARISONS[type(s)](*pair) for s, *pair in zip(signs, sides, sides[1:], strict=False))
        case ast.IfExp(test=test, body=body, orelse=other):
            return compute(body if compute(test) else other)
    raise ValueError


def _calculate(sign: ast.operator, left: Any, right: Any) -> Any:
    """Return a sum of lists, a list of plain values repeated, or the result of an operation on two numbers.

    Raises:
        TypeError, LookupError: they are none of these.
    """
    if isinstance(sign, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    values, count = (right, left) if isinstance(right, list) else (left, right)
    if isinstance(sign, ast.Mult) and isinstance(values, list) and type(count) is int:
        # Lists of lists would multiply at each level.
        if len(values) * count > MAX_REPEATED or not all(isinstance(value, _SCALARS) for value in values):
            raise TypeError
        return values * count
    # Of text, a product with a number may not fit into memory.
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in (left, right)):
        raise TypeError
    return _OPERATORS[type(sign)](left, right)
