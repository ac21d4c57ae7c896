"""The jobs of the matrix, and how a user submits, follows and collects them."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import NoConnection

from flare_sparse.config.loading import load_config
from flare_sparse.flare.controller import RESULTS
from flare_sparse.flare.recipe import export_job

from .federation import SERVER, Federation, Unexpected, wait_for

METHODS = {
    "neurosfl": ("{name: neurosfl, rounds: 4, sparsity: 0.5, training: {lr: 0.01}}", "float32"),
    "topk_ef": ("{name: topk_ef, rounds: 4, fraction: 0.1, down: 0.2, decay: 0.8, training: {lr: 0.01}}", "bfloat16"),
    "scbf": ("{name: scbf, rounds: 4, rate: 0.3, training: {optimizer: sgd, lr: 0.01}}", "float32"),
    "metagater": ("{name: metagater, rounds: 4, lasso: 0, training: {optimizer: sgd, lr: 0.05}}", "float32"),
}
"""Settings and number format by method: each keeps state at the sites or sends patches over a base."""
MASKED = {"neurosfl_masked": ("{name: neurosfl, rounds: 4, sparsity: 0.5, training: {lr: 0.01}}", "float32")}
"""The same for a job whose values travel in sums that the server cannot take apart."""
PLAIN = {"fedavg": ("{name: fedavg, rounds: 4, training: {lr: 0.01}}", "float32")}
"""The same for a method without such state."""
STATEFUL = ("topk_ef",)
"""Methods that end with another model if a site loses what it adds to its next update."""
WAITING = "min_sites: 3, task_timeout_s: 120"
LEAVING_OUT = "min_sites: 2, task_timeout_s: 10, quarantine_after: 0"
TIMEOUT_S = 240.0
LOST = ("the next update starts without it", "starts from zero")
"""What a site's log says when a residual or a method's memory is lost."""


@dataclass(frozen=True)
class Result:
    """Record of a job that ended with a model.

    Attributes:
        digest: sha256 of the final model.
        rounds: lines of ``rounds.jsonl``.
        messages: round, site, direction, kind and bytes of each message.
        full_models: number of requests with every entry of the model, by site.
    """

    digest: str
    rounds: list[dict[str, Any]]
    messages: list[list[Any]]
    full_models: dict[str, int]

    @classmethod
    def read(cls, folder: Path) -> Result:
        """Read the record in a folder."""
        summary = json.loads((folder / "summary.json").read_text())
        rounds, ledger = (
            [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            for name in ("rounds", "ledger")
        )
        full: dict[str, int] = {}
        for line in ledger:
            if line["direction"] == "down" and line["scalars_sent"] == line["scalars_total"]:
                full[line["site"]] = full.get(line["site"], 0) + 1
        messages = [[line[key] for key in ("round", "site", "direction", "kind", "payload_bytes")] for line in ledger]
        return cls(summary["model_sha256"], rounds, messages, full)

    def list_messages(self, above: int) -> list[list[Any]]:
        """Return the messages of the rounds above a number, sorted: sites reply in any order."""
        return sorted(message for message in self.messages if message[0] > above)

    def is_balanced(self) -> bool:
        """Return whether every site asked is in exactly one of the four columns of its round."""
        return bool(self.rounds) and all(
            sorted([*line["sites_contributed"], *line["rejected"], *line["abstained"], *line["timed_out"]])
            == line["sites_asked"]
            for line in self.rounds
        )


def write_job(folder: Path, method: str, rules: str = WAITING, rounds: int = 4) -> Path:
    """Write the configuration of a method's job and its exported folder; return the folder."""
    settings, values = (METHODS | MASKED | PLAIN)[method]
    aggregation = ", aggregation: masked" if method in MASKED else ""
    name = f"{method}_{'waits' if rules == WAITING else 'leaves_out'}"
    if not (folder / name).is_dir():
        config = folder / f"{name}.yaml"
        config.write_text(
            f"name: {name}\nseed: 3\nmethod: {settings.replace('rounds: 4', f'rounds: {rounds}')}\n"
            "task: {name: table, kind: binary, target: died, id: stay, "
            "features: [med_a, med_b, med_c], scaling: none, model: {name: mlp, hidden: [8]}}\n"
            f"federation: {{{rules}}}\nwire: {{values: {values}{aggregation}}}\n"
        )
        export_job(load_config(config), folder)
    return folder / name


def submit(federation: Federation, job: Path) -> str:
    """Submit an exported job without following it; return its id."""
    # FLARE signs the folder in place, so each submission has a copy.
    copy = federation.folder / "submitted" / job.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(job, copy)
    return str(federation.get_session().submit_job(str(copy)))


def follow(federation: Federation, job: str, out: Path, seconds: float = TIMEOUT_S) -> Result:
    """Wait for the end of a job and return its downloaded record.

    Raises:
        Unexpected: the job is still running, or it ended without a result.
    """
    end, status = time.monotonic() + seconds, ""
    while not status.startswith("FINISHED"):
        if time.monotonic() > end:
            raise Unexpected(f"{job} is {status} after {seconds:.0f} s")
        # On a busy machine a login may take longer than the admin client waits.
        with suppress(NoConnection):
            status = str(federation.get_session().get_job_status(job))
        time.sleep(0.5)
    wait_for(lambda: not federation.list_job_processes(), 60, "the processes of a finished job are gone", every=0.3)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    downloaded = Path(federation.get_session().download_job_result(job, str(out)))
    record = next(iter(downloaded.glob(f"**/app_server/{RESULTS}")), None)
    if record is None or not (record / "summary.json").is_file():
        raise Unexpected(f"{job} ended as {status} without a result; files: {downloaded}")
    result = Result.read(record)
    if not status.endswith("COMPLETED"):
        raise Unexpected(f"{job} ended as {status}")
    return result


def read_committed(federation: Federation, job: str) -> list[int]:
    """Return the rounds that a running job has committed, without evaluations."""
    file = federation.kits / SERVER / job / "app_server" / RESULTS / "rounds.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [line["round"] for line in map(json.loads, lines) if line["kind"] != "evaluate"]


def is_loss_reported(federation: Federation, job: str, site: str) -> bool:
    """Return whether a site's log of a job says that what it adds to its next update is lost."""
    file = federation.kits / site / job / "log.txt"
    return file.is_file() and any(words in file.read_text(errors="replace") for words in LOST)
