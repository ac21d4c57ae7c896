"""What is wrong with a configuration, as one message: every field with its path, what came and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..errors import suggest
from .choice import KEYS, Registries, select

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    dict: "a section",
    list: "a list",
    tuple: "a list",
    type(None): "null",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}


def format_allowed(field: FieldInfo) -> str:
    """The type and range of a field in words, such as ``a number, >= 0, < 1``."""
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([_words(field.annotation), *bounds])


def _words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_words(part) for part in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section with " + ", ".join(annotation.model_fields)
    return _WORDS.get(origin or annotation, getattr(annotation, "__name__", "a value"))


def describe_problem(error: ErrorDetails, root: type[BaseModel], data: Any, entries: Registries) -> str:
    """One line for one problem that pydantic found in ``data``."""
    loc, path = error["loc"], ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        fields = _fields(loc[:-1], root, data, entries)
        listed = f" Fields here: {', '.join(fields)}." if fields else ""
        return f"{path}: no such field.{suggest(str(loc[-1]), fields)}{listed}"
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] in ("choice", "value_error"):
        return f"{path}: {text}" if path else text
    field = _field(loc, root, data, entries)
    expected = f"expected {format_allowed(field)}" if field else text
    meaning = f" ({field.description})" if field and field.description else ""
    if error["type"] == "missing":
        return f"{path}: missing; {expected}{meaning}"
    return f"{path}: found {error['input']!r}; {expected}{meaning}"


def _field(loc: Sequence[int | str], root: type[BaseModel], data: Any, entries: Registries) -> FieldInfo | None:
    return _fields(loc[:-1], root, data, entries).get(str(loc[-1])) if loc else None


def _fields(loc: Sequence[int | str], root: type[BaseModel], data: Any, entries: Registries) -> dict[str, FieldInfo]:
    """The fields of the section at ``loc``; which ones a registry's section has depends on the name in ``data``."""
    model: type[BaseModel] | None = root
    for key in loc:
        data = data.get(key) if isinstance(data, Mapping) else None
        if model is None:
            return {}
        if key in KEYS and key in entries:
            model = entries[str(key)].get(str(select(str(key), data)[1]))
        else:
            field = model.model_fields.get(str(key))
            model = _section(field.annotation) if field else None
    return dict(model.model_fields) if model else {}


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as ``X`` or ``X | None``."""
    for part in get_args(annotation) or (annotation,):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None
