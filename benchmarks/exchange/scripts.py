r"""FLARE's example scripts with the methods of this package, beside the same script under FLARE's ``FedAvgRecipe``.

    python benchmarks/exchange/scripts.py --examples ../shared/flare_examples --data ../shared/data \
        --scripts hello-pt --exchanges fedavg_recipe fedsparsify --json cells.jsonl
    python benchmarks/exchange/scripts.py --json cells.jsonl --docs

The examples are those of NVIDIA/NVFlare, read from ``--examples`` and never changed there. What the benchmark changes
in its own copy, paths of the data, it shows as a patch, and refuses one of more than six lines. A cell of FLARE's
recipe that fails keeps the first error of its sites. Accuracy is that of the final model on the test images, or mean
Dice on the test volumes; *measured* bytes are those of the loopback interface in a network namespace of the job's own
(``unshare``, Linux); *ledger* bytes are the lengths of the messages. A cell that is in the file is not run again.
``hello-lightning`` needs ``pip install pytorch-lightning``, ``monai-spleen`` ``pip install pytorch-ignite``;
``stand_in/`` takes the place of torchvision, which has no build for torch without CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from examples import (
    COMPONENTS,
    EXAMPLES,
    EXCHANGES,
    METHODS,
    MODES,
    RECIPE,
    Example,
    count_lines,
    list_cells,
    write_example,
)
from scripts_report import format_table, write_page

FOLDER = Path(__file__).parent
SITES = 2


def run_recipe(model: str, args: str, rounds: int, exchange: str, mode: str) -> None:
    """Run FLARE's recipe in the working folder, with components of this package or without."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    from flare_sparse.components import FromCSR, KeepMask, MagnitudePruning, ToCSR, add_components

    has_components = exchange == COMPONENTS
    recipe = FedAvgRecipe(
        name="job",
        min_clients=SITES,
        num_rounds=rounds,
        model={"class_path": model, "args": {}},
        train_script="client.py",
        train_args=args,
        launch_external_process=mode == MODES[1],
        aggregator=MagnitudePruning(sparsity=0.9, min_sites=SITES) if has_components else None,
    )
    if has_components:
        add_components(recipe, client_output=[KeepMask(), ToCSR()], server_input=[FromCSR()])
    recipe.add_server_config({"server": {"task_request_interval": 0.1}})
    recipe.execute(SimEnv(num_clients=SITES, workspace_root="workspace", log_config="concise"))


def write_configuration(example: Example, data: Path, exchange: str, *, external: bool) -> None:
    """Write the job of a method to ``job.yaml``."""
    config = {
        "name": "job",
        "seed": 1,
        "method": {"name": exchange, "rounds": example.rounds, **METHODS[exchange]},
        "task": {
            "script": "client.py",
            "model": example.model,
            "args": example.args.format(data=data),
            **({"launch": "python"} if external else {}),
        },
        "simulator": {"sites": SITES, "data": {"path": ".", "partition": {"kind": "shared"}}},
    }
    Path("job.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def build_path() -> str:
    """Return the value of ``PYTHONPATH`` with the example in the working folder and the stand-in for torchvision."""
    return os.pathsep.join([str(Path.cwd()), str(FOLDER / "stand_in"), os.environ.get("PYTHONPATH", "")])


def run_cell(example: Example, data: Path, exchange: str, *, external: bool) -> dict[str, Any]:
    """Run one job in the working folder; return its bytes and seconds, or why FLARE's own recipe failed.

    Raises:
        SystemExit: a method of this package ended without a model; the text is the end of the job's output.
    """
    job = [example.model, example.args.format(data=data), str(example.rounds), exchange, MODES[external]]
    command = [sys.executable, str(FOLDER / "scripts.py"), "--job", *job]
    if exchange in METHODS:
        write_configuration(example, data, exchange, external=external)
        main_code = "from flare_sparse.cli import app; app()"
        command = [sys.executable, "-c", main_code, "run", "job.yaml", "--out", "out"]
    started = time.monotonic()
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", 'ip link set lo up; "$@"; grep "lo:" /proc/net/dev > bytes', "sh", *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": build_path()},
    )
    seconds = time.monotonic() - started
    if find_model() is None:
        if exchange == RECIPE and (reason := find_failure()):
            return {"failure": reason}
        raise SystemExit(f"{exchange}: no model\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return {
        "measured": int(Path("bytes").read_text().split()[1]),
        "ledger": read_ledger(),
        "seconds": round(seconds),
    }


def find_failure() -> str:
    """Return the first error in the sites' logs of FLARE's recipe in the working folder; empty when they hold none."""
    logs = [file.read_text() for file in sorted(Path("workspace/job").glob("site-*/error_log.txt"))]
    return next(
        (line.split(" - ERROR - ", 1)[1] for log in logs for line in log.splitlines() if " - ERROR - " in line), ""
    )


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


def compute_accuracy(example: Example, data: Path) -> float:
    """Return the accuracy of the final model in the working folder: on images, or mean Dice on volumes."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "score_model.py"), example.model, str(find_model()), str(data)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": build_path()},
    )
    return float(done.stdout.split()[-1])


def measure_cell(options: argparse.Namespace, script: str, exchange: str, mode: str) -> dict[str, Any]:
    """Run one job in a folder of its own, and return the cell of the table."""
    here, source, sets = Path.cwd(), (options.examples / script).resolve(), options.data.resolve()
    with tempfile.TemporaryDirectory() as folder:
        data, example = Path(folder) / "data", EXAMPLES[script]
        example.write_data(sets, data)
        patch = write_example(source, example, Path(folder), data)
        os.chdir(folder)
        try:
            figures = run_cell(example, data, exchange, external=mode == MODES[1])
            if "failure" not in figures:
                figures["accuracy"] = compute_accuracy(example, data)
        finally:
            os.chdir(here)
    patch = patch.replace(str(data), "DATA")
    names = {"script": script, "exchange": exchange, "mode": mode, "rounds": example.rounds}
    return {**names, **figures, "changed": count_lines(patch.splitlines()), "patch": patch}


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        run_recipe(sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:7])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=Path, default=Path("../shared/flare_examples"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--scripts", nargs="+", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--exchanges", nargs="+", default=list(EXCHANGES), choices=EXCHANGES)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--json", type=Path, required=True, help="file of the cells, a line each; those in it are kept")
    parser.add_argument("--docs", action="store_true", help="write docs/results/bytes.md from the file; run nothing")
    options = parser.parse_args()
    cells = [json.loads(line) for line in options.json.read_text().splitlines()] if options.json.is_file() else []
    if options.docs:
        write_page(cells)
        return
    done = {(cell["script"], cell["exchange"], cell["mode"]) for cell in cells}
    for script, exchange, mode in list_cells():
        chosen = script in options.scripts and exchange in options.exchanges and mode in options.modes
        if chosen and (script, exchange, mode) not in done:
            cells.append(measure_cell(options, script, exchange, mode))
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(cells[-1]) + "\n")
            print(cells[-1], flush=True)
    print(*(format_table(cells, script) for script in options.scripts), sep="\n\n")


if __name__ == "__main__":
    main()
