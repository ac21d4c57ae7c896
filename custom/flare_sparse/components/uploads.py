"""Filters that let a part of a site's delta leave: its most changed channels, or adapter ranks."""

from abc import abstractmethod
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from ..core.errors import ConfigError, UndefinedScores
from ..core.mask import Mask
from ..core.params import Layout
from ..methods.lora_a2 import LoRAA2, LoRAA2Config
from ..methods.scbf import ChannelConfig, ChannelSelector
from ..methods.scores.ranks import FACTOR_NAME, compute_slot_scores, select_slots
from ..methods.scores.scbf.groups import Biases, Selection
from .arrays import MASK, Arrays, ComponentError, guess_layout, hold, pack_mask, to_vector
from .masking import ReceivingFilter


class UploadFilter(ReceivingFilter):
    """Lets selected entries of what a site trained leave; all others keep the received value, or are a zero difference.

    The mask of the selection travels in the meta, so that the server can tell an entry of delta zero from one that was
    not sent. Arrays that the layout does not have never leave: integer buffers, a frozen base model.
    """

    def get_layout(self, arrays: Arrays) -> Layout:
        """Return the layout of the tensors of which entries may leave."""
        return guess_layout(arrays)

    @abstractmethod
    def select(self, delta: Tensor, start: Tensor, layout: Layout, site: str, t: int) -> Mask:
        """Return the entries of a site's delta ``(P,)``, measured from ``start``, that leave in round ``t``."""

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        received = self.get_received(dxo, fl_ctx)
        layout = self.get_layout(received.arrays)
        start, sent = (to_vector(arrays, layout, self) for arrays in (received.arrays, dxo.data))
        is_difference = dxo.data_kind == DataKind.WEIGHT_DIFF
        delta = sent if is_difference else sent - start
        if not bool(torch.isfinite(delta).all()):
            raise UndefinedScores("the update has entries that are not finite; nothing is selected")
        mask = self.select(delta, start, layout, fl_ctx.get_identity_name(), received.round)
        data = hold(dxo.data, layout.unflatten(mask.bits), None if is_difference else received.arrays)
        return DXO(dxo.data_kind, data=data, meta={**dxo.meta, MASK: pack_mask(mask, layout)})


ConfigT = TypeVar("ConfigT", bound=BaseModel)


def build_settings(component: object, config: type[ConfigT], **others: Any) -> ConfigT:
    """Return the settings that a component has as arguments of the same names, and others.

    Raises:
        ComponentError: an argument has a value that they refuse.
    """
    own = {name: value for name, value in vars(component).items() if name in config.model_fields}
    try:
        return config(**own, **others)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "arguments"
        found = f"{name} is {first.get('input')!r}" if first["loc"] else "the arguments do not fit together"
        raise ComponentError(component, f"{found}: {first['msg']}", "correct the job's configuration") from error


@dataclass(eq=False)
class ChannelUpload(UploadFilter):
    """Lets the entries on a site's most changed channel paths leave (docs/algorithms.md, sections 3.4 to 3.7).

    Args:
        rate: alpha, share of the channel paths.
        budget: instead of ``rate``: exact share of the parameters.
        selection: ``"positive"``: entries on a selected path; ``"negative"``: those on no other path.
        biases: ``"selected"``, ``"never"`` (as printed in the paper) or ``"all"``.
        model: the network, whose connections give the paths. None: units are selected layer by layer, by the names and
            shapes of the arrays alone.
        seed: seed of the sample of paths, in networks with too many to list.

    Raises:
        ComponentError: an argument is invalid.
    """

    # FLARE exports no argument that equals its default; who reviews the job must see these.
    _always_serialize_args = ("rate", "budget", "selection", "biases")

    rate: float = 0.3
    budget: float | None = None
    selection: Selection = "positive"
    biases: Biases = "selected"
    model: nn.Module | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._selector = ChannelSelector(build_settings(self, ChannelConfig), self.seed)
        self._layout = None if self.model is None else Layout.from_module(self.model)

    def get_layout(self, arrays: Arrays) -> Layout:
        return guess_layout(arrays) if self._layout is None else self._layout

    def select(self, delta: Tensor, start: Tensor, layout: Layout, site: str, t: int) -> Mask:
        return self._selector.select(delta, layout, site, t)


@dataclass(eq=False)
class RankUpload(UploadFilter):
    """Lets one factor of the adapters leave in turn, B in odd rounds, in the slots with the highest scores.

    The active factor is also the mask of the task, so that a script trains nothing else in the block
    ``masked`` of ``flare_sparse.client``. A slot's score is that of the entries which the site sends, ``||dB_i A_i||``
    (docs/algorithms.md, section 4.3); a script that trains the slots of a trial alone, as the paper does, sends just
    these.

    Args:
        rank: r_k, number of slots by adapted module; not less than the adapters' rank: all slots.
        schedule: ``"alternate"``: B in odd rounds and A in even ones; ``"b_only"``: always B (FFA-LoRA).
        heads: patterns of names of trained tensors that are no adapters, such as ``["classifier.*"]``; these leave in
            full. Whatever no pattern names belongs to the frozen base model.

    Raises:
        ComponentError: an argument is invalid.
    """

    _always_serialize_args = ("rank", "schedule", "heads")

    rank: int = 8
    schedule: Literal["alternate", "b_only"] = "alternate"
    heads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._config = build_settings(self, LoRAA2Config)

    def get_layout(self, arrays: Arrays) -> Layout:
        return guess_layout({n: a for n, a in arrays.items() if FACTOR_NAME.fullmatch(n) or self._is_head(n)})

    def _is_head(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.heads)

    def _build_method(self, layout: Layout) -> LoRAA2:
        try:
            return LoRAA2(self._config, layout)
        except ConfigError as error:
            raise ComponentError(self, str(error), "inject adapters into the network of the job (peft)") from error

    def prepare(self, dxo: DXO, t: int) -> None:
        layout = self.get_layout(dxo.data)
        known, trained = {spec.name for spec in layout.tensors}, self._build_method(layout).select_exchanged(t)
        # A frozen base model: the float parameters that are not in the layout.
        rest = guess_layout({n: a for n, a in dxo.data.items() if n not in known and np.ndim(a)})
        base = rest.drop({spec.name for spec in rest.tensors if spec.role == "buffer"})
        frozen = pack_mask(Mask.empty(base.size), base)
        dxo.meta[MASK] = {**pack_mask(trained, layout), **frozen}

    def select(self, delta: Tensor, start: Tensor, layout: Layout, site: str, t: int) -> Mask:
        method = self._build_method(layout)
        slots, active = method.slots, method.get_active_factor(t)
        if self.rank >= slots.rank:
            return method.select_exchanged(t)
        scores = compute_slot_scores(slots, delta, start, active)
        return select_slots(slots, scores, self.rank, active) | slots.other_entries
