"""Who can take part: what a site says of itself before it is asked, and what a run makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from flare_sparse.capabilities import local_capabilities
from flare_sparse.checkpoint.store import Store
from flare_sparse.endpoints.server import ServerEndpoint
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.errors import RejectedMessage, RoundFailed, SiteExcluded
from flare_sparse.federation import Federation, Outcome, RoundRecord, RoundRules
from flare_sparse.local.run import run_locally
from flare_sparse.methods.support.lora import RankSiteConfig
from flare_sparse.params import compute_digest
from flare_sparse.wire.ledger import Ledger

RUN = "0" * 16
SITES = ["site-1", "site-2", "site-3"]
OLD = {"version": "0.0.9", "wire": 1}


class Killed(BaseException):
    """The process is gone."""


class Ward:
    """A federation in this process whose sites say of themselves what a test lets them say."""

    def __init__(self, name: str = "fedavg", rules: RoundRules | None = None, bench: Any = None, **settings: Any):
        self.bench = bench or toy.Bench()
        self.method = self.bench.method(name, **settings)
        self.sites = self.bench.sites()
        self.endpoints = {n: SiteEndpoint(site, self.method, RUN, "float32") for n, site in self.sites.items()}
        self.says: dict[str, Any] = {}
        self.limits: dict[str, dict[str, Any]] = {}
        self.greeted: list[list[str]] = []
        self.asked: list[tuple[int, str]] = []
        self.warnings: list[SiteExcluded] = []
        self.ledger = Ledger()
        self.rules = rules
        self.on_round: Callable[[RoundRecord], None] = lambda record: None
        self.store: Store | None = None

    def greet(self, names: list[str]) -> Mapping[str, Any]:
        self.greeted.append(names)
        said: dict[str, Any] = {n: self.endpoints[n].build_hello(**self.limits.get(n, {})) for n in names}
        said |= {n: self.says[n] for n in names if n in self.says}
        return {n: hello for n, hello in said.items() if hello != "silence"}

    def run(self, *, resume: bool = False) -> Outcome:
        server = ServerEndpoint(self.bench.layout, RUN, "float32", self.ledger)
        federation = Federation(
            self.method, server, self.bench.task.metric, self.rules, self.on_round, self.store, self.warnings.append
        )

        def carry(question: Any) -> dict[str, Any]:
            replies: dict[str, Any] = {}
            for name, message in question.messages.items():
                self.asked.append((question.round, name))
                endpoint = self.endpoints[name]
                request = endpoint.receive(message)
                update = endpoint.answer(request)
                replies[name] = server.decode(
                    name, endpoint.encode(request, update).data, update.num_examples, update.metrics
                )
            return replies

        return federation.run(self.bench.weights, lambda: SITES, carry, handshake=self.greet, resume=resume)


def without(site: str, name: str = "fedavg", **settings: Any) -> str:
    bench = toy.Bench()
    sites = {n: s for n, s in bench.sites().items() if n != site}
    return compute_digest(
        run_locally(bench.method(name, **settings), bench.weights, sites, bench.task.metric)[0].weights
    )


def test_every_site_is_greeted_once_and_a_run_without_limits_has_the_bits_of_before() -> None:
    ward = Ward()
    outcome = ward.run()
    assert ward.greeted == [SITES]
    bench = toy.Bench()
    assert compute_digest(outcome.weights) == bench.compute_digest("fedavg")
    assert all(record.excluded == {} for record in outcome.rounds)


def test_a_site_of_another_version_is_never_asked_and_the_job_goes_on_as_if_it_were_not_there() -> None:
    ward = Ward()
    ward.says["site-2"] = OLD
    outcome = ward.run()
    assert ward.greeted == [SITES]
    assert {site for _, site in ward.asked} == {"site-1", "site-3"}
    assert compute_digest(outcome.weights) == without("site-2")
    assert [why.code for why in ward.warnings] == ["E_VERSION"]
    for record in outcome.rounds:
        assert list(record.excluded) == ["site-2"]
        assert "flare-sparse 0.0.9 (wire format 1), the server flare-sparse 0.1.0" in record.excluded["site-2"]
        assert record.is_balanced


@pytest.mark.parametrize("method", ["dispfl", "neurosfl"])
def test_a_method_that_counts_its_sites_at_the_start_does_not_count_who_cannot_take_part(method: str) -> None:
    ward = Ward(method)
    ward.says["site-1"] = OLD
    assert compute_digest(ward.run().weights) == without("site-1", method)


@pytest.mark.parametrize("said", ["silence", None, "hello", {}, {"version": "0.1.0", "wire": 1, "rank": -1}])
def test_a_site_that_says_nothing_or_nonsense_is_greeted_again_before_each_round_until_it_rests(said: Any) -> None:
    ward = Ward(rules=RoundRules(quarantine_after=2), rounds=4)
    ward.says["site-3"] = said
    outcome = ward.run()
    assert ward.greeted == [SITES, ["site-3"], ["site-3"]]
    assert [record.quarantined for record in outcome.rounds] == [[], [], ["site-3"], [], ["site-3"]]
    assert [why.code for why in ward.warnings] == ["E_HELLO"]
    assert compute_digest(outcome.weights) == without("site-3", rounds=4)


def test_a_site_that_comes_late_is_greeted_before_its_first_round() -> None:
    ward = Ward()
    ward.says["site-3"] = "silence"
    ward.on_round = lambda record: ward.says.clear() if record.round == 1 else None
    outcome = ward.run()
    assert [record.sites_contributed for record in outcome.rounds] == [["site-1", "site-2"], *[SITES] * 3]
    assert [list(record.excluded) for record in outcome.rounds] == [["site-3"], [], [], []]


def test_with_too_few_sites_the_run_stops_before_the_first_question_and_says_why() -> None:
    ward = Ward(rules=RoundRules(min_sites=2, retries=1))
    ward.says = {"site-1": OLD, "site-2": "silence"}
    with pytest.raises(
        RoundFailed, match=r"1 of 3 sites can take part, 2 are needed: E_VERSION: site 'site-1'.*E_HELLO"
    ):
        ward.run()
    assert ward.asked == []
    assert ward.greeted == [SITES, ["site-2"]]


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"max_upload_bytes": 200}, "at most 200 bytes, the answer has 856 or more (train, round 1)"),
        ({"max_upload_share": 0.5}, "at most 50.0% of the model in a message, the answer has 100.0% or more"),
    ],
)
def test_a_site_whose_cap_is_too_small_is_not_made_to_train_but_judges_in_the_end(
    limit: dict[str, Any], text: str
) -> None:
    ward = Ward()
    ward.limits["site-2"] = limit
    outcome = ward.run()
    assert [(t, site) for t, site in ward.asked if site == "site-2"] == [(4, "site-2")]
    assert outcome.rounds[-1].sites_contributed == SITES
    assert [why.code for why in ward.warnings] == ["E_CAP"]
    assert text in str(ward.warnings[0])
    assert compute_digest(outcome.weights) == without("site-2")


def test_the_cap_is_held_against_the_very_bytes_that_would_travel() -> None:
    """The ledger's figure passes, eight bytes less do not."""
    ward = Ward()
    ward.run()
    size = max(line.payload_bytes for line in ward.ledger.lines if line.direction == "up")
    for cap, warned in ((size, []), (size - 8, ["E_CAP"])):
        ward = Ward()
        ward.limits["site-2"] = {"max_upload_bytes": cap}
        ward.run()
        assert [why.code for why in ward.warnings] == warned


def test_a_site_takes_part_in_the_rounds_whose_messages_pass() -> None:
    """FedSparsify's answers shrink: a site that lets out half of the model joins when half of it is left."""
    ward = Ward("fedsparsify", sparsity=0.8, rounds=5)
    ward.limits["site-3"] = {"max_upload_share": 0.8}
    outcome = ward.run()
    joined = ["site-3" in record.sites_contributed for record in outcome.rounds]
    assert joined[0] is False
    assert joined == sorted(joined)
    assert all(record.quarantined == [] for record in outcome.rounds)


def test_scores_that_a_site_may_not_send_are_made_without_it_and_it_trains_inside_the_mask() -> None:
    ward = Ward("neurosfl", sparsity=0.8)
    ward.limits["site-1"] = {"max_upload_bytes": 600}
    outcome = ward.run()
    assert [record.sites_contributed for record in outcome.rounds] == [["site-2", "site-3"], *[SITES] * 4]


def test_what_a_method_leaves_to_its_sites_is_asked_for() -> None:
    ward = Ward("scbf", rate=0.1)
    ward.limits["site-1"] = {"max_upload_bytes": 200}
    ward.run()
    assert ward.warnings == []


def test_a_round_that_too_few_sites_may_answer_stops_the_run_before_anybody_trains() -> None:
    ward = Ward(rules=RoundRules(min_sites=3))
    ward.limits["site-1"] = {"max_upload_bytes": 128}
    with pytest.raises(RoundFailed, match=r"2 of 3 sites can answer, 3 are needed: E_CAP: site 'site-1'"):
        ward.run()
    assert ward.asked == []


@pytest.mark.parametrize("method", ["lora_a2", "flexlora", "hetlora"])
def test_a_sites_rank_budget_is_the_smaller_of_the_jobs_and_its_own(method: str) -> None:
    """The same bits as if the job had said so for these sites."""
    bench = toy.Bench(toy.Adapted())
    ward = Ward(method, bench=bench, rank=3, ranks={"site-3": 1})
    ward.sites["site-1"].site_settings = RankSiteConfig(rank=2)
    ward.sites["site-3"].site_settings = RankSiteConfig(rank=4)
    told = bench.run(method, rank=3, ranks={"site-1": 2, "site-3": 1})
    outcome = ward.run()
    assert all(record.rejected == {} for record in outcome.rounds)
    assert (
        compute_digest(outcome.weights)
        == compute_digest(told[0].weights)
        != bench.compute_digest(method, rank=3, ranks={"site-3": 1})
    )
    assert [line.payload_bytes for line in ward.ledger.lines] == [line.payload_bytes for line in told[1].lines]


def test_a_site_that_sends_more_ranks_than_it_said_is_refused() -> None:
    ward = Ward("lora_a2", bench=toy.Bench(toy.Adapted()), rank=3)
    ward.limits["site-2"] = {"rank": 1}  # says 1, and goes by the job's 3
    with pytest.raises(RejectedMessage, match="E_MASK"):
        ward.run()


def test_the_smallest_answer_of_lora_a2_is_that_of_the_narrowest_slots() -> None:
    bench = toy.Bench(toy.Adapted())
    method = bench.method("lora_a2", rank=1)
    request = method.ask(method.init(bench.weights, SITES), SITES)["site-1"]
    widths = method.slots.widths("B").sort().values[: method.slots.modules]
    assert request.expected.min_entries("site-1") == int(widths.sum()) + method.slots.rest.count
    able = method.configured_for({"site-1": local_capabilities(rank=1), "site-2": local_capabilities()})
    assert able.config.ranks == {"site-1": 1}


def test_a_killed_run_with_limits_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    def ward(folder: Path) -> Ward:
        made = Ward("lora_a2", bench=toy.Bench(toy.Adapted()), rank=3, rounds=4)
        made.sites["site-1"].site_settings = RankSiteConfig(rank=1)
        made.says["site-2"] = OLD
        made.limits["site-3"] = {"max_upload_share": 0.2}
        made.store = Store(folder / "server", {"run": RUN})
        made.endpoints = {
            n: SiteEndpoint(site, made.method, RUN, "float32", Store(folder / n, {})) for n, site in made.sites.items()
        }
        return made

    def facts(outcome: Outcome) -> Any:
        return compute_digest(outcome.weights), [
            (r.sites_contributed, r.excluded, r.bytes_up, r.sequence) for r in outcome.rounds
        ]

    whole = facts(ward(tmp_path / "whole").run())
    for commits in (1, 2, 3):
        cut = ward(tmp_path / str(commits))
        seen: list[RoundRecord] = []

        def on_round(record: RoundRecord, seen: list[RoundRecord] = seen, commits: int = commits) -> None:
            seen.append(record)
            if len(seen) == commits:
                raise Killed

        cut.on_round = on_round
        with pytest.raises(Killed):
            cut.run()
        again = ward(tmp_path / str(commits))
        assert facts(again.run(resume=True)) == whole
        assert again.greeted == [SITES]


def test_the_hello_of_a_site_names_no_more_than_its_versions_and_limits() -> None:
    endpoint = Ward().endpoints["site-1"]
    assert endpoint.build_hello() == local_capabilities().to_message()
    assert endpoint.build_hello(max_upload_bytes=5) == {**local_capabilities().to_message(), "max_upload_bytes": 5}
    assert torch.equal(endpoint.site.weights, torch.zeros(endpoint.site.layout.size))
