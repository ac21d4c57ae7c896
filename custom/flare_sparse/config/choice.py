"""Sections that select an entry of a registry and configure it: ``method: {name: neurosfl, sparsity: 0.9}``."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, PlainSerializer, PlainValidator, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from ..core.errors import suggest

C = TypeVar("C", bound=BaseModel)
Registries = Mapping[str, Mapping[str, type[Any]]]
"""The class of every entry, by section (``method``, ``task``, ``partition``) and name; see :func:`get_settings`."""

KEYS = {"method": ("name", "class"), "task": ("name", "class", "script"), "partition": ("kind",)}
"""Keys that may hold the name, by section. ``class`` holds the dotted path of the user's own class, ``script`` the file
of a training script."""


def get_settings(entry: type[Any]) -> type[BaseModel]:
    """Return the settings class of an entry: that of a method or a task is its ``Config``."""
    settings: type[BaseModel] = entry if issubclass(entry, BaseModel) else entry.Config
    return settings


@dataclass(frozen=True)
class Choice(Generic[C]):
    """A selected entry of a registry and its validated settings.

    Attributes:
        name: name of the entry in the registry.
        config: settings, of the entry's own class.
        key: key under which the name was given.
        entry: the entry itself, such as the class of the method.
    """

    name: str
    config: C
    key: str = "name"
    # A module that is imported again has other, equal classes.
    entry: type[Any] = field(default=object, compare=False, repr=False)

    @property
    def has_own_code(self) -> bool:
        """Whether a job with this section needs code of the user's, or classes of a bundle's own."""
        return self.key != "name" or bool(getattr(self.config, "code", ()))

    def to_dict(self) -> dict[str, Any]:
        """Return the section as plain JSON values, with all defaults filled in."""
        return {self.key: self.name, **self.config.model_dump(mode="json")}


def find_name(section: str, value: Any) -> tuple[str, Any]:
    """Return the key and the name that a section's ``value`` gives; the name is None if it gives none."""
    keys = KEYS[section]
    present = [key for key in keys if isinstance(value, Mapping) and key in value]
    return (present[0], value[present[0]]) if present else (keys[0], None)


def find_conflict(keys: Iterable[str], value: Any) -> str | None:
    """Return what is wrong with a section that gives its name under two of ``keys``; None: nothing is."""
    present = [key for key in keys if isinstance(value, Mapping) and key in value]
    return f"found {' and '.join(present)}; expected one of them" if len(present) > 1 else None


def build_choice_validator(default: Callable[[], Mapping[str, type[Any]]]) -> PlainValidator:
    """Return the validator of a field that selects an entry of a registry.

    The registry is the validation context's entry under the field's name, or else ``default()``.
    """

    def validate_choice(value: Any, info: ValidationInfo) -> Choice[Any]:
        if isinstance(value, Choice):
            return value
        section = str(info.field_name)
        registry = (info.context or {}).get(section) or default()
        if conflict := find_conflict(KEYS[section], value):
            raise build_error(conflict)
        key, name = find_name(section, value)
        if not isinstance(name, str) or name not in registry:
            raise _build_unknown_error(key, name, registry, value)
        settings = {k: v for k, v in value.items() if k != key}
        entry = registry[name]
        return Choice(name, get_settings(entry).model_validate(settings), key, entry)

    return PlainValidator(validate_choice)


def _build_unknown_error(key: str, name: Any, registry: Mapping[str, type[Any]], value: Any) -> ValidationError:
    """Return the error for a section without a known name."""
    names = ", ".join(sorted(registry))
    if not isinstance(value, Mapping):
        text = f"expected a section such as {{{key}: {next(iter(sorted(registry)), '...')}}}, found {value!r}"
        return build_error(text)
    if name is None:
        return build_error(f"missing; expected one of: {names}", loc=(key,))
    return build_error(f"found {name!r}; expected one of: {names}.{suggest(str(name), registry)}", loc=(key,))


def build_error(*texts: str, loc: tuple[str, ...] = ()) -> ValidationError:
    """Return the error of a validator that has found one or several problems of a section, or of its field ``loc``."""
    details = [
        InitErrorDetails(type=PydanticCustomError("choice", "{text}", {"text": text}), loc=loc, input=None)
        for text in texts
    ]
    return ValidationError.from_exception_data("choice", details)


ChoiceSerializer = PlainSerializer(Choice.to_dict, return_type=dict)
"""Serializer of a field validated by :func:`build_choice_validator`."""
