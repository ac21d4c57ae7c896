"""FFA-LoRA (Sun et al. 2024): the initial A is frozen; only B trains and is averaged.

"Improving LoRA in Privacy-preserving Federated Learning", arXiv 2403.12313; docs/algorithms.md, section 4.8. With one A
for all, the average of the products is the product of the averages. The server sees every site's B.
"""

from collections.abc import Sequence
from typing import final

from ..core.exchange import Assignment, Contribution, Patch, Request, UpdateSpec
from ..core.mask import Mask
from ..core.params import Layout
from .aggregation.weighted import weigh_by_examples, weighted_sum
from .method import ModelState
from .support.lora import LoRAConfig, LoRAMethod


@final
class FFALoRA(LoRAMethod[LoRAConfig, ModelState]):
    """Sites train factor B (and a trained head), which the server averages; A stays fixed and is sent once."""

    name = "ffa_lora"
    Config = LoRAConfig
    update_content = "delta"

    def __init__(self, config: LoRAConfig, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self._exchanged: Mask = ~self.slots.factors["A"]

    def build_assignment(self, kind: str, state: ModelState) -> Assignment:
        full_model = self.model(state)
        model = Patch.from_vector(state.weights, self._exchanged, "previous") if state.round > 1 else full_model
        return Assignment(
            Request(kind, state.round, model, self._exchanged),
            UpdateSpec(self.update_content, mask=self._exchanged),
            full_model=full_model,
        )

    def learn(self, state: ModelState, contributions: Sequence[Contribution]) -> ModelState:
        values = self._exchanged.take(state.weights + weighted_sum(contributions, weigh_by_examples))
        return ModelState(state.round + 1, self._exchanged.put(values, state.weights.clone()))
