"""The stage of a message that keeps values from the server, here for values in the clear: it changes nothing.

A site seals an update and opens a model; the server opens updates, by reading, aggregating or summing them. Encryption
(``encrypted.py``) and sums of padded values (``site_sums.py``, ``server_sums.py``) are subclasses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ...core.errors import RejectedMessage, RequestRefused
from ...core.exchange import Assignment, Contribution, Patch, RequestId, SealedValues, Update
from ...core.mask import Mask
from ...wire.codec import Decoded
from ...wire.formats import FORMATS, ValueType
from ...wire.plan import CiphertextFormat


@dataclass(frozen=True)
class SealedModel:
    """The model as a server that cannot read it holds it: its mask and its sealed values."""

    mask: Mask
    values: SealedValues


class SiteStage:
    """A site's end of the stage.

    Attributes:
        ciphertext_format: format of sealed values that this end accepts; None: it accepts none.
        is_summed: whether values leave in a sum only, after the message that answers a request.
    """

    ciphertext_format: CiphertextFormat | None = None
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

    def seal(self, update: Update, answer: str) -> Update:
        """Return an update as its message has it; the same for the same answer.

        Args:
            update: the update.
            answer: name of the answer.

        Raises:
            RejectedMessage: a value cannot be sealed. Nothing may be sent.
        """
        return update

    def open(self, patch: Patch) -> Patch:
        """Return a patch of the server with readable values.

        Raises:
            RejectedMessage: this site cannot open them.
        """
        return patch

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
    """The server's end of the stage.

    Attributes:
        ciphertext_format: as at a site.
        model: the model since the first sum of sealed values; None: the server can read the model.
    """

    ciphertext_format: CiphertextFormat | None = None
    model: SealedModel | None = None

    def attach(self, patch: Patch) -> Patch:
        """Return a patch of the model with its sealed values, which the method's state does not have."""
        return patch

    def check(self, message: Decoded, values: ValueType, site: str) -> None:
        """Check that an update is sealed as the job requires.

        Args:
            message: the update.
            values: number format that values in the clear must have.
            site: the sender.

        Raises:
            RejectedMessage: it is not.
        """
        if message.patch.sealed is not None:
            raise RejectedMessage("E_SEALED", f"values of {message.content}", "numbers", message.values, site)
        if message.values != values:
            raise RejectedMessage("E_DTYPE", "values", values, message.values, site)

    def can_send(self, model: Patch, values: ValueType) -> bool:
        """Whether all values of a model are finite in a number format; a sealed model always passes."""
        return FORMATS[values].can_hold(model.values)

    def aggregate(self, contributions: Sequence[Contribution]) -> None:
        """Replace :attr:`model` with the mean of a round's sealed updates; without such updates, do nothing."""

    def find_underweight_sites(self, contributions: Sequence[Contribution]) -> list[str]:
        """Return the sites whose share of a sealed sum is too small for it."""
        return []

    def find_sites_with_wrong_key(self, contributions: Sequence[Contribution]) -> list[str]:
        """Return the sites whose update is sealed with another key than the model or than most updates."""
        return []

    def start_sum(self, assignments: Mapping[str, Assignment], sequence: int) -> Any:
        """Return the sum over the updates of an attempt; None: each update carries its values, or has none."""
        return None
