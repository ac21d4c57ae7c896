"""The base of all sections of settings."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen section of settings; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
