"""Conflicts of a job with a policy are found before the job runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import JOBS
from torch import nn

from flare_sparse.config.assemble import assemble
from flare_sparse.config.loading import load_config
from flare_sparse.config.policy.check import find_policy_conflicts, iterate_conflicts
from flare_sparse.config.policy.initial import find_changed_tensor
from flare_sparse.config.policy.policy import Policy, find_policy_file, read_policy
from flare_sparse.config.user_classes import load_task
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.methods.neurosfl import NeuroSFL
from flare_sparse.methods.registry import METHODS
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.local.dry_run import DryTrainer, dry_run
from flare_sparse.training import Site
from flare_sparse.wire.ledger import LedgerLine

CONFIGS = Path(__file__).parents[3] / "app_configs"
SLOW = {"metagater_cifar10", "metagater_mnist"}
"""Half a minute each; metagater_morphometry_age has the same messages."""
BUILDABLE = sorted(
    file.stem for file in CONFIGS.glob("*.yaml") if "\n  base: " not in file.read_text() and file.stem not in SLOW
)
"""All but those with a pre-trained base model, which is not part of the project."""
LAYOUT = Layout.from_module(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))


def test_minima_are_checked_on_the_examples_that_the_settings_would_read() -> None:
    policy = read_policy(find_policy_file(Path("careful")))

    def conflicts(**settings: Any) -> list[str]:
        method = NeuroSFL(NeuroSFL.Config(rounds=2, sparsity=0.5, **settings), LAYOUT, 1)
        sites = {
            name: Site(name, DryTrainer(name, LAYOUT, examples=count))
            for name, count in {"site-1": 200, "site-2": 10}.items()
        }
        _, ledger = dry_run(method, torch.ones(LAYOUT.size), sites)
        used = {name: site.trainer.usages for name, site in sites.items()}
        return [reason.split(";")[0] for reason in iterate_conflicts(policy, "neurosfl", ledger.lines, used, LAYOUT)]

    small = [
        "min_examples: scores were computed from 10 examples, the minimum is 20 (site-2)",
        "min_score_examples: scores were computed from 10 examples, the minimum is 64 (site-2)",
        "min_score_batches: scores were computed from 2 minibatches, the minimum is 4 (site-2)",
        "min_examples: weights were computed from 10 examples, the minimum is 20 (site-2)",
    ]
    assert conflicts(saliency_batches=None) == small
    assert conflicts(saliency_batches=1, training={"batch_size": 1})[:3] == [
        "min_examples: scores were computed from 1 examples, the minimum is 20 (site-1)",
        "min_score_examples: scores were computed from 1 examples, the minimum is 64 (site-1)",
        "min_score_batches: scores were computed from 1 minibatches, the minimum is 4 (site-1)",
    ]


def test_main_job_passes_the_careful_policy_where_sites_have_enough_subjects() -> None:
    careful = read_policy(find_policy_file(Path("careful")))

    def conflicts(examples: int, *overrides: str) -> list[str]:
        job = load_config(CONFIGS / "neurosfl_brain_age.yaml", list(overrides))
        return [
            reason.split(":")[0] for reason in find_policy_conflicts(careful, job, assemble(job), {"site-1": examples})
        ]

    assert conflicts(64) == []
    assert conflicts(63) == ["min_score_examples"]
    assert conflicts(64, "method.saliency_batches=1") == ["min_examples", "min_score_examples", "min_score_batches"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in JOBS else [pytest.mark.long], id=name) for name in BUILDABLE]
)
def test_every_published_job_passes_the_open_policy_with_and_without_training_examples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_config(CONFIGS / f"{name}.yaml")
    assembly = assemble(job, load_task(job, CONFIGS))
    receive = SiteEndpoint.receive

    def verify_initial_model(endpoint: SiteEndpoint, *arguments: Any) -> Any:
        """Compare as the presets do, which have verify_initial_model."""
        request, site = receive(endpoint, *arguments), endpoint.site
        if endpoint.method.sends_initial_model(request.kind, request.round):
            mask = Mask.full(site.layout.size) if site.live_patch is None else site.live_patch.mask
            assert not find_changed_tensor(site.weights, assembly.weights, mask, site.layout, endpoint.values)
        return request

    monkeypatch.setattr(SiteEndpoint, "receive", verify_initial_model)
    for examples in (200, 0):
        assert find_policy_conflicts(Policy(), job, assembly, {"hospital": examples}) == []


@pytest.mark.parametrize(
    ("terms", "conflict"),
    [
        (
            {"tensors": ("nothing_like_it*",)},
            f"tensors: {LAYOUT.tensors[0].name} may not leave, and a message has all tensors of the model",
        ),
        ({}, None),
    ],
)
def test_full_model_conflicts_with_terms_that_forbid_it(terms: dict[str, Any], conflict: str | None) -> None:
    method = METHODS["fedavg"](METHODS["fedavg"].Config(rounds=2), LAYOUT, 1)
    sites = {"site-1": Site("site-1", DryTrainer("site-1", LAYOUT, examples=200))}
    _, ledger = dry_run(method, torch.ones(LAYOUT.size), sites)
    reasons = [
        reason.split(";")[0] for reason in iterate_conflicts(Policy(**terms), "fedavg", ledger.lines, {}, LAYOUT)
    ]
    assert reasons == ([conflict] if conflict else [])


LINE = LedgerLine(
    run="0" * 16, round=1, sequence=1, site="A", direction="up", kind="train", content="delta", encoding="bitmap",
    values="float32", scalars_total=100, scalars_sent=50, payload_bytes=328, selection_bytes=0, dense_bytes=400,
    floor_bytes=200,
)  # fmt: skip


def test_upload_whose_examples_are_not_known_is_no_upload_without_conflicts() -> None:
    with pytest.raises(ValueError, match="zip"):
        list(iterate_conflicts(Policy(), "fedavg", [LINE], {"A": []}, LAYOUT))


@pytest.mark.parametrize(
    ("terms", "changes", "conflicts"),
    [
        ({"max_upload_bytes": 328}, {}, []),
        ({"max_upload_bytes": 327}, {}, ["max_upload_bytes: the message has 328 bytes, the limit is 327"]),
        ({"max_upload_bytes": 327}, {"direction": "down"}, []),
        ({"max_upload_share": 0.5}, {}, []),
        ({"max_upload_share": 0.49}, {}, ["max_upload_share: 50.0% of the model's entries, the limit is 49.0%"]),
        ({"max_upload_share": 0.49}, {"content": "metrics"}, []),
        ({"noise": 0.1, "clip_norm": 1.0}, {"content": "statistics"}, ["noise: statistics of inputs"]),
        ({"noise": 0.1, "clip_norm": 1.0}, {}, []),
        ({"tensors": ("none*",)}, {}, []),
        ({"contents": ("weights", "metrics")}, {}, ["contents: delta may not leave this site; choose other"]),
        ({"methods": ("scbf",)}, {}, ["methods: fedavg may not run at this site"]),
    ],
)  # fmt: skip
def test_each_term_on_messages_conflicts_at_its_limit_and_not_at_other_messages(
    terms: dict[str, Any], changes: dict[str, Any], conflicts: list[str]
) -> None:
    found = list(iterate_conflicts(Policy(**terms), "fedavg", [replace(LINE, **changes)], {}, LAYOUT))
    assert [reason[: len(start)] for reason, start in zip(found, conflicts, strict=True)] == conflicts


def test_job_without_privacy_conflicts_with_a_budget(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    settings = (
        "name: job\nmethod: {name: fedavg, rounds: 2, training: {batch_size: 64}}\n"
        "task: {name: table, kind: regression, target: age, features: [destrieux], scaling: freesurfer}\n"
    )
    file.write_text(settings)
    config = load_config(file)
    (reason,) = find_policy_conflicts(Policy(epsilon=8), config, assemble(config), {"site-1": 20})
    assert reason == "epsilon: the job has no privacy section; add one, such as privacy: {epsilon: 3}"
    file.write_text(f"{settings}privacy: {{noise_multiplier: 1.0}}\n")
    config = load_config(file)
    assert find_policy_conflicts(Policy(epsilon=100), config, assemble(config), {"site-1": 20}) == []
    (reason,) = find_policy_conflicts(Policy(epsilon=1), config, assemble(config), {"site-1": 20})
    assert "It covers 0 of 2 rounds" in reason
    assert reason.endswith("(site-1)")


def test_job_that_sends_single_updates_conflicts_with_a_policy_that_requires_sums() -> None:
    job = load_config(CONFIGS / "masked_brain_age.yaml")
    assembly = assemble(job, load_task(job, CONFIGS))
    assert find_policy_conflicts(Policy(masked=True), job, assembly, {"hospital": 200}) == []
    plain = job.model_copy(update={"wire": job.wire.model_copy(update={"aggregation": "plain"})})
    assert find_policy_conflicts(Policy(masked=True), plain, assembly, {"hospital": 200}) == [
        "masked: no values of a single site may be readable; set wire.aggregation: masked"
    ]
