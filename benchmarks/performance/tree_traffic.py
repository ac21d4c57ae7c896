"""Bytes that a server's network interface receives and sends: sites behind hubs against the same sites without.

    sudo python benchmarks/performance/tree_traffic.py [--hubs 3] [--sites 4] [--rounds 2] [--out runs/tree_traffic]

A provisioned federation with mTLS runs NeuroSFL at 90 % twice, with hubs and without; both models must have the same
bits. Server, hubs, sites and lead have a network namespace each (``hosts.py``). The kernel counts the bytes of the
server's interface, from the first request of a job to its last commit; those of the lead, who follows the job, are
subtracted. All namespaces are removed at the end, also after Ctrl-C. Needs root and iproute2 with the scheduler
``tbf``, and about 700 MB of memory for each site.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hosts
import numpy as np
from hosts import HIDDEN, MEDICATIONS, ROWS, build_network, get_namespace, provision, run_command, start

from flare_sparse.flare.hubs.addresses import HUBS_FILE
from flare_sparse.flare.site.allow_list import allow_classes

PORT = 8811
RATE_MBIT = 1000.0


class Bytes(NamedTuple):
    """Bytes that an interface has received and sent."""

    received: int
    sent: int

    @classmethod
    def from_proc(cls, net: Path) -> Bytes:
        """Read the kernel's counters from a process's folder ``/proc/PID/net``."""
        fields = (net / "dev").read_text().partition("eth0:")[2].split()
        return cls(int(fields[0]), int(fields[8]))


class Counters(threading.Thread):
    """A thread that samples the interfaces of server and lead, with the time of each sample."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, Bytes]] = []
        # One process stays in each namespace, because /proc/PID/net shows the namespace of that process.
        self._processes = [
            subprocess.Popen(["ip", "netns", "exec", get_namespace(host), "sleep", "infinity"])
            for host in ("server", "lead")
        ]
        self._done = threading.Event()

    def run(self) -> None:
        server, lead = (Path("/proc", str(one.pid), "net") for one in self._processes)
        while not self._done.wait(0.05):
            at_server, at_lead = Bytes.from_proc(server), Bytes.from_proc(lead)
            # What the lead sends, the server receives.
            found = Bytes(at_server.received - at_lead.sent, at_server.sent - at_lead.received)
            self.samples.append((time.time(), found))

    def stop(self) -> None:
        self._done.set()
        self.join()
        for one in self._processes:
            one.kill()
            one.wait()

    def count_between(self, begin: float, end: float) -> Bytes:
        """Return the bytes between the last sample before ``begin`` and the first after ``end``."""
        before = [found for at, found in self.samples if at <= begin][-1]
        after = next(found for at, found in self.samples if at >= end)
        return Bytes(after.received - before.received, after.sent - before.sent)


def prepare(folder: Path, hubs: Mapping[str, Sequence[str]]) -> Path:
    """Provision all participants, with a table of admissions for each site; return the folder of the kits."""
    sites = [site for of_hub in hubs.values() for site in of_hub]
    kits = provision(folder, [*hubs, *sites])
    for number, site in enumerate(sites):
        rng = np.random.default_rng(number)
        taken = (rng.random((ROWS, MEDICATIONS)) < 0.02).astype(int)
        died = (taken[:, :20].sum(1) > 0).astype(int)
        lines = [f"{i},{died[i]}," + ",".join(map(str, taken[i])) for i in range(ROWS)]
        header = ",".join(["stay", "died", *(f"med_{i}" for i in range(MEDICATIONS))])
        (folder / f"{site}.csv").write_text("\n".join([header, *lines]) + "\n")
        (kits / site / "local" / "flare_sparse.yaml").write_text(f"data: {folder / f'{site}.csv'}\n")
    for hub, of_hub in hubs.items():
        (kits / hub / "local" / HUBS_FILE).write_text(f"{hub}: 0.0.0.0:{PORT}\n")
        for site in of_hub:
            (kits / site / "local" / HUBS_FILE).write_text(f"{hub}: {hub}:{PORT}\n")
    for kit in ("server", *hubs, *sites):
        allow_classes(kits / kit)
    return kits


def wait_for_clients(kits: Path, clients: Sequence[str]) -> None:
    for _ in range(240):
        logs = ((kits / client / "process.log").read_text() for client in clients)
        if all("Successfully registered client" in log for log in logs):
            return
        time.sleep(1)
    raise RuntimeError(f"not every client has connected to the server; see {kits}/*/process.log")


def write_job(folder: Path, hubs: Mapping[str, Sequence[str]], sites: int, options: argparse.Namespace) -> Path:
    tree = {hub: {"sites": list(of_hub)} for hub, of_hub in hubs.items()}
    federation = {"min_sites": sites, "task_timeout_s": 300, **({"hubs": tree} if tree else {})}
    file = folder / "job.yaml"
    file.write_text(
        f"name: traffic\nseed: 1\n"
        f"method: {{name: neurosfl, sparsity: 0.9, rounds: {options.rounds}, training: {{lr: 0.01}}}}\n"
        f"task: {{name: mortality, medications: {MEDICATIONS}, model: {{name: mlp, hidden: [{HIDDEN}]}}}}\n"
        f"wire: {{aggregation: {options.aggregation}}}\nfederation: {json.dumps(federation)}\n"
    )
    return file


def measure(folder: Path, kits: Path, job: Path, label: str) -> dict[str, Any]:
    """Run one job; return the bytes of the server by the kernel and by the ledger, and the digest of its model."""
    counters = Counters()
    counters.start()
    kit, out = kits / "lead@coordination.org", folder / label
    line = ["flare-sparse", "run", str(job), "--env", "prod", "--kit", str(kit), "--out", str(out)]
    run_command(*line, inside="lead")
    time.sleep(0.5)
    counters.stop()
    rounds = [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    begin, end = rounds[0]["committed_at"] - rounds[0]["seconds"], rounds[-1]["committed_at"]
    counted = counters.count_between(begin, end)
    traffic = {way: summary["traffic"][way]["payload_bytes"] for way in ("down", "up")}
    links = summary.get("links", {}).get("server", traffic)
    trained = sorted(record["seconds"] for record in rounds if record["kind"] == "train")
    return {
        "label": label,
        "sent": counted.sent,
        "received": counted.received,
        "ledger_sent": links["down"],
        "ledger_received": links["up"],
        "round_s": trained[len(trained) // 2],
        "digest": summary["model_sha256"],
    }


def format_table(flat: Mapping[str, Any], tree: Mapping[str, Any], options: argparse.Namespace) -> str:
    tree_label = f"{options.hubs} hubs of {options.sites} sites"
    lines = [
        f"| bytes at the server, {options.aggregation} | flat | {tree_label} | flat / tree |",
        "| --- | --- | --- | --- |",
    ]
    for text, key in (
        ("sent, by the kernel", "sent"),
        ("received, by the kernel", "received"),
        ("sent, by the ledger", "ledger_sent"),
        ("received, by the ledger", "ledger_received"),
    ):
        lines.append(f"| {text} | {flat[key]:,} | {tree[key]:,} | {flat[key] / tree[key]:.1f} |")
    lines.append(f"| median round | {flat['round_s']:.2f} s | {tree['round_s']:.2f} s | |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hubs", type=int, default=3)
    parser.add_argument("--sites", type=int, default=4, help="sites of each hub")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--aggregation", choices=("fixed_point", "masked"), default="fixed_point")
    parser.add_argument("--out", type=Path, default=Path("runs/tree_traffic"))
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root: run it with sudo, or as root in a container of your own")
    names = [f"site-{number}" for number in range(1, options.hubs * options.sites + 1)]
    hubs = {f"hub-{h + 1}": names[h * options.sites : (h + 1) * options.sites] for h in range(options.hubs)}
    folder = (options.out / options.aggregation).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Names of its own, so that hosts.py can run at the same time.
    hosts.PREFIX, hosts.HUB = "tree", "tree-switch"
    with build_network(RATE_MBIT, 0.0, ("server", *hubs, *names, "lead")):
        kits = prepare(folder, hubs)
        start(kits, names)
        wait_for_clients(kits, names)
        flat = measure(folder, kits, write_job(folder, {}, len(names), options), "flat")
        # Only now: a job without hubs takes every client for a site, and a hub has no data.
        for hub in hubs:
            run_command("bash", "-c", "startup/start.sh > process.log 2>&1", inside=hub, cwd=kits / hub)
        wait_for_clients(kits, list(hubs))
        tree = measure(folder, kits, write_job(folder, hubs, len(names), options), "tree")
    (folder / "tree_traffic.json").write_text(json.dumps({"flat": flat, "tree": tree}, indent=1))
    print(format_table(flat, tree, options))
    assert flat["digest"] == tree["digest"], "tree and flat run have different bits"
    print(f"both models: sha256 {flat['digest'][:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
