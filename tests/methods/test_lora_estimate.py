"""Uploads of RoBERTa-base with 72 modules, 30 sites, 50 rounds (docs/algorithms.md, section 8, vector 6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import estimate_traffic

from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.scores.ranks import Slots
from flare_sparse.tasks.registry import TASKS

SITES, ROUNDS = 30, 50
FL_LORA = {8: 1_990_656_000, 4: 995_328_000, 2: 497_664_000, 1: 248_832_000}
CAPS = {8: 1_327_104_000, 4: 995_328_000, 2: 663_552_000, 1: 331_776_000}


@pytest.fixture(scope="module")
def adapted() -> dict[int, Layout]:
    """Layouts of RoBERTa-base with adapters, by rank."""
    layouts = {}
    for rank in (8, 4, 2, 1, 16):
        task = TASKS["text_classification"]({"architecture": "roberta-base", "adapter": {"rank": rank}})
        with torch.device("meta"):  # shapes only: nothing is drawn, so no digest of the base either
            model = task.model()
        named = model.named_parameters()
        layouts[rank] = Layout(
            tuple(TensorSpec(name, tuple(p.shape), "weight") for name, p in named if p.requires_grad)
        )
    return layouts


def count_uploads(name: str, layout: Layout, **settings: Any) -> int:
    """Return the scalars of all uploads: those of one site in two rounds, times sites and pairs of rounds."""
    method = METHODS[name](METHODS[name].Config.model_validate({"rounds": 2, **settings}), layout, 1)
    _, ledger = estimate_traffic(method, torch.randn(layout.size), 1, "float32")
    return sum(line.scalars_sent for line in ledger.lines if line.direction == "up") * SITES * ROUNDS // 2


@pytest.mark.slow
def test_uploads_of_fl_lora_and_ffa_lora_equal_the_papers(adapted: dict[int, Layout]) -> None:
    slots = Slots(adapted[1])
    assert slots.num_modules == 72
    assert int(slots.get_slot_widths("A").sum()) == int(slots.get_slot_widths("B").sum()) == 82_944
    assert {rank: count_uploads("fedavg", adapted[rank]) for rank in FL_LORA} == FL_LORA
    assert count_uploads("flexlora", adapted[8]) == FL_LORA[8]
    assert count_uploads("ffa_lora", adapted[8]) == FL_LORA[8] // 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", CAPS)
def test_uploads_of_lora_a2_lie_between_their_bounds(adapted: dict[int, Layout], rank: int) -> None:
    sent = count_uploads("lora_a2", adapted[16], rank=rank)
    assert 72 * rank * 768 * SITES * ROUNDS <= sent <= CAPS[rank]


@pytest.mark.slow
@pytest.mark.parametrize("rank", CAPS)
def test_upper_bound_is_the_size_of_the_widest_slots(adapted: dict[int, Layout], rank: int) -> None:
    slots = Slots(adapted[16])
    widest = slots.get_slot_widths("B").sort(descending=True).values[: rank * 72].sum()
    assert int(widest) * SITES * ROUNDS == CAPS[rank]


@pytest.mark.slow
@pytest.mark.parametrize("rank", CAPS)
def test_budget_of_scalars_uploads_at_most_half_of_fl_lora(adapted: dict[int, Layout], rank: int) -> None:
    assert count_uploads("lora_a2", adapted[16], rank=rank, budget="scalars") <= FL_LORA[rank] // 2
