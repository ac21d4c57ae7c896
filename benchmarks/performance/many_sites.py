"""Memory, traffic and time of a server with 50, 200 and 1,000 sites, for AlexNet3D.

The server runs in this process, without FLARE. The sites run in another one and share a model: each adds its own small
delta to it, and encodes its own message. All messages are those of the wire; the bytes are those of the ledger. Memory
is that of the server's process alone, beyond what it had before the first request, without the pages of files that the
system can take back at any time.

    python benchmarks/performance/many_sites.py [--sites 50 200 1000] [--json FILE] [--write]

Each row has a process of its own. ``--write`` writes the tables into docs/results/time.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from page_tables import write_section
from torch import Tensor

from flare_sparse.core.exchange import EVALUATE, RequestId
from flare_sparse.core.params import Layout
from flare_sparse.methods.method import Method
from flare_sparse.methods.registry import METHODS
from flare_sparse.privacy.secure_aggregation.keys import SHARE_BYTES
from flare_sparse.privacy.secure_aggregation.party import BOX_BYTES
from flare_sparse.privacy.secure_aggregation.stage import SumRules
from flare_sparse.rounds.endpoints.server import Attempt, ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.endpoints.update_store import UpdateStore
from flare_sparse.rounds.federation.loop import Federation
from flare_sparse.rounds.federation.roster import Connections
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.dry_run import DryTrainer
from flare_sparse.rounds.local.run import build_stages
from flare_sparse.tasks.models import build_model
from flare_sparse.tasks.task import Metric
from flare_sparse.training import Site, Training
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.stage import PLAIN_STAGE, Questions, Reply, SiteStage

VOLUME = (121, 145, 121)
RUN, SEED, ROUNDS = "0" * 16, 1, 2
MIB = 2**20
LINKS = (100, 1000)
"""Links of the server in Mbit/s."""
EXTRAPOLATED = (50, 200, 1000)

METHODS_BY_NAME: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("fedavg", {"rounds": ROUNDS}),
    "sparse": ("neurosfl", {"rounds": ROUNDS, "sparsity": 0.95, "scores": "random"}),
}


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        model: key of ``METHODS_BY_NAME``.
        aggregation: ``plain`` or ``masked``.
        sites: number of sites.
        window_mib: memory for updates; 0: all of them stay in memory.
    """

    model: str
    aggregation: str
    sites: int
    window_mib: int


@dataclass(frozen=True)
class Figures:
    """What a run measured, of its last training round.

    Attributes:
        memory: largest memory of the server in bytes beyond that before the first request.
        up, down: bytes of all sites' messages.
        file_bytes: bytes of the updates that waited in files.
        seconds: wall time, sites and server at the same time.
        server_s: processor time of the server.
    """

    memory: int
    up: int
    down: int
    file_bytes: int
    seconds: float
    server_s: float


class ManySites(DryTrainer):
    """One site that plays many: its delta is scaled by a factor of the one that it plays."""

    factor = 1.0

    def train(self, training: Training) -> Tensor:
        return training.trainable.take(training.start + self._step * self.factor)


def build_job(model: str) -> tuple[Method[Any, Any], Tensor]:
    """Return the method and its initial model."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        module = build_model("alexnet3d", volume=VOLUME, outputs=1)
    layout = Layout.from_module(module)
    weights = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))
    name, settings = METHODS_BY_NAME[model]
    return METHODS[name](METHODS[name].Config.model_validate(settings), layout, SEED), weights


def serve_sites(connection: Connection, model: str, stages: Mapping[str, SiteStage]) -> None:
    """Answer requests and questions of sums for all sites, until the server's process ends."""
    torch.set_num_threads(1)
    method, _ = build_job(model)
    trainer = ManySites("site", method.layout, SEED)
    site = Site("site", trainer)
    endpoint = SiteEndpoint(site, method, RUN, "float32")
    while True:
        kind, names, data = connection.recv()
        if kind == "stop":
            return
        if kind == "question":
            connection.send(stages[names[0]].answer(data))
            continue
        request = endpoint.receive(data, None)
        for number, name in enumerate(names):
            trainer.factor = 1 + number / len(names)
            update = endpoint.answer(request)
            endpoint.stage = stages[name]
            request_id = RequestId(request.kind, request.round)
            endpoint.stage.seal(update, request_id, site.weights, endpoint.compute_model_digest)
            message = endpoint.encode_message(request, update).data
            connection.send((name, message, update.num_examples))
        # The state moves on once, as that of a site that has answered.
        endpoint.encode(request, endpoint.answer(request))


class Sampler(threading.Thread):
    """Samples the memory of this process until it is stopped.

    Attributes:
        largest: largest memory in bytes.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.largest = measure_memory()
        self.is_running = True

    def run(self) -> None:
        while self.is_running:
            self.largest = max(self.largest, measure_memory())
            time.sleep(0.005)


def measure_memory() -> int:
    """Return the memory of this process in bytes that belongs to no file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def measure(row: Row) -> Figures:
    """Run the rounds of a row and return the figures of the last training round."""
    torch.set_num_threads(1)
    names = [f"site-{number:04d}" for number in range(1, row.sites + 1)]
    method, weights = build_job(row.model)
    ledger = Ledger()
    stage = SumRules(64.0) if row.aggregation == "masked" else PLAIN_STAGE
    server_stage, stages = build_stages(method, RUN, stage, names, ledger)
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    sites = multiprocessing.get_context("fork").Process(target=serve_sites, args=(theirs, row.model, stages))
    sites.start()
    stages.clear()
    window = row.window_mib * MIB or 2**60
    server = ServerEndpoint(method.layout, RUN, "float32", ledger, server_stage, SEED, updates=UpdateStore(window))
    times: dict[int, list[float]] = {}

    def exchange(attempt: Attempt) -> dict[str, Reply]:
        times[attempt.round] = [time.monotonic(), time.process_time()]
        # All sites hold the same base, so they receive one message.
        assert len({id(message) for message in attempt.messages.values()}) == 1
        ours.send(("request", list(attempt.messages), next(iter(attempt.messages.values()))))
        replies: dict[str, Reply] = {}
        for _ in attempt.messages:
            name, message, examples = ours.recv()
            replies[name] = server.decode(name, message, examples, {})
        return replies

    def exchange_steps(questions: Questions) -> Iterator[tuple[str, Any]]:
        for name, question in questions.messages.items():
            ours.send(("question", [name], question))
            yield name, ours.recv()

    sampler = Sampler()
    sampler.start()
    rules = RoundRules(min_sites=3)
    federation = Federation(
        method,
        server,
        Metric("none", "", "min"),
        Connections(lambda: names, exchange, exchange_steps),
        rules=rules,
    )
    federation.run(weights)
    sampler.is_running = False
    sampler.join()
    ours.send(("stop", [], None))
    sites.join()
    last = [line for line in ledger.lines if line.round == ROUNDS and line.kind != EVALUATE]
    up, down = (sum(line.payload_bytes for line in last if line.direction == way) for way in ("up", "down"))
    live = max(line.scalars_sent for line in last if line.direction == "up")
    waits = row.aggregation == "plain" and 4 * live > window // row.sites
    # The next round begins when this one is committed.
    begin, end = times[ROUNDS], times[ROUNDS + 1]
    return Figures(
        sampler.largest - sampler.start_bytes,
        up,
        down,
        4 * live * row.sites if waits else 0,
        end[0] - begin[0],
        end[1] - begin[1],
    )


def list_rows(sites: Sequence[int]) -> list[Row]:
    """Return the rows of the table."""
    rows = [Row("sparse", "plain", number, window) for number in sites for window in (0, 64)]
    # The updates of 200 dense models take 2 GB, and the pads of 200 sites 20 GB of key stream.
    few = [number for number in sites if number <= 50]
    rows += [Row("dense", "plain", number, window) for number in few for window in (0, 64)]
    return rows + [Row("sparse", "masked", number, 0) for number in few]


def format_rows(results: Sequence[tuple[Row, Figures]]) -> str:
    """Return the table of the runs."""
    lines = [
        "| model | sums | sites | updates in memory | server's memory | in files | up | down | s | server's CPU s |",
        "| --- " * 10 + "|",
    ]
    for row, figures in results:
        kept = "all" if row.window_mib == 0 else f"{row.window_mib} MiB"
        if row.aggregation == "masked":
            kept = "one"
        sizes = [f"{size / 1e6:,.0f} MB" for size in (figures.memory, figures.file_bytes, figures.up, figures.down)]
        times = f"{figures.seconds:.1f} | {figures.server_s:.1f}"
        lines.append(f"| {row.model} | {row.aggregation} | {row.sites:,} | {kept} | {' | '.join(sizes)} | {times} |")
    return "\n".join(lines) + "\n"


def format_links(results: Sequence[tuple[Row, Figures]]) -> str:
    """Return the table of links and memory, from the bytes of one site in the largest run of each kind."""
    head = "".join(f" up at {link:,} Mbit/s |" for link in LINKS)
    lines = [f"| model | sums | sites | up | down |{head} all updates |", "| --- " * (6 + len(LINKS)) + "|"]
    largest = {(row.model, row.aggregation): (row, figures) for row, figures in results}
    for (model, aggregation), (row, figures) in largest.items():
        for sites in EXTRAPOLATED:
            up, down = figures.up * sites / row.sites, figures.down * sites / row.sites
            if aggregation == "masked":
                # Keys and shares grow with the square of the number of sites.
                up, down = (float(size) for size in extrapolate_masked(figures, row.sites, sites))
            links = "".join(f" {up * 8 / (link * 1e6):,.1f} s |" for link in LINKS)
            updates = "one sum" if aggregation == "masked" else f"{up / 1e6:,.0f} MB"
            sizes = f"{up / 1e6:,.0f} MB | {down / 1e6:,.0f} MB"
            lines.append(f"| {model} | {aggregation} | {sites:,} | {sizes} |{links} {updates} |")
    return "\n".join(lines) + "\n"


KEYS_BYTES, NAME_BYTES = 1082, 10
"""Bytes of a site's keys, with its length and an RSA certificate of this benchmark, and of a name."""


def extrapolate_masked(figures: Figures, measured: int, sites: int) -> tuple[int, int]:
    """Return the bytes up and down of a masked round: each site adds shares and reveals for every other one."""
    more = sites - measured
    up = figures.up / measured + more * (BOX_BYTES + SHARE_BYTES)
    down = figures.down / measured + more * (BOX_BYTES + KEYS_BYTES + 3 * NAME_BYTES)
    return round(up * sites), round(down * sites)


def run_row(row: Row) -> Figures:
    """Return the figures of a row, measured in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_figures, args=(theirs, row))
    process.start()
    theirs.close()
    figures: Figures = ours.recv()
    process.join()
    return figures


def _send_figures(connection: Connection, row: Row) -> None:
    connection.send(measure(row))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=list(EXTRAPOLATED))
    parser.add_argument("--json", type=Path, help="file with the results so far; rows in it are not measured again")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/results/time.md")
    options = parser.parse_args()
    known = json.loads(options.json.read_text()) if options.json and options.json.is_file() else []
    measured = {Row(**item["row"]): Figures(**item["figures"]) for item in known}
    for row in list_rows(options.sites):
        if row not in measured:
            measured[row] = run_row(row)
            print(row, measured[row], flush=True)
            if options.json:
                content = [{"row": asdict(r), "figures": asdict(f)} for r, f in measured.items()]
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    results = [(row, measured[row]) for row in list_rows(options.sites)]
    tables = {"runs": format_rows(results), "links": format_links(results)}
    print("\n".join(tables.values()))
    if options.write:
        for name, table in tables.items():
            write_section("time", f"many_sites_{name}", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
