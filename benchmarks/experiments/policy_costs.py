"""What the presets of a policy cost an honest study: metric, rounds and seconds, with each site behind its guards.

Run as ``python benchmarks/experiments/policy_costs.py CONFIG [--data FILE] [--set KEY=VALUE ...] [--seeds 3]``: trains
the configuration without a policy and with all sites under ``open``, ``careful`` and ``strict``; a choice of rows that
a site has to approve is approved, and said. The sites are those of a run in one process; what leaves them goes through
the guards of a kit. Prints a line of the table each: the metric as the sites report it, and the exact metric of the
delivered model on the sites' test examples, which a policy of cells draws anew.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import yaml
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContextManager
from torch.utils.data import ConcatDataset

from flare_sparse.api import local
from flare_sparse.api.run import Run
from flare_sparse.api.start import run
from flare_sparse.config.assemble import Assembly, open_site
from flare_sparse.config.people import ReleaseGate
from flare_sparse.config.policy.policy import POLICY_FILE, PRESETS, read_policy
from flare_sparse.core.errors import FlareSparseError, PolicyRefusal
from flare_sparse.core.observer import SILENT
from flare_sparse.flare.executor import EncodeUpdate
from flare_sparse.flare.payload import EVENTS, UPDATE, get_refusal_code, shareable_to_message, update_to_dxo
from flare_sparse.flare.session import SiteSession
from flare_sparse.flare.site.guards import SiteLastGate, SiteResultPolicy
from flare_sparse.flare.workspace import JOB_FILE
from flare_sparse.privacy.release import Rule
from flare_sparse.rounds.endpoints.request_log import RequestLog
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.local import run as rounds
from flare_sparse.tasks.task import SiteData
from flare_sparse.training import Site

KITS: dict[str, Path] = {}
"""Folder of each site's kit."""


INITIAL: list[torch.Tensor] = []
"""Initial weights of the jobs, the last one's last."""


SITES: list[Site] = []
"""Sites of the last run."""


class Refused(FlareSparseError):
    """A site's guards let a result not leave."""


class GuardedSites(rounds.LocalSites):
    """Sites of this process whose answers pass the guards of their kits."""

    def _answer(self, name: str, endpoint: SiteEndpoint, message: Any, counted: str | None) -> tuple[Any, Any, Any]:
        request = endpoint.receive(message, counted)
        update = endpoint.answer(request)
        session, kit = SiteSession(), KITS[name]
        session._endpoint = endpoint
        session.build_initial_weights = lambda fl_ctx: INITIAL[-1]  # type: ignore[method-assign]
        workspace = SimpleNamespace(
            get_root_dir=lambda: str(kit),
            get_site_config_dir=lambda: str(kit / "local"),
            get_run_dir=lambda job: str(kit),
            get_app_config_dir=lambda job: str(kit),
        )
        engine = SimpleNamespace(
            get_component=lambda name: session, get_workspace=lambda: workspace, fire_event=lambda *event: None
        )
        fl_ctx = FLContextManager(engine=engine, identity_name=name, job_id="job").new_context()
        reply = update_to_dxo(update, endpoint.site.layout).to_shareable()
        reply[UPDATE] = (request, update)
        reply = EncodeUpdate().process(SiteResultPolicy().process(reply, fl_ctx), fl_ctx)
        fl_ctx.set_prop(FLContextKey.TASK_RESULT, reply, private=True, sticky=False)
        SiteLastGate().handle_event(EventType.AFTER_TASK_RESULT_FILTER, fl_ctx)
        if reply.get_return_code() != ReturnCode.OK:
            error = Refused((kit / "site_error.txt").read_text().splitlines()[0])
            error.code = get_refusal_code(reply)
            raise error
        data, meta = shareable_to_message(reply, name)
        sent = SimpleNamespace(num_examples=meta["examples"], metrics=meta["metrics"])
        return sent, data, meta.get(EVENTS, ())


def open_recorded(assembly: Assembly, data: SiteData, account: Any = None) -> Site:
    """Open a site and keep it in SITES."""
    SITES.append(open_guarded(assembly, data, account))
    return SITES[-1]


def open_guarded(assembly: Assembly, data: SiteData, account: Any = None) -> Site:
    """Open a site behind its policy, if it has one; approve the job's choice of rows where that is needed."""
    kit = KITS[data.site]
    INITIAL.append(assembly.weights)
    file = kit / "local" / POLICY_FILE
    policy = read_policy(file) if file.exists() else None
    if policy is None or policy.release == "exact":
        return open_site(assembly, data, account)
    for approved in (policy.approved_rows, None):
        try:
            gate = ReleaseGate(kit / "local", kit / "release", Rule(policy.min_cell), approved or policy.approved_rows)
            return open_site(assembly, data, account, gate)
        except PolicyRefusal as error:
            if approved is None or not (asked := re.search(r"approved_rows: \[(\w+)\]", str(error))):
                raise
            print(f"  {data.site}: a person approves the choice of rows {asked[1]}")
            policy = policy.model_copy(update={"approved_rows": (asked[1],)})
            file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"approved_rows": [asked[1]]}))
    raise AssertionError("the second attempt returns or raises")


class CountedEndpoint(SiteEndpoint):
    """An endpoint with a record of requests, without which no metrics leave."""

    def __init__(self, site: Site, method: Any, run: str, values: Any, store: Any, stage: Any, **settings: Any):
        log = RequestLog(run, method.count_requests, attempts=3, max_starts=None)
        super().__init__(site, method, run, values, store, stage, requests=log, **settings)


def evaluate_delivered(done: Run) -> float:
    """Return the exact metric of the final model on the test examples of all sites together."""
    task = SITES[0].trainer.task
    tests = ConcatDataset([site.trainer.examples.test for site in SITES if site.trainer.examples.n_test])
    return task.evaluate(done.model(), tests)[task.metric.name]


@dataclass(frozen=True)
class Cost:
    """What a run ended with.

    Attributes:
        reported: the metric as the sites report it.
        delivered: that of the delivered model on the sites' test examples.
        rounds: committed rounds.
        sites: how many contributed to the last one.
        seconds: from start to end.
        refusals: what sites let not leave in single rounds.
    """

    reported: float
    delivered: float
    rounds: int
    sites: int
    seconds: float
    refusals: tuple[str, ...]


def measure(config: Path, preset: str | None, terms: dict[str, Any], overrides: list[str]) -> Cost:
    """Train under a preset with some of its terms changed.

    Raises:
        Refused: the policy refuses the study, or its numbers let no model be made.
    """
    with tempfile.TemporaryDirectory() as folder:

        class Kits(dict[str, Path]):
            def __missing__(self, name: str) -> Path:
                kit = Path(folder) / "kits" / name
                (kit / "local").mkdir(parents=True)
                (kit / JOB_FILE).touch()
                if preset is not None:
                    content = yaml.safe_load(PRESETS[preset].read_text()) | terms
                    (kit / "local" / POLICY_FILE).write_text(yaml.safe_dump(content))
                self[name] = kit
                return kit

        globals()["KITS"] = Kits()
        SITES.clear()
        plain = rounds.LocalSites, rounds.SiteEndpoint
        sites, endpoint = plain if preset is None else (GuardedSites, CountedEndpoint)
        start = time.perf_counter()
        try:
            with (
                patch.object(local, "open_site", open_recorded),
                patch.multiple(rounds, LocalSites=sites, SiteEndpoint=endpoint),
            ):
                done = run(config, overrides=overrides, out=Path(folder) / "run", observer=SILENT)
        except FlareSparseError as error:
            reasons = sorted(file.read_text().splitlines()[0] for file in Path(folder).rglob("site_error.txt"))
            raise Refused((reasons or [str(error)])[0]) from error
        refusals = {line for file in Path(folder).rglob("errors/*.txt") for line in file.read_text().splitlines()[:1]}
        return Cost(
            done.summary["final"]["metrics"].get(done.study.assembly.task.metric.name, float("nan")),
            evaluate_delivered(done),
            done.summary["rounds"],
            len(done.rounds[-1]["sites_contributed"]),
            time.perf_counter() - start,
            tuple(sorted(refusals)),
        )


def format_costs(costs: list[Cost]) -> str:
    """Return the cells of a line: means over seeds, and in brackets the delivered model's of each seed."""
    delivered = ", ".join(f"{cost.delivered:.3f}" for cost in costs)
    refusals = "; ".join(sorted({refusal for cost in costs for refusal in cost.refusals}))
    return (
        f"{mean(cost.reported for cost in costs):.3f} | {mean(cost.delivered for cost in costs):.3f} ({delivered}) | "
        f"{costs[0].rounds} | {min(cost.sites for cost in costs)} | {mean(cost.seconds for cost in costs):.0f} | "
        f"{refusals}"
    )


def main() -> None:
    """Print the lines of a configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--data", type=Path, help="data of the simulated sites; default: that of the configuration")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", help="KEY=VALUE")
    parser.add_argument("--presets", nargs="+", default=["none", *PRESETS], choices=["none", *PRESETS])
    parser.add_argument("--terms", type=yaml.safe_load, default={}, help="changed terms, {withhold_isolated: false}")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 1, 2, ...")
    options = parser.parse_args()
    overrides = options.overrides + ([f"simulator.data.path={options.data}"] if options.data else [])
    print(
        "| preset | reported | delivered | rounds | sites | seconds | refusals |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    for preset in options.presets:
        try:
            costs = [
                measure(
                    options.config, None if preset == "none" else preset, options.terms, [*overrides, f"seed={seed}"]
                )
                for seed in range(1, options.seeds + 1)
            ]
            cells = format_costs(costs)
        except Refused as error:
            cells = f"refused | {error} | | | "
        print(f"| {preset} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
