"""The stock jobs, and others of the same components, in FLARE's simulator, beside the package's own runs.

    python benchmarks/exchange/components.py [--cells scbf swarm ...] [--docs]
    python benchmarks/exchange/components.py --cells scbf fedsparsify HE --kit KITS/lead@coordination.org

Accuracy is the mean over the sites of the final model's share of right answers on their test examples; *sent* is what
left the sites, without headers of FLARE, as their egress logs or ``sparse_exchange.jsonl`` count it, *dense* the same
messages as float32. The last column is the largest difference of an entry from the final model of the package's own run
with the same settings. ``--docs`` writes the table of docs/components.md. ``--kit``, the startup kit of an admin,
submits the jobs to a running federation of three sites on this machine instead, in POC mode or provisioned. The cell
``HE`` needs one, with keys: ``nvflare poc prepare -n 3 -he``, or ``HEBuilder`` in the project file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
STOCK, PAGE = ROOT / "jobs" / "stock", ROOT / "docs" / "components.md"
CODE = STOCK / "custom"
FLARE, OWN = "nvflare.app_common", "flare_sparse.components"
FULL_BATCH = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "batch_size": 10_000}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedsparsify": {"name": "fedsparsify", "sparsity": 0.8},
    "scbf": {"name": "scbf", "budget": 0.3, "aggregation": "mean"},
    "neurosfl": {"name": "neurosfl", "sparsity": 0.8},
    "lora_a2": {"name": "lora_a2", "rank": 2, "training": {**FULL_BATCH, "epochs": 3, "lr": 0.05}},
    "flexlora": {
        "name": "flexlora", "rank": 4, "training": {**FULL_BATCH, "epochs": 5, "lr": 0.1, "momentum": 0.9}
    },
    "metagater": {
        "name": "metagater", "lasso": 0.02, "local_steps": 3, "training": {**FULL_BATCH, "lr": 0.1}, "adapt_lr": 0.1
    },
}  # fmt: skip
NETWORKS = {"lora_a2": "AdaptedNet", "flexlora": "AdaptedNet", "metagater": "GatedNet"}
"""Networks of the methods that the package trains by a task of its own; the others train ``Net`` by ``client.py``."""
TASK = """
import torch
from study import {net} as Net, load, loss, measure
from torch.utils.data import TensorDataset
from flare_sparse import Examples, Metric, Task


class StockTask(Task):
    metric = Metric("accuracy", "", "max")

    def model(self):
        return Net()

    def load(self, data, seed):
        x, y, x_test, y_test = load(data.site)
        return Examples(TensorDataset(x, y), TensorDataset(x_test, y_test))

    def loss(self, model, batch):
        return loss(model, batch)

    def predict(self, model, batch):
        return model(batch[0]), batch[1]

    def metrics(self, predictions, targets):
        return {{"accuracy": float(((predictions > 0) == (targets > 0.5)).float().mean())}}
"""
Config = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One job.

    Attributes:
        job: the stock job that it is, or is made of.
        own: the package's run that it is compared with; empty: none.
        components: what it is made of, as display text.
        change: changes the configurations of server and clients.
        privacy: filters of results in each site's ``local/privacy.json``.
    """

    job: str
    own: str
    components: str
    change: Callable[[Config, Config], None] = lambda server, client: None
    privacy: tuple[Config, ...] = ()


def describe(path: str, **args: Any) -> Config:
    """Return an entry of a configuration."""
    return {"path": path, "args": args}


def scatter_and_gather(server: Config, _: Config) -> None:
    """Use FLARE's controller of Shareables."""
    aggregator = {"id": "aggregator", **server["workflows"][0]["args"]["aggregator"]}
    args = {
        "min_clients": 3, "num_rounds": 5, "wait_time_after_min_received": 0, "aggregator_id": "aggregator",
        "persistor_id": "persistor", "shareable_generator_id": "generator", "train_task_name": "train",
    }  # fmt: skip
    path = f"{FLARE}.workflows.scatter_and_gather.ScatterAndGather"
    server["workflows"] = [{"id": "controller", **describe(path, **args)}]
    generator = f"{FLARE}.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator"
    server["components"] += [aggregator, {"id": "generator", **describe(generator)}]


def homomorphic(server: Config, client: Config) -> None:
    """Let FLARE encrypt what the selection leaves, as its recipe with homomorphic encryption does."""
    scatter_and_gather(server, client)
    he = "nvflare.app_opt.he"
    parts = {
        "aggregator": describe(
            f"{he}.intime_accumulate_model_aggregator.HEInTimeAccumulateWeightedAggregator",
            expected_data_kind="WEIGHTS",
        ),
        "generator": describe(f"{he}.model_shareable_generator.HEModelShareableGenerator"),
    }
    for entry in server["components"]:
        entry.update(parts.get(entry["id"], {}))
        if entry["id"] == "persistor":
            entry["args"]["filter_id"] = "serializer"
    serializer = describe(f"{he}.model_serialize_filter.HEModelSerializeFilter")
    server["components"] += [{"id": "serializer", **serializer}]
    server["task_data_filters"] = server["task_result_filters"] = []
    select = find_filter(client, "ChannelUpload")
    decrypt = describe(f"{he}.model_decryptor.HEModelDecryptor")
    encrypt = describe(f"{he}.model_encryptor.HEModelEncryptor")
    client["task_data_filters"] = [{"tasks": ["train"], "filters": [decrypt]}]
    client["task_result_filters"] = [{"tasks": ["train"], "filters": [select, encrypt]}]


def exclude(server: Config, client: Config) -> None:
    """Let the last layer stay at the sites."""
    server["workflows"][0]["args"]["aggregator"]["args"]["aggregation"] = "count"
    hide = describe(f"{FLARE}.filters.exclude_vars.ExcludeVars", exclude_vars=["5.weight", "5.bias"])
    client["task_result_filters"][0]["filters"].insert(1, hide)


def mask_first(_: Config, client: Config) -> None:
    """Hold the script to the mask before a site's own filters, which want differences."""
    executor = client["executors"][0]["executor"]
    executor["path"] = f"{OWN}.masking.MaskedTraining"
    executor["args"]["params_transfer_type"] = "DIFF"
    del client["task_result_filters"][0]["filters"][0]


def launch(server: Config, client: Config) -> None:
    """Hold a script in a process of its own to the mask."""
    mask_first(server, client)
    command = {"execution_mode": "external_process", "command": [sys.executable, "-u", "custom/client.py"]}
    client["executors"][0]["executor"]["args"] = {"params_exchange_format": "pytorch", **command}


def average(server: Config, client: Config) -> None:
    """Send everything, exactly, to a mean in the order of names."""
    server["workflows"][0]["args"]["aggregator"] = describe(f"{OWN}.aggregators.OrderedMean", min_sites=3)
    del client["task_result_filters"][0]["filters"][0]


def decompose(server: Config, client: Config) -> None:
    """Send both factors of the adapters, which the script of the other jobs trains, to FlexLoRA's server."""
    aggregator = describe(f"{OWN}.aggregators.FlexLoRAMean", rank=4, min_sites=3)
    server["workflows"][0]["args"]["aggregator"] = aggregator
    client["executors"][0]["executor"]["args"]["task_script_path"] = "client.py"
    del client["task_result_filters"][0]["filters"][0]


def swarm(_: Config, client: Config) -> None:
    """Put the filters on the messages between the sites of FLARE's swarm."""
    path = f"{OWN}.sparse_exchange.SparseExchange"
    limits = [describe(f"{OWN}.masking.KeepMask", source="zeros"), client.pop("selection")]
    send_to_peers(client, limits, [describe(path, content="model"), describe(path, content="update")] * 2)


def swarm_csr(_: Config, client: Config) -> None:
    """Put CSR on them, and hold the script to the zeros, at the site that aggregates, too."""
    client.pop("selection")
    (executor,) = [entry["executor"] for entry in client["executors"] if "train" in entry["tasks"]]
    executor.update(path=f"{OWN}.masking.MaskedTraining", args={**executor["args"], "source": "zeros"})
    csr = [describe(f"{OWN}.csr.ToCSR")] * 2 + [describe(f"{OWN}.csr.FromCSR")] * 2
    send_to_peers(client, [], csr)


def send_to_peers(client: Config, limits: list[Config], codecs: list[Config]) -> None:
    """Set the chains of models and updates, sent (the first two codecs) and received."""
    model_out, update_out, model_in, update_in = codecs
    chains = [
        ("swarm_learn", "out", [*limits, model_out]),
        ("swarm_learn", "in", [model_in, *limits]),
        ("swarm_report_learn_result", "out", [*limits, update_out]),
        ("swarm_report_learn_result", "in", [update_in]),
    ]
    client["task_data_filters"] = [{"tasks": [t], "direction": d, "filters": f} for t, d, f in chains]


def find_filter(client: Config, name: str) -> Config:
    """Return the entry of a filter of results."""
    (entry,) = [f for f in client["task_result_filters"][0]["filters"] if f["path"].endswith(name)]
    return entry


SITES_OWN = describe(f"{FLARE}.filters.percentile_privacy.PercentilePrivacy", percentile=50, gamma=0.05)
CELLS = {
    "fedsparsify": Cell("fedsparsify", "fedsparsify", "MagnitudePruning, KeepMask, ToCSR, FromCSR"),
    "scbf": Cell("scbf", "scbf", "SelectiveSum, ChannelUpload, SparseExchange"),
    "neurosfl": Cell("neurosfl", "neurosfl", "NeuroSFLController, ScoredMask, ScoreExecutor, KeepMask, CSR"),
    "lora_a2": Cell("lora_a2", "lora_a2", "RankMean, RankUpload, SparseExchange"),
    "metagater": Cell("metagater", "metagater", "MetaGaterController, MetaStep, KeepMask, CSR"),
    "ScatterAndGather": Cell("fedsparsify", "fedsparsify", "MagnitudePruning, KeepMask, CSR", scatter_and_gather),
    "own process": Cell("fedsparsify", "fedsparsify", "MagnitudePruning, MaskedTraining, CSR", launch),
    "mean": Cell("scbf", "fedavg", "OrderedMean, SparseExchange", average),
    "flexlora": Cell("lora_a2", "flexlora", "FlexLoRAMean, SparseExchange", decompose),
    "swarm": Cell("scbf", "", "FLARE's swarm, KeepMask, ChannelUpload, SparseExchange", swarm),
    "swarm CSR": Cell("scbf", "", "FLARE's swarm, MaskedTraining, CSR", swarm_csr),
    "ExcludeVars": Cell("scbf", "", "SelectiveSum, ChannelUpload, ExcludeVars, SparseExchange", exclude),
    "site's filter": Cell(
        "fedsparsify", "", "MagnitudePruning, MaskedTraining, PercentilePrivacy, CSR", mask_first, (SITES_OWN,)
    ),
    "HE": Cell("scbf", "scbf", "ChannelUpload, FLARE's HE", homomorphic),
}


def write_swarm(folder: Path) -> None:
    """Export FLARE's swarm with the stock jobs' network, of its weights four fifths zero, and their script."""
    code = f"""
import torch
from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe
from study import Net
network = Net()
for weight in (p for p in network.parameters() if p.ndim > 1):
    weight.data[weight.abs() < weight.abs().quantile(0.8)] = 0
torch.save(network.state_dict(), "pruned.pt")
script = {str(CODE / "client.py")!r}
recipe = SwarmLearningRecipe(
    name="scbf", model=Net(), min_clients=3, num_rounds=5, train_script=script, initial_ckpt="pruned.pt"
)
recipe._job.set_app_packages(["flare_sparse"])
recipe.export({str(folder)!r})
"""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(CODE)}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, capture_output=True)
    own = json.loads((STOCK / "scbf" / "app" / "config" / "config_fed_client.json").read_text())
    file = folder / "scbf" / "app" / "config" / "config_fed_client.json"
    selection = find_filter(own, "ChannelUpload")
    file.write_text(json.dumps({**json.loads(file.read_text()), "selection": selection}))


def write_job(name: str, folder: Path) -> Path:
    """Write the job of a cell below ``folder``, and return its own folder."""
    cell = CELLS[name]
    if cell.change in (swarm, swarm_csr):
        write_swarm(folder)
    else:
        subprocess.run([STOCK / "build", folder], check=True)
    files = [folder / cell.job / "app" / "config" / f"config_fed_{end}.json" for end in ("server", "client")]
    server, client = (json.loads(file.read_text()) for file in files)
    cell.change(server, client)
    for file, config in zip(files, (server, client), strict=True):
        file.write_text(json.dumps(config, indent=2))
    if cell.change is decompose:
        script = folder / cell.job / "app" / "custom" / "client.py"
        script.write_text(script.read_text().replace("import Net,", "import AdaptedNet as Net,"))
    return folder / cell.job


def run_stock(job: Path, folder: Path, privacy: tuple[Config, ...]) -> Path:
    """Run a job in FLARE's simulator and return its workspace; its output lies beside it, in ``log.txt``."""
    workspace = folder / "workspace"
    if privacy:
        scope = {"name": "own", "task_result_filters": [{**entry, "direction": "out"} for entry in privacy]}
        (workspace / "local").mkdir(parents=True)
        (workspace / "local" / "privacy.json").write_text(json.dumps({"scopes": [scope], "default_scope": "own"}))
    command = [Path(sys.executable).parent / "nvflare", "simulator", job, "-w", workspace, "-n", "3", "-t", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    return workspace


def run_deployed(job: Path, folder: Path, kit: Path) -> Path:
    """Submit a job, wait until it ends, and return the folder of its downloaded result."""

    def call(*words: str) -> Any:
        line = [Path(sys.executable).parent / "nvflare", "--format", "json", "job", *words, "--startup-kit", kit]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])["data"]

    number = call("submit", "-j", str(job))["job_id"]
    while not (states := [row["status"] for row in call("list") if row["job_id"] == number])[0].startswith("FINISHED"):
        time.sleep(5)
    (folder / "log.txt").write_text(f"{job.name}: {states[0]}")
    call("download", number, "-o", str(folder))
    return folder / number


def read_stock(workspace: Path, kit: Path | None) -> dict[str, torch.Tensor]:
    """Return the model that FLARE's persistor saved last, decrypted with the key of a site.

    Raises:
        SystemExit: there is none; the text is the end of the job's output.
    """
    files = sorted(workspace.rglob("FL_global_model.pt"))
    if not files:
        raise SystemExit((workspace.parent / "log.txt").read_text()[-4000:])
    values = torch.load(files[0], weights_only=False)["model"]
    if not any(isinstance(value, bytes) for value in values.values()):
        return {name: torch.as_tensor(value) for name, value in values.items()}
    import tenseal

    assert kit is not None, "HE needs a federation with keys"
    context = tenseal.context_from((kit.parent / "site-1" / "startup" / "client_context.tenseal").read_bytes())
    shapes = runpy.run_path(str(CODE / "study.py"))["Net"]().state_dict()
    flat = {name: tenseal.ckks_vector_from(context, value).decrypt() for name, value in values.items()}
    return {name: torch.tensor(value).view_as(shapes[name]) for name, value in flat.items()}


def run_own(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Run the method of the same settings as the package does, and return its final model."""
    from flare_sparse import load_model
    from flare_sparse.api.local import run
    from flare_sparse.config.study import Study
    from flare_sparse.results.runs.folder import RunFolder

    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
    task: dict[str, Any] = {"script": "client.py", "model": "study.Net"}
    if name in NETWORKS:
        (folder / f"stock_{name}.py").write_text(TASK.format(net=NETWORKS[name]))
        task = {"class": f"stock_{name}.StockTask"}
    simulator = {"sites": 3, "data": {"path": str(folder), "partition": {"kind": "shared"}}}
    content = {"name": name, "seed": 0, "method": {**METHODS[name], "rounds": 5}, "task": task, "simulator": simulator}
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    run(Study.load(folder / "study.yaml"), RunFolder(folder / "run"))
    return load_model(folder / "run", trust_code=True).state_dict()


def find_difference(stock: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of an entry of two models; 0.0 exactly if they have the same bits."""
    return max(0.0 if torch.equal(stock[n], v) else float((stock[n] - v).abs().max()) for n, v in own.items())


def count_bytes(workspace: Path, kit: Path | None, model: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return the bytes that left the sites, and those of the same messages as float32."""
    from flare_sparse.components.sparse_exchange import SUMS_FILE

    if ends := [json.loads(file.read_text()) for file in workspace.rglob(SUMS_FILE)]:
        # What a site sends is recorded where it arrives; of sites among themselves each receiver has a part.
        up = [site["up"] for end in ends for site in end["sites"].values() if "up" in site]
        return sum(part["sent_bytes"] for part in up), sum(part["dense_bytes"] for part in up)
    logs = (workspace if kit is None else kit.parent).rglob("flare_sparse_egress/*/egress.jsonl")
    lines = [json.loads(text) for log in logs for text in log.read_text().splitlines()]
    # Messages outside of a result are FLARE's own, such as those that prepare a task.
    lines = [line for line in lines if line["kind"] != "message" and (kit is None or line["job"] == workspace.name)]
    models = [line for line in lines if set(line["contents"]) & {"WEIGHTS", "WEIGHT_DIFF", "APP_DEFINED"}]
    dense = 4 * sum(tensor.numel() for tensor in model.values() if tensor.is_floating_point())
    return sum(line["bytes"] for line in lines), dense * len(models)


def compute_accuracy(name: str, model: dict[str, torch.Tensor]) -> float:
    """Return the mean accuracy of a stock job's model over the sites."""
    # By its file: another module of this process may have the name of the job's.
    study = runpy.run_path(str(CODE / "study.py"))
    network = study[NETWORKS.get(name, "Net")]()
    network.load_state_dict(model)
    figures = [study["measure"](network, *study["load"](f"site-{n}")[2:])["accuracy"] for n in (1, 2, 3)]
    return sum(figures) / len(figures)


def measure_cell(name: str, kit: Path | None = None) -> str:
    """Run a cell, in the simulator or by an admin's kit, and return its row of the table."""
    cell = CELLS[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        job = write_job(name, folder / "jobs")
        workspace = run_stock(job, folder, cell.privacy) if kit is None else run_deployed(job, folder, kit)
        model = read_stock(workspace, kit)
        sent, dense = count_bytes(workspace, kit, model)
        worst = find_difference(model, run_own(cell.own, folder)) if cell.own else None
    equality = "no such run" if worst is None else "bit-equal" if worst == 0 else f"{worst:.1e}"
    # What sites of a swarm send each other is logged with FLARE's own messages.
    sizes = f"{sent:,} | {dense:,}" if dense else "- | -"
    figures = f"{compute_accuracy(cell.job, model):.3f} | {sizes} | {equality}"
    return f"| {name} | {cell.components} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=[name for name in CELLS if name != "HE"], choices=list(CELLS))
    parser.add_argument("--docs", action="store_true", help="write the rows into docs/components.md")
    parser.add_argument("--kit", type=Path, help="startup kit of an admin of a running federation")
    options = parser.parse_args()
    for name in options.cells:
        row = measure_cell(name, options.kit)
        print(row, flush=True)
        if options.docs:
            page = PAGE.read_text()
            PAGE.write_text(re.sub(rf"^\| {re.escape(name)} \|.*$", lambda _, row=row: row, page, flags=re.MULTILINE))


if __name__ == "__main__":
    main()
