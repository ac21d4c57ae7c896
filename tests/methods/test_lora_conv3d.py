"""LoRA-A2 on 3D convolutions, whose factors differ in width (docs/algorithms.md, section 4.1), over the wire."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset
from toy import contribute

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.methods.lora_a2 import LoRAA2
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, build_site

TRAINING = {"epochs": 1, "batch_size": 4, "optimizer": "adamw", "lr": 0.003, "weight_decay": 0.05}


def brains(seed: int) -> Examples:
    draw = torch.Generator().manual_seed(seed)
    ages = 20 + 60 * torch.rand(10, 1, generator=draw)
    volumes = torch.randn(10, 1, 16, 16, 16, generator=draw) * ages.view(-1, 1, 1, 1, 1) / 50
    return Examples(TensorDataset(volumes[:8], ages[:8]), TensorDataset(volumes[8:], ages[8:]))


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["slots", "scalars"])
def test_base_model_and_unselected_slots_stay_and_the_ledger_counts_the_selected_ones(budget: str) -> None:
    settings = {"shape": (16, 16, 16), "downsample": 1, "adapter": {"rank": 8, "head": "trained"}}
    task = TASKS["brain_age"](settings)
    layout, weights = build_initial_model(task, 1)
    tasks = [LocalTask.open(f"site-{i}", task, brains(i), layout, 1) for i in (1, 2)]
    sites, network = {local.name: build_site(local) for local in tasks}, tasks[0].model.module
    base = {n: p.clone() for n, p in network.named_parameters() if "lora" not in n}
    config = {"rounds": 2, "rank": 2, "budget": budget, "training": TRAINING}
    method = LoRAA2(LoRAA2.Config.model_validate(config), layout, 1)
    outcome, ledger = run_locally(method, weights, sites, task.metric)
    slots = method.slots
    assert slots.num_modules == 6
    assert [a.get_slot_width("A") for a in slots.adapters] == [27, 16 * 27, 32 * 27, 64 * 27, 64 * 27, 64]
    assert [a.get_slot_width("B") for a in slots.adapters] == [16, 32, 64, 64, 64, 32]
    after = dict(network.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in base.items() if "modules_to_save" not in name)
    up = {(line.round, line.site): line.scalars_sent for line in ledger.lines if line.direction == "up"}
    again = {name: build_site(LocalTask.open(name, task, brains(int(name[-1])), layout, 1)) for name in sites}
    state = method.init(weights, [])
    for t in (1, 2):
        active = method.get_active_factor(t)
        requests = method.ask(state, sorted(again)) or {}
        updates = []
        for name, site in again.items():
            site.weights = state.weights.clone()
            update = method.answer(requests[name].request, site)
            chosen = slots.find_slots(update.patch.mask, active)
            assert chosen is not None
            widths = slots.get_slot_widths(active)
            assert up[t, name] == int(widths[chosen].sum()) + slots.other_entries.count
            if budget == "scalars":
                assert int(widths[chosen].sum()) <= 2 * int(widths.sum()) // 8
            else:
                assert int(chosen.sum()) == 2 * 6
            updates.append(contribute(name, update))
        moved = torch.stack([u.patch.mask.bits for u in updates]).any(0)
        following = method.learn(state, updates)
        assert torch.equal(following.weights[~moved], state.weights[~moved])
        state = following
    assert torch.equal(outcome.weights, state.weights)
