"""``flare-sparse rehearse``: the same run in one process, for debugging and for checking FLARE's bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from ..assemble import assemble, build_rules, open_checkpoints, open_site
from ..config import RunConfig, build_task, load_user_task_class
from ..federation import RoundRecord
from ..local.run import run_locally as rehearse_method
from ..report.card import write_card
from ..runs.folder import RunFolder, build_run_facts
from ..runs.progress import progress_line
from ..runs.results import Run
from ..seeds import limit_threads
from ..wire.ledger import Ledger
from .console import out as console
from .keys import opened, run_contexts
from .resume import Resume, checkpoint_root
from .run import keep_own_task, with_options
from .sites import simulated_sites
from .summary import show_result


def rehearse(
    config: Annotated[Path, typer.Argument(help="configuration file")],
    sites: Annotated[int | None, typer.Option(help="number of sites")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds of training")] = None,
    seed: Annotated[int | None, typer.Option(help="all randomness of the run derives from it")] = None,
    out: Annotated[Path | None, typer.Option(help="result folder; default: runs/<name>-rehearsal")] = None,
    resume: Resume = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, such as method.sparsity=0.95")
    ] = None,
) -> None:
    """Run a job in this process, through the real wire but without FLARE; it ends with the same model bit for bit.

    [dim]flare-sparse rehearse app_configs/neurosfl_brain_age.yaml --rounds 2[/]
    """
    resolved = with_options(config, sites, rounds, seed, set_)
    folder = (out or Path("runs") / f"{resolved.name}-rehearsal").resolve()
    show_result(console, rehearse_config(resolved, config, folder, resume=resume), folder)


def rehearse_config(config: RunConfig, file: Path, out: Path, *, resume: bool = False) -> dict[str, Any]:
    """Run a configuration in this process; the summary comes back and the record is in ``out``."""
    kind = load_user_task_class(config, file.parent)
    assembly = assemble(config, build_task(config, kind))
    root = checkpoint_root(config, assembly, out, resume=resume)
    contexts = run_contexts(config, out, resume=resume)
    data = simulated_sites(config, assembly.task, out)
    with limit_threads(config.federation.threads):
        sites = {name: open_site(assembly, where) for name, where in data.items()}
    facts = build_run_facts(config, assembly)
    ledger = Ledger()
    folder = RunFolder(out, facts, assembly.layout, ledger)

    def committed(record: RoundRecord) -> None:
        console.print(progress_line(folder.commit(record)))

    outcome = rehearse_method(
        assembly.method,
        assembly.weights,
        sites,
        assembly.task.metric,
        values=config.wire.values,
        run=assembly.run_id,
        rules=build_rules(config),
        on_round=committed,
        ledger=ledger,
        thread_count=config.federation.threads,
        stores=lambda end: open_checkpoints(config.job, assembly, root, end),
        resume=resume,
        contexts=contexts,
    )[0]
    summary = folder.finish(outcome)
    if contexts:
        summary = opened(config, assembly.task, out, contexts.client)
    keep_own_task(kind, out)
    write_card(Run.read(out))
    shutil.rmtree(root, ignore_errors=True)  # a run that is over is not gone on from
    return summary
