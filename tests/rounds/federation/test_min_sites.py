"""``federation.min_sites`` holds at the start and in every round; it is never lowered to the sites that are there."""

from __future__ import annotations

import pytest
from local_federation import LocalFederation

from flare_sparse.core.errors import RoundFailed
from flare_sparse.rounds.federation.rules import RoundRules


def test_run_with_too_few_sites_stops_before_the_first_message() -> None:
    federation = LocalFederation("fedavg", sites=4, rules=RoundRules(min_sites=9))
    with pytest.raises(
        RoundFailed, match=r"min_sites is 9, but only 4 sites are there: site-1, site-2, site-3, site-4"
    ):
        federation.run()
    assert federation.ledger.lines == []


def test_run_that_loses_sites_stops_below_the_quorum() -> None:
    federation = LocalFederation("fedavg", sites=3, rules=RoundRules(min_sites=3), rounds=4)

    def list_sites() -> list[str]:
        return federation.list_sites() if len(federation.records) < 2 else ["site-1", "site-3"]

    with pytest.raises(RoundFailed, match="min_sites is 3, but only 2 sites are there: site-1, site-3"):
        federation.run(sites=list_sites)
    assert [record.round for record in federation.records] == [1, 2]


def test_round_that_asks_fewer_sites_than_it_needs_stops_at_once() -> None:
    federation = LocalFederation("fedavg", sites=4, rules=RoundRules(min_sites=3), participation=0.5)
    with pytest.raises(RoundFailed, match=r"round 1 \(train\): federation.min_sites is 3, but the method asks only 2"):
        federation.run()
    assert federation.ledger.lines == []


def test_site_over_its_upload_cap_leaves_the_round_below_the_quorum() -> None:
    federation = LocalFederation("fedavg", sites=3, rules=RoundRules(min_sites=3))
    hellos = federation.build_hellos(federation.list_sites())
    with pytest.raises(RoundFailed, match="2 of 3 sites can answer, 3 are needed"):
        federation.run(handshake=lambda names: hellos | {"site-2": {**hellos["site-2"], "max_upload_bytes": 10}})


def test_evaluation_needs_the_sites_that_have_a_part_in_it() -> None:
    """The last round asks the target site alone, which contributes to no model."""
    federation = LocalFederation("metagater", sites=4, rules=RoundRules(min_sites=3), targets=["site-4"])
    outcome = federation.run()
    assert outcome.rounds[-1].sites_contributed
    assert all(len(record.sites_contributed) == 3 for record in outcome.rounds[:-1])
