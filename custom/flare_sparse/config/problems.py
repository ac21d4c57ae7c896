"""Error texts of a configuration: each names the field's path, the value found and the values allowed."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..core.errors import suggest
from .choice import KEYS, Choice, Registries, find_name, get_settings
from .yaml_files import find_value

_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    dict: "a section",
    list: "a list",
    tuple: "a list",
    type(None): "null",
    Choice: "a section such as {name: ...}",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}


def format_allowed(field: FieldInfo) -> str:
    """Return the type and the range of a field in words, such as ``a number, >= 0, < 1``."""
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(limit, name, None) is not None
    ]
    kind = f"one of {', '.join(field.examples)}" if field.examples else _describe_type(field.annotation)
    return ", ".join([kind, *bounds])


def _describe_type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_describe_type(part) for part in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section with " + ", ".join(annotation.model_fields)
    return _TYPE_NAMES.get(origin or annotation, getattr(annotation, "__name__", "a value"))


def describe_problems(
    error: ValidationError, root: type[BaseModel], data: Any, registries: Registries | None = None
) -> list[str]:
    """Return a line for each problem that pydantic found in ``data``; see :func:`describe_problem`."""
    found = error.errors(include_url=False)
    # Each alternative of a union fails by itself.
    return list(dict.fromkeys(describe_problem(problem, root, data, registries or {}) for problem in found))


def describe_problem(error: ErrorDetails, root: type[BaseModel], data: Any, registries: Registries) -> str:
    """Describe one problem that pydantic found in ``data``, in one line.

    Args:
        error: the problem.
        root: model that ``data`` was validated against.
        data: the configuration as plain values.
        registries: entries that the sections of ``root`` may select.
    """
    loc = _drop_alternatives(error["loc"], root, data, registries)
    path = ".".join(str(part) for part in loc)
    if error["type"] == "extra_forbidden":
        fields = _find_fields(loc[:-1], root, data, registries)
        allowed_fields = f" Allowed fields: {', '.join(fields)}." if fields else ""
        near = suggest(str(loc[-1]), fields) or _suggest_section(loc, fields, root, data, registries)
        return f"{path}: no such field.{near}{allowed_fields}"
    if error["type"] == "finite_number":
        return f"{path}: expected a finite number"
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] in ("choice", "value_error"):
        return f"{path}: {text}" if path else text
    field = _find_fields(loc[:-1], root, data, registries).get(str(loc[-1])) if loc else None
    expected = f"expected {format_allowed(field)}" if field else text
    meaning = f" ({field.description})" if field and field.description else ""
    if error["type"] == "missing":
        return f"{path}: missing; {expected}{meaning}"
    found = error["input"] if len(loc) == len(error["loc"]) else find_value(data, loc)
    return f"{path or 'content'}: found {found!r}; {expected}{meaning}"


def _drop_alternatives(
    loc: tuple[int | str, ...], root: type[BaseModel], data: Any, registries: Registries
) -> tuple[int | str, ...]:
    """Return the location of the field itself, for a problem of one alternative of its type, as ``literal[...]`` is."""
    for depth in range(1, len(loc)):
        field = _find_fields(loc[: depth - 1], root, data, registries).get(str(loc[depth - 1]))
        if field is not None and "[" in str(loc[depth]) and get_origin(field.annotation) in (Union, UnionType):
            return loc[:depth]
    return loc


def _suggest_section(
    loc: Sequence[int | str], fields: Iterable[str], root: type[BaseModel], data: Any, registries: Registries
) -> str:
    """Return `` Did you mean 'x.y'?`` with the section beside the field that has such a field, or an empty string."""
    for section in fields:
        if str(loc[-1]) in _find_fields((*loc[:-1], section), root, data, registries):
            return f" Did you mean {'.'.join(map(str, (*loc[:-1], section, loc[-1])))!r}?"
    return ""


def _find_fields(
    loc: Sequence[int | str], root: type[BaseModel], data: Any, registries: Registries
) -> dict[str, FieldInfo]:
    """Return the fields of the section at ``loc``.

    The fields of a section that selects a registry entry depend on the name that ``data`` gives.
    """
    model: type[BaseModel] | None = root
    for key in loc:
        data = data.get(key) if isinstance(data, Mapping) else None
        if model is None:
            return {}
        if key in KEYS and key in registries:
            entry = registries[str(key)].get(str(find_name(str(key), data)[1]))
            model = get_settings(entry) if entry else None
        else:
            field = model.model_fields.get(str(key))
            model = _find_model(field.annotation) if field else None
    return dict(model.model_fields) if model else {}


def _find_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation such as ``X`` or ``X | None``."""
    for part in get_args(annotation) or (annotation,):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None
