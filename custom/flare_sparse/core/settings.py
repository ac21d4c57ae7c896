"""The base of all sections of settings."""

from typing import Any

from pydantic import BaseModel, ConfigDict


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
