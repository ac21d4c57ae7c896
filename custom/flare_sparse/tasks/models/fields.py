"""Types and ranges of the networks' settings; configurations are validated against a builder's annotations."""

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Features = Annotated[int, Field(ge=1, le=10_000_000)]
Side = Annotated[int, Field(ge=1, le=4096)]
Share = Annotated[float, Field(ge=0, lt=1)]
Bins = Annotated[int, Field(ge=1, le=256)]
Gain = Annotated[float, Field(gt=0, le=1)]
Channels = Annotated[tuple[Count, ...], Field(min_length=1)]
Units = tuple[Count, ...]
Volume = tuple[Side, Side, Side]
Image = tuple[Side, Side, Side]
