"""What RoBERTa-base would send in the paper's setting: 72 modules, 30 sites, 50 rounds (vector 6; ALGORITHMS 3.3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flare_sparse.local.dry_run import estimate
from flare_sparse.methods import METHODS
from flare_sparse.params import Layout, TensorSpec
from flare_sparse.scores.ranks import Slots
from flare_sparse.tasks import TASKS

SITES, ROUNDS = 30, 50
FL_LORA = {8: 1_990_656_000, 4: 995_328_000, 2: 497_664_000, 1: 248_832_000}
CAPS = {8: 1_327_104_000, 4: 995_328_000, 2: 663_552_000, 1: 331_776_000}


@pytest.fixture(scope="module")
def adapted() -> dict[int, Layout]:
    """Layouts of RoBERTa-base's shapes with adapters of several ranks."""
    found = {}
    for rank in (8, 4, 2, 1, 16):
        task = TASKS["text_classification"]({"architecture": "roberta-base", "adapter": {"rank": rank}})
        with torch.device("meta"):  # shapes only: nothing is drawn, so no digest of the base either
            model = task.model()
        named = model.named_parameters()
        found[rank] = Layout(tuple(TensorSpec(name, tuple(p.shape), "weight") for name, p in named if p.requires_grad))
    return found


def uploaded(name: str, layout: Layout, **settings: Any) -> int:
    """Scalars of two rounds of one site, times the sites and pairs of rounds of the whole run."""
    method = METHODS[name](METHODS[name].Config.model_validate({"rounds": 2, **settings}), layout, 1)
    _, ledger = estimate(method, torch.randn(layout.size), 1, "float32")
    return sum(line.scalars_sent for line in ledger.lines if line.direction == "up") * SITES * ROUNDS // 2


def test_vector_6_fl_lora_and_ffa_lora(adapted: dict[int, Layout]) -> None:
    slots = Slots(adapted[1])
    assert slots.modules == 72
    assert int(slots.widths("A").sum()) == int(slots.widths("B").sum()) == 82_944
    assert {rank: uploaded("fedavg", adapted[rank]) for rank in FL_LORA} == FL_LORA
    assert uploaded("flexlora", adapted[8]) == FL_LORA[8]
    assert uploaded("ffa_lora", adapted[8]) == FL_LORA[8] // 2


@pytest.mark.parametrize("rank", CAPS)
def test_vector_6_lora_a2_lies_between_its_bounds(adapted: dict[int, Layout], rank: int) -> None:
    sent = uploaded("lora_a2", adapted[16], rank=rank)
    assert 72 * rank * 768 * SITES * ROUNDS <= sent <= CAPS[rank]


@pytest.mark.parametrize("rank", CAPS)
def test_vector_6_the_caps_are_those_of_choosing_the_widest_slots(adapted: dict[int, Layout], rank: int) -> None:
    slots = Slots(adapted[16])
    widest = slots.widths("B").sort(descending=True).values[: rank * 72].sum()
    assert int(widest) * SITES * ROUNDS == CAPS[rank]


@pytest.mark.parametrize("rank", CAPS)
def test_a_budget_of_scalars_never_sends_more_than_half_of_fl_lora(adapted: dict[int, Layout], rank: int) -> None:
    assert uploaded("lora_a2", adapted[16], rank=rank, budget="scalars") <= FL_LORA[rank] // 2
