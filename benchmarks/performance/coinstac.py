"""Seconds of a round of NeuroSFL against FLARE's FedAvg: the COINSTAC experiment of NeuroSFL (Table 3) on FLARE.

    python benchmarks/performance/coinstac.py [--networks resnet32 resnet110] [--repeats 3] [--rounds 6]
    sudo python benchmarks/performance/coinstac.py --rates 0 100 --repeats 3 [--json FILE]

Five sites; ResNets for CIFAR of 32, 44, 56 and 110 layers; NeuroSFL at 90 % sparsity. The networks are sent but never
trained, so a round consists of encoding, sending, loading, sending back and summing. Rate 0 is loopback in FLARE's
simulator, with one process per site. Any other rate is a provisioned federation with mTLS: server and sites have a
network namespace each, and every link is capped in both directions (needs root, iproute2 and the scheduler ``tbf``).

The contestants take turns, network by network and repeat by repeat: FLARE's FedAvgRecipe with its defaults, in which a
site asks for work every 2 s, most of a short round; the same with the 0.05 s with which our jobs start, which fills a
slow link; our dense FedAvg; NeuroSFL.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import hosts
from idle_task import IdleNet, IdleTask
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from round_time import CLIENT, parse_round_starts

from flare_sparse.config.schema import FederationConfig, RunConfig
from flare_sparse.flare.launch.connection import ServerConnection
from flare_sparse.flare.launch.simulator import Workplace, redirect_output, simulate
from flare_sparse.flare.launch.submission import run_deployed
from flare_sparse.flare.recipe import SparseRecipe
from flare_sparse.flare.site.setup import allow_classes

SITES = tuple(f"site-{i}" for i in range(1, 6))
PAPER = {"resnet32": 1.20, "resnet44": 1.24, "resnet56": 1.30, "resnet110": 2.32}
FLARE, BUSY, DENSE, SPARSE = "FLARE FedAvg", "FLARE FedAvg, 0.05 s", "our FedAvg", "NeuroSFL 90 %"
FLARES = (FLARE, BUSY)
TASK_MODULE = Path(__file__).resolve().with_name("idle_task.py")
LEAD = "lead@coordination.org"
Runner = Callable[[str, str, int, Path], list[float]]
"""Takes contestant, network, rounds and an empty folder; returns the seconds of all rounds but the first."""


def build_recipe(contestant: str, network: str, rounds: int) -> SparseRecipe:
    """Return the job of NeuroSFL or of dense FedAvg. A random mask has as many entries as one of saliencies."""
    method: dict[str, Any] = {"name": "fedavg"}
    if contestant == SPARSE:
        method = {"name": "neurosfl", "sparsity": 0.9, "scores": "random"}
    settings = {
        "name": f"{method['name']}_{network}",
        "method": {**method, "rounds": rounds, "training": {"optimizer": "sgd", "lr": 1e-6}},
        "task": {"class": "idle_task.IdleTask", "network": network},
        "federation": {"min_sites": len(SITES), "task_timeout_s": 300},
        "deployment": {"packaging": "byoc"},
    }
    config = RunConfig.model_validate(settings, context={"task": {"idle_task.IdleTask": IdleTask.Config}})
    return SparseRecipe(config, modules=(TASK_MODULE,))


def build_flare_recipe(contestant: str, network: str, rounds: int, folder: Path) -> FedAvgRecipe:
    """Return FLARE's FedAvg; a site sends back what it received."""
    script = folder / "client.py"
    script.write_text(CLIENT)
    recipe = FedAvgRecipe(
        name=f"flare_{network}",
        model=IdleNet(network),
        min_clients=len(SITES),
        num_rounds=rounds,
        train_script=str(script),
    )
    if contestant == BUSY:
        recipe.add_server_config({"server": {"task_request_interval": FederationConfig().request_interval_s}})
    return recipe


def read_commit_seconds(folder: Path) -> list[float]:
    """Return the seconds between the commits of our successive rounds."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [b - a for a, b in pairwise(line["committed_at"] for line in lines if line["kind"] == "train")]


def read_start_seconds(log: Path, rounds: int) -> list[float]:
    """Return the seconds between the starts of FLARE's successive rounds.

    The first round is left out: the sites' scripts start in it.
    """
    found = dict(parse_round_starts(log.read_text(errors="replace")))
    if len(found) < rounds:
        raise RuntimeError(f"FLARE's FedAvg ran {len(found)} of {rounds} rounds; see {log}")
    return [b - a for a, b in pairwise(found[n] for n in sorted(found)[1:])]


def run_on_loopback(contestant: str, network: str, rounds: int, folder: Path) -> list[float]:
    """Run one job in FLARE's simulator; return the seconds of its rounds."""
    if contestant in FLARES:
        recipe = build_flare_recipe(contestant, network, rounds, folder)
        with redirect_output(folder / "flare.log"):
            recipe.execute(SimEnv(clients=list(SITES), workspace_root=str(folder / "workspace")))
        return read_start_seconds(folder / "flare.log", rounds)
    for site in SITES:
        (folder / f"{site}.yaml").write_text(f"data: {folder}\n")
    workplace = Workplace(SITES, str(folder / "{site}.yaml"))
    simulate(build_recipe(contestant, network, rounds), workplace, folder / "result")
    return read_commit_seconds(folder / "result")


@contextmanager
def start_federation(rate: float, delay_ms: float, folder: Path) -> Iterator[Runner]:
    """Start server and sites on capped links; yield a runner that submits jobs from the lead's host."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with hosts.build_network(rate, delay_ms, ("server", *SITES, "lead")):
        kits = hosts.provision(folder, SITES)
        for kit in ("server", *SITES):
            allow_classes(kits / kit, ["idle_task."])
            (kits / kit / "local" / "flare_sparse.yaml").write_text(f"data: {folder}\ncheckpoints: off\n")
        hosts.start(kits, SITES)

        def run(contestant: str, network: str, rounds: int, out: Path) -> list[float]:
            line = [sys.executable, __file__, "--submit", contestant, network, str(rounds), str(kits / LEAD), str(out)]
            hosts.run_command(*line, inside="lead", cwd=Path(__file__).parent)
            if contestant in FLARES:
                return read_start_seconds(next(out.glob("*/*/workspace/log.txt")), rounds)
            return read_commit_seconds(out)

        yield run


def submit(contestant: str, network: str, rounds: str, kit: str, out: str) -> int:
    """Run one job from the lead's network namespace and fetch its record, or FLARE's log."""
    folder = Path(out)
    if contestant not in FLARES:
        run_deployed(build_recipe(contestant, network, int(rounds)), Path(kit), folder)
        return 0
    recipe = build_flare_recipe(contestant, network, int(rounds), folder)
    recipe.export(str(folder / "job"))
    with closing(ServerConnection(Path(kit))) as connection:
        session = connection.ask(lambda session: session)
        job = session.submit_job(str(folder / "job" / recipe.name))
        session.monitor_job(job, timeout=0.0, poll_interval=1.0)
        session.download_job_result(job, str(folder / "fetched"))
    return 0


def measure_rounds(run: Runner, arguments: argparse.Namespace, rate: float) -> list[dict[str, Any]]:
    """Return the seconds of all rounds: repeat by repeat, network by network, the contestants in turn."""
    found = []
    for repeat in range(1, arguments.repeats + 1):
        for network in arguments.networks:
            for contestant in arguments.contestants:
                folder = (arguments.out / f"{rate:g}-{network}-{contestant}-{repeat}".replace(" ", "_")).resolve()
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                seconds = run(contestant, network, arguments.rounds, folder)
                row = {"rate": rate, "network": network, "contestant": contestant, "repeat": repeat, "seconds": seconds}
                found.append(row)
                print(json.dumps(row), flush=True)
                shutil.rmtree(folder, ignore_errors=True)
    return found


def format_cell(rows: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """Return the median of the repeats' medians, and its text with the smallest and the largest of them."""
    medians = [statistics.median(row["seconds"]) for row in rows]
    middle = statistics.median(medians)
    return middle, f"{middle:.2f} ({min(medians):.2f} to {max(medians):.2f})"


def format_table(found: list[dict[str, Any]], rate: float) -> list[str]:
    """Return one row per network, with the paper's ratio beside ours."""
    own = [row for row in found if row["rate"] == rate]
    contestants = list(dict.fromkeys(row["contestant"] for row in own))
    versus = [name for name in contestants if name != SPARSE]
    heads = ["network", *(f"{name}, s" for name in contestants), *(f"{name} / {SPARSE}" for name in versus), "paper"]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for network in dict.fromkeys(row["network"] for row in own):
        of = {n: format_cell([r for r in own if (r["network"], r["contestant"]) == (network, n)]) for n in contestants}
        ratios = [f"{of[name][0] / of[SPARSE][0]:.2f}x" for name in versus]
        lines.append(
            "| " + " | ".join([network, *(of[n][1] for n in contestants), *ratios, f"{PAPER[network]:.2f}x"]) + " |"
        )
    return lines


def main() -> int:
    if "--submit" in sys.argv:
        return submit(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=PAPER, default=list(PAPER))
    parser.add_argument("--contestants", nargs="+", choices=(*FLARES, DENSE, SPARSE), default=[*FLARES, DENSE, SPARSE])
    parser.add_argument("--rates", type=float, nargs="+", default=[0], help="Mbit/s of every link; 0: loopback")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="round trip over capped links")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/coinstac"))
    parser.add_argument("--json", type=Path, default=None, help="also write every round's seconds to this file")
    arguments = parser.parse_args()
    if any(arguments.rates) and os.geteuid() != 0:
        parser.error("network namespaces need root: run it with sudo, or as root in a container of your own")
    found: list[dict[str, Any]] = []
    for rate in arguments.rates:
        if rate:
            with start_federation(rate, arguments.delay_ms, arguments.out.resolve() / f"federation-{rate:g}") as run:
                found += measure_rounds(run, arguments, rate)
        else:
            found += measure_rounds(run_on_loopback, arguments, rate)
        print(
            "\n".join(["", f"## {f'{rate:g} Mbit/s' if rate else 'Loopback'}", "", *format_table(found, rate)]),
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
