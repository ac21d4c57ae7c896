"""Bytes that cross each site's network interface against those of the ledger, on capped links.

    sudo python benchmarks/performance/hosts.py --rates 1000 100 10 [--delay-ms 50] [--rounds 6] [--out runs/hosts]

A provisioned federation with FLARE's kits and mTLS runs NeuroSFL and FedAvg on the same data. Server, three sites and
the lead have a network namespace each, connected by a bridge in a sixth; every link is capped in both directions (token
bucket) and, on request, delayed (``slow_switch.py``, because not every kernel has netem). The kernel's byte counters of
each site's interface, sampled during the rounds, are compared with the ledger's sums. All namespaces are removed at the
end, also after Ctrl-C. Needs root, iproute2 and the scheduler ``tbf``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flare_sparse.flare.site.setup import allow_classes

SITES = ("site-1", "site-2", "site-3")
HOSTS = ("server", *SITES, "lead")
PREFIX, HUB = "fs", "fs-hub"
SWITCH = Path(__file__).with_name("slow_switch.py")
SEGMENT_BYTES = 1514
"""Size of a full TCP segment on Ethernet: an upper bound for a retransmitted segment."""
PORTS = (8802, 8803)
MEDICATIONS, ROWS, HIDDEN = 2000, 120, 256
METHODS = {"NeuroSFL 90 %": "{name: neurosfl, sparsity: 0.9", "FedAvg": "{name: fedavg"}
PROJECT = """api_version: 3
name: hosts
description: one host per participant
participants:
  - {{name: server, type: server, org: coordination, fed_learn_port: {0}, admin_port: {1}}}
{2}
  - {{name: lead@coordination.org, type: admin, org: coordination, role: lead}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config, scheme: grpc}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


def get_namespace(host: str) -> str:
    return f"{PREFIX}-{host}"


def run_command(*words: str, inside: str | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, in a host's namespace if one is given; its output is shown only if it fails."""
    line = [*(["ip", "netns", "exec", get_namespace(inside)] if inside else []), *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False, **more)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)}: {(done.stderr or done.stdout).strip()[-800:]}")
    return done


@contextmanager
def build_network(rate_mbit: float, delay_ms: float, members: Sequence[str] = HOSTS) -> Iterator[None]:
    """Create namespaces with capped links to a bridge or a slow switch; remove them at the end."""
    ports = {f"p{number}": host for number, host in enumerate(members, start=1)}
    try:
        run_command("ip", "netns", "add", HUB)
        hosts = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{i} {h}\n" for i, h in enumerate(members, start=1))
        for number, (port, host) in enumerate(ports.items(), start=1):
            folder = Path("/etc/netns") / get_namespace(host)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(hosts)
            run_command("ip", "netns", "add", get_namespace(host))
            link = f"ip link add eth0 netns {get_namespace(host)} type veth peer name {port} netns {HUB}"
            run_command(*link.split())
            run_command(
                sys.executable, str(SWITCH), "--prepare", "eth0", inside=host
            )  # whole frames: counted as a wire would
            for setting in (f"addr add 10.77.0.{number}/24 dev eth0", "link set eth0 up", "link set lo up"):
                run_command("ip", *setting.split(), inside=host)
            cap_rate("eth0", get_namespace(host), rate_mbit)
            cap_rate(port, HUB, rate_mbit)
        with connect_ports(ports, delay_ms):
            yield
    finally:
        for host in members:
            with suppress(RuntimeError):
                for pid in run_command("ip", "netns", "pids", get_namespace(host)).stdout.split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            with suppress(RuntimeError):
                run_command("ip", "netns", "del", get_namespace(host))
            shutil.rmtree(Path("/etc/netns") / get_namespace(host), ignore_errors=True)
        with suppress(RuntimeError):
            run_command("ip", "netns", "del", HUB)


def cap_rate(device: str, namespace: str, rate_mbit: float) -> None:
    """Limit a link's rate in one direction."""
    tc = ("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device)
    run_command(
        *tc, "root", "handle", "1:", *("tbf", "rate", f"{rate_mbit}mbit", "burst", "256kbit", "latency", "800ms")
    )


@contextmanager
def connect_ports(ports: Mapping[str, str], delay_ms: float) -> Iterator[None]:
    """Connect the hub's ports by a bridge, or by a slow switch with a round trip of ``delay_ms``."""
    inside = ["ip", "netns", "exec", HUB]
    for port in ports:
        run_command(*inside, "ip", "link", "set", port, "up")
    if not delay_ms:
        run_command(*inside, "ip", "link", "add", "br0", "type", "bridge")
        run_command(*inside, "ip", "link", "set", "br0", "up")
        for port in ports:
            run_command(*inside, "ip", "link", "set", port, "master", "br0")
        yield
        return
    switch = subprocess.Popen([*inside, sys.executable, str(SWITCH), "--delay-ms", str(delay_ms / 2), *ports])
    try:
        yield
        if switch.poll() is not None:
            raise RuntimeError(f"the switch ended with {switch.returncode}; the measured link is not the delayed one")
    finally:
        switch.kill()
        switch.wait()


def provision(folder: Path, sites: Sequence[str] = SITES) -> Path:
    """Provision all participants; return the folder of their kits. The server stores its jobs beside them."""
    clients = "\n".join(f"  - {{name: {site}, type: client, org: hospital_{i}}}" for i, site in enumerate(sites, 1))
    (folder / "project.yml").write_text(PROJECT.format(*PORTS, clients))
    run_command("nvflare", "provision", "-p", str(folder / "project.yml"), "-w", str(folder / "workspace"))
    kits = folder / "workspace" / "hosts" / "prod_00"
    resources = kits / "server" / "local" / "resources.json.default"
    resources.write_text(resources.read_text().replace("/tmp/nvflare", str(folder / "store")))
    return kits


def prepare(folder: Path) -> Path:
    """Provision all participants and write a table of admissions for each site; return the folder of the kits."""
    kits = provision(folder)
    header = ",".join(["stay", "died", *(f"med_{i}" for i in range(MEDICATIONS))])
    for number, site in enumerate(SITES):
        rng = np.random.default_rng(number)
        taken = (rng.random((ROWS, MEDICATIONS)) < 0.02).astype(int)
        died = (taken[:, :20].sum(1) > 0).astype(int)
        lines = [f"{i},{died[i]}," + ",".join(map(str, taken[i])) for i in range(ROWS)]
        (folder / f"{site}.csv").write_text("\n".join([header, *lines]) + "\n")
        (kits / site / "local" / "flare_sparse.yaml").write_text(f"data: {folder / f'{site}.csv'}\n")
    for kit in ("server", *SITES):
        allow_classes(kits / kit)
    return kits


def start(kits: Path, sites: Sequence[str] = SITES) -> None:
    for host in ("server", *sites):
        run_command("bash", "-c", "startup/start.sh > process.log 2>&1", inside=host, cwd=kits / host)
        if host == "server":
            wait_for_server(kits)


def wait_for_server(kits: Path) -> None:
    probe = f"import socket; socket.create_connection(('server', {PORTS[0]}), 1)"
    for _ in range(90):
        with suppress(RuntimeError):
            run_command(sys.executable, "-c", probe, inside="site-1")
            return
        time.sleep(1)
    raise RuntimeError(f"the server does not listen; see {kits / 'server' / 'process.log'}")


@dataclass(frozen=True)
class Sample:
    """Counters of a host's kernel: bytes of its interface in both directions, and retransmitted TCP segments."""

    bytes: int
    retransmitted: int

    @classmethod
    def from_proc(cls, net: Path) -> Sample:
        """Read the counters from a process's folder ``/proc/PID/net``."""
        fields = (net / "dev").read_text().partition("eth0:")[2].split()
        names, counts = (line.split() for line in (net / "snmp").read_text().splitlines() if line.startswith("Tcp:"))
        return cls(int(fields[0]) + int(fields[8]), int(counts[names.index("RetransSegs")]))

    def __sub__(self, earlier: Sample) -> Sample:
        return Sample(self.bytes - earlier.bytes, self.retransmitted - earlier.retransmitted)


class Counters(threading.Thread):
    """A thread that samples the kernels of server and sites, with the times when each sample began and ended."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, dict[str, Sample], float]] = []
        # One process stays in each namespace, because /proc/PID/net shows the namespace of that process.
        self._processes = {
            host: subprocess.Popen(["ip", "netns", "exec", get_namespace(host), "sleep", "infinity"])
            for host in ("server", *SITES)
        }
        self._nets = {host: Path("/proc", str(one.pid), "net") for host, one in self._processes.items()}
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.05):
            began = time.time()
            found = {host: Sample.from_proc(net) for host, net in self._nets.items()}
            self.samples.append((began, found, time.time()))

    def stop(self) -> None:
        self._done.set()
        self.join()
        for one in self._processes.values():
            one.kill()
            one.wait()

    def count_between(self, begin: float, end: float, host: str) -> Sample:
        """Return the counts between the last sample before ``begin`` and the first after ``end``."""
        before = [found for _, found, ended in self.samples if ended <= begin][-1]
        after = next(found for began, found, _ in self.samples if began >= end)
        return after[host] - before[host]


def write_job(folder: Path, label: str, rounds: int, interval_s: float) -> Path:
    file = folder / "job.yaml"
    file.write_text(
        f"name: hosts\nseed: 1\nmethod: {METHODS[label]}, rounds: {rounds}, training: {{lr: 0.01}}}}\n"
        f"task: {{name: table, kind: binary, target: died, id: stay, features: ['med_{{0..{MEDICATIONS - 1}}}'],"
        f" scaling: none, model: {{name: mlp, hidden: [{HIDDEN}]}}}}\n"
        f"federation: {{min_sites: 3, task_timeout_s: 300, request_interval_s: {interval_s}}}\n"
    )
    return file


def measure(folder: Path, kits: Path, label: str, rounds: int, interval_s: float) -> dict[str, Any]:
    """Run one job; return its bytes by the kernel and by the ledger, and the median seconds of a round."""
    counters = Counters()
    time.sleep(0.5)
    counters.start()
    time.sleep(0.5)
    out = folder / label.split(maxsplit=1)[0]
    kit = kits / "lead@coordination.org"
    run_command(
        "flare-sparse",
        "run",
        str(write_job(folder, label, rounds, interval_s)),
        "--env",
        "prod",
        "--kit",
        str(kit),
        "--out",
        str(out),
        inside="lead",
    )
    time.sleep(0.5)
    counters.stop()
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    messages = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    begin, end = lines[0]["committed_at"] - lines[0]["seconds"], lines[-1]["committed_at"]
    sites = {}
    for site in SITES:
        own = [m for m in messages if m["site"] == site]
        sites[site] = {
            "kernel": counters.count_between(begin, end, site).bytes,
            "ledger": sum(m["payload_bytes"] for m in own),
            "messages": len(own),
        }
    # Sorted: the slowest round, normally the first, is left out.
    trained = sorted(line["seconds"] for line in lines if line["kind"] == "train")[: rounds - 1]
    retransmitted = (
        sum(counters.count_between(begin, end, host).retransmitted for host in ("server", *SITES)) * SEGMENT_BYTES
    )
    return {
        "label": label,
        "sites": sites,
        "retransmitted": retransmitted,
        "round_s": trained[len(trained) // 2],
        "window_s": end - begin,
    }


def format_table(found: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Return bytes of the three sites in both directions, from the first request to the last commit.

    Retransmissions are those of sites and server.
    """
    rates, size = " ".join(f"{rate:g}" for rate in arguments.rates), MEDICATIONS * HIDDEN + 2 * HIDDEN + 1
    lines = [
        (
            f"`--rates {rates} --delay-ms {arguments.delay_ms:g} --interval-s {arguments.interval_s:g} "
            f"--rounds {arguments.rounds}`, {size:,} parameters:"
        ),
        "",
        "| link | method | kernel MB | ledger MB | more | resent MB | beyond 5 %, each | messages | round |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        kernel, ledger, messages = (
            sum(s[what] for s in row["sites"].values()) for what in ("kernel", "ledger", "messages")
        )
        retransmitted = row["retransmitted"]
        beyond = (kernel - 1.05 * ledger) / messages
        lines.append(
            f"| {row['rate']:g} Mbit/s | {row['label']} | {kernel / 1e6:.3f} | {ledger / 1e6:.3f} "
            f"| {kernel / ledger - 1:.1%} | {retransmitted / 1e6:.3f} | {beyond / 1e3:.1f} kB "
            f"| {messages} | {row['round_s']:.2f} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 10], help="Mbit/s of every link")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="round trip")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--interval-s", type=float, default=0.05, help="initial interval between a site's requests for work"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/hosts"))
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root: run it with sudo, or as root in a container of your own")
    found: list[dict[str, Any]] = []
    for rate in arguments.rates:
        folder = (arguments.out / f"{rate:g}").resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with build_network(rate, arguments.delay_ms):
            kits = prepare(folder)
            start(kits)
            for label in METHODS:
                found.append({"rate": rate, **measure(folder, kits, label, arguments.rounds, arguments.interval_s)})
                print(json.dumps(found[-1]), flush=True)
    text = format_table(found, arguments)
    (arguments.out / "hosts.json").write_text(json.dumps(found, indent=1))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
