"""What a training script receives and sends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from ..core.errors import FlareSparseError

NUM_STEPS = "NUM_STEPS_CURRENT_ROUND"
"""Key of FLARE for the number of optimiser steps of a round, in the meta that a script sends."""
NUM_EXAMPLES = "num_examples"
"""Key for the number of training examples of the site."""
REQUEST_KIND = "flare_sparse_request"
"""Key of the kind of a request in the meta of a received model."""
TRAINABLE = "flare_sparse_trainable"
"""Key of the entries that may change: bool tensors by name; absent where all may."""
GRADIENTS = "flare_sparse_gradients"
"""Key under which a script that sends gradients, of shape (batches, *shape), gives the size of each minibatch."""


class ScriptFailed(FlareSparseError):
    """The site's training script raised an exception, ended early or sent something unusable.

    Args:
        happened: what happened.
        output: where to find what the script printed; empty: unknown.
    """

    code = "E_SCRIPT"

    def __init__(self, happened: str, output: str = ""):
        # Pass both arguments on: a script's process pickles the error.
        super().__init__(happened, output)
        self.happened, self.output = happened, output

    def __str__(self) -> str:
        return f"{self.happened}\nits output is in {self.output}" if self.output else self.happened


@dataclass(frozen=True)
class ScriptRequest:
    """What a script receives.

    Attributes:
        kind: ``"train"``, ``"evaluate"`` or ``"score"``; a script that knows no scores trains.
        params: complete state dict of the network.
        round: 0-based, as FLARE counts; where the method asks for scores, these are round 0.
        total_rounds: number of rounds, with the requests for scores.
        trainable: bool tensors of the entries that may change, by name; empty: all of them.
        seed: seed of the script's random numbers from here on.
    """

    kind: Literal["train", "evaluate", "score"]
    params: Mapping[str, Tensor]
    round: int
    total_rounds: int
    trainable: Mapping[str, Tensor]
    seed: int


@dataclass(frozen=True)
class ScriptReply:
    """What a script sent.

    Attributes:
        params: trained tensors by name; None: none.
        is_delta: whether ``params`` are trained minus received values.
        metrics: metrics of the received model.
        meta: FLARE's meta, such as the number of steps.
    """

    params: Mapping[str, Any] | None = None
    is_delta: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


class ScriptRunner(Protocol):
    """Runs a site's script and passes requests to it."""

    def run(self, request: ScriptRequest) -> ScriptReply:
        """Return the script's reply to a request.

        Raises:
            ScriptFailed: the script raised an exception or ended.
        """
