"""What left each site of a run: from its own egress log where it is at hand, else from the server's ledger."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...rounds.endpoints.egress import LOG_FILE, find_logs, read_chain, sum_lines
from ..runs.results import RunResult


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
    ledger = [(line["kind"], line["round"], line["payload_bytes"]) for line in received]
    if folder is None:
        lines = [
            {"job": site, "kind": m["kind"], "contents": [m["content"]], "bytes": m["payload_bytes"]} for m in received
        ]
        note = "not given: a site's log stays at the site; add it with --site"
        return {"sums": _list_sums(lines), "source": "ledger", "lines": None, "head": None, "note": note}
    whole, head = read_chain(folder)
    name, run_ids = run.summary["name"], (run.summary["run"], "")
    # A hello and a refusal name the job alone.
    lines = [line for line in whole if line["job"] == name and line["run"] in run_ids]
    sent = [(line["kind"], line["round"], line["bytes"]) for line in lines if line["run"]]
    note = "the same messages and bytes as the server's ledger"
    if sorted(sent) != sorted(ledger):
        totals = [f"{len(part)} messages, {sum(size for *_, size in part)} bytes" for part in (sent, ledger)]
        note = f"{totals[0]}, and the server's ledger {totals[1]}: see rejected messages among the deviations"
    return {"sums": _list_sums(lines), "source": "log", "lines": len(whole), "head": head, "note": note}


def _list_sums(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "contents": contents, "messages": messages, "bytes": size}
        for (_, kind, contents), (messages, size) in sum_lines(lines).items()
    ]


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
