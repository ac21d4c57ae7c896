"""No site refuses a request of an honest server under the strict policy, whatever happens to the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import toy
from local_federation import RUN, LocalFederation, Upload

from flare_sparse.config.policy.policy import PRESETS, read_policy
from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import RequestRefused
from flare_sparse.core.params import compute_digest
from flare_sparse.rounds.endpoints.events import SERVER
from flare_sparse.rounds.endpoints.request_log import RequestLog, read_record
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.federation.records import Outcome, RoundRecord
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.stage import Reply

STRICT = read_policy(PRESETS["strict"])
SITES = ("site-1", "site-2", "site-3")
RULES = RoundRules(min_sites=3, retries=1)
METHODS: dict[str, dict[str, Any]] = {
    "topk_ef": {"fraction": 0.2, "down": 0.3, "decay": 0.8},
    # Several requests in round 0, all of them before the training.
    "neurosfl": {"scores": "iter_snip", "iter_snip": "progressive", "iterations": 3, "sparsity": 0.5},
}


class Killed(BaseException):
    """Ends the run as a kill of the process would."""


class LoggedFederation(LocalFederation):
    """Sites with the limits of the strict policy, whose records of answered requests are files, as in FLARE.

    Args:
        folder: folder of the checkpoints and the records.
        name: name of the method.
        run: id of the run, after which the records are named.
        rounds: number of rounds.
    """

    def __init__(self, folder: Path, name: str, *, run: str = RUN, rounds: int = 5, rules: RoundRules = RULES):
        self.folder, self.run_id, self.attempts = folder, run, rules.retries + 1
        super().__init__(
            name,
            toy.ToyBench(),
            rules=rules,
            values="bfloat16",
            stores=lambda end: Store(folder / end, {}),
            rounds=rounds,
            **METHODS[name],
        )
        self.kill_after: int | None = None
        self.lost: set[tuple[int, str]] = set()
        self.change_message = self._lose

    def get_file(self, site: str) -> Path:
        return self.folder / "requests" / site / f"job-{self.run_id}.json"

    def count_starts(self) -> dict[str, int]:
        """Return the number of starts of the job that each site has counted."""
        return {site: read_record(self.get_file(site)).start for site in SITES}

    def run_until_killed(self, commits: int) -> None:
        """Resume the run and kill the server after all updates of the next attempt, once it has so many commits."""
        self.kill_after = commits
        with pytest.raises(Killed):
            self.run(resume=True)

    def deliver(self, attempt: Attempt) -> Mapping[str, Reply]:
        replies = super().deliver(attempt)
        # A refusal counts as a miss of the site, and the quorum of all sites would end the run.
        assert not [reply for reply in replies.values() if isinstance(reply, RequestRefused)], replies
        if len(self.records) == self.kill_after:
            raise Killed
        return replies

    def _lose(self, upload: Upload) -> Upload | None:
        return None if (upload.attempt.sequence, upload.site) in self.lost else upload

    def _build_endpoint(self, name: str) -> SiteEndpoint:
        endpoint = super()._build_endpoint(name)
        endpoint.requests = RequestLog(
            self.run_id,
            self.method.count_requests,
            attempts=self.attempts,
            max_starts=STRICT.max_starts,
            file=self.get_file(name),
        )
        return endpoint


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(params=METHODS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def digest(name: str, tmp_path: Path) -> str:
    """Return the digest of the model of the undisturbed run."""
    federation = LoggedFederation(tmp_path / "undisturbed", name)
    digest = compute_digest(federation.run().weights)
    assert federation.count_starts() == dict.fromkeys(SITES, 1)
    return digest


def check(federation: LoggedFederation, outcome: Outcome, digest: str, starts: int) -> None:
    assert compute_digest(outcome.weights) == digest
    assert federation.count_starts() == dict.fromkeys(SITES, starts)


@pytest.mark.slow
def test_lost_replies_and_restarted_sites_are_no_new_start(name: str, digest: str, tmp_path: Path) -> None:
    federation = LoggedFederation(tmp_path, name)
    federation.lost = {(2, "site-1"), (4, "site-2"), (4, "site-3")}
    federation.restarts = {(3, "site-1"), (5, "site-2"), (7, "site-3")}
    check(federation, federation.run(), digest, starts=1)


@pytest.mark.slow
def test_server_killed_in_every_round_is_no_new_start(name: str, digest: str, tmp_path: Path) -> None:
    """Every kill repeats a request that was answered once; the attempts that the job allows suffice."""
    total = len(LoggedFederation(tmp_path / "count", name).run().rounds)
    for commits in range(total):
        LoggedFederation(tmp_path, name).run_until_killed(commits)
    federation = LoggedFederation(tmp_path, name)
    check(federation, federation.run(resume=True), digest, starts=1)


@pytest.mark.slow
def test_kills_beyond_the_attempts_and_a_step_back_are_one_new_start_each(
    name: str, digest: str, tmp_path: Path
) -> None:
    for _kill in range(3):
        LoggedFederation(tmp_path, name).run_until_killed(3)
    assert LoggedFederation(tmp_path, name).count_starts() == dict.fromkeys(SITES, 2)
    Store(tmp_path / SERVER, {}).step_back()
    stepped_back = LoggedFederation(tmp_path, name)
    stepped_back.lost = {(4, "site-2")}
    stepped_back.run_until_killed(4)
    assert stepped_back.count_starts() == dict.fromkeys(SITES, 3)
    federation = LoggedFederation(tmp_path, name)
    federation.restarts = {(6, "site-1"), (7, "site-2")}
    check(federation, federation.run(resume=True), digest, starts=3)
    assert [event.event for event in federation.records[-1].events] == []


@pytest.mark.slow
def test_site_that_was_away_takes_part_again_in_the_same_start(name: str, tmp_path: Path) -> None:
    federation = LoggedFederation(tmp_path, name, rules=RoundRules(min_sites=2, retries=1))
    federation.is_silent = lambda site, attempt: site == "site-3" and attempt.round in (2, 3)
    missed = [record.round for record in federation.run().rounds if record.timed_out]
    assert missed == [2, 3]
    assert federation.count_starts() == dict.fromkeys(SITES, 1)


@pytest.mark.slow
def test_continuation_is_the_first_start_of_its_own_run(tmp_path: Path) -> None:
    name = "topk_ef"
    digest = compute_digest(LoggedFederation(tmp_path / "undisturbed", name).run().weights)
    finished = LoggedFederation(tmp_path, name, rounds=3)

    def kill_at_the_end(record: RoundRecord) -> None:
        if record.round > 3:
            raise Killed

    finished.on_round = kill_at_the_end
    with pytest.raises(Killed):
        finished.run()
    longer = LoggedFederation(tmp_path, name, run="1" * 16)
    check(longer, longer.run(resume=True), digest, starts=1)
    assert min(entry.round for entry in read_record(longer.get_file("site-1")).requests) == 4
    assert finished.count_starts() == dict.fromkeys(SITES, 1)


@pytest.mark.slow
def test_more_starts_than_the_policy_allows_are_refused_with_the_remedy(tmp_path: Path) -> None:
    starts = STRICT.max_starts
    assert starts == 5
    for _step in range(starts):
        LoggedFederation(tmp_path, "topk_ef").run_until_killed(2)
        Store(tmp_path / SERVER, {}).step_back()
    with pytest.raises(Exception, match=r"this site's policy allows max_starts 5.*raise max_starts or remove"):
        LoggedFederation(tmp_path, "topk_ef").run(resume=True)
