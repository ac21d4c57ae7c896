"""Arguments of components as settings of a method, which declares and validates them."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from ..methods.method import MethodConfig
from .arrays import ComponentError

ConfigT = TypeVar("ConfigT", bound=MethodConfig)


def check_settings(component: object, config: type[ConfigT], arguments: Mapping[str, Any]) -> ConfigT:
    """Return a method's settings.

    Raises:
        ComponentError: an argument has a value that the method refuses.
    """
    try:
        return config(**arguments)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "arguments"
        found = f"{name} is {first.get('input')!r}" if first["loc"] else "the arguments do not fit together"
        raise ComponentError(component, f"{found}: {first['msg']}", "correct the job's configuration") from error
