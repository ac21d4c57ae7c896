"""The record counts, for every site, the rounds with and without its contribution."""

from __future__ import annotations

from typing import Any

import pytest
from local_federation import LocalFederation

from flare_sparse.core.exchange import SiteEvent
from flare_sparse.rounds.endpoints.events import MAX_EVENTS, pack_events, parse_events
from flare_sparse.rounds.federation.rules import RoundRules


def test_every_round_of_a_site_is_contributed_or_missed_for_a_reason() -> None:
    federation = LocalFederation(
        "fedavg", sites=4, rules=RoundRules(quarantine_after=2, examples={"site-9": 10}), rounds=4
    )
    federation.is_silent = lambda site, attempt: site == "site-2" and attempt.kind == "train"
    federation.change_update = lambda upload: (
        upload.with_values(upload.update.patch.values * float("inf"))
        if (upload.site, upload.attempt.round) == ("site-3", 2)
        else upload
    )
    outcome = federation.run()
    counts = {site: (part.asked, part.contributed, part.missed) for site, part in outcome.count_contributions().items()}
    assert counts == {
        "site-1": (4, 4, {}),
        "site-2": (3, 0, {"quarantined": 1, "timed_out": 3}),
        "site-3": (4, 3, {outcome.rounds[1].rejected["site-3"]: 1}),
        "site-4": (4, 4, {}),
        "site-9": (0, 0, {}),
    }


def test_events_of_a_message_are_bounded_and_malformed_ones_are_ignored() -> None:
    events = tuple(SiteEvent("checkpoint_damaged", number) for number in range(MAX_EVENTS))
    assert parse_events(pack_events(events), sequence=MAX_EVENTS) == events
    assert len(parse_events([["checkpoint_damaged", 1]] * 1000, sequence=1)) == MAX_EVENTS


@pytest.mark.parametrize(
    "value",
    [
        None,
        "checkpoint_damaged",
        {"checkpoint_damaged": 1},
        [["patient-17", 1]],
        [["checkpoint_damaged", True]],
        [["checkpoint_damaged", -1]],
        [["checkpoint_damaged", 6]],
        [["checkpoint_damaged", 1.0]],
        [["checkpoint_damaged", 1, "patient-17"]],
        [[["checkpoint_damaged"], 1]],
    ],
)
def test_text_of_a_site_never_enters_the_record(value: Any) -> None:
    assert parse_events(value, sequence=5) == ()
