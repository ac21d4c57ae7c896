"""What both ends agree on before a message is sent; the receiver checks the message against its own copy."""

import re
from dataclasses import dataclass, field

from torch import Tensor

from ..core.mask import Mask
from ..core.params import Layout

NO_NAME = "0" * 16
"""In the place of a name in a header: the message names nothing."""


def is_name(value: object) -> bool:
    """Whether a value is a name, such as that of a vector: 16 lower-case hex digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


@dataclass(frozen=True)
class Plan:
    """What one end knows about a message before it arrives.

    Attributes:
        layout: layout of the model; each end builds its own.
        run: 16 hex digits that identify the run.
        base: name of the vector that the receiver holds; None: it holds none.
        base_mask: mask of the vector; for an update, the trainable mask of its request.
        base_vector: ``(P,)`` the vector, for formats that send weights as differences to it; None: such messages
            cannot be sent or read.
        target: name of the vector that the request leads to.
        request: name of the request that the message is or answers.
        sequence, round, kind: of that request. A sender gives all of them, from ``target`` on. A site that receives a
            request does not know them yet and leaves them None; they are then not checked.
        is_request: whether the message is a request, which alone has a trainable section; None: this is not checked.

    Raises:
        ValueError: ``run`` or a name is not 16 hex digits.
    """

    layout: Layout
    run: str
    base: str | None = None
    base_mask: Mask | None = None
    base_vector: Tensor | None = field(default=None, compare=False, repr=False)
    target: str | None = None
    request: str | None = None
    sequence: int | None = None
    round: int | None = None
    kind: str | None = None
    is_request: bool | None = None

    def __post_init__(self) -> None:
        for field_name in ("run", "base", "target", "request"):
            value = getattr(self, field_name)
            if not is_name(value or "" if field_name == "run" else value or NO_NAME):
                raise ValueError(f"{field_name}: expected 16 lower-case hex digits, found {value!r}")

    @property
    def max_message_bytes(self) -> int:
        """Length that no message of this model exceeds: all values, and two selections in their longest encoding."""
        # The longest encodings take at most 8 bytes for each entry and tensor; the rest is for headers.
        selections = 2 * 8 * (self.layout.size + len(self.layout.tensors) + 1)
        return 4096 + selections + 4 * self.layout.size
