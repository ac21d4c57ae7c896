"""A run in which nothing happens says so in its record."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toy import Plain, ToyBench

from flare_sparse.core.exchange import Content, Patch, Update
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.rounds.endpoints.request_log import is_standstill
from flare_sparse.rounds.federation.progress import describe_cut_tensors
from flare_sparse.training import TrainingConfig

LAYOUT = Layout.from_module(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
START = torch.arange(LAYOUT.size, dtype=torch.float32)


def test_sites_that_learn_nothing_are_events() -> None:
    training = TrainingConfig(optimizer="sgd", lr=1e-30)
    outcome, _ = ToyBench(Plain()).run("topk_ef", rounds=2, training=training.model_dump(), fraction=0.1)
    found = [(event.round, event.site, event.event) for event in outcome.events]
    unchanged = [(1, f"site-{i}", "model_unchanged") for i in (1, 2, 3)]
    assert found == unchanged
    outcome, _ = ToyBench().run("fedavg", rounds=2)
    assert outcome.events == []


@pytest.mark.parametrize("content", ["weights", "delta"])
@pytest.mark.parametrize("is_full", [True, False])
def test_parameters_count_and_running_statistics_do_not(content: Content, is_full: bool) -> None:
    def is_unchanged(entry: int | None, mask: Mask) -> bool:
        step = torch.zeros(LAYOUT.size) if entry is None else torch.eye(LAYOUT.size)[entry]
        values = START + step if content == "weights" else step
        return is_standstill(Update(Patch.from_vector(values, mask), content, 1), START, LAYOUT)

    mask = Mask.full(LAYOUT.size) if is_full else Mask(START > 2)
    assert [is_unchanged(entry, mask) for entry in (None, LAYOUT.size - 1, 4)] == [True, True, False]
    # An update without parameters says nothing about training.
    assert not is_unchanged(None, Mask(LAYOUT.select(lambda spec: spec.role == "buffer")))


def test_weights_that_lose_their_last_live_entry_are_named_once() -> None:
    full = Mask.full(LAYOUT.size)
    without_weight = Mask(LAYOUT.select(lambda spec: spec.name != "0.weight"))
    without_bias = Mask(LAYOUT.select(lambda spec: spec.name != "0.bias"))
    assert describe_cut_tensors(LAYOUT, full, without_weight).startswith(
        "no entry is live any more of 1 of 1 weights: 0."
    )
    assert describe_cut_tensors(LAYOUT, full, without_bias) == ""
    assert describe_cut_tensors(LAYOUT, without_weight, without_weight & without_bias) == ""
