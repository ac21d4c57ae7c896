"""The stage of a message that keeps values from the server, here for values in the clear: it changes nothing.

Sums of padded values (``site_sums.py``, ``server_sums.py``) are subclasses.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from ...core.errors import RejectedMessage, RequestRefused
from ...core.exchange import Assignment, Patch, RequestId, Update
from ...wire.codec import Decoded
from ...wire.formats import ValueType


class SiteStage:
    """A site's end of the stage.

    Attributes:
        is_summed: whether values leave in a sum only, after the message that answers a request.
    """

    is_summed = False

    def withhold(self, update: Update, request: RequestId, model: Tensor, model_digest: str = "") -> None:
        """Keep the values of an update for its sum.

        Args:
            update: the update.
            request: id of the request that it answers.
            model: ``(P,)`` the model of the request.
            model_digest: its digest; a sum has values of one model only.

        Raises:
            RejectedMessage: a value cannot be summed. Nothing may be sent.
        """

    def seal(self, update: Update) -> Update:
        """Return an update as its message has it."""
        return update

    @property
    def message_bytes(self) -> int:
        """Length of the message of a sum with the values that wait for it; 0: none wait."""
        return 0

    def is_withheld(self, patch: Patch) -> bool:
        """Whether the values that wait for a sum, if they leave in one, are exactly these."""
        return True

    def discard(self) -> None:
        """Drop the values that wait for a sum: they may not leave."""

    def answer(self, data: Any) -> np.ndarray:
        """Return the reply to a question of a sum, which is not trusted.

        Raises:
            RejectedMessage: the message is malformed, or holds keys or shares that are not those of their sites.
            RequestRefused: this site does not take part in such a sum, or a step is out of order.
        """
        raise RequestRefused("a step of a sum, but updates of this site's copy of the job carry their values")

    def take_reply(self) -> np.ndarray | None:
        """Return the last reply once, for a process that lets only this site's own messages leave; None: none."""
        return None


class ServerStage:
    """The server's end of the stage."""

    def check(self, message: Decoded, values: ValueType, site: str) -> None:
        """Check that the values of an update arrive as the job requires.

        Args:
            message: the update.
            values: number format that they must have.
            site: the sender.

        Raises:
            RejectedMessage: they do not.
        """
        if message.values != values:
            raise RejectedMessage("E_DTYPE", "values", values, message.values, site)

    def start_sum(self, assignments: Mapping[str, Assignment], sequence: int) -> Any:
        """Return the sum over the updates of an attempt; None: each update carries its values, or has none."""
        return None
