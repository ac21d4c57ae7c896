"""What the sites' processes sent according to the kernel, beside their egress logs.

    python benchmarks/exchange/kernel_bytes.py [--rounds 20] [--kinds method script components]

Each kind of job (a method of the package, the user's script under a method, FLARE's recipe with components of the
package) runs twice in FLARE's simulator with two sites: with a network of about 258,000 parameters and with one of some
ten, whose bytes beyond its results are FLARE's own control messages. *Kernel* are the bytes that the sites' processes
sent (``ss``, Linux, read ten times a second until the job ends), *logged* the ``sent_bytes`` of the egress logs,
*ratio* the one by the other in the large job, *results alone* the same of the differences of both jobs, *control* the
rest of the small job by site and round.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

SITES, WIDTHS = 2, {"large": 500, "small": 1}
KINDS = ("method", "script", "components")
TASK = {"name": "table", "kind": "regression", "target": "y", "features": [f"x{i}" for i in range(10)], "id": "id"}
NET = """
import torch
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        a, b, c = nn.Linear(10, {width}), nn.Linear({width}, {width}), nn.Linear({width}, 1)
        super().__init__(a, nn.ReLU(), b, nn.ReLU(), c)
"""
CLIENT = """
from contextlib import suppress
import nvflare.client as flare, torch
from net import Net
with suppress(SystemExit):
    torch.set_num_threads(1)
    flare.init()
    net, x = Net(), torch.randn(40, 10, generator=torch.Generator().manual_seed(len(flare.get_site_name())))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    while flare.is_running():
        if (received := flare.receive()) is None:
            break
        net.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        steps = {"NUM_STEPS_CURRENT_ROUND": 1}
        flare.send(flare.FLModel(params=net.state_dict(), metrics={"mse": float(loss.detach())}, meta=steps))
"""
RECIPE = """
from flare_sparse.components import FromCSR, KeepMask, MagnitudePruning, ToCSR, add_components
from net import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
recipe = FedAvgRecipe(
    name="job", min_clients={sites}, num_rounds={rounds}, model=Net(), train_script="client.py",
    aggregator=MagnitudePruning(sparsity=0.5, min_sites={sites}),
)
add_components(recipe, client_output=[KeepMask(), ToCSR()], server_input=[FromCSR()])
recipe.execute(SimEnv(num_clients={sites}, workspace_root="out"))
"""


def write_job(kind: str, width: int, rounds: int, folder: Path) -> list[str]:
    """Write a job into a folder, and return the command that runs it there."""
    (folder / "net.py").write_text(NET.format(width=width))
    (folder / "client.py").write_text(CLIENT)
    if kind == "components":
        (folder / "job.py").write_text(RECIPE.format(sites=SITES, rounds=rounds))
        return [sys.executable, "job.py"]
    rows = [f"{i}," + ",".join(str((i * (k + 3)) % 17) for k in range(11)) for i in range(80)]
    (folder / "t.csv").write_text("\n".join(["id," + ",".join(TASK["features"]) + ",y", *rows]) + "\n")
    training = {"epochs": 1, "batch_size": 40, "optimizer": "sgd", "lr": 0.001}
    script = {"script": "client.py", "model": "net.Net", "metric": {"name": "mse", "mode": "min"}}
    shared, table = ({"path": path, "partition": {"kind": part}} for path, part in ((".", "shared"), ("t.csv", "iid")))
    content = {
        "name": "job",
        "method": {"name": "fedavg", "rounds": rounds, **({} if kind == "script" else {"training": training})},
        "task": script if kind == "script" else {**TASK, "model": {"name": "mlp", "hidden": [width, width]}},
        "simulator": {"sites": SITES, "data": shared if kind == "script" else table},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(content))
    return [sys.executable, "-m", "flare_sparse", "run", "job.yaml", "--env", "sim", "--out", "out"]


def read_kernel(processes: set[int]) -> dict[tuple[str, str], int]:
    """Return the bytes that some processes have sent so far, by connection."""
    text = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in re.sub(r"\n\s+", " ", text).splitlines():
        sent = re.search(r"bytes_sent:(\d+)", line)
        owners = {int(number) for number in re.findall(r"pid=(\d+)", line)}
        if sent and owners & processes:
            found[line.split()[3], line.split()[4]] = int(sent[1])
    return found


def measure(kind: str, width: int, rounds: int) -> tuple[int, int]:
    """Run a job; return the bytes that its sites' processes sent by the kernel's counters, and by their egress logs."""
    with tempfile.TemporaryDirectory() as text:
        folder, sent = Path(text), dict[tuple[str, str], int]()
        with (folder / "log.txt").open("w") as log:
            job = subprocess.Popen(write_job(kind, width, rounds, folder), cwd=folder, stdout=log, stderr=log)
            while job.poll() is None:
                workers = psutil.Process(job.pid).children(recursive=True)
                sent |= read_kernel({worker.pid for worker in workers if is_site(worker)})
                time.sleep(0.1)
        if job.returncode:
            raise SystemExit((folder / "log.txt").read_text()[-3000:])
        logs = [file.read_text().splitlines() for file in folder.rglob("flare_sparse_egress/*/egress.jsonl")]
        return sum(sent.values()), sum(json.loads(line)["sent_bytes"] for lines in logs for line in lines)


def is_site(process: psutil.Process) -> bool:
    """Return whether a process of the simulator is that of a site."""
    try:
        return any("simulator_worker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    options = parser.parse_args()
    print("| job | kernel | logged | ratio | results alone | control, a site and round |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in options.kinds:
        kernel, logged = measure(kind, WIDTHS["large"], options.rounds)
        rest, few = measure(kind, WIDTHS["small"], options.rounds)
        control = (rest - few) / SITES / options.rounds
        ratios = f"{kernel / logged:.3f} | {(kernel - rest) / (logged - few):.3f}"
        print(f"| {kind} | {kernel:,} | {logged:,} | {ratios} | {control:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
