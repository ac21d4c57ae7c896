"""The handshake before a site's first request: versions, upload caps and ranks, and what a run makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from local_federation import RUN, LocalFederation

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import RoundFailed
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.support.lora import RankSiteConfig
from flare_sparse.rounds.endpoints.events import SERVER
from flare_sparse.rounds.federation.records import Outcome, RoundRecord
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.wire.capabilities import WIRE_VERSION, local_capabilities

SITES = ["site-1", "site-2", "site-3"]
OLD = {"version": "0.0.9", "wire": 1}


class Killed(BaseException):
    """Stands for a kill of the process."""


class Federated(LocalFederation):
    """A local federation whose sites reply to the handshake as a test wants."""

    def __init__(self, name: str = "fedavg", rules: RoundRules | None = None, bench: Any = None, **options: Any):
        super().__init__(name, bench, rules=rules, **options)
        self.hellos: dict[str, Any] = {}
        self.limits: dict[str, dict[str, Any]] = {}
        self.contacted: list[list[str]] = []

    def shake_hands(self, names: list[str]) -> Mapping[str, Any]:
        self.contacted.append(names)
        hellos: dict[str, Any] = {n: self.endpoints[n].build_hello(**self.limits.get(n, {})) for n in names}
        hellos |= {n: self.hellos[n] for n in names if n in self.hellos}
        return {n: hello for n, hello in hellos.items() if hello != "no reply"}

    def run(self, *, resume: bool = False) -> Outcome:
        return super().run(sites=lambda: SITES, handshake=self.shake_hands, resume=resume)


def compute_digest_without(site: str, name: str = "fedavg", **settings: Any) -> str:
    bench = toy.ToyBench()
    sites = {n: s for n, s in bench.sites().items() if n != site}
    return compute_digest(
        run_locally(bench.method(name, **settings), bench.weights, sites, bench.task.metric)[0].weights
    )


def test_each_site_introduces_itself_once_and_a_handshake_without_limits_changes_no_bit() -> None:
    federated = Federated()
    outcome = federated.run()
    assert federated.contacted == [SITES]
    bench = toy.ToyBench()
    assert compute_digest(outcome.weights) == bench.compute_digest("fedavg")
    assert all(record.excluded == {} for record in outcome.rounds)


def test_site_of_another_version_is_excluded_for_good() -> None:
    federated = Federated()
    federated.hellos["site-2"] = OLD
    outcome = federated.run()
    assert federated.contacted == [SITES]
    assert {site for _, site in federated.requested} == {"site-1", "site-3"}
    assert compute_digest(outcome.weights) == compute_digest_without("site-2")
    assert [why.code for why in federated.warnings] == ["E_VERSION"]
    for record in outcome.rounds:
        assert list(record.excluded) == ["site-2"]
        assert "flare-sparse 0.0.9 (wire format 1), the server runs flare-sparse 0.1.0" in record.excluded["site-2"]
        assert record.is_balanced


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dispfl", "neurosfl"])
def test_excluded_site_is_not_counted_by_a_method_that_counts_its_sites(method: str) -> None:
    federated = Federated(method)
    federated.hellos["site-1"] = OLD
    assert compute_digest(federated.run().weights) == compute_digest_without("site-1", method)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hello", ["no reply", None, "hello", {}, {"version": "0.1.0", "wire": WIRE_VERSION, "rank": -1}]
)
def test_site_with_a_missing_or_invalid_hello_is_contacted_before_each_round_until_quarantine(hello: Any) -> None:
    federated = Federated(rules=RoundRules(quarantine_after=2), rounds=4)
    federated.hellos["site-3"] = hello
    outcome = federated.run()
    assert federated.contacted == [SITES, ["site-3"], ["site-3"]]
    assert [record.quarantined for record in outcome.rounds] == [[], [], ["site-3"], [], ["site-3"]]
    assert [why.code for why in federated.warnings] == ["E_HELLO"]
    assert compute_digest(outcome.weights) == compute_digest_without("site-3", rounds=4)


def test_site_that_joins_late_introduces_itself_before_its_first_round() -> None:
    federated = Federated()
    federated.hellos["site-3"] = "no reply"
    federated.on_round = lambda record: federated.hellos.clear() if record.round == 1 else None
    outcome = federated.run()
    assert [record.sites_contributed for record in outcome.rounds] == [["site-1", "site-2"], *[SITES] * 3]
    assert [list(record.excluded) for record in outcome.rounds] == [["site-3"], [], [], []]


def test_run_with_too_few_capable_sites_stops_before_the_first_request() -> None:
    federated = Federated(rules=RoundRules(min_sites=2, retries=1))
    federated.hellos = {"site-1": OLD, "site-2": "no reply"}
    with pytest.raises(
        RoundFailed, match=r"1 of 3 sites can take part, 2 are needed: E_VERSION: site 'site-1'.*E_HELLO"
    ):
        federated.run()
    assert federated.requested == []
    assert federated.contacted == [SITES, ["site-2"]]


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"max_upload_bytes": 200}, "at most 200 bytes, the update has 856 or more (train, round 1)"),
        ({"max_upload_share": 0.5}, "at most 50.0% of the model in a message, the update has 100.0% or more"),
    ],
)
def test_site_with_too_small_an_upload_cap_evaluates_but_does_not_train(limit: dict[str, Any], text: str) -> None:
    federated = Federated()
    federated.limits["site-2"] = limit
    outcome = federated.run()
    assert [(t, site) for t, site in federated.requested if site == "site-2"] == [(4, "site-2")]
    assert outcome.rounds[-1].sites_contributed == SITES
    assert [why.code for why in federated.warnings] == ["E_CAP"]
    assert text in str(federated.warnings[0])
    assert compute_digest(outcome.weights) == compute_digest_without("site-2")


def test_upload_cap_is_compared_with_the_exact_size_of_the_message() -> None:
    """A cap of the bytes in the ledger is enough, a cap of eight bytes less is not."""
    federated = Federated()
    federated.run()
    size = max(line.payload_bytes for line in federated.ledger.lines if line.direction == "up")
    for cap, warned in ((size, []), (size - 8, ["E_CAP"])):
        federated = Federated()
        federated.limits["site-2"] = {"max_upload_bytes": cap}
        federated.run()
        assert [why.code for why in federated.warnings] == warned


def test_site_takes_part_in_the_rounds_whose_updates_fit_its_cap() -> None:
    """FedSparsify's updates shrink: a site with a cap of 80 % of the model joins when 80 % of it is left."""
    federated = Federated("fedsparsify", sparsity=0.8, rounds=5)
    federated.limits["site-3"] = {"max_upload_share": 0.8}
    outcome = federated.run()
    joined = ["site-3" in record.sites_contributed for record in outcome.rounds]
    assert joined[0] is False
    assert joined == sorted(joined)
    assert all(record.quarantined == [] for record in outcome.rounds)


def test_site_whose_scores_exceed_its_cap_trains_with_the_mask_of_the_others() -> None:
    federated = Federated("neurosfl", sparsity=0.8)
    federated.limits["site-1"] = {"max_upload_bytes": 600}
    outcome = federated.run()
    assert [record.sites_contributed for record in outcome.rounds] == [["site-2", "site-3"], *[SITES] * 4]


def test_update_whose_size_the_site_decides_is_not_excluded_by_a_cap() -> None:
    federated = Federated("scbf", rate=0.1)
    federated.limits["site-1"] = {"max_upload_bytes": 200}
    federated.run()
    assert federated.warnings == []


def test_round_with_too_few_sites_within_their_caps_stops_the_run_before_training() -> None:
    federated = Federated(rules=RoundRules(min_sites=3))
    federated.limits["site-1"] = {"max_upload_bytes": 128}
    with pytest.raises(RoundFailed, match=r"2 of 3 sites can answer, 3 are needed: E_CAP: site 'site-1'"):
        federated.run()
    assert federated.requested == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora_a2", "flexlora", "hetlora"])
def test_rank_of_a_site_is_the_minimum_of_the_jobs_and_its_own(method: str) -> None:
    """The bits are those of a job that sets these ranks."""
    bench = toy.ToyBench(toy.Adapted())
    federated = Federated(method, bench=bench, rank=3, ranks={"site-3": 1})
    federated.sites["site-1"].site_settings = RankSiteConfig(rank=2)
    federated.sites["site-3"].site_settings = RankSiteConfig(rank=4)
    job = bench.run(method, rank=3, ranks={"site-1": 2, "site-3": 1})
    outcome = federated.run()
    assert all(record.rejected == {} for record in outcome.rounds)
    assert (
        compute_digest(outcome.weights)
        == compute_digest(job[0].weights)
        != bench.compute_digest(method, rank=3, ranks={"site-3": 1})
    )
    assert [line.payload_bytes for line in federated.ledger.lines] == [line.payload_bytes for line in job[1].lines]


def test_update_with_more_ranks_than_announced_is_rejected() -> None:
    federated = Federated("lora_a2", bench=toy.ToyBench(toy.Adapted()), rank=3)
    # It announces rank 1 and trains with the job's 3.
    federated.limits["site-2"] = {"rank": 1}
    *training, last = federated.run().rounds
    assert all(record.rejected == {"site-2": "E_MASK"} for record in training)
    assert last.rejected == {}


def test_smallest_update_of_lora_a2_has_the_narrowest_slots() -> None:
    bench = toy.ToyBench(toy.Adapted())
    method = bench.method("lora_a2", rank=1)
    request = method.ask(method.init(bench.weights, SITES), SITES)["site-1"]
    widths = method.slots.get_slot_widths("B").sort().values[: method.slots.num_modules]
    assert request.expected.min_entries("site-1") == int(widths.sum()) + method.slots.other_entries.count
    able = method.configure_for({"site-1": local_capabilities(rank=1), "site-2": local_capabilities()})
    assert able.config.ranks == {"site-1": 1}


@pytest.mark.slow
def test_killed_run_with_limits_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def federated(folder: Path) -> Federated:
        made = Federated(
            "lora_a2",
            bench=toy.ToyBench(toy.Adapted()),
            stores=lambda end: Store(folder / end, {"run": RUN} if end == SERVER else {}),
            rank=3,
            rounds=4,
        )
        made.sites["site-1"].site_settings = RankSiteConfig(rank=1)
        made.hellos["site-2"] = OLD
        made.limits["site-3"] = {"max_upload_share": 0.2}
        return made

    def facts(outcome: Outcome) -> Any:
        return compute_digest(outcome.weights), [
            (r.sites_contributed, r.excluded, r.bytes_up, r.sequence) for r in outcome.rounds
        ]

    whole = facts(federated(tmp_path / "whole").run())
    for commits in (1, 2, 3):
        cut = federated(tmp_path / str(commits))
        seen: list[RoundRecord] = []

        def on_round(record: RoundRecord, seen: list[RoundRecord] = seen, commits: int = commits) -> None:
            seen.append(record)
            if len(seen) == commits:
                raise Killed

        cut.on_round = on_round
        with pytest.raises(Killed):
            cut.run()
        again = federated(tmp_path / str(commits))
        assert facts(again.run(resume=True)) == whole
        assert again.contacted == [SITES]


def test_hello_holds_only_versions_and_limits() -> None:
    endpoint = Federated().endpoints["site-1"]
    assert endpoint.build_hello() == local_capabilities().to_message()
    assert endpoint.build_hello(max_upload_bytes=5) == {**local_capabilities().to_message(), "max_upload_bytes": 5}
    assert torch.equal(endpoint.site.weights, torch.zeros(endpoint.site.layout.size))


def test_quarantined_site_that_sends_a_hello_takes_part_in_the_next_round_once() -> None:
    """Rounds 1 and 2 are missed. The hello after them is answered each time, the requests only from round 6 on."""
    federation = LocalFederation("fedavg", rules=RoundRules(quarantine_after=2), rounds=8)
    federation.is_silent = lambda site, attempt: site == "site-2" and attempt.round < 6
    admission: list[list[str]] = []

    def list_returned(sites: list[str]) -> list[str]:
        admission.append(sites)
        return sites

    federation.returned = list_returned
    outcome = federation.run()
    asked = [record.round for record in outcome.rounds if "site-2" in record.sites_asked]
    left_out = [record.round for record in outcome.rounds if record.quarantined == ["site-2"]]
    # Quarantined for 1 round from round 3 on and released; then for 2 rounds, 4 and 5.
    assert asked == [1, 2, 3, 6, 7, 8, 9]
    assert left_out == [4, 5]
    assert admission[0] == ["site-2"]
