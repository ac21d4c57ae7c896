"""LoRA-A2's upload (Koo et al. 2025, section 3): a site sends the adapter ranks that it moved most."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
from nvflare.apis.dxo import DXO
from torch import Tensor

from ..core.errors import ConfigError
from ..core.mask import Mask
from ..core.params import Layout
from ..methods.lora_a2 import LoRAA2, LoRAA2Config
from ..methods.scores.ranks import FACTOR_NAME, compute_slot_scores, select_slots
from .arrays import MASK, Arrays, ComponentError, guess_layout, pack_mask
from .settings import check_settings
from .uploads import UploadFilter


class RankUpload(UploadFilter):
    """Lets one factor of the adapters leave in turn, B in odd rounds, in the slots with the highest scores.

    The active factor is also the mask of the task, so that a script with ``flare_sparse.client.masked`` trains nothing
    else. A slot's score is that of the entries which the site sends, ``||dB_i A_i||`` (docs/algorithms.md, section
    4.3); a script that trains the slots of a trial alone, as the paper does, sends just these.

    Args:
        rank: r_k, number of slots by adapted module; not less than the adapters' rank: all slots.
        budget: ``"slots"`` over the whole model (the paper), or as many ``"scalars"`` as ``rank`` ranks have.
        schedule: ``"alternate"``: B in odd rounds and A in even ones; ``"b_only"``: always B (FFA-LoRA).
        heads: patterns of names of trained tensors that are no adapters, such as ``["classifier.*"]``; these leave in
            full. Whatever no pattern names belongs to the frozen base model.

    Raises:
        ComponentError: an argument is invalid.
    """

    _always_serialize_args = ("rank", "budget", "schedule", "heads")

    def __init__(
        self,
        rank: int = 8,
        budget: Literal["slots", "scalars"] = "slots",
        schedule: Literal["alternate", "b_only"] = "alternate",
        heads: Sequence[str] = (),
    ):
        super().__init__()
        self.rank, self.budget, self.schedule, self.heads = rank, budget, schedule, list(heads)
        self._config = check_settings(self, LoRAA2Config, {"rank": rank, "budget": budget, "schedule": schedule})

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
        trained, base = self._build_method(layout).select_exchanged(t), layout_of_rest(dxo.data, layout)
        frozen = pack_mask(Mask.empty(base.size), base)
        dxo.meta[MASK] = {**pack_mask(trained, layout), **frozen}

    def select(self, delta: Tensor, start: Tensor, layout: Layout, site: str, t: int) -> Mask:
        method = self._build_method(layout)
        slots, active = method.slots, method.get_active_factor(t)
        if self.rank >= slots.rank:
            return method.select_exchanged(t)
        scores = compute_slot_scores(slots, delta, start, active)
        chosen = select_slots(slots, scores, self.rank, active, per_scalar=self.budget == "scalars")
        return chosen | slots.other_entries


def layout_of_rest(arrays: Arrays, layout: Layout) -> Layout:
    """Return the layout of the float parameters that are not in ``layout``: a frozen base model."""
    known = {spec.name for spec in layout.tensors}
    rest = guess_layout({n: a for n, a in arrays.items() if n not in known and np.ndim(a)})
    return rest.drop({spec.name for spec in rest.tensors if spec.role == "buffer"})
