"""``flare-sparse site``: what a hospital's IT does, once, at a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import build_task, load_config, load_user_task_class
from .console import out as console

HELP = """Prepare a site: for a hospital's IT.

[dim]flare-sparse site allow /opt/flare/site-1[/]

[dim]flare-sparse site policy /opt/flare/site-1 --file careful[/]

[dim]flare-sparse site no-code /opt/flare/site-1[/]

[dim]flare-sparse site preflight /opt/flare/site-1[/]
"""

site = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=HELP)

Kit = Annotated[Path, typer.Argument(help="the site's startup kit: the folder with startup/ and local/ in it")]


@site.command()
def allow(
    kit: Kit,
    also: Annotated[
        list[str] | None, typer.Option(help="another class that a job may name, such as our_hospital.tasks.Dose")
    ] = None,
) -> None:
    """Let jobs of this package run here; no code comes in with them.

    Adds this package's classes to the list in local/resources.json of those that a job may name, one by one; the prefix
    [bold]flare_sparse.flare.[/] goes where it stands, for FLARE would call every function below it. All that FLARE
    allows by itself stays allowed; what a site wrote there stays. Restart the site afterwards.

    [dim]flare-sparse site allow /opt/flare/site-1[/]
    """
    from ..flare.site.allow_list import allow as add

    new, gone = add(kit, also or ())
    said = [f"{what}: {', '.join(names)}" for what, names in (("allowed now", new), ("no more", gone)) if names]
    console.print(f"{'; '.join(said)}. Restart the site." if said else "nothing to do: allowed already")


@site.command()
def policy(
    kit: Kit,
    file: Annotated[
        Path | None,
        typer.Option(help="a policy's file, or a ready one: open, careful, strict; default: the one that is there"),
    ] = None,
) -> None:
    """Say what may leave this site, and put guards there that no job can leave out or undo.

    Writes the policy to local/flare_sparse_policy.yaml, a filter into every privacy scope and a last gate behind all
    filters of a job (local/privacy.json), refuses jobs with filters of their own, and stops FLARE from streaming logs
    to the server (local/resources.json). What stands there stays. Restart the site afterwards.

    [dim]flare-sparse site policy /opt/flare/site-1 --file careful[/]
    """
    from ..flare.site.install import install_guards

    said = install_guards(kit, file).model_dump(exclude_defaults=True)
    console.print("in force: " + ("; ".join(f"{k}: {v}" for k, v in said.items()) or "all may leave"), markup=False)
    console.print("Restart the site.")


@site.command(name="no-code")
def no_code(kit: Kit) -> None:
    """Let nobody send code to this site: jobs are settings only.

    FLARE's startup kits let leads and project admins send code with a job (BYOC); it runs in the site's own process,
    past allow-list and guards. This takes the right [bold]byoc[/] from every role in local/authorization.json; all other
    rights stay. Restart the site afterwards.

    [dim]flare-sparse site no-code /opt/flare/site-1[/]
    """
    from ..flare.site.byoc import revoke_code_right

    roles = revoke_code_right(kit)
    console.print(
        f"could send code until now: {', '.join(roles)}. Restart the site."
        if roles
        else "nothing to do: nobody may send code"
    )


@site.command()
def preflight(
    kit: Kit,
    job: Annotated[
        Path | None,
        typer.Option(
            help="configuration of a job to come: would it find its data here, and would the policy let it through?"
        ),
    ] = None,
) -> None:
    """Look whether this site is ready for a job; PASS, WARN or FAIL with the remedy. Nothing is changed.

    [dim]flare-sparse site preflight /opt/flare/site-1 --job app_configs/neurosfl_brain_age.yaml[/]
    """
    from ..flare.site.preflight import preflight as look

    config = load_config(job) if job else None
    kind = load_user_task_class(config, job.parent) if config and job else None
    own = build_task(config, kind) if config and kind else None
    colours, failed = {"PASS": "bold green", "WARN": "bold yellow", "FAIL": "bold red"}, False
    for finding in look(kit, config, own):
        console.print(f"[{colours[finding.verdict]}]{finding.verdict}[/]", end=" ")
        console.print(f"{finding.what}: {finding.detail}", markup=False)
        failed = failed or finding.verdict == "FAIL"
    raise typer.Exit(int(failed))
