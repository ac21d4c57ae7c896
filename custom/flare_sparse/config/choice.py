"""A section that names an entry of a registry and sets it: ``method: {name: neurosfl, sparsity: 0.9}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, PlainSerializer, PlainValidator, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from ..errors import suggest

C = TypeVar("C", bound=BaseModel)
Registries = Mapping[str, Mapping[str, type[BaseModel]]]
"""Per section (``method``, ``task``, ``partition``): its entries by name, and the settings of each."""

KEYS = {"method": ("name",), "task": ("name", "class"), "partition": ("kind",)}
"""Which keys of a section may hold the name. ``class`` is the dotted path of a user's own task."""


@dataclass(frozen=True)
class Choice(Generic[C]):
    """An entry and its checked settings.

    Attributes:
        name: in the registry.
        config: its settings, of the entry's own class.
        key: under which the name was given.
    """

    name: str
    config: C
    key: str = "name"

    def flat(self) -> dict[str, Any]:
        """The section as plain JSON values, all defaults filled in."""
        return {self.key: self.name, **self.config.model_dump(mode="json")}


def select(section: str, value: Any) -> tuple[str, Any]:
    """The key and the name that a section gives; the name is None when it gives none."""
    keys = KEYS[section]
    given = [key for key in keys if isinstance(value, Mapping) and key in value]
    return (given[0], value[given[0]]) if given else (keys[0], None)


def choose_from(default: Callable[[], Mapping[str, type[BaseModel]]]) -> PlainValidator:
    """Validator of a field whose value is looked up in a registry.

    The registry is the one that the validation context holds under the field's name, else ``default``.
    """

    def choose(value: Any, info: ValidationInfo) -> Choice[Any]:
        if isinstance(value, Choice):
            return value
        section = str(info.field_name)
        entries = (info.context or {}).get(section) or default()
        key, name = select(section, value)
        if not isinstance(name, str) or name not in entries:
            raise _unknown(key, name, entries, value)
        settings = {k: v for k, v in value.items() if k != key}
        return Choice(name, entries[name].model_validate(settings), key)

    return PlainValidator(choose)


def _unknown(key: str, name: Any, entries: Mapping[str, type[BaseModel]], value: Any) -> ValidationError:
    names = ", ".join(sorted(entries))
    if not isinstance(value, Mapping):
        text = f"expected a section such as {{{key}: {next(iter(sorted(entries)), '...')}}}, found {value!r}"
        return _error(text, (), value)
    if name is None:
        return _error(f"missing; expected one of: {names}", (key,), value)
    return _error(f"found {name!r}; expected one of: {names}.{suggest(str(name), entries)}", (key,), name)


def _error(text: str, loc: tuple[str, ...], found: Any) -> ValidationError:
    kind = PydanticCustomError("choice", "{text}", {"text": text})
    return ValidationError.from_exception_data("choice", [InitErrorDetails(type=kind, loc=loc, input=found)])


FLAT = PlainSerializer(Choice.flat, return_type=dict)
"""Serializer of such a field."""
