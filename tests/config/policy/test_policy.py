"""The terms of a policy, on values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flare_sparse.config.policy.policy import PRESETS, Policy, compute_norm, find_policy_file, read_policy
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.inputs.scaling import InputScaler, build_statistics_mask
from flare_sparse.training import SampleUsage

LAYOUT = Layout.from_module(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
FULL = Mask.full(LAYOUT.size)


def refusals(policy: Policy, content: Any = "weights", **more: Any) -> list[str]:
    """Names of the terms that refuse an update of the full model, computed from 100 examples in 10 minibatches."""
    arguments = {
        "usage": SampleUsage(100, 10),
        "mask": FULL,
        "values": torch.ones(FULL.count),
        "layout": LAYOUT,
        **more,
    }
    return [reason.split(":")[0] for reason in policy.find_refusals(content, **arguments)]


def test_default_policy_refuses_only_values_that_are_not_finite() -> None:
    assert refusals(Policy()) == refusals(Policy(), "scores") == refusals(Policy(), "metrics") == []
    bad = torch.ones(FULL.count).index_fill_(0, torch.tensor([3]), float("inf"))
    assert refusals(Policy(), values=bad) == ["finite"]


@pytest.mark.parametrize(
    ("policy", "content", "more", "reason"),
    [
        ({"contents": ["weights"]}, "scores", {}, "contents"),
        ({"min_examples": 101}, "weights", {}, "min_examples"),
        ({"min_score_examples": 101}, "scores", {}, "min_score_examples"),
        ({"min_score_batches": 11}, "scores", {}, "min_score_batches"),
        ({"max_upload_bytes": 1000}, "weights", {"size": 1001}, "max_upload_bytes"),
        ({"max_upload_share": 0.9}, "weights", {}, "max_upload_share"),
        ({"tensors": ["0.*"]}, "weights", {}, "tensors"),
        ({"max_norm": 4.7}, "delta", {}, "max_norm"),
    ],
)
def test_each_term_refuses_only_what_it_names(
    policy: dict[str, Any], content: str, more: dict[str, Any], reason: str
) -> None:
    assert refusals(Policy.model_validate(policy), content, **more) == [reason]
    within = {"contents": ["weights", "delta", "scores"], "min_examples": 100, "min_score_examples": 100}
    within["min_score_batches"] = 10
    wide = {"max_upload_bytes": 1001, "max_upload_share": 1.0, "tensors": ["0.*", "1.*"], "max_norm": 4.9}
    assert refusals(Policy.model_validate({**within, **wide}), content, **more) == []


SCALER = InputScaler([True, True])
SCALED = Layout.from_module(nn.Sequential(SCALER, nn.Linear(2, 1)))
STATISTICS_MASK = build_statistics_mask(SCALED)


@pytest.mark.parametrize(
    ("policy", "reasons"),
    [
        ({}, []),
        ({"min_examples": 2}, []),
        ({"min_examples": 3}, ["min_examples"]),
        ({"noise": 0.1, "clip_norm": 0.1}, ["noise"]),
        ({"max_norm": 0.1}, []),
        ({"contents": ["weights", "delta", "scores", "metrics"]}, ["contents"]),
    ],
)
def test_statistics_leave_only_if_every_column_has_enough_values(policy: dict[str, Any], reasons: list[str]) -> None:
    """100 examples, of which two have the second column."""
    inputs = torch.arange(200.0).view(100, 2)
    inputs[2:, 1] = torch.nan
    values = SCALER.compute_statistics(inputs).flatten()
    more = {"mask": STATISTICS_MASK, "values": values, "layout": SCALED}
    assert refusals(Policy(**policy), "statistics", **more) == reasons
    patch = Patch(values, STATISTICS_MASK)
    assert Policy(**policy).sanitize_values("statistics", patch, SCALED) is values


def test_few_entries_of_statistics_may_be_asked_for() -> None:
    policy = Policy(min_entries=256)
    assert list(policy.find_request_refusals("statistics", 10)) == []
    assert list(policy.find_request_refusals("train", 10)) != []


def test_metrics_are_checked_against_contents_only() -> None:
    tight = Policy(min_examples=1000, max_upload_share=0.01, tensors=("nothing",))
    empty = Mask.empty(LAYOUT.size)
    assert refusals(tight, "metrics", usage=SampleUsage(), mask=empty, values=torch.zeros(0)) == []


@given(values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=23), limit=st.floats(0.01, 100))
def test_delta_is_clipped_to_the_norm_and_keeps_its_direction(values: list[float], limit: float) -> None:
    mask = Mask(torch.arange(LAYOUT.size) < len(values))
    patch = Patch(torch.tensor(values, dtype=torch.float32), mask)
    clipped = Policy(clip_norm=limit).sanitize_values("weights", patch, LAYOUT)
    assert compute_norm(clipped) <= limit * (1 + 1e-5)
    if compute_norm(patch.values) <= limit:
        assert clipped is patch.values
    else:
        assert torch.allclose(
            clipped * compute_norm(patch.values), patch.values * compute_norm(clipped), rtol=1e-4, atol=1e-4
        )


def test_noise_has_the_given_deviation_and_differs_between_messages() -> None:
    layout = Layout.from_module(nn.Linear(1000, 50))
    patch = Patch(torch.zeros(layout.size), Mask.full(layout.size))
    policy = Policy(clip_norm=2.0, noise=0.05)
    first, second = (policy.sanitize_values("delta", patch, layout) for _ in range(2))
    assert float(first.std()) == pytest.approx(0.1, rel=0.02)
    assert not torch.equal(first, second)


def test_scores_are_quantized() -> None:
    scores = Patch(torch.rand(LAYOUT.size, generator=torch.Generator().manual_seed(1)), FULL)
    coarse = LAYOUT.unflatten(Policy(score_bits=2).sanitize_values("scores", scores, LAYOUT))
    assert all(part.unique().numel() <= 4 for part in coarse.values())
    assert Policy().sanitize_values("scores", scores, LAYOUT) is scores.values


@pytest.mark.parametrize(
    ("asked", "scored", "refusal"),
    [
        pytest.param([0, *range(12, 23)], "asked", "scores of 1 entries of 0.weight, the minimum is 6", id="one entry"),
        pytest.param(range(23), "asked", None, id="whole tensors, the bias smaller than the minimum"),
        pytest.param([0, *range(12, 23)], "all", None, id="entries that the method chooses"),
        pytest.param(range(6), "asked", None, id="as many as the minimum"),
    ],
)
def test_scores_of_few_entries_of_a_tensor_are_refused(asked: Iterable[int], scored: str, refusal: str | None) -> None:
    bits = torch.zeros(LAYOUT.size, dtype=torch.bool)
    bits[list(asked)] = True
    trainable = Mask(bits)
    policy = Policy(min_entries=6)
    problems = list(policy.find_score_refusals(trainable, trainable if scored == "asked" else FULL, LAYOUT))
    assert bool(problems) == bool(refusal)
    assert not refusal or re.search(refusal, problems[0])


def test_metrics_of_few_examples_stay_whichever_part_they_are_of() -> None:
    metrics = {"mae": 3.14159, "test_examples": 20.0, "validation_mae": 2.71828, "validation_examples": 4.0}
    counts = {"test_examples": 20, "validation_examples": 4}
    policy = Policy(min_test_examples=5, metrics="rounded")
    assert policy.sanitize_metrics(metrics, counts) == {"mae": 3.14, "test_examples": 20.0}
    assert policy.sanitize_metrics(metrics, {**counts, "test_examples": 4}) == {}
    exact = Policy(min_test_examples=4)
    assert exact.sanitize_metrics(metrics, counts) == metrics
    assert Policy(metrics="none").sanitize_metrics(metrics, counts) == {}


def test_presets_become_stricter_from_open_to_careful_to_strict() -> None:
    policies = {name: read_policy(find_policy_file(Path(name))) for name in PRESETS}
    assert list(policies) == ["careful", "open", "strict"]
    careful, strict = policies["careful"], policies["strict"]
    assert set(policies["open"].contents) == set(Policy().contents)
    for term in ("max_evaluations", "max_lifetime_questions", "max_starts"):
        assert getattr(policies["open"], term) > getattr(careful, term) > getattr(strict, term), term
    for term in ("min_examples", "min_score_examples", "min_score_batches", "min_test_examples"):
        assert getattr(policies["open"], term) < getattr(careful, term) < getattr(strict, term), term
    assert set(strict.contents) < set(careful.contents)


@pytest.mark.parametrize(("limit", "rounds"), [(None, [1, 2, 3, 4, 5]), (1, [5]), (2, [1, 5]), (3, [1, 3, 5])])
def test_metrics_of_the_last_model_and_of_others_at_equal_intervals_may_leave(
    limit: int | None, rounds: list[int]
) -> None:
    policy = Policy(max_evaluations=limit)
    assert [t for t in range(1, 6) if policy.allows_metrics(t, 4, 1)] == rounds


def test_policy_is_a_file_or_the_name_of_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"careful\.yaml: there is no such file and no such preset.* careful, open, strict"
    ):
        find_policy_file(Path("careful.yaml"))
    assert find_policy_file(Path("careful")) == PRESETS["careful"]
    Path("careful").write_text("min_examples: 3\n")  # a file wins over a preset of the same name
    assert read_policy(find_policy_file(Path("careful"))).min_examples == 3
    Path("careful").write_text("# nothing is set\n")
    assert read_policy(Path("careful")) == Policy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_upload_byte: 3", "Did you mean 'max_upload_bytes'"),
        ("coarse_scores: true", r"coarse_scores: no such field\. Allowed fields: methods, .*score_bits"),
        ("max_norm: -1", "max_norm"),
        ("noise: 0.1", "give clip_norm"),
        ("max_starts: true", "max_starts: .*found true; expected a value"),
        ("noise: no", "noise: .*found false; expected a value"),
        ("contents: [everything]", "contents"),
        ("- a\n- b", "content"),
        ("a: [", r"^\S+/policy\.yaml: cannot be read as a policy, terms and values in YAML: not YAML: while parsing"),
    ],
)
def test_malformed_policy_is_refused_with_the_name_of_the_field(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_policy(tmp_path / "policy.yaml")


def test_job_must_name_the_permit_of_the_site() -> None:
    policy = Policy(permit="EA 12/2026")
    assert list(policy.find_job_refusals("EA 12/2026")) == []
    for permit, found in ((None, "the job has none"), ("EA 1/2026", "the job has 'EA 1/2026'")):
        (reason,) = policy.find_job_refusals(permit)
        assert reason == (f"permit: this site takes part under 'EA 12/2026', and {found}; set permit: 'EA 12/2026'")
    assert list(Policy().find_job_refusals("EA 1/2026")) == []


@pytest.mark.parametrize("preset", ["careful", "strict"])
def test_nested_subgroups_of_no_declaration_stay_at_the_site(preset: str) -> None:
    """P4: a group of one column and a group of another one differ by one patient."""
    sent = {"subjects in diagnosis=AD": 21.0, "mae in diagnosis=AD": 4.1, "subjects in subtype=AD": 20.0, "mae": 4.0}
    policy = read_policy(PRESETS[preset])
    assert policy.sanitize_metrics(sent, {"test_examples": 60}) == {"mae": 4.0}
    declared = policy.sanitize_metrics(sent, {"test_examples": 60}, {"diagnosis=AD"})
    assert set(declared) == {"subjects in diagnosis=AD", "mae in diagnosis=AD", "mae"}
