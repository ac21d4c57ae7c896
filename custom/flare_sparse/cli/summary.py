"""The summary of a finished run on the screen: metrics per site, bytes, who contributed, files, and a next step."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..results.report.tables import NO_TESTS, describe_tests
from ..results.runs.progress import compare_with_dense, format_bytes
from ..results.runs.results import RunResult
from ..rounds.federation.records import Participation
from ..tasks.task import TEST_EXAMPLES, VALIDATION
from .console import build_table

PARTIAL = 3
"""Exit code of a finished run to which a site contributed in no round."""


def show_result(console: Console, run: RunResult) -> None:
    """Print a finished run's summary."""
    summary, out = run.summary, run.path
    name, unit = run.metric, summary["metric"]["unit"]
    console.print(_build_sites_table(run))
    console.print(_build_bytes_table(summary))
    if summary["note"]:
        console.print(f"{summary['method']}: {summary['note']}")
    best = summary["best"]
    if best["round"] >= 0:
        figure = best["metrics"][f"{VALIDATION}{name}"]
        console.print(f"best model: after round {best['round']}, {name} on validation examples {figure:.3f} {unit}")
    if stopped := summary.get("stopped_after"):
        console.print(f"stopped after round {stopped} of {summary['rounds']}: no better on validation examples")
    console.print(f"seconds: {summary['seconds']:.0f}   model sha256: {summary['model_sha256'][:16]}...")
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
    for line in describe_contributions(run):
        console.print(line)


def describe_contributions(run: RunResult) -> list[str]:
    """Return the last lines of a run: in how many rounds each site contributed, events, and idle sites.

    The counts are those of ``contributions`` in ``summary.json``: over the committed rounds that changed the model.
    """
    counts, lines = run.contributions, []
    if any(count.expected for count in counts.values()):
        lines.append("contributed: " + ", ".join(_describe_site(site, count) for site, count in counts.items()))
    lines += [
        f"note: round {event['round']}, {event['site']}: {event['detail']}" for event in run.summary.get("events", ())
    ]
    if idle := run.idle_sites:
        lines.append(
            f"warning: the model was trained without {', '.join(idle)}: no contribution in any round (exit code "
            f"{PARTIAL}). {_locate_reports(run.path, idle)}; docs/troubleshooting.md lists the codes"
        )
    return lines


def _locate_reports(out: Path, sites: list[str]) -> str:
    """Return where the errors of sites are described: files on this machine, or files at the sites."""
    # The first place is that of --env local, the second that of FLARE's simulator.
    places = [name for site in sites for name in (f"site_errors/{site}.txt", f"workspace/**/{site}/**/site_error.txt")]
    files = [str(file) for place in places for file in sorted(out.glob(place))]
    if files:
        return f"The reason is in {', '.join(files)}"
    return "site_error.txt and the log at the site give the reason"


def _describe_site(site: str, count: Participation) -> str:
    if not count.expected:
        return f"{site} (never asked)"
    return f"{site} {count.contributed}/{count.expected}" + (f" ({count.describe_missed()})" if count.missed else "")


def _build_sites_table(run: RunResult) -> Table:
    final, overall, absent, rows = run.summary["final"]["sites"], run.summary["final"]["metrics"], find_absent(run), []
    for site in sorted({*final, *absent}):
        value = f"{final[site][run.metric]:.3f}" if run.metric in final.get(site, {}) else "-"
        rows.append([site, value, absent.get(site) or describe_tests(final.get(site, {}))])
    title = f"{run.summary['name']}: final model at each site"
    table = build_table(title, ("site", run.metric_label, "test examples"), rows)
    if run.final_metric is not None:
        table.add_section()
        table.add_row("all sites", f"{run.final_metric:.3f}", f"{overall.get(TEST_EXAMPLES, 0):.0f}")
    return table


def find_absent(run: RunResult) -> dict[str, str]:
    """Return why a site has no figure of the final model, by site."""
    last = run.rounds[-1] if run.rounds else {}
    reasons = {
        **dict.fromkeys(run.idle_sites, "not evaluated"),
        **dict.fromkeys(last.get("quarantined", ()), "quarantined"),
        **{site: str(reason).partition(":")[0] for site, reason in last.get("excluded", {}).items()},
        **dict.fromkeys(last.get("timed_out", ()), "did not reply"),
        **last.get("rejected", {}),
        **dict.fromkeys([*last.get("abstained", ()), *last.get("sites_contributed", ())], NO_TESTS),
    }
    return {site: reason for site, reason in reasons.items() if site not in run.summary["final"]["sites"]}


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
