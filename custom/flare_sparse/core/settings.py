"""The base of all sections of settings."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import abbreviate, suggest


class Settings(BaseModel):
    """A frozen section of settings; an unknown field and a number that is not finite are errors.

    The text below a field is its description.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Join the lines of the descriptions, which tables and errors show."""
        super().__pydantic_init_subclass__(**kwargs)
        for field in cls.model_fields.values():
            if field.description:
                field.description = " ".join(field.description.split())


def explain(error: ValidationError, section: type[BaseModel]) -> str:
    """Return the problems that pydantic found, in one line: each names the field, what is expected and what was found.

    Args:
        error: the problems.
        section: the model, whose fields an unknown one is compared with.
    """
    texts, fields = [], list(section.model_fields)
    for problem in error.errors(include_url=False):
        name = ".".join(map(str, problem["loc"]))
        text = f"{name or 'content'}: {problem['msg'].removeprefix('Value error, ')}"
        if len(problem["loc"]) == 1 and name not in fields:
            text = f"{name}: no such field.{suggest(name, fields)} Allowed fields: {', '.join(fields)}"
        elif problem["type"] not in ("missing", "value_error"):
            text += f", found {abbreviate(problem['input'])}"
        texts.append(text)
    return "; ".join(texts)
