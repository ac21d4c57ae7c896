"""SCBF's upload (Shao et al. 2020, Algorithm 2): a site reveals the channels that its data moved most."""

from typing import Literal

from torch import Tensor, nn

from ..core.mask import Mask
from ..core.params import Layout
from ..methods.scbf import ChannelConfig, ChannelSelector
from ..methods.scores.scbf.groups import Biases, Selection
from .arrays import Arrays, guess_layout
from .settings import check_settings
from .uploads import UploadFilter


class ChannelUpload(UploadFilter):
    """Lets the entries on a site's most changed channel paths leave (docs/algorithms.md, sections 3.4 to 3.7).

    Args:
        rate: alpha, share of the channel paths.
        budget: instead of ``rate``: exact share of the parameters.
        selection: ``"positive"``: entries on a selected path; ``"negative"``: those on no other path.
        biases: ``"selected"``, ``"never"`` (as printed in the paper) or ``"all"``.
        channels: ``"paths"`` through the network, or ``"layerwise"``: the units of each layer by themselves.
        model: the network, whose connections give the paths. None: units are selected layer by layer, by the names and
            shapes of the arrays alone.
        seed: seed of the sample of paths, in networks with too many to list.

    Raises:
        ComponentError: an argument is invalid.
    """

    # FLARE exports no argument that equals its default; who reviews the job must see these.
    _always_serialize_args = ("rate", "budget", "selection", "biases", "channels")

    def __init__(
        self,
        rate: float = 0.3,
        budget: float | None = None,
        selection: Selection = "positive",
        biases: Biases = "selected",
        channels: Literal["paths", "layerwise"] = "paths",
        model: nn.Module | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.rate, self.budget, self.selection, self.biases = rate, budget, selection, biases
        self.channels, self.model, self.seed = channels, model, seed
        settings = {"rate": rate, "budget": budget, "selection": selection, "biases": biases, "channels": channels}
        self._selector = ChannelSelector(check_settings(self, ChannelConfig, settings), seed)
        self._layout = None if model is None else Layout.from_module(model)

    def get_layout(self, arrays: Arrays) -> Layout:
        return guess_layout(arrays) if self._layout is None else self._layout

    def select(self, delta: Tensor, start: Tensor, layout: Layout, site: str, t: int) -> Mask:
        return self._selector.select(delta, layout, site, t)
