"""A site that misses an attempt, or loses its checkpoints, costs that round a message and the later rounds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from local_federation import LocalFederation

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.params import compute_digest
from flare_sparse.rounds.federation.rules import RoundRules

METHODS: dict[str, dict[str, Any]] = {
    "topk_ef": {"fraction": 0.1},
    "dssgd": {"rate": 0.1},
    "scbf": {"rate": 0.1},
    "ffa_lora": {},
    "lora_a2": {},
}
"""The methods whose training requests build on the previous model."""
ADAPTED = ("ffa_lora", "lora_a2")
VALUES = ("float32", "bfloat16", "float16", "int4")
MISSED = 2
"""Number of the attempt that is disturbed: the first one of round 2. Every round takes one attempt otherwise."""


def build(name: str, values: Any, folder: Path | None = None) -> LocalFederation:
    """Return a run of four rounds that need all three sites."""
    stores = (lambda end: Store(folder / end, {})) if folder else (lambda end: None)
    return LocalFederation(
        name,
        toy.ToyBench(toy.Adapted()) if name in ADAPTED else toy.ToyBench(),
        rules=RoundRules(min_sites=3),
        values=values,
        stores=stores,
        rounds=4,
        **METHODS[name],
    )


def list_bytes(federation: LocalFederation, *, above: int) -> list[tuple[int, str, str, int]]:
    """Return round, direction, site and bytes of every message of the rounds above a number."""
    return [
        (line.round, line.direction, line.site, line.payload_bytes)
        for line in federation.ledger.lines
        if line.round > above
    ]


def list_requests(federation: LocalFederation, number: int) -> list[tuple[str, int, int]]:
    """Return site, values and bytes of every request of one round."""
    return [
        (line.site, line.scalars_sent, line.payload_bytes)
        for line in federation.ledger.lines
        if line.round == number and line.direction == "down"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("site", "is_delivered"), [("site-1", True), ("site-3", False)], ids=["reply lost", "request lost"]
)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", METHODS)
def test_missed_attempt_changes_no_bit_and_no_later_message(
    name: str, values: str, site: str, is_delivered: bool
) -> None:
    """The base of the site that missed the attempt is older than that of the others, or of the same age."""
    planned, disturbed = build(name, values), build(name, values)
    if is_delivered:
        disturbed.change_message = lambda upload: (
            None if (upload.site, upload.attempt.sequence) == (site, MISSED) else upload
        )
    else:
        disturbed.is_silent = lambda silent, attempt: (silent, attempt.sequence) == (site, MISSED)
    expected, outcome = planned.run(), disturbed.run()
    assert compute_digest(outcome.weights) == compute_digest(expected.weights)
    assert [record.attempts for record in outcome.rounds] == [1, 2, 1, 1, 1]
    assert list_bytes(disturbed, above=2) == list_bytes(planned, above=2)
    # Both attempts of the disturbed round are sent with the planned bytes: no site refuses the retry.
    assert list_requests(disturbed, MISSED) == list_requests(planned, MISSED) * 2
    assert max(scalars for _, scalars, _ in list_requests(planned, MISSED + 1)) < planned.method.layout.size


@pytest.mark.slow
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", METHODS)
def test_site_that_lost_its_checkpoints_is_sent_the_full_model_once(name: str, values: str, tmp_path: Path) -> None:
    """The message with the full model has a number of its own, so the site's base is newer than that of the others."""
    planned, disturbed = build(name, values, tmp_path / "planned"), build(name, values, tmp_path / "disturbed")
    disturbed.restarts = {(MISSED, "site-2")}
    store = Store(tmp_path / "disturbed" / "site-2", {})
    restart = disturbed.restart_site

    def restart_without_checkpoints(site: str) -> None:
        store.delete()
        restart(site)

    disturbed.restart_site = restart_without_checkpoints  # type: ignore[method-assign]
    residuals: dict[int, Any] = {}
    deliver = disturbed.deliver

    def record(attempt: Any) -> Any:
        residuals[attempt.sequence] = dict(disturbed.server._link.residuals)
        return deliver(attempt)

    disturbed.deliver = record  # type: ignore[method-assign]
    planned.run()
    disturbed.run()
    # The full model is rounded on its own: the residual that the other sites' messages build on stays.
    assert residuals[MISSED].keys() == residuals[MISSED + 1].keys()
    assert all(residuals[MISSED][stream] is residuals[MISSED + 1][stream] for stream in residuals[MISSED])
    size = planned.method.layout.size
    assert [site for site, scalars, _ in list_requests(disturbed, MISSED) if scalars == size] == ["site-2"]
    for number in (3, 4):
        requests = list_requests(disturbed, number)
        assert [site for site, _, _ in requests] == ["site-1", "site-2", "site-3"]
        assert len({(scalars, length) for _, scalars, length in requests}) == 1
        assert requests[0][1] < size


@pytest.mark.slow
def test_restart_after_an_update_that_did_not_count_changes_no_bit(tmp_path: Path) -> None:
    """Round 2 goes on without site-3, and round 3 is tried twice: the second attempt starts before round 2's update."""
    lost = {(2, "site-3"), (3, "site-1"), (3, "site-2")}

    def run(folder: Path, restarts: set[tuple[int, str]]) -> torch.Tensor:
        federation = LocalFederation(
            "topk_ef", rules=RoundRules(min_sites=2), rounds=4, fraction=0.1, stores=lambda end: Store(folder / end, {})
        )
        federation.change_message = lambda upload: None if (upload.attempt.sequence, upload.site) in lost else upload
        federation.restarts = restarts
        weights = federation.run().weights
        assert [record.round for record in federation.records if "site-3" not in record.sites_contributed] == [2]
        return weights

    assert torch.equal(run(tmp_path / "undisturbed", set()), run(tmp_path / "restarted", {(4, "site-3")}))
