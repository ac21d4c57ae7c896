"""What a training script receives and sends, and the reading of what it sent, which may be anything."""

import math
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..core.errors import FlareSparseError
from ..core.params import match_state_dict

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
_PEFT = "base_model.model."
"""Start of the names of the network that ``peft.get_peft_model`` has wrapped."""
_ADAPTER = re.compile(r"(?:(\.lora_\w+)|\.modules_to_save)\.[^.]+(?=\.|$)")
"""Name of an adapter, which peft leaves out of what it saves."""
_WRAPPED = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts that ``torch.compile``, Opacus, FSDP and checkpointing insert into the names of what they wrap."""
_MOST_WRAPPERS = 3
"""Most first parts that all names share, such as ``module.`` of ``DataParallel``, and are no part of the network's."""
_COUNTER = "n_averaged"
"""Number of averaged models beside the tensors of an averaged one."""


class ScriptFailed(FlareSparseError):
    """The site's training script raised an exception, ended early or sent something unusable.

    Args:
        happened: what happened.
        output: where to find what the script printed; empty: unknown.
    """

    code = "E_SCRIPT"

    def __init__(self, happened: str, output: str = ""):
        # Both arguments: a script's process pickles the error.
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


def read_tensors(params: Mapping[str, Any], network: nn.Module) -> dict[str, Tensor]:
    """Return what a script sent as float32 tensors on the CPU, by the names of the network's parameters and buffers.

    Args:
        params: values by the names of the network's ``state_dict()``.
        network: a network of the class that the script trains.

    Raises:
        ScriptFailed: a name is not the network's, or a value is no tensor.
    """
    matches = match_state_dict(network)
    params = _strip_wrappers({str(name): value for name, value in params.items()}, set(matches))
    aliases = _list_aliases(matches)
    params = {name if name in matches else aliases.get(name, name): value for name, value in params.items()}
    if unknown := sorted(params.keys() - matches.keys()):
        remedy = "call peft.get_peft_model in its class (docs/lora.md)" if ".lora_" in "".join(unknown) else ""
        raise ScriptFailed(
            f"params has {unknown[0]!r}, which the network {type(network).__name__} of task.model does not have; "
            + (
                remedy
                or "is it the network of the script? Where a wrapper (torch.compile, Opacus, an averaged model, "
                "Lightning) renames tensors, send the state_dict() of the network inside it: net.module.state_dict()"
            )
        )
    tensors: dict[str, Tensor] = {}
    for name, value in params.items():
        # Two names of a tied tensor: its own one decides.
        if matches[name] == name or matches[name] not in tensors:
            tensors[matches[name]] = _read_tensor(name, value)
    return tensors


def check_shape(value: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return ``value``.

    Raises:
        ScriptFailed: it has another shape.
    """
    # A transposed layer has as many entries, which would be read in the wrong order.
    if tuple(value.shape) != shape:
        raise ScriptFailed(f"params[{name!r}] has the shape {tuple(value.shape)}; the network's is {shape}")
    return value


def read_count(meta: Mapping[str, Any], key: str) -> int | None:
    """Return a number of steps or examples; None if the script sent none.

    Raises:
        ScriptFailed: it is no whole number from 0.
    """
    value = meta.get(key)
    if value is None:
        return None
    number = to_float(value)
    if number is None or number < 0 or number != int(number):
        raise ScriptFailed(f"meta[{key!r}] is {value!r}; expected a whole number from 0")
    return int(number)


def to_float(value: Any) -> float | None:
    """Return a finite number as float; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    return float(value)


def _list_aliases(names: Iterable[str]) -> dict[str, str]:
    """Return the names of a network's state dict by those that ``peft.get_peft_model_state_dict`` gives its tensors.

    These begin in the network that peft has wrapped, and name no adapter. A name that two tensors share is left out.
    """
    aliases: dict[str, set[str]] = {}
    for name in names:
        _, found, inner = name.partition(_PEFT)
        if found:
            for alias in (found + inner, _ADAPTER.sub(r"\1", found + inner)):
                aliases.setdefault(alias, set()).add(name)
    return {alias: shared.pop() for alias, shared in aliases.items() if len(shared) == 1}


def _strip_wrappers(params: Mapping[str, Any], known: set[str]) -> Mapping[str, Any]:
    """Return params by the network's names if these are all that is left without the names of wrappers.

    Otherwise the params are returned as they are: a name that is not the network's is an error. Beside the known
    wrappers, first parts that all names share are removed, such as ``module.`` of ``DataParallel`` and averaged models,
    or ``model.`` of a LightningModule.
    """
    sent = {name: value for name, value in params.items() if name in known or name.rpartition(".")[2] != _COUNTER}
    plain, count = {_WRAPPED.sub("", name): value for name, value in sent.items()}, len(sent)
    for _ in range(_MOST_WRAPPERS + 1):
        if params.keys() <= known or (len(plain) == count and plain.keys() <= known):
            break
        if len({name.partition(".")[0] for name in plain}) != 1:
            return params
        plain = {name.partition(".")[2]: value for name, value in plain.items()}
    return params if params.keys() <= known or not plain.keys() <= known else plain


def _read_tensor(name: str, value: Any) -> Tensor:
    """Return a value as a float32 tensor on the CPU.

    Raises:
        ScriptFailed: it is no tensor, array or number.
    """
    try:
        return torch.as_tensor(value).detach().cpu().float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ScriptFailed(f"params[{name!r}] is {type(value).__name__}; expected a tensor or an array") from error
