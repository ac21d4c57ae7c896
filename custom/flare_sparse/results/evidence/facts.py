"""Facts of a run for its evidence: cohorts, policies, what left the sites, deviations, approval, digests.

What left a site is known from its own egress log where that is at hand, else from the server's ledger.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.params import compute_digest
from ...rounds.endpoints.egress import LOG_FILE, find_logs, read_chain, sum_lines
from ..runs.load import FILES, load_study
from ..runs.model_files import read_model
from ..runs.record import APPENDED_FILES, CONFIG, SUMMARY, collect_versions
from ..runs.results import AUDIT_FILE, RunResult

_OF_SITES = {
    "excluded": "not asked: {}",
    "quarantined": "not asked after repeated misses",
    "rejected": "its update was refused: {}",
    "timed_out": "it did not reply in time",
    "abstained": "it replied without values",
    "capped": "it counted with {} examples, fewer than it reported",
    "clipped": "its delta of L2 norm {:.3g} was clipped",
}
"""What happened to a site in a round, by its name in the line of the round; the text may end with what is noted."""


def list_deviations(run: RunResult) -> list[dict[str, Any]]:
    """Return what differs from a run in which every site contributes to every round at the first attempt.

    Each deviation has a ``kind``, a ``round`` (None: the run as a whole), a ``site`` (None: the round as a whole) and a
    ``detail`` in words.
    """
    summary = run.summary
    deviations = [
        _describe("event", event["detail"], event["round"], event["site"]) for event in summary.get("events", [])
    ]
    if (stopped := summary.get("stopped_after")) is not None:
        deviations.append(_describe("stopped_early", f"after round {stopped} of {summary['rounds']}, by validation"))
    if run.withdrawn:
        deviations.append(_describe("withdrawn", run.withdrawn))
    for site, part in run.contributions.items():
        if part.is_idle:
            deviations.append(_describe("no_contribution", "the model learned nothing from this site", site=site))
    recorded, present = summary.get("versions", {}), collect_versions()
    for name in sorted(recorded.keys() & present.keys()):
        if recorded[name] != present[name]:
            detail = f"the run used {name} {recorded[name]}; this evidence was made with {present[name]}"
            deviations.append(_describe("version", detail))
    return [*deviations, *(deviation for line in run.rounds for deviation in _iterate_round(line))]


def _iterate_round(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    number = line["round"]
    if line["attempts"] > 1:
        yield _describe("retried", f"{line['attempts']} attempts until the quorum was met", number)
    for kind, text in _OF_SITES.items():
        for site in sorted(line[kind]):
            yield _describe(kind, text.format(line[kind][site] if isinstance(line[kind], dict) else ""), number, site)


def _describe(kind: str, detail: str, number: int | None = None, site: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "round": number, "site": site, "detail": detail}


def describe_egress(run: RunResult, given: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return what left each site, with the head of its egress log, and whether the server received the same.

    Args:
        run: the run.
        given: by site, the folder of its egress log, or its startup kit; logs in the result folder are found.

    Raises:
        ConfigError: there is no log in a folder.
        EgressError: an egress log was changed.
    """
    logs = {**find_logs(run.path), **{site: _find_log(site, folder) for site, folder in given.items()}}
    return {site: _describe_site(run, site, logs.get(site)) for site in run.sites}


def _describe_site(run: RunResult, site: str, folder: Path | None) -> dict[str, Any]:
    received = [line for line in run.messages if line["direction"] == "up" and line["site"] == site]
    if folder is None:
        lines = [
            {"job": site, "kind": m["kind"], "contents": [m["content"]], "bytes": m["payload_bytes"]} for m in received
        ]
        return {
            "sums": sum_lines(lines),
            "head": None,
            "note": "not given: a site's log stays at the site; add it with --site",
        }
    whole, head = read_chain(folder)
    # A hello and a refusal name the job alone.
    name, run_ids = run.summary["name"], (run.summary["run"], "")
    lines = [line for line in whole if line["job"] == name and line["run"] in run_ids]
    sent = [(line["kind"], line["round"], line["bytes"]) for line in lines if line["run"]]
    ledger = [(line["kind"], line["round"], line["payload_bytes"]) for line in received]
    note = "the same messages and bytes as the server's ledger"
    if sorted(sent) != sorted(ledger):
        totals = [f"{len(part)} messages, {sum(size for *_, size in part)} bytes" for part in (sent, ledger)]
        note = f"{totals[0]}, and the server's ledger {totals[1]}: see rejected messages among the deviations"
    return {"sums": sum_lines(lines), "lines": len(whole), "head": head, "note": note}


def _find_log(site: str, folder: Path) -> Path:
    """Return the folder of a site's log: the given one, or that of the site within a startup kit.

    Raises:
        ConfigError: there is none.
    """
    if (folder / LOG_FILE).is_file():
        return folder
    if site not in (found := find_logs(folder)):
        raise ConfigError(f"--site {site}={folder}: no {LOG_FILE} of this site there; give the folder that holds it")
    return found[site]


@dataclass(frozen=True)
class Approval:
    """Who submitted a job of FLARE, by its signatures.

    Attributes:
        signature: ``verified``: every file of the job is signed by a certificate of the federation's root; ``invalid``;
            ``unverified``: there is no root certificate to check it with; ``none``: the run has no signed job.
        note: the reason, in words.
        job_id: id of the job at the server; empty without a job.
        submitter: name, organization and role of the signer; without a verified signature as the server states them.
        submitted_at: ISO 8601 time, as the server states it.
        deployed: which participants accepted the job, as the server states it.
    """

    signature: str
    note: str
    job_id: str = ""
    submitter: Mapping[str, str] | None = None
    submitted_at: str = ""
    deployed: tuple[str, ...] = ()


def digest_model(run: RunResult) -> str:
    """Return the digest of the run's model, computed from its file.

    Raises:
        ConfigError: the model is missing, or its digest is not the one of the record.
    """
    recorded = run.summary["model_sha256"]
    digest = compute_digest(read_model(run.path / "model.safetensors", load_study(run.path).assembly.layout))
    if digest != recorded:
        raise ConfigError(
            f"{run.path}: model.safetensors has the digest {digest}, summary.json states {recorded}; the folder was "
            "changed after the run. Take the evidence from an unchanged copy of the result folder"
        )
    return digest


def list_files(run: Path) -> list[Path]:
    """Return the files of a result folder that prove the run, relative to it; no site's own model, no predictions."""
    names = [CONFIG, SUMMARY, *APPENDED_FILES, "model_card.md", AUDIT_FILE, *FILES.values()]
    found = [Path(name) for name in names if (run / name).is_file()]
    code = [path.relative_to(run) for path in sorted((run / "code").rglob("*")) if path.is_file()]
    return found + [path for path in code if "__pycache__" not in path.parts]
