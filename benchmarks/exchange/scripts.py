r"""FLARE's example scripts with the methods of this package, beside the same script under FLARE's ``FedAvgRecipe``.

    python benchmarks/exchange/scripts.py --examples ../shared/flare_examples --data ../shared/data \
        --scripts hello-pt --exchanges fedavg_recipe fedsparsify --json cells.jsonl
    python benchmarks/exchange/scripts.py --json cells.jsonl --table

The examples are those of NVIDIA/NVFlare, read from ``--examples`` and never changed there. What the benchmark changes
in its own copy, paths and sizes of the data, it prints as a patch, and refuses one of more than six lines. Accuracy is
that of the final model on the test images; *measured* bytes are those of the loopback interface in a network namespace
of the job's own (``unshare``, Linux); *ledger* bytes are the lengths of the messages. A cell that is in the file is not
run again. ``hello-lightning`` needs ``pip install pytorch-lightning``; ``stand_in/`` takes the place of torchvision,
which has no build for torch without CUDA.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

FOLDER = Path(__file__).parent
STAND_IN = FOLDER / "stand_in"
MAX_LINES = 6
SITES = 2
RECIPE = "fedavg_recipe"
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedsparsify": {"sparsity": 0.9},
    "neurosfl": {"sparsity": 0.9},
    "topk_ef": {"fraction": 0.1},
    "scbf": {},
}
EXCHANGES = (RECIPE, *METHODS)
MODES = ("in process", "external process")


@dataclass(frozen=True)
class Example:
    """One of FLARE's examples.

    Attributes:
        model: class of its network.
        args: command line of its script.
        replacements: lines of its script that name data or sizes, and what replaces them.
    """

    model: str
    args: str
    replacements: tuple[tuple[str, str], ...] = ()


def list_examples(images: Path) -> dict[str, Example]:
    """Return the examples; ``images`` is the file of :func:`write_images`."""
    return {
        "hello-pt": Example(
            "model.SimpleNetwork",
            "--epochs 1 --num_workers 0",
            (('DATASET_PATH = "/tmp/nvflare/data"', f'DATASET_PATH = "{images}"'),),
        ),
        "hello-lightning": Example("model.LitNet", f"--batch_size 24 --data_root {images}"),
    }


def write_images(source: Path, file: Path, train: int, test: int) -> None:
    """Write a random sample of CIFAR-10, the same each time, in the format of the data set."""
    random, arrays = np.random.default_rng(0), {}
    with np.load(source / "cifar10" / "cifar10_jpeg.npz") as data:
        for part, count in (("train", train), ("test", test)):
            ends, blob = data[f"{part}_ends"], data[f"{part}_blob"]
            rows = random.permutation(len(ends))[:count]
            pieces = [blob[ends[row - 1] if row else 0 : ends[row]] for row in rows]
            arrays[f"{part}_labels"] = data[f"{part}_labels"][rows]
            arrays[f"{part}_ends"] = np.cumsum([len(piece) for piece in pieces])
            arrays[f"{part}_blob"] = np.concatenate(pieces)
    np.savez(file, **arrays)


def write_example(source: Path, example: Example, folder: Path) -> str:
    """Write the example's script and network with its replacements to a folder; return the patch.

    Raises:
        SystemExit: a line to replace is not there, or there are too many of them.
    """
    original = (source / "client.py").read_text()
    text = original
    for old, new in example.replacements:
        if text.count(f"{old}\n") != 1:
            raise SystemExit(f"{source}/client.py: expected the line {old!r} once")
        text = text.replace(f"{old}\n", f"{new}\n")
    (folder / "client.py").write_text(text)
    (folder / "model.py").write_text((source / "model.py").read_text())
    patch = list(
        difflib.unified_diff(original.splitlines(), text.splitlines(), "client.py", "client.py", "", "", 0, "")
    )
    if count_lines(patch) > MAX_LINES:
        raise SystemExit(f"{source}: {count_lines(patch)} lines changed; at most {MAX_LINES}")
    return "\n".join(patch)


def count_lines(patch: list[str]) -> int:
    """Return the number of lines that a patch adds."""
    return sum(line.startswith("+") and not line.startswith("+++") for line in patch)


def run_recipe(example: Example, rounds: int, *, external: bool) -> None:
    """Run FLARE's recipe in the working folder."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    recipe = FedAvgRecipe(
        name="job",
        min_clients=SITES,
        num_rounds=rounds,
        model={"class_path": example.model, "args": {}},
        train_script="client.py",
        train_args=example.args,
        launch_external_process=external,
    )
    recipe.add_server_config({"server": {"task_request_interval": 0.1}})
    recipe.execute(SimEnv(num_clients=SITES, workspace_root="workspace", log_config="concise"))


def write_configuration(example: Example, exchange: str, rounds: int, *, external: bool) -> None:
    """Write the job of a method to ``job.yaml``."""
    config = {
        "name": "job",
        "seed": 1,
        "method": {"name": exchange, "rounds": rounds, **METHODS[exchange]},
        "task": {
            "script": "client.py",
            "model": example.model,
            "args": example.args,
            **({"launch": "python"} if external else {}),
        },
        "simulator": {"sites": SITES, "data": {"path": ".", "partition": {"kind": "shared"}}},
    }
    Path("job.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def run_cell(example: Example, exchange: str, rounds: int, *, external: bool) -> dict[str, Any]:
    """Run one job in the working folder and return its bytes and seconds.

    Raises:
        SystemExit: there is no final model; the text is the end of the job's output.
    """
    command = [sys.executable, str(FOLDER / "scripts.py"), "--job", json.dumps([*vars(example).values()]), str(rounds)]
    if external:
        command.append("external")
    if exchange != RECIPE:
        write_configuration(example, exchange, rounds, external=external)
        main_code = "from flare_sparse.cli import app; app()"
        command = [sys.executable, "-c", main_code, "run", "job.yaml", "--out", "out"]
    path = os.pathsep.join([str(Path.cwd()), str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    started = time.monotonic()
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", 'ip link set lo up; "$@"; grep "lo:" /proc/net/dev > bytes', "sh", *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    seconds = time.monotonic() - started
    if find_model() is None:
        raise SystemExit(f"{exchange}: no model\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return {
        "measured": int(Path("bytes").read_text().split()[1]),
        "ledger": read_ledger(),
        "seconds": round(seconds),
    }


def find_model() -> Path | None:
    """Return the file of the final model in the working folder."""
    files = [Path("out/model.safetensors"), Path("workspace/job/server/simulate_job/app_server/FL_global_model.pt")]
    return next((file for file in files if file.is_file()), None)


def read_ledger() -> int | None:
    """Return the bytes of all messages; None for FLARE's recipe, which has no ledger."""
    file = Path("out/ledger.jsonl")
    if not file.is_file():
        return None
    traffic = json.loads(Path("out/summary.json").read_text())["traffic"]
    return sum(traffic[direction]["payload_bytes"] for direction in ("down", "up"))


def compute_accuracy(example: Example, images: Path) -> float:
    """Return the share of the test images whose class the final model in the working folder finds."""
    code = (
        "import importlib, sys, torch, safetensors.torch\n"
        "from torchvision.datasets import CIFAR10\n"
        "from torchvision.transforms import Compose, Normalize, ToTensor\n"
        "module, name = sys.argv[1].split('.')\n"
        "net = getattr(importlib.import_module(module), name)()\n"
        "file = sys.argv[2]\n"
        "load = safetensors.torch.load_file if file.endswith('safetensors') else (\n"
        "    lambda f: torch.load(f, weights_only=False)['model'])\n"
        "state = {key: torch.as_tensor(value) for key, value in load(file).items()}\n"
        "net.load_state_dict(state, strict=False)\n"
        "data = CIFAR10(sys.argv[3], False, transform=Compose([ToTensor(), Normalize((0.5,) * 3, (0.5,) * 3)]))\n"
        "x = torch.stack([data[i][0] for i in range(len(data))])\n"
        "with torch.no_grad():\n"
        "    print(float((net.eval()(x).argmax(1) == torch.tensor(data.targets)).float().mean()))\n"
    )
    path = os.pathsep.join([str(Path.cwd()), str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, example.model, str(find_model()), str(images)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return float(done.stdout.split()[-1])


def measure_cell(options: argparse.Namespace, script: str, exchange: str, mode: str) -> dict[str, Any]:
    """Run one job in a folder of its own, and return the cell of the table."""
    here, source = Path.cwd(), options.data.resolve()
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "cifar10.npz"
        write_images(source, images, options.train, options.test)
        example = list_examples(images)[script]
        patch = write_example(options.examples.resolve() / script, example, Path(folder))
        os.chdir(folder)
        try:
            figures = run_cell(example, exchange, options.rounds, external=mode == MODES[1])
            accuracy = compute_accuracy(example, images)
        finally:
            os.chdir(here)
    patch = patch.replace(str(images), "cifar10.npz")
    changed = count_lines(patch.splitlines())
    names = {"script": script, "exchange": exchange, "mode": mode, "rounds": options.rounds}
    return {**names, "accuracy": accuracy, **figures, "changed": changed, "patch": patch}


def format_table(cells: list[dict[str, Any]]) -> str:
    """Return the cells as a Markdown table, with those that were not run."""
    rows = [
        "| script | exchange | runs | accuracy | ledger | measured | of FedAvgRecipe | lines changed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    known = {(cell["script"], cell["exchange"], cell["mode"]): cell for cell in cells}
    for script in list_examples(Path()):
        for mode in MODES:
            dense = known.get((script, RECIPE, mode))
            for exchange in EXCHANGES:
                cell = known.get((script, exchange, mode))
                if cell is None:
                    rows.append(f"| {script} | {exchange} | {mode} | not run | | | | |")
                    continue
                share = f"{cell['measured'] / dense['measured']:.2f}" if dense else ""
                ledger = "" if cell["ledger"] is None else f"{cell['ledger']:,}"
                rows.append(
                    f"| {script} | {exchange} | {mode} | {cell['accuracy']:.3f} | {ledger} | {cell['measured']:,} "
                    f"| {share} | {cell['changed']} |"
                )
    return "\n".join(rows)


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        run_recipe(Example(*json.loads(sys.argv[2])), int(sys.argv[3]), external=sys.argv[4:] == ["external"])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=Path, default=Path("../shared/flare_examples"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--scripts", nargs="+", default=list(list_examples(Path())))
    parser.add_argument("--exchanges", nargs="+", default=list(EXCHANGES), choices=EXCHANGES)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", type=int, default=2000, help="training images, the same at both sites")
    parser.add_argument("--test", type=int, default=1000, help="test images")
    parser.add_argument("--json", type=Path, required=True, help="file of the cells, a line each; those in it are kept")
    parser.add_argument(
        "--table", action="store_true", help="print the table of the cells in the file, and run nothing"
    )
    options = parser.parse_args()
    cells = [json.loads(line) for line in options.json.read_text().splitlines()] if options.json.is_file() else []
    done = {(cell["script"], cell["exchange"], cell["mode"]) for cell in cells}
    for mode in [] if options.table else options.modes:
        for script in options.scripts:
            for exchange in options.exchanges:
                if (script, exchange, mode) in done:
                    continue
                cells.append(measure_cell(options, script, exchange, mode))
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(cells[-1]) + "\n")
                print(cells[-1], flush=True)
    print(*dict.fromkeys(cell["patch"] for cell in cells if cell["patch"]), sep="\n")
    print(format_table(cells))


if __name__ == "__main__":
    main()
