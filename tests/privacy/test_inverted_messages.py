"""A server rebuilds the input of one example without a policy, and nothing under the careful one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts import load_script
from torch import nn
from torch.utils.data import TensorDataset
from toy import Plain

from flare_sparse.config.assemble import Assembly, build_initial_model
from flare_sparse.config.policy.policy import PRESETS, Policy, read_policy
from flare_sparse.core.errors import DataError
from flare_sparse.methods.registry import METHODS
from flare_sparse.privacy.dp.account import PrivacyAccount
from flare_sparse.privacy.dp.accounting import SamplingPlan
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.mechanism import SiteMechanism
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, SitePrivacy, build_site

ServerAttacks: Any = load_script("experiments/inversion_attack").ServerAttacks


def build_attacks(policy: Policy | None, steps: int = 0, privacy: SitePrivacy | None = None) -> ServerAttacks:
    task = Plain()
    task.model = lambda: nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 1))  # type: ignore[method-assign]
    layout, weights = build_initial_model(task, 0)
    method = METHODS["fedavg"](METHODS["fedavg"].Config(), layout, 0)
    x = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    parts = [TensorDataset(rows, rows.sum(1, keepdim=True)) for rows in x.split([30, 10])]
    site = build_site(LocalTask.open("site-1", task, Examples(*parts), layout, 0), privacy=privacy)
    assembly = Assembly(task, method, layout, weights, "0" * 16, layout, {})
    return ServerAttacks(assembly, site, parts[1], policy, steps)


def test_one_example_is_rebuilt_from_an_update_and_from_scores() -> None:
    inversions = list(build_attacks(None).invert_messages(lambda line: None))
    assert [(one.message, one.batch_size) for one in inversions] == [
        (message, size) for message in ("update", "scores") for size in (1, 2, 4, 8)
    ]
    by_size = {(one.message, one.batch_size): one.best for one in inversions}
    for message in ("update", "scores"):
        single, many = by_size[message, 1], by_size[message, 8]
        assert single is not None
        assert many is not None
        assert (single.way, single.ssim) == ("linear layer", None)
        assert single.psnr > 60
        assert many.psnr < 25


@pytest.mark.parametrize("preset", ["careful", "strict"])
def test_policy_refuses_messages_of_few_examples(preset: str) -> None:
    inversions = list(build_attacks(read_policy(PRESETS[preset])).invert_messages(lambda line: None))
    assert {one.best for one in inversions} == {None}
    assert all("this site's policy: " in one.reason for one in inversions)


def test_withheld_units_leave_nothing_to_rebuild_one_example_from() -> None:
    policy = Policy(withhold_isolated=True)
    single = next(build_attacks(policy).invert_messages(lambda line: None))
    assert (single.best, single.reason) == (None, "no input could be rebuilt from a first linear layer")


def test_first_layer_of_flattened_images_reveals_the_image() -> None:
    attacks = build_attacks(None)
    image = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(1))
    attacks._model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 1))
    attacks._others = torch.zeros(2, 1, 3, 4)
    best = attacks._invert("update", (image, torch.ones(1, 1)))
    assert best.rebuilt.shape == (1, 3, 4)
    assert torch.allclose(best.rebuilt, image[0], atol=1e-4)


@pytest.mark.parametrize("policy", [None, Policy(withhold_isolated=True)])
def test_noise_of_a_private_site_hides_the_example(policy: Policy | None) -> None:
    config, plan = PrivacyConfig(epsilon=None, noise_multiplier=1.0), SamplingPlan.build(30, 10, 1, 1)
    mechanism = SiteMechanism(config, plan, PrivacyAccount(), "0" * 16, "job")
    attacks = build_attacks(policy, privacy=SitePrivacy(mechanism))
    update, scores = attacks.invert_messages(lambda line: None, [1])
    assert update.best is not None
    assert update.best.psnr < 15
    assert scores.best is not None
    assert scores.best.psnr < 15


def test_examples_without_float_inputs_are_not_inverted() -> None:
    attacks = build_attacks(None)
    tokens = TensorDataset(torch.zeros(3, 2, dtype=torch.long), torch.zeros(3))
    with pytest.raises(DataError, match="tensor of numbers"):
        ServerAttacks(attacks._assembly, attacks._site, tokens, None, 0)
