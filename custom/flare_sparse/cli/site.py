"""``flare-sparse site``: the commands with which an IT department prepares a site."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..core.errors import ConfigError
from .console import out as console
from .options import AsJson

HELP = """Prepare a site: allow classes, set a policy, refuse code, check that it is ready; show what was asked of it.

[dim]flare-sparse site setup /opt/flare/site-1 --data /data/brains --policy careful[/]

[dim]flare-sparse site allow /opt/flare/site-1[/]

[dim]flare-sparse site policy /opt/flare/site-1 --file careful[/]

[dim]flare-sparse site no-code /opt/flare/site-1[/]

[dim]flare-sparse site preflight /opt/flare/site-1[/]

[dim]flare-sparse site declare /opt/flare/site-1 --id patient[/]

[dim]flare-sparse site withdraw /opt/flare/site-1 --subjects withdrawn.txt[/]

[dim]flare-sparse site requests /opt/flare/site-1[/]

[dim]flare-sparse site egress /opt/flare/site-1[/]
"""

site = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=HELP, add_completion=False)

Kit = Annotated[
    Path, typer.Argument(help="The site's startup kit: the folder that holds startup/ and local/", show_default=False)
]
JobFile = Annotated[
    Path | None,
    typer.Option(
        help="Configuration of a planned job: check that it can read the data here and that the policy allows it"
    ),
]


@site.command()
def setup(
    kit: Kit,
    data: Annotated[
        Path | None, typer.Option(help="Folder or file of the site's data; default: keep the site file in the kit")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="What may leave: a file, or one of open, careful, strict; default: the kit's own policy, else careful"
        ),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option("--id", help="Column of a table with the identifiers of subjects")
    ] = None,
    job: JobFile = None,
    systemd: Annotated[
        bool, typer.Option("--systemd", help="Also write a unit of systemd, which starts the site with the machine")
    ] = False,
) -> None:
    """Make a site ready: where its data is, what may leave, which classes jobs may name, no code in jobs; then check.

    Does what [bold]allow[/], [bold]policy[/] and [bold]no-code[/] do, writes the site file, and ends with
    [bold]preflight[/]. What is in the kit already stays. The last lines say what is left for a person.

    [dim]flare-sparse site setup /opt/flare/site-1 --data /data/brains --policy careful --job study.yaml[/]
    """
    from ..config.policy.policy import POLICY_FILE
    from ..flare.site.allow_list import find_local_folder
    from ..flare.site.setup import UNIT_FILE, set_up_site, write_unit

    if policy is None and not (find_local_folder(kit) / POLICY_FILE).is_file():
        policy = Path("careful")
    for line in set_up_site(kit, data, policy, id_column):
        console.print(line, markup=False)
    if systemd:
        console.print(f"service: {write_unit(kit)}; its first line says where it goes", markup=False)
    code = _check_site(kit, job, as_json=False)
    start = f"systemctl enable --now {UNIT_FILE}" if systemd else f"{kit.resolve() / 'startup' / 'start.sh'}"
    console.print(f"left for you: read the policy (docs/site-policy.md); start the site: {start}", markup=False)
    raise typer.Exit(code)


@site.command()
def allow(
    kit: Kit,
    also: Annotated[
        list[str] | None,
        typer.Option(help="Another class that jobs may name, such as our_hospital.tasks.Dose; repeatable"),
    ] = None,
) -> None:
    """Allow the classes that jobs of this package name. No code travels with such a job.

    Adds the package's classes, one by one, to class_allow_list in local/resources.json; in the kit of a server
    also the one that sends figures to MLflow. Removes the prefix
    [bold]flare_sparse.flare.[/] if it is listed, because FLARE would call every function below it. All other entries
    stay. Turns off streaming of logs to the server. Restart the site afterwards.

    [dim]flare-sparse site allow /opt/flare/site-1[/]
    """
    from ..flare.site.allow_list import allow_classes

    added, removed = allow_classes(kit, also or ())
    changes = [f"{what}: {', '.join(names)}" for what, names in (("added", added), ("removed", removed)) if names]
    console.print(f"{'; '.join(changes)}. Restart the site." if changes else "nothing to do: already allowed")


@site.command()
def policy(
    kit: Kit,
    file: Annotated[
        Path | None,
        typer.Option(help="Policy file, or one of open, careful, strict; default: keep the policy in the kit"),
    ] = None,
) -> None:
    """Set what may leave this site, and install guards that no job can remove.

    Writes the policy to local/flare_sparse_policy.yaml. Adds to local/privacy.json a filter in every privacy scope and
    a last gate behind all filters of a job. Adds to local/resources.json a component that refuses jobs with filters
    of their own, and turns off streaming of logs to the server. Other entries stay. Restart the site afterwards.

    [dim]flare-sparse site policy /opt/flare/site-1 --file careful[/]
    """
    from ..flare.site.install import install_guards

    settings = install_guards(kit, file).model_dump(exclude_defaults=True)
    description = "; ".join(f"{name}: {value}" for name, value in settings.items())
    console.print(f"in force: {description or 'everything that the package sends may leave'}", markup=False)
    console.print("Restart the site.")


@site.command(name="no-code")
def no_code(kit: Kit) -> None:
    """Refuse jobs that carry code (BYOC), so that jobs are settings only.

    FLARE's startup kits let leads and project admins send code with a job; it runs in the site's own process, past
    allow-list and guards. This takes the right [bold]byoc[/] from every role in local/authorization.json; all other
    rights stay. KIT may be the server's kit, too: its process runs the code of a job's server app. Restart afterwards.

    [dim]flare-sparse site no-code /opt/flare/site-1[/]
    """
    from ..flare.site.byoc import revoke_code_right

    roles = revoke_code_right(kit)
    console.print(
        f"may no longer send code: {', '.join(roles)}. Restart the site."
        if roles
        else "nothing to do: no role may send code"
    )


@site.command()
def preflight(
    kit: Kit,
    job: JobFile = None,
    as_json: AsJson = False,
) -> None:
    """Check that this site is ready for a job: PASS, WARN or FAIL, each with its remedy. Nothing is changed.

    [dim]flare-sparse site preflight /opt/flare/site-1 --job app_configs/neurosfl_brain_age.yaml[/]
    """
    raise typer.Exit(_check_site(kit, job, as_json=as_json))


def _check_site(kit: Path, job: Path | None, *, as_json: bool) -> int:
    """Print what is found at a site, and return the exit code."""
    from ..config.loading import load_config
    from ..config.user_tasks import load_task
    from ..flare.site.preflight import check_site
    from .check import print_findings

    config = load_config(job) if job else None
    user_task = load_task(config, job.parent) if config and job else None
    return min(print_findings(check_site(kit, config, user_task), as_json=as_json), 1)


@site.command()
def withdraw(
    kit: Kit,
    subjects: Annotated[Path, typer.Option(help="File with the identifiers of the subjects, one a line")],
    wait: Annotated[float, typer.Option(help="Seconds to wait for jobs that use the data", min=0)] = 0,
    end: Annotated[bool, typer.Option("--end", help="End the jobs that still use the data then")] = False,
) -> None:
    """Leave subjects who have withdrawn out of all later jobs, and delete what the jobs before hold of them.

    Adds them to local/flare_sparse_withdrawn.txt, which a job cannot undo. Refuses an identifier that matches nothing
    in the site's data. Waits for jobs that run, or ends them. Deletes their folders and checkpoints and the site's own
    models, and names the jobs that this site has answered. Tell their leads to run them again.

    [dim]flare-sparse site withdraw /opt/flare/site-1 --subjects withdrawn.txt --wait 600[/]
    """
    from ..flare.site.withdrawal import withdraw_at_site

    done = withdraw_at_site(kit, subjects, wait_s=wait, ends_jobs=end)
    console.print(f"{done.added} subjects added, {done.total} on the list", markup=False)
    console.print(f"deleted: {', '.join(done.deleted) or 'nothing'}", markup=False)
    for job in done.jobs:
        console.print(f"may have learned from them, run it again: {job}", markup=False, soft_wrap=True)


@site.command()
def declare(
    kit: Kit,
    id_column: Annotated[str, typer.Option("--id", help="Column with the identifier of a person")],
    table: Annotated[Path | None, typer.Option(help="Table of the people; default: the site's data")] = None,
    folds: Annotated[int, typer.Option(help="Number of folds, which the site's secret assigns", min=2, max=50)] = 5,
    write: Annotated[bool, typer.Option("--write", help="Write the proposal to the kit; otherwise print it")] = False,
) -> None:
    """Propose which columns and groups of this site's people jobs may ask for (release: cells of the policy).

    A column is proposed if every cell of the complete cross table with the folds and the columns before it holds the
    policy's min_cell; the others are named. Change the groups as you like: a column that does not fit is left out.
    The first job fixes the declaration for life.

    [dim]flare-sparse site declare /opt/flare/site-1 --id patient[/]

    [dim]flare-sparse site declare /opt/flare/site-1 --id patient --write[/]
    """
    from ..flare.site.people import declare_people

    text, left = declare_people(kit, id_column, table, folds, write=write)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"left out: {', '.join(left) or 'none'}", markup=False, soft_wrap=True)


@site.command()
def requests(
    kit: Kit,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the kind, round, time and model digest of every request")
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(help="Output of --json from another site: name the requests with other models, and exit with 1"),
    ] = None,
) -> None:
    """Show what servers asked of this site, run by run, from the site's own record. Nothing is changed.

    For each run: how many models the site answered by kind of request, the last round, how often the job was started,
    how many models' metrics left, and the SHA-256 of the last model. Sites whose method has one model for all can
    compare the digests of a round with each other (--compare): different digests show that the server sent them
    different models. Send the file to the other site yourself, not through the server.

    [dim]flare-sparse site requests /opt/flare/site-1[/]

    [dim]flare-sparse site requests /opt/flare/site-1 --json > requests.json[/]

    [dim]flare-sparse site requests /opt/flare/site-1 --compare requests_of_site_2.json[/]
    """
    from ..flare.site.requests import find_different_models, summarize_requests

    runs = summarize_requests(kit)
    if compare is not None:
        differences = find_different_models(runs, _read_json(compare))
        for text in differences or ["all requests that both sites answered came with the same model"]:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(int(bool(differences)))
    if as_json:
        typer.echo(json.dumps([run.to_dict() for run in runs], indent=2))
        return
    for run in runs:
        record = run.record
        counts = ", ".join(f"{count} {kind}" for kind, count in run.counts.items()) or "none"
        period = f"{_format_time(run.first_time)} to {_format_time(run.last_time)}"
        lines = [
            f"{run.job} (run {record.run}), {run.site}: {period}",
            f"  requests: {counts}; last round {run.last_round}; {run.answers} answers with retries",
            f"  starts of the job: {record.start}; models whose metrics left: {record.evaluations}",
            f"  questions that count for life: {len(record.questions)}; sums: {len(record.sums)}",
        ]
        lines += [f"  unchecked results of task {task}: {count}" for task, count in record.foreign.items()]
        if run.rounds_with_many_models:
            lines.append(f"  more than one model in: {', '.join(run.rounds_with_many_models)}")
        if record.requests:
            last = record.requests[-1]
            lines.append(f"  last model ({last.kind}, round {last.round}): sha256 {last.digest}")
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not runs:
        console.print("no request of this package was answered here yet")


@site.command()
def egress(
    kit: Annotated[
        Path, typer.Argument(help="The site's startup kit, or the result folder of a simulated run", show_default=False)
    ],
    since: Annotated[
        datetime | None,
        typer.Option(
            help="Only messages from this time on, such as 2026-03-01", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M"]
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines of the log as JSON, by site")] = False,
    rotate: Annotated[
        bool,
        typer.Option("--rotate", help="Begin a new file, which continues the chain, and print the old one's name"),
    ] = False,
) -> None:
    """Show what left this site, by job and kind of message, from the site's own log, and check that log.

    A line was written before its message was sent. Each line holds the digest of the one before it: a line that was
    changed, removed or moved is named, and the command ends with exit code 1.

    [dim]flare-sparse site egress /opt/flare/site-1 --since 2026-03-01[/]
    """
    from ..flare.site.allow_list import find_local_folder
    from ..rounds.endpoints.egress import ROTATION, EgressLog, find_logs, read_chain, sum_lines

    for folder in find_logs(kit).values() if rotate else ():
        console.print(f"{EgressLog(folder, '').rotate() or 'nothing to rotate'}", markup=False, soft_wrap=True)
    start = "" if since is None else since.astimezone(UTC).isoformat(timespec="milliseconds")
    chains = {name: read_chain(folder) for name, folder in find_logs(kit).items()}
    if not chains:
        # Raises for a folder that is no kit: without it, a mistyped path would read as a site that has sent nothing.
        find_local_folder(kit)
    logs = {
        name: [line for line in lines if line["time"] >= start and line["kind"] != ROTATION]
        for name, (lines, _) in chains.items()
    }
    if as_json:
        typer.echo(json.dumps(logs, indent=2))
        return
    for name, lines in logs.items():
        console.print(
            f"{name}: {len(lines)} messages, with headers {sum(line['sent_bytes'] for line in lines):,} bytes; chain "
            f"intact, head {chains[name][1]}",
            markup=False,
            soft_wrap=True,
        )
        table = Table("job", "kind", "contents", "messages", "bytes", "total", box=None)
        for column in table.columns[3:]:
            column.justify = "right"
        total = 0
        for (job, kind, contents), (messages, size) in sum_lines(lines).items():
            total += size
            table.add_row(job, kind, contents, str(messages), f"{size:,}", f"{total:,}")
        console.print(table)
    if not logs:
        console.print("nothing has left this site yet: it has no egress log")


def _read_json(file: Path) -> Any:
    """Return the content of a file.

    Raises:
        ConfigError: it cannot be read as JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error


def _format_time(moment: float | None) -> str:
    return "never" if moment is None else datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M")
