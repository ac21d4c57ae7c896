"""The summary of a finished run on the screen: metrics per site, bytes, who contributed, files, and a next step."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..results.report.tables import NO_TESTS, describe_tests
from ..results.runs.progress import compare_with_dense, format_bytes
from ..results.runs.results import read_contributions
from ..rounds.federation.records import Participation
from ..tasks.task import VALIDATION
from .console import build_table

PARTIAL = 3
"""Exit code of a finished run to which a site contributed in no round."""


def show_result(console: Console, summary: dict[str, Any], out: Path) -> None:
    """Print a finished run's summary."""
    metric = summary["metric"]
    name, unit = metric["name"], metric["unit"]
    console.print(_build_sites_table(summary, name, unit, read_final_evaluation(out)))
    console.print(_build_bytes_table(summary))
    if summary["note"]:
        console.print(f"{summary['method']}: {summary['note']}", markup=False)
    best = summary["best"]
    if best["round"] >= 0:
        figure = best["metrics"][f"{VALIDATION}{name}"]
        console.print(f"best model: after round {best['round']}, {name} on validation examples {figure:.3f} {unit}")
    if stopped := summary.get("stopped_after"):
        console.print(f"stopped after round {stopped} of {summary['rounds']}: no better on validation examples")
    digest = summary["model_sha256"]
    console.print(f"seconds: {summary['seconds']:.0f}   model sha256: {digest[:16]}...")
    best_file = "  (best: best_model.safetensors)" if best["round"] >= 0 else ""
    console.print(f"model:  {out / 'model.safetensors'}{best_file}")
    log = "; FLARE's log: flare.log" if (out / "flare.log").is_file() else ""
    console.print(f"record: {out / 'summary.json'}, rounds.jsonl, ledger.jsonl, config.yaml, model_card.md{log}")
    console.print(f"report: flare-sparse report {out}")
    other = "neurosfl" if summary["method"] == "fedavg" else "fedavg"
    console.print(
        f"next: flare-sparse run {out / 'config.yaml'} --set method.name={other}; your own data: flare-sparse init "
        "table --data FILE"
    )
    for line in describe_contributions(summary, out):
        console.print(line, markup=False)


def describe_contributions(summary: Mapping[str, Any], out: Path) -> list[str]:
    """Return the last lines of a run: in how many rounds each site contributed, events, and idle sites.

    The counts are those of ``contributions`` in ``summary.json``: over the committed rounds that changed the model.

    Args:
        summary: summary of the run.
        out: result folder, with the reports of the sites that failed where they are on this machine.
    """
    counts, lines = read_contributions(summary), []
    if any(count.expected for count in counts.values()):
        lines.append("contributed: " + ", ".join(_describe_site(site, count) for site, count in counts.items()))
    lines += [
        f"note: round {event['round']}, {event['site']}: {event['detail']}" for event in summary.get("events", ())
    ]
    if idle := find_idle_sites(summary):
        lines.append(
            f"warning: the model was trained without {', '.join(idle)}: no contribution in any round (exit code "
            f"{PARTIAL}). {_locate_reports(out, idle)}; docs/troubleshooting.md lists the codes"
        )
    return lines


def find_idle_sites(summary: Mapping[str, Any]) -> list[str]:
    """Return the sites that were to contribute and did so in no round.

    A site that the method itself never asks, such as one that only adapts the final model, is not among them.
    """
    return [site for site, count in read_contributions(summary).items() if count.is_idle]


def _locate_reports(out: Path, sites: list[str]) -> str:
    """Return where the errors of sites are described: files on this machine, or files at the sites."""
    # With --env local and in FLARE's simulator.
    places = [name for site in sites for name in (f"site_errors/{site}.txt", f"workspace/**/{site}/**/site_error.txt")]
    files = [str(file) for place in places for file in sorted(out.glob(place))]
    if files:
        return f"The reason is in {', '.join(files)}"
    return "site_error.txt and the log at the site give the reason"


def _describe_site(site: str, count: Participation) -> str:
    if not count.expected:
        return f"{site} (never asked)"
    return f"{site} {count.contributed}/{count.expected}" + (f" ({count.describe_missed()})" if count.missed else "")


def read_final_evaluation(out: Path) -> dict[str, Any]:
    """Return the last line of ``rounds.jsonl``, that of the final evaluation; empty without the file."""
    file = out / "rounds.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return last


def _build_sites_table(summary: dict[str, Any], name: str, unit: str, last: Mapping[str, Any]) -> Table:
    final, absent, rows = summary["final"]["sites"], find_absent_sites(summary, last), []
    for site in sorted({*final, *absent}):
        figures = final.get(site, {})
        value = f"{figures[name]:.3f}" if name in figures else "-"
        rows.append([site, value, absent.get(site) or describe_tests(figures)])
    columns = ("site", f"{name} ({unit})" if unit else name, "test examples")
    table = build_table(f"{summary['name']}: final model at each site", columns, rows)
    overall = summary["final"]["metrics"]
    if name in overall:
        table.add_section()
        table.add_row("all sites", f"{overall[name]:.3f}", f"{overall.get('test_examples', 0):.0f}")
    return table


def find_absent_sites(summary: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, str]:
    """Return why a site has no figure of the final model, by site.

    Args:
        summary: summary of the run.
        last: the record of the final evaluation.
    """
    reasons = {
        **dict.fromkeys(find_idle_sites(summary), "not evaluated"),
        **dict.fromkeys(last.get("quarantined", ()), "quarantined"),
        **{site: str(reason).partition(":")[0] for site, reason in last.get("excluded", {}).items()},
        **dict.fromkeys(last.get("timed_out", ()), "did not reply"),
        **last.get("rejected", {}),
        **dict.fromkeys(last.get("abstained", ()), NO_TESTS),
        **dict.fromkeys(last.get("sites_contributed", ()), NO_TESTS),
    }
    return {site: reason for site, reason in reasons.items() if site not in summary["final"]["sites"]}


def _build_bytes_table(summary: dict[str, Any]) -> Table:
    rows = []
    for direction, label in (("down", "server to sites"), ("up", "sites to server")):
        sums = summary["traffic"][direction]
        sent, dense = sums["payload_bytes"], sums["dense_bytes"]
        compared = compare_with_dense(sent, dense).removesuffix(" than dense") if dense else "-"
        sizes = format_bytes(sent), format_bytes(dense), compared, format_bytes(sums["floor_bytes"])
        rows.append([label, str(sums["messages"]), *sizes])
    columns = ("direction", "messages", "sent", "dense FedAvg", "compared", "floor")
    return build_table("bytes on the wire, all rounds", columns, rows)
