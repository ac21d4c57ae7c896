"""``flare-sparse site``: the commands with which an IT department prepares a site."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import build_table, print_json
from .console import out as console

if TYPE_CHECKING:
    from ..flare.site.people import RunSummary

HELP = """Prepare a site and keep it: data, policy, allowed classes; people, withdrawals; what was asked of it and left.

[dim]flare-sparse site setup /opt/flare/site-1 --data /data/brains --policy careful[/]

[dim]flare-sparse site declare /opt/flare/site-1[/]

[dim]flare-sparse site withdraw /opt/flare/site-1 withdrawn.txt[/]

[dim]flare-sparse site log /opt/flare/site-1[/]
"""

site = typer.Typer(no_args_is_help=True, help=HELP)

Kit = Annotated[Path, typer.Argument(help="The site's startup kit: the folder that holds startup/ and local/")]


@site.command()
def setup(
    kit: Kit,
    data: Annotated[
        Path | None, typer.Option(help="Folder or file of the site's data; default: keep the site file in the kit")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="What may leave: a file, one of open, careful, strict, or none for no guards at all; default: the "
            "kit's own policy, else careful"
        ),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option("--id", help="Column of a table with the identifiers of subjects")
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(help="Another class that jobs may name, such as our_hospital.tasks.Dose; repeatable"),
    ] = None,
    byoc: Annotated[bool, typer.Option("--byoc", help="Let leads go on sending code with their jobs")] = False,
) -> None:
    """Make a site ready: where its data is, what may leave, which classes jobs may name, no code in jobs; then check.

    Writes the site file and the policy to local/. Adds guards that no job can remove to local/privacy.json and
    local/resources.json, adds the package's classes, one by one, to class_allow_list, removes the prefix
    [bold]flare_sparse.flare.[/] from it, because FLARE would call every function below it, and turns off streaming of
    logs to the server. Takes the right [bold]byoc[/] from every role in local/authorization.json: code of a job would
    run in the site's own process, past allow-list and guards. Everything else in these files stays, and a second call
    changes nothing. Restart the site afterwards.

    KIT may be the server's: it gets classes and rights, no policy. For a site, the last lines are those of flare-sparse
    check --site KIT, and say what is left for a person.

    [dim]flare-sparse site setup /opt/flare/site-1 --data /data/brains --policy careful[/]
    """
    from ..flare.site.preflight import check_site
    from ..flare.site.setup import is_server, set_up_server, set_up_site
    from .check import print_findings

    lines = (
        set_up_server(kit, also or (), keeps_code=byoc)
        if is_server(kit)
        else set_up_site(kit, data, policy, id_column, also or (), keeps_code=byoc)
    )
    for line in lines:
        console.print(line)
    # A site may be set up before the server runs.
    code = 0 if is_server(kit) else min(print_findings(check_site(kit, needs_server=False)), 1)
    start = kit.resolve() / "startup" / "start.sh"
    console.print(f"left for you: read the policy (docs/site-policy.md); start the site: {start}")
    raise typer.Exit(code)


@site.command()
def withdraw(
    kit: Kit,
    subjects: Annotated[Path, typer.Argument(help="File with the identifiers of the subjects, one a line")],
    end_after: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Wait so long for jobs that use the data, then end them"),
    ] = None,
) -> None:
    """Leave subjects who have withdrawn out of all later jobs, and delete what the jobs before hold of them.

    Adds them to local/flare_sparse_withdrawn.txt, which a job cannot undo. Refuses an identifier that matches nothing
    in the site's data. Deletes the folders and checkpoints of earlier jobs and the site's own models, nothing while a
    job runs: wait, or give --end-after. Names the jobs that this site has answered: tell their leads to run them again.

    [dim]flare-sparse site withdraw /opt/flare/site-1 withdrawn.txt --end-after 600[/]
    """
    from ..flare.site.people import withdraw_at_site

    for line in withdraw_at_site(kit, subjects, end_after_s=end_after):
        console.print(line)


@site.command()
def declare(
    kit: Kit,
    write: Annotated[bool, typer.Option("--write", help="Write the proposal to the kit; otherwise print it")] = False,
) -> None:
    """Propose which columns and groups of this site's people jobs may ask for (release: cells of the policy).

    A column is proposed if every cell of the complete cross table with the folds and the columns before it holds the
    policy's min_cell; the others are named. Change the groups as you like: a column that does not fit is left out.
    The first job fixes the declaration for life.

    [dim]flare-sparse site declare /opt/flare/site-1[/]

    [dim]flare-sparse site declare /opt/flare/site-1 --write[/]
    """
    from ..flare.site.people import declare_people

    text, left = declare_people(kit, write=write)
    console.print(text)
    reason = " (free text, one value, or cells of too few people)" if left else "none"
    console.print(f"left out: {', '.join(left)}{reason}")


@site.command()
def log(
    kit: Annotated[Path, typer.Argument(help="The site's startup kit, or the result folder of a simulated run")],
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate", help="Begin a new egress log, which continues the chain, and print the old one's name"
        ),
    ] = False,
) -> None:
    """Show what servers asked of this site and what left it, from the site's own records, and check these.

    Of each run: how many models the site answered by kind of request, the last round, how often the job was started,
    how many models' metrics left, and the SHA-256 of the last model. Sites whose method has one model for all can
    compare the digests of a round (--json has all): different ones show that the server sent them different models.

    A line of the egress log was written before its message was sent, and holds the digest of the one before it: a line
    that was changed, removed or moved is named, and the command ends with exit code 1.

    [dim]flare-sparse site log /opt/flare/site-1 --json > site_1.json[/]
    """
    from ..flare.site.people import summarize_requests
    from ..flare.site.setup import find_local_folder
    from ..rounds.endpoints.egress import ROTATION, EgressLog, find_logs, read_chain

    folders = find_logs(kit)
    for folder in folders.values() if rotate else ():
        console.print(f"{EgressLog(folder, '').rotate() or 'nothing to rotate'}")
    if not folders:
        # Raises for a folder that is no kit: without it, a mistyped path would read as a site that has sent nothing.
        find_local_folder(kit)
    runs = summarize_requests(kit) if (kit / "local").is_dir() or kit.name == "local" else []
    chains = {name: read_chain(folder) for name, folder in folders.items()}
    logs = {name: [line for line in lines if line["kind"] != ROTATION] for name, (lines, _) in chains.items()}
    requests = [{"site": run.site, "job": run.job, **run.record.model_dump()} for run in runs]
    if print_json({"requests": requests, "egress": logs}):
        return
    for run in runs:
        _show_run(run)
    if not runs and not logs:
        console.print("no request of this package was answered here yet, and nothing has left: there is no egress log")
    for name, lines in logs.items():
        _show_egress(name, lines, chains[name][1])


def _show_run(run: RunSummary) -> None:
    """Print what was asked of the site in a run."""
    record = run.record
    kinds = Counter(request.kind for request in record.requests)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
    answers = sum(request.answers for request in record.requests)
    answered = f"{datetime.fromtimestamp(run.last_time).astimezone():%Y-%m-%d %H:%M}" if record.requests else "never"
    lines = [
        f"{run.label}, {run.site}: last answer {answered}",
        f"  requests: {counts}; last round {run.last_round}; {answers} answers with retries",
        f"  starts of the job: {record.start}; models whose metrics left: {record.evaluations}",
        f"  questions that count for life: {len(record.questions)}; sums: {len(record.sums)}",
    ]
    if run.rounds_with_many_models:
        lines.append(f"  more than one model in: {', '.join(run.rounds_with_many_models)}")
    if record.requests:
        last = record.requests[-1]
        lines.append(f"  last model ({last.kind}, round {last.round}): sha256 {last.digest}")
    for line in lines:
        console.print(line)


def _show_egress(name: str, lines: list[dict[str, Any]], head: str) -> None:
    """Print what left the site: messages and bytes by job, kind and contents."""
    from ..results.runs.received import neutralize
    from ..rounds.endpoints.egress import sum_lines

    sent = sum(line["sent_bytes"] for line in lines)
    console.print(f"{name}: {len(lines)} messages left, with headers {sent:,} bytes; chain intact, head {head}")
    rows, total = [], 0
    for (job, kind, contents), (messages, size) in sum_lines(lines).items():
        total += size
        # A job of another package names its kinds of data itself.
        rows.append([*map(neutralize, (job, kind, contents)), str(messages), f"{size:,}", f"{total:,}"])
    columns = ("job", "kind", "contents", "messages", "bytes", "total")
    console.print(build_table("", columns, rows, left=columns[:3]))
