"""Deviations of a run from its plan: sites left out, attempts repeated, weights capped, steps back."""

from collections.abc import Iterator
from typing import Any

from ...config.withdrawals import Withdrawals
from ..runs.record import list_versions
from ..runs.results import RunResult


def list_deviations(run: RunResult) -> list[dict[str, Any]]:
    """Return what differs from a run in which every site contributes to every round at the first attempt.

    Each deviation has a ``kind``, a ``round`` (None: the run as a whole), a ``site`` (None: the round as a whole) and a
    ``detail`` in words.
    """
    return [*_list_of_run(run), *(deviation for line in run.rounds for deviation in _iterate_round(line))]


def _list_of_run(run: RunResult) -> list[dict[str, Any]]:
    summary = run.summary
    deviations = [
        _describe("event", event["detail"], event["round"], event["site"]) for event in summary.get("events", [])
    ]
    if (stopped := summary.get("stopped_after")) is not None:
        deviations.append(_describe("stopped_early", f"after round {stopped} of {summary['rounds']}, by validation"))
    if withdrawn := Withdrawals.read(run.path).describe():
        deviations.append(_describe("withdrawn", withdrawn))
    for site, part in run.contributions.items():
        if part.is_idle:
            deviations.append(_describe("no_contribution", "the model learned nothing from this site", site=site))
    recorded, present = summary.get("versions", {}), list_versions()
    for name in sorted(recorded.keys() & present.keys()):
        if recorded[name] != present[name]:
            detail = f"the run used {name} {recorded[name]}; this evidence was made with {present[name]}"
            deviations.append(_describe("version", detail))
    return deviations


def _iterate_round(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    number = line["round"]
    if line["attempts"] > 1:
        yield _describe("retried", f"{line['attempts']} attempts until the quorum was met", number)
    for site, reason in sorted(line["excluded"].items()):
        yield _describe("excluded", f"not asked: {reason}", number, site)
    for site in line["quarantined"]:
        yield _describe("quarantined", "not asked after repeated misses", number, site)
    for site, code in sorted(line["rejected"].items()):
        yield _describe("rejected", f"its update was refused: {code}", number, site)
    for site in line["timed_out"]:
        yield _describe("timed_out", "it did not reply in time", number, site)
    for site in line["abstained"]:
        yield _describe("abstained", "it replied without values", number, site)
    for site, weight in sorted(line["capped"].items()):
        yield _describe("capped", f"it counted with {weight} examples, fewer than it reported", number, site)
    for site, norm in sorted(line["clipped"].items()):
        yield _describe("clipped", f"its delta of L2 norm {norm:.3g} was clipped", number, site)


def _describe(kind: str, detail: str, number: int | None = None, site: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "round": number, "site": site, "detail": detail}
