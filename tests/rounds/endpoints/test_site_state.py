"""Every cell of the table of ``SiteState``: what each transition makes of each field."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch

from flare_sparse.core.mask import Mask
from flare_sparse.rounds.endpoints.bases import SiteBase
from flare_sparse.rounds.endpoints.site_state import RequestId, SiteMemory, SiteSnapshot, SiteState

FIELDS = [field.name for field in fields(SiteState)]
FULL = Mask.full(4)
OLDEST, OLDER, BASE, NEW = (SiteBase(FULL, sequence) for sequence in (3, 5, 7, 9))
SCORES, TRAIN, COUNT = RequestId("scores", 0), RequestId("train", 1), RequestId("count", 2)
BEFORE, AFTER, CURRENT, RESULT = (SiteMemory(torch.tensor([float(n)])) for n in range(4))
EMPTY = SiteMemory()

RECEIVED = SiteState(
    base=BASE,
    received=TRAIN,
    earlier_bases=(OLDER,),
    answered=SCORES,
    memory=CURRENT,
    memory_before=BEFORE,
    memory_after=AFTER,
    checkpoint=5,
    fallback=3,
    reserve=1,
)
"""Received a request, and did not answer it yet."""

ANSWERED = SiteState(
    base=BASE,
    received=TRAIN,
    earlier_bases=(OLDER,),
    answered=TRAIN,
    memory=BEFORE,
    memory_before=BEFORE,
    memory_after=AFTER,
    checkpoint=7,
    fallback=5,
    reserve=3,
)
"""Answered the request that it received last."""

NEWEST_SNAPSHOT = SiteSnapshot("train", 1, torch.ones(4), BASE, AFTER)
OTHER_SNAPSHOT = SiteSnapshot("scores", 0, torch.zeros(4), OLDER, BEFORE)

ROWS = {
    "receive, not yet answered": (
        ANSWERED,
        ANSWERED.receive(COUNT, NEW),
        {"base": NEW, "received": COUNT, "earlier_bases": (BASE,), "memory": AFTER},
    ),
    "receive, answered earlier": (
        RECEIVED,
        RECEIVED.receive(SCORES, NEW),
        {"base": NEW, "received": SCORES, "earlier_bases": (BASE,), "memory": BEFORE},
    ),
    "retry, not yet answered": (
        RECEIVED,
        RECEIVED.receive(TRAIN, NEW),
        {"base": NEW, "earlier_bases": (OLDER, BASE), "memory": AFTER},
    ),
    "retry, answered": (
        ANSWERED,
        ANSWERED.receive(TRAIN, NEW),
        {"base": NEW, "earlier_bases": (OLDER, BASE), "memory": BEFORE},
    ),
    "answer, first time": (
        RECEIVED,
        RECEIVED.answer(TRAIN, RESULT),
        {
            "answered": TRAIN,
            "memory_before": CURRENT,
            "memory_after": RESULT,
            "checkpoint": 7,
            "fallback": 5,
            "reserve": 3,
        },
    ),
    "answer, again": (
        ANSWERED.receive(TRAIN, NEW),
        ANSWERED.receive(TRAIN, NEW).answer(TRAIN, RESULT),
        {"memory_before": BEFORE, "memory_after": RESULT, "checkpoint": 9},
    ),
    "restart from one request": (
        SiteState(),
        SiteState.restart(NEWEST_SNAPSHOT, None),
        {
            "base": BASE,
            "received": TRAIN,
            "earlier_bases": (None,),
            "answered": TRAIN,
            "memory": AFTER,
            "memory_before": EMPTY,
            "memory_after": AFTER,
            "checkpoint": 7,
            "fallback": None,
            "reserve": None,
        },
    ),
    "restart from two requests": (
        SiteState(),
        SiteState.restart(NEWEST_SNAPSHOT, OTHER_SNAPSHOT, reserve=3),
        {
            "base": BASE,
            "received": TRAIN,
            "earlier_bases": (OLDER,),
            "answered": TRAIN,
            "memory": AFTER,
            "memory_before": BEFORE,
            "memory_after": AFTER,
            "checkpoint": 7,
            "fallback": 5,
            "reserve": 3,
        },
    ),
    "forget memory": (ANSWERED, ANSWERED.forget_memory(), {"memory_after": EMPTY}),
    "take back": (
        ANSWERED,
        ANSWERED.take_back(),
        {"memory_after": BEFORE, "checkpoint": 5, "fallback": 3, "reserve": None},
    ),
}
"""By transition: the state before, the state after, and the fields that change."""


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("transition", ROWS)
def test_transition_sets_field_as_the_table_says(transition: str, field: str) -> None:
    state, result, changes = ROWS[transition]
    assert getattr(result, field) == changes.get(field, getattr(state, field))


def test_docstring_has_a_row_per_transition_and_a_column_per_field() -> None:
    table = (SiteState.__doc__ or "").splitlines()
    assert all(any(line.strip().startswith(f"{row}  ") for line in table) for row in ROWS)
    ruler = next(number for number, line in enumerate(table) if line.strip().startswith("="))
    columns = [slice(*match.span()) for match in re.finditer("=+", table[ruler])]
    # A long field name is broken over the two lines of the header.
    header = ["".join(line[column].strip() for line in table[ruler + 1 : ruler + 3]) for column in columns]
    assert header == ["transition", *FIELDS]


def test_every_retry_starts_from_the_memory_before_the_first_attempt() -> None:
    state = RECEIVED.answer(TRAIN, RESULT)
    for sequence in (11, 13, 15):
        state = state.receive(TRAIN, SiteBase(FULL, sequence))
        assert state.memory is CURRENT
        state = state.answer(TRAIN, SiteMemory(torch.tensor([float(sequence)])))
    assert state.memory_before is CURRENT
    assert (state.fallback, state.reserve) == (5, 3)


def test_every_base_since_the_first_attempt_is_remembered() -> None:
    state = SiteState()
    for base in (OLDEST, OLDER, BASE):
        state = state.receive(TRAIN, base)
    assert state.earlier_bases == (None, OLDEST, OLDER)
    assert state.receive(COUNT, NEW).earlier_bases == (BASE,)


def test_sequence_is_that_of_the_base() -> None:
    assert SiteState().sequence == 0
    assert SiteState().receive(TRAIN, NEW).sequence == 9


def test_retry_after_restart_has_the_memory_of_a_retry_without_restart() -> None:
    restarted = SiteState.restart(NEWEST_SNAPSHOT, OTHER_SNAPSHOT)
    assert restarted.receive(TRAIN, NEW).memory is ANSWERED.receive(TRAIN, NEW).memory is BEFORE
    assert restarted.receive(COUNT, NEW).memory is ANSWERED.receive(COUNT, NEW).memory is AFTER


@pytest.mark.parametrize(
    ("damaged", "before", "after"),
    [([], BEFORE, AFTER), ([3], BEFORE, AFTER), ([9], BEFORE, AFTER), ([6], EMPTY, AFTER), ([6, 9], EMPTY, AFTER)],
)
def test_memory_before_is_empty_if_a_checkpoint_between_the_intact_ones_is_damaged(
    damaged: list[int], before: SiteMemory, after: SiteMemory
) -> None:
    """The intact checkpoints have the numbers 5 and 7."""
    restarted = SiteState.restart(NEWEST_SNAPSHOT, OTHER_SNAPSHOT, damaged)
    assert restarted.receive(TRAIN, NEW).memory == before
    assert restarted.receive(COUNT, NEW).memory == after
