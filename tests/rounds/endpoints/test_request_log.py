"""A site answers the requests that its own copy of the job provides for, and counts them across restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flare_sparse.core.errors import RequestRefused
from flare_sparse.core.exchange import RequestId
from flare_sparse.privacy.secure_aggregation.limits import find_violation
from flare_sparse.rounds.endpoints.request_log import RequestLog, read_record
from flare_sparse.wire.stage import RevealedSum


def build_digest(model: int) -> str:
    """Return the digest of a model."""
    return f"{model:064x}"


ONE, TWO = build_digest(1), build_digest(2)


def open_log(file: Path | None = None, *, attempts: int = 2, max_starts: int | None = 2) -> RequestLog:
    """Return the log of a job with two rounds of training and one evaluation after them."""
    counts = {("train", 1): 1, ("train", 2): 1, ("evaluate", 3): 1}

    def count_requests(kind: str, t: int) -> int:
        return counts.get((kind, t), 0)

    return RequestLog("0" * 16, count_requests, attempts=attempts, max_starts=max_starts, file=file)


def test_honest_run_with_retries_is_one_start() -> None:
    log = open_log(max_starts=1)
    for request in (RequestId("train", 1), RequestId("train", 2), RequestId("evaluate", 3)):
        for _attempt in range(2):
            log.admit(request, build_digest(request.round))


def test_job_that_returned_to_its_first_round_goes_on_in_the_same_start() -> None:
    log = open_log(attempts=1, max_starts=2)
    for _start in range(2):
        for request in (RequestId("train", 1), RequestId("train", 2), RequestId("evaluate", 3)):
            log.admit(request, build_digest(request.round))


@pytest.mark.parametrize("models", [(ONE, ONE, ONE), (ONE, TWO, TWO)])
def test_steps_of_scores_with_the_same_model_are_one_start(models: tuple[str, ...]) -> None:
    """A step that removes no further entry from the mask sends the model of the step before."""
    counts = {("score", 0): 3, ("train", 1): 1}
    log = RequestLog("0" * 16, lambda kind, t: counts.get((kind, t), 0), attempts=2, max_starts=1)
    for model in models:
        for _attempt in range(2):
            log.admit(RequestId("score", 0), model)
    log.admit(RequestId("train", 1), TWO)
    with pytest.raises(RequestRefused):
        log.admit(RequestId("score", 0), ONE)


@pytest.mark.parametrize(
    ("request_", "model"),
    [
        pytest.param(RequestId("train", 2), TWO, id="one attempt too many"),
        pytest.param(RequestId("train", 1), ONE, id="an earlier round"),
        pytest.param(RequestId("train", 2), ONE, id="another model in the same round"),
    ],
)
def test_deviation_counts_as_a_new_start_and_starts_are_limited(request_: RequestId, model: str) -> None:
    log = open_log()

    def begin() -> None:
        for number in (1, 2):
            for _attempt in range(2 if number == 2 else 1):
                log.admit(RequestId("train", number), build_digest(number))

    begin()
    log.admit(request_, model)
    with pytest.raises(RequestRefused, match="max_starts 2"):
        log.admit(RequestId("train", 1), TWO)


def test_restart_of_the_site_resets_no_limit(tmp_path: Path) -> None:
    file = tmp_path / "requests" / "job.json"
    for model in (ONE, TWO):
        open_log(file).admit(RequestId("evaluate", 3), model)
    with pytest.raises(RequestRefused, match="max_starts 2"):
        open_log(file).admit(RequestId("evaluate", 3), build_digest(3))
    assert [entry.digest for entry in read_record(file).requests] == [ONE, TWO]
    file.write_text("{")
    with pytest.raises(RequestRefused, match="cannot be read"):
        open_log(file).admit(RequestId("train", 1), ONE)


def test_metrics_of_a_limited_number_of_models_leave_again_at_no_cost(tmp_path: Path) -> None:
    log, first = open_log(tmp_path / "job.json"), RequestId("train", 1)
    assert log.release_metrics(first, ONE, limit=1, lifetime=None)
    assert log.release_metrics(first, ONE, limit=1, lifetime=None)  # the same metrics
    # Not those of the last model either: a server that repeats the last request could send any model.
    assert not log.release_metrics(RequestId("evaluate", 3), TWO, limit=1, lifetime=None)


def test_lifetime_limit_counts_all_jobs(tmp_path: Path) -> None:
    first = RequestId("train", 1)
    assert open_log(tmp_path / "a.json").release_metrics(first, ONE, limit=None, lifetime=2)
    other = open_log(tmp_path / "b.json")
    assert other.release_metrics(first, ONE, limit=None, lifetime=2)
    assert not other.release_metrics(first, TWO, limit=None, lifetime=2)
    assert len(json.loads((tmp_path / "b.json").read_text())["questions"]) == 1


def test_questions_of_every_kind_share_the_lifetime_limit(tmp_path: Path) -> None:
    first = open_log(tmp_path / "a.json")
    for _again in range(2):
        first.admit_question("describe", ONE, lifetime=2)
    assert first.release_metrics(RequestId("train", 1), ONE, limit=1, lifetime=2)
    other = open_log(tmp_path / "b.json")
    assert not other.release_metrics(RequestId("train", 1), ONE, limit=None, lifetime=2)
    with pytest.raises(RequestRefused, match="max_lifetime_questions 2"):
        other.admit_question("fingerprint", ONE, lifetime=2)
    first.admit_question("describe", ONE, lifetime=2)


def test_mask_to_which_removed_entries_return_is_a_new_start() -> None:
    log = open_log(max_starts=2)
    log.admit(RequestId("train", 1), ONE)
    log.admit(RequestId("train", 2), TWO, is_regrown=True)
    with pytest.raises(RequestRefused, match="earlier round or mask"):
        log.admit(RequestId("train", 2), TWO, is_regrown=True)


def build_sum(sites: list[str], **changes: Any) -> RevealedSum:
    """Return a sum over sites of equal weight, all of which survive."""
    fields = {"run": "0" * 16, "kind": "train", "round": 1, "model": ONE, "answer": "a", "survivors": sites}
    return RevealedSum.model_validate({**fields, "shares": dict.fromkeys(sites, 1 / len(sites)), **changes})


def test_site_that_restarts_reveals_no_second_sum_of_a_request(tmp_path: Path) -> None:
    """A second sum over other sites would differ by the values of some, whichever process and whichever model."""
    file, sites = tmp_path / "record.json", [f"site-{number}" for number in range(1, 9)]
    open_log(file).admit_sum(build_sum(sites), find_violation)
    log = open_log(file)
    for other in (sites[:7], sites[:5], [*sites, "site-9"]):
        for model in (ONE, TWO):
            with pytest.raises(RequestRefused, match="for this request, this site has helped"):
                log.admit_sum(build_sum(other, model=model), find_violation)
    with pytest.raises(RequestRefused, match="differs by site-8"):
        log.admit_sum(build_sum(sites, survivors=sites[:7]), find_violation)
    # The same sum again, and one of another request for another model.
    log.admit_sum(build_sum(sites), find_violation)
    log.admit_sum(build_sum(sites[:7], round=2, model=TWO), find_violation)
    assert len(read_record(file).sums) == 2


def test_site_reveals_no_second_sum_of_the_answer_to_a_model_in_another_job(tmp_path: Path) -> None:
    sites = [f"site-{number}" for number in range(1, 6)]
    open_log(tmp_path / "one.json").admit_sum(build_sum(sites), find_violation)
    log = open_log(tmp_path / "two.json")
    again = {"run": "1" * 16}
    with pytest.raises(RequestRefused, match="for the same model in run 0000000000000000"):
        log.admit_sum(build_sum(sites[:4], **again), find_violation)
    # Before the survivors are known, and whatever the round.
    with pytest.raises(RequestRefused, match="differs by site-5"):
        log.admit_sum(build_sum(sites[:4], **again, survivors=[], round=2), find_violation)
    unequal = dict(zip(sites, (0.1, 0.1, 0.1, 0.1, 0.6), strict=True))
    with pytest.raises(RequestRefused, match="weighed the sites otherwise"):
        log.admit_sum(build_sum(sites, **again, shares=unequal), find_violation)
    # The same members; or another split of each site's subjects; or scores instead of weights; or another model.
    log.admit_sum(build_sum(sites, **again), find_violation)
    log.admit_sum(build_sum(sites, **again, answer="b", shares=unequal, round=2), find_violation)
    log.admit_sum(build_sum(sites[:4], **again, kind="score"), find_violation)
    log.admit_sum(build_sum(sites[:4], **again, model=TWO, round=3), find_violation)
    # A record that changes while both jobs run is read again.
    open_log(tmp_path / "one.json").admit_sum(build_sum(sites, round=4, model="c" * 64), find_violation)
    with pytest.raises(RequestRefused, match="differs by site-5"):
        log.admit_sum(build_sum(sites[:4], **again, round=4, model="c" * 64), find_violation)
