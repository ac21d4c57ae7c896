"""What a policy would refuse of a job, before the job comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flare_sparse.assemble import assemble
from flare_sparse.config import load_config
from flare_sparse.local.dry_run import DrySite, dry_run
from flare_sparse.methods import METHODS
from flare_sparse.methods.neurosfl import NeuroSFL
from flare_sparse.params import Layout
from flare_sparse.policy.check import find_policy_conflicts, iterate_conflicts
from flare_sparse.policy.policy import Policy, policy_file, read_policy

CONFIGS = Path(__file__).parents[2] / "app_configs"
BUILDABLE = sorted(file.stem for file in CONFIGS.glob("*.yaml") if "\n  base: " not in file.read_text())
"""All but those that start from a pre-trained network, which is not part of the project."""
LAYOUT = Layout.from_module(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))


def test_a_job_is_held_against_what_its_own_settings_would_read() -> None:
    policy = read_policy(policy_file(Path("careful")))

    def said(**settings: Any) -> list[str]:
        method = NeuroSFL(NeuroSFL.Config(rounds=2, sparsity=0.5, **settings), LAYOUT, 1)
        dry = {name: DrySite(name, LAYOUT, examples=count) for name, count in {"site-1": 200, "site-2": 10}.items()}
        _, ledger = dry_run(method, torch.ones(LAYOUT.size), dry, "float32")
        used = {name: site.answers for name, site in dry.items()}
        return [reason.split(";")[0] for reason in iterate_conflicts(policy, "neurosfl", ledger.lines, used, LAYOUT)]

    small = [
        "min_examples: scores of 10, wanted are 20 (site-2)",
        "min_score_examples: scores of 10, wanted are 64 (site-2)",
        "min_score_batches: scores of 2, wanted are 4 (site-2)",
        "min_examples: weights of 10, wanted are 20 (site-2)",
    ]
    assert said(saliency_batches=None) == small
    assert said(saliency_batches=1, training={"batch_size": 1})[:3] == [
        "min_examples: scores of 1, wanted are 20 (site-1)",
        "min_score_examples: scores of 1, wanted are 64 (site-1)",
        "min_score_batches: scores of 1, wanted are 4 (site-1)",
    ]


def test_the_main_job_passes_the_careful_policy_once_it_scores_enough_subjects() -> None:
    careful = read_policy(policy_file(Path("careful")))

    def refused(examples: int, *overrides: str) -> list[str]:
        job = load_config(CONFIGS / "neurosfl_brain_age.yaml", list(overrides))
        return [
            reason.split(":")[0] for reason in find_policy_conflicts(careful, job, assemble(job), {"site-1": examples})
        ]

    assert refused(64) == ["min_examples", "min_score_examples", "min_score_batches"]
    assert refused(64, "method.saliency_batches=null") == []
    assert refused(63, "method.saliency_batches=null") == ["min_score_examples"]


@pytest.mark.parametrize("name", BUILDABLE)
def test_every_published_job_passes_an_open_policy_also_at_a_site_that_only_judges(name: str) -> None:
    job = load_config(CONFIGS / f"{name}.yaml")
    assembly = assemble(job)
    for examples in (200, 0):
        assert find_policy_conflicts(Policy(), job, assembly, {"hospital": examples}) == []


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"encrypted": True}, "encrypted: weights leave encrypted only"),
        (
            {"tensors": ("nothing_like_it*",)},
            f"tensors: {LAYOUT.tensors[0].name} may not leave, and a message has the whole model",
        ),
        ({}, None),
    ],
)
def test_a_whole_model_in_the_clear_is_held_against_the_terms_for_it(terms: dict[str, Any], said: str | None) -> None:
    method = METHODS["fedavg"](METHODS["fedavg"].Config(rounds=2), LAYOUT, 1)
    sites = {"site-1": DrySite("site-1", LAYOUT, examples=200)}
    _, ledger = dry_run(method, torch.ones(LAYOUT.size), sites, "float32")
    reasons = [
        reason.split(";")[0] for reason in iterate_conflicts(Policy(**terms), "fedavg", ledger.lines, {}, LAYOUT)
    ]
    assert reasons == ([said] if said else [])
