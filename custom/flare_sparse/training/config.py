"""Local training: epochs, batch size, optimiser and learning rate, declared once for all methods.

Learning rate over the rounds of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from ..compute import Compute
from ..core.errors import ConfigError
from ..core.mask import floor_fraction
from ..core.settings import Settings


class LearningRateSchedule(Settings):
    """Factor of the learning rate, by round; a function of the share of the run that is over.

    A schedule over the rounds, and not over the steps of one round, gives every site the same learning rate, however
    many examples it has (docs/algorithms.md, section 1.8).
    """

    kind: Literal["constant", "cosine", "poly"] = "constant"
    """cosine: falls to final along half a cosine; poly: falls to 0 as (1 - share) ** 0.9, as nnU-Net's"""
    warmup: float = Field(0.0, ge=0, lt=1)
    """share of the rounds over which the learning rate first rises linearly"""
    final: float = Field(0.0, ge=0, le=1)
    """cosine: share of the learning rate that it falls to"""

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate does not depend on the number of rounds."""
        return self.kind == "constant" and self.warmup == 0

    def compute_factor(self, t: int, rounds: int) -> float:
        """Return the factor of round ``t``, 1-based, of ``rounds``.

        >>> [round(LearningRateSchedule(kind="cosine").compute_factor(t, 4), 3) for t in (1, 2, 3, 4)]
        [1.0, 0.854, 0.5, 0.146]
        """
        # Training before the first or after the last round, such as fine-tuning, has the rate of that round.
        t = min(max(t, 1), rounds)
        warmup = floor_fraction(self.warmup, rounds)
        if t <= warmup:
            return t / (warmup + 1)
        if self.kind == "constant":
            return 1.0
        # Below 1 in the last round: a rate of 0 would make it useless.
        progress = (t - 1 - warmup) / (rounds - warmup)
        if self.kind == "poly":
            return float((1 - progress) ** 0.9)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2


Precision = Literal["float32", "bfloat16", "float16"]
"""Number format in which autocast computes the operations that allow it."""


@dataclass(frozen=True)
class Hardware:
    """What a site computes on, and how tensors lie there.

    Attributes:
        device: CPU or GPU.
        channels_last: whether images and volumes are stored with their channels last.
        is_compiled: whether the network is compiled by ``torch.compile``.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    channels_last: bool = False
    is_compiled: bool = False


CPU = Hardware()


class TrainingConfig(Settings):
    """Settings of local training in one round.

    The optimiser is new in every round, so no optimiser state has to survive at a site (docs/algorithms.md, section
    1.8).
    """

    epochs: int = Field(1, ge=1)
    """passes over the site's training examples in a round"""
    batch_size: int = Field(8, ge=1)
    """examples per minibatch"""
    accumulate: int = Field(1, ge=1)
    """minibatches per optimiser step, which follows the mean of their gradients"""
    optimizer: Literal["sgd", "adam", "adamw", "novograd"] = "adam"
    """optimiser, new in every round"""
    lr: float = Field(1e-3, gt=0)
    """learning rate, before lr_decay and schedule"""
    lr_decay: float = Field(1.0, gt=0, le=1)
    """the learning rate of round t is multiplied by lr_decay ** (t - 1)"""
    schedule: LearningRateSchedule = Field(default_factory=LearningRateSchedule)
    """learning rate over the rounds of the run"""
    momentum: float = Field(0.0, ge=0, lt=1)
    """momentum (sgd only)"""
    nesterov: bool = False
    """Nesterov's momentum (sgd only), as nnU-Net has it"""
    weight_decay: float = Field(0.0, ge=0)
    """weight decay"""
    amsgrad: bool = False
    """divide by the largest second moment so far (adam, adamw, novograd)"""
    clip_norm: float | None = Field(None, gt=0)
    """largest L2 norm of the masked gradient; none: no clipping"""
    proximal: float = Field(0.0, ge=0)
    """FedProx: factor mu of the penalty mu / 2 * ||w - w_received||^2 in a site's loss"""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d{1,2})?)$")
    """where a site computes: cpu, cuda or cuda:N; auto: the device in the site file, else a GPU if the site has one"""
    deterministic: bool = False
    """refuse operations whose bits may differ from run to run on a GPU; some of them are slower then"""
    channels_last: bool = False
    """volumes and images are stored with their channels last, which GPUs convolve faster"""
    workers: int = Field(0, ge=0, le=64)
    """processes that read a site's minibatches while it trains, for data that is not kept in memory; 0: none; the bits
    are the same"""
    compile: bool = False
    """compile the network by torch.compile, which needs a C++ compiler at each site; computes densely"""

    precision: Precision = "float32"
    """number format of a training pass; bfloat16, float16: torch's autocast, for GPUs; float16 scales the loss;
    weights, optimiser and messages stay float32"""
    compute: Compute = "auto"
    """how a CPU computes a masked network; auto: each layer by sparse kernels where these are faster, if
    flare-sparse[fast] is installed; a result's last bits depend on it"""

    @model_validator(mode="after")
    def _check_nesterov(self) -> TrainingConfig:
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError("nesterov: needs optimizer: sgd and a momentum above 0")
        return self

    @model_validator(mode="after")
    def _check_compute(self) -> TrainingConfig:
        if self.compute == "sparse" and (self.precision != "float32" or self.compile or self.device.startswith("cuda")):
            raise ValueError(
                "compute: sparse excludes other precisions than float32, compile, and a GPU: its kernels compute in "
                "float32 on a CPU, and torch.compile cannot trace them; set compute to auto or dense"
            )
        return self

    @property
    def has_constant_rate(self) -> bool:
        """Whether the learning rate is the same in all rounds."""
        return self.lr_decay == 1 and self.schedule.is_constant

    def resolve_schedule(self, t: int, rounds: int) -> TrainingConfig:
        """Return the settings of round ``t`` (1-based) of ``rounds``, with the factor of the schedule in ``lr``."""
        if self.schedule.is_constant:
            return self
        lr = self.lr * self.schedule.compute_factor(t, rounds)
        return self.model_copy(update={"lr": lr, "schedule": LearningRateSchedule()})

    def count_steps(self, examples: int) -> int:
        """Return the optimiser's steps of a round on this number of examples.

        >>> TrainingConfig(epochs=2, batch_size=8, accumulate=2).count_steps(20)
        3
        """
        return math.ceil(self.epochs * math.ceil(examples / self.batch_size) / self.accumulate)

    def compute_learning_rate(self, t: int) -> float:
        """Return the learning rate of round ``t`` (1-based), without the schedule's factor."""
        return self.lr * self.lr_decay ** max(t - 1, 0)

    def build_optimizer(self, parameter: nn.Parameter, t: int, sizes: Sequence[int] = ()) -> torch.optim.Optimizer:
        """Build a new optimiser of a vector for round ``t``.

        Args:
            parameter: the vector.
            t: the round, 1-based.
            sizes: entries of each of the network's tensors in it, in order, for optimisers that tell them apart.
        """
        lr = self.compute_learning_rate(t)
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                [parameter], lr=lr, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov
            )
        kind: Any = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        pieces: Sequence[int] = _cut(parameter.numel())
        if self.optimizer == "novograd":
            # Ginsburg et al. 2019. Its second moment is one number a tensor.
            from monai.optimizers import Novograd

            kind, pieces = Novograd, sizes
        return _InPieces(parameter, pieces, partial(kind, lr=lr, weight_decay=self.weight_decay, amsgrad=self.amsgrad))

    def select_hardware(self, own: str | None = None) -> Hardware:
        """Return what a site computes on.

        Args:
            own: device in the site file, which ``device: auto`` leaves the choice to.

        Raises:
            ConfigError: this machine has no such GPU.
        """
        name = own if own is not None and self.device == "auto" else self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        device, count = torch.device(name), torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= count:
            raise ConfigError(
                f"device {name}: torch {torch.__version__} finds {count or 'no'} GPU{'s' if count > 1 else ''} on this "
                "machine; set method.training.device, or device in the site file, to cpu or auto"
            )
        return Hardware(device, self.channels_last, self.compile)


def _cut(count: int) -> list[int]:
    """Return the sizes of at most eight pieces of a vector, all but the last of whole lines of a processor's cache.

    Adam holds what it computes in a step beside its moments: of a piece and not of the vector.
    """
    size = max(-(-count // 8 // 64) * 64, 2**14)
    return [min(size, count - start) for start in range(0, max(count, 1), size)]


class _InPieces(torch.optim.Optimizer):
    """An optimiser of the pieces of a vector.

    Args:
        vector: the vector.
        sizes: entries of each piece, in order.
        build: returns the optimiser of a list of pieces.
    """

    def __init__(
        self, vector: nn.Parameter, sizes: Sequence[int], build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ):
        super().__init__([vector], {})
        self._vector, self._sizes = vector, list(sizes)
        self._pieces = [nn.Parameter(piece) for piece in vector.data.split(self._sizes)]
        self._inner = build(self._pieces)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step along the vector's gradient, which it may overwrite."""
        assert self._vector.grad is not None
        for piece, gradient in zip(self._pieces, self._vector.grad.split(self._sizes), strict=True):
            piece.grad = gradient
        self._inner.step()
