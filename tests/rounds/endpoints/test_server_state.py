"""Every cell of the table of ``ServerState``: what each transition makes of each field."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from flare_sparse.core.exchange import Assignment, EncryptedValues, Patch, Request
from flare_sparse.core.mask import Mask
from flare_sparse.rounds.endpoints.bases import SiteBase
from flare_sparse.rounds.endpoints.server_state import KEPT_VECTORS, EncryptedModel, ServerSnapshot, ServerState

FIELDS = [field.name for field in fields(ServerState)]
FULL, HALF = Mask.full(4), Mask(torch.tensor([True, True, False, False]))
DENSE = Patch(torch.ones(4), FULL)
SPARSE = Patch(torch.ones(2), HALF, "previous")
OLD, NEW = (Assignment(Request("train", number, DENSE, FULL)) for number in (1, 2))
RESIDUAL, NEXT_RESIDUAL = torch.zeros(4), torch.ones(4)
FIRST_CIPHERTEXT, NEXT_CIPHERTEXT = (
    EncryptedModel(FULL, EncryptedValues(torch.full((1,), n, dtype=torch.uint8))) for n in range(2)
)

STATE = ServerState(
    sequence=7,
    first_sequence=6,
    previous_first_sequence=3,
    assignments=(OLD,),
    bases={"a": SiteBase(FULL, 5), "b": SiteBase(HALF, 2)},
    bases_before={"a": SiteBase(FULL, 4), "b": SiteBase(HALF, 1)},
    residuals={"all": RESIDUAL},
    residuals_before={"all": None},
    pending={"a": OLD, "b": OLD},
    sent={"a": SPARSE, "b": DENSE},
    vectors={"a": RESIDUAL, "b": RESIDUAL},
    acknowledged={"a": 5, "b": 2},
    acknowledged_before={"a": 2},
    encrypted=FIRST_CIPHERTEXT,
)

SNAPSHOT = ServerSnapshot(9, 8, {"c": SiteBase(FULL, 9)}, {"c": NEXT_RESIDUAL}, {"c": 9}, NEXT_CIPHERTEXT)

ROWS = {
    "start": (
        STATE.start({"a": NEW, "c": NEW}),
        {
            "sequence": 8,
            "first_sequence": 8,
            "previous_first_sequence": 6,
            "assignments": (NEW,),
            "bases_before": {"a": SiteBase(FULL, 5), "b": SiteBase(HALF, 2)},
            "residuals_before": {"all": RESIDUAL},
            "acknowledged_before": {"a": 5, "b": 2},
            "pending": {"a": NEW, "c": NEW},
            "sent": {},
            "vectors": {},
        },
    ),
    "retry": (
        STATE.retry({"b": OLD}),
        {"sequence": 8, "acknowledged": {"a": 5}, "pending": {"b": OLD}, "sent": {}, "vectors": {}},
    ),
    "send": (
        STATE.send({"a": DENSE}, {"all": NEXT_RESIDUAL}, {"a": NEXT_RESIDUAL}),
        {"sent": {"a": DENSE}, "residuals": {"all": NEXT_RESIDUAL}, "vectors": {"a": NEXT_RESIDUAL}},
    ),
    "acknowledge": (
        STATE.acknowledge("b"),
        {
            "bases": {"a": SiteBase(FULL, 5), "b": SiteBase(FULL, 7)},
            "pending": {"a": OLD},
            "acknowledged": {"a": 5, "b": 7},
        },
    ),
    "forget_base": (
        STATE.forget_base("a"),
        {"bases": {"b": SiteBase(HALF, 2)}, "bases_before": {"b": SiteBase(HALF, 1)}},
    ),
    "aggregate": (STATE.aggregate(NEXT_CIPHERTEXT), {"encrypted": NEXT_CIPHERTEXT}),
    "restore": (
        ServerState.restore(SNAPSHOT),
        {
            "sequence": 9,
            "first_sequence": 8,
            "previous_first_sequence": 0,
            "assignments": (),
            "bases": {"c": SiteBase(FULL, 9)},
            "bases_before": {},
            "residuals": {"c": NEXT_RESIDUAL},
            "residuals_before": {},
            "pending": {},
            "sent": {},
            "vectors": {},
            "acknowledged": {"c": 9},
            "acknowledged_before": {},
            "encrypted": NEXT_CIPHERTEXT,
        },
    ),
}
"""By transition from ``STATE``: the state after, and the fields that change."""


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("transition", ROWS)
def test_transition_sets_field_as_the_table_says(transition: str, field: str) -> None:
    result, changes = ROWS[transition]
    assert getattr(result, field) == changes.get(field, getattr(STATE, field))


def test_retry_takes_back_the_updates_of_the_sites_that_it_asks_alone() -> None:
    assert STATE.retry({"a": OLD}).acknowledged == {"a": 2, "b": 2}
    assert STATE.retry({"a": OLD, "b": OLD}).acknowledged == {"a": 2}


def test_docstring_has_a_row_per_transition_and_describes_every_field() -> None:
    text = (ServerState.__doc__ or "").splitlines()
    assert all(any(line.strip().startswith(f"{row}  ") for line in text) for row in ROWS)
    assert all(any(line.strip().startswith(f"{field}: ") for line in text) for field in FIELDS)


def test_assignments_shared_by_sites_are_kept_once() -> None:
    assert STATE.start({"a": OLD, "b": NEW, "c": NEW}).assignments == (OLD, NEW)


def test_residuals_of_other_streams_stay() -> None:
    state = STATE.send({}, {"a": NEXT_RESIDUAL})
    assert state.residuals == {"all": RESIDUAL, "a": NEXT_RESIDUAL}


def test_acknowledged_patch_over_the_previous_model_keeps_the_mask_of_the_base() -> None:
    assert STATE.acknowledge("a").bases["a"] == SiteBase(FULL, 7)


def test_only_the_same_assignment_objects_make_a_retry() -> None:
    assert STATE.is_retry({"b": OLD})
    assert not STATE.is_retry({"a": OLD, "b": NEW})
    assert not STATE.is_retry({"b": Assignment(OLD.request)})


def test_site_needs_the_full_model_without_a_base_since_the_previous_assignments() -> None:
    assert not STATE.needs_full_model(STATE.bases.get("a"))
    assert STATE.needs_full_model(STATE.bases.get("b"))
    assert STATE.needs_full_model(STATE.bases.get("c"))
    oldest = replace(STATE, bases={"a": SiteBase(FULL, STATE.previous_first_sequence)})
    assert not oldest.needs_full_model(oldest.bases.get("a")), (
        "the first attempt at the previous assignments is recent enough"
    )
    started = STATE.start({"a": NEW}).send({"a": DENSE}, {})
    assert started.needs_full_model(started.bases.get("a")), (
        "its base is older than the first attempt at the previous assignments"
    )
    acknowledged = started.acknowledge("a")
    assert not acknowledged.needs_full_model(acknowledged.bases.get("a"))


def test_snapshot_restores_what_a_resumed_run_needs() -> None:
    assert ServerState.restore(SNAPSHOT).snapshot() == SNAPSHOT
    assert ServerState.restore(STATE.snapshot()).start({"a": NEW}).previous_first_sequence == STATE.first_sequence


def test_server_keeps_the_vectors_that_most_sites_hold() -> None:
    """A site with another vector is one without a base: it receives the full model."""
    shared = torch.zeros(4)
    bases = {f"site-{n}": SiteBase(FULL, n, torch.zeros(4)) for n in range(1, KEPT_VECTORS + 2)}
    bases |= {"plain": SiteBase(FULL, 1), "a": SiteBase(FULL, 1, shared), "b": SiteBase(FULL, 1, shared)}
    started = replace(STATE, bases=bases).start({"a": NEW})
    newest = [f"site-{n}" for n in range(3, KEPT_VECTORS + 2)]
    assert sorted(started.bases) == ["a", "b", "plain", *newest]
    assert started.bases_before == started.bases
    assert len(replace(STATE, bases=bases).start({"a": NEW, "b": OLD}).bases) == len(bases), "two models, twice as many"


def test_acknowledged_base_has_the_vector_that_the_site_reads() -> None:
    vector = torch.ones(4)
    state = STATE.send({"b": DENSE}, {}, {"b": vector}).acknowledge("b")
    assert state.bases["b"].vector is vector
    assert ServerState.restore(state.snapshot()).bases["b"].vector is vector
