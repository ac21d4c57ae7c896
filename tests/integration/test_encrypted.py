"""Real encrypted FLARE jobs: in the simulator, and with the kits of ``nvflare poc prepare --he``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ENVIRONMENT
from mortality_job import write_mortality_job
from typer.testing import CliRunner

from flare_sparse import load_model
from flare_sparse.api.local import run as run_in_process
from flare_sparse.api.sim import run as run_in_simulator
from flare_sparse.cli import app
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import Study
from flare_sparse.privacy.encryption import CLIENT_FILE, KeyContexts
from flare_sparse.results.runs.folder import RunFolder

TOLERANCE = 1e-5
"""Tolerance of the final weights: three sums, each within 2^-22, propagated by SGD with a small learning rate."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_mortality_job(tmp_path, "encrypted", 3)


def compute_largest_difference(one: Path, other: Path) -> float:
    """Return the largest difference between the entries of two models."""
    first, second = (load_model(folder).state_dict() for folder in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def check_record(out: Path, summary: dict[str, Any], plain: Path) -> None:
    """Check model, ledger and server folder of an encrypted run.

    The model equals that of the plain run, the ledger lists every ciphertext, and the server's folder holds no trained
    model in readable form. The best model may be the initial one, which is not secret.
    """
    assert compute_largest_difference(out, plain) <= TOLERANCE
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    weights = [line for line in lines if line["direction"] == "up" and line["content"] == "weights"]
    assert len(weights) == 9
    assert {line["values"] for line in weights} == {"ckks"}
    assert all(230_000 < line["payload_bytes"] < 240_000 for line in weights)  # one ciphertext each
    assert summary["traffic"]["up"]["payload_bytes"] == sum(
        line["payload_bytes"] for line in lines if line["direction"] == "up"
    )
    server_models = {path.name for path in out.rglob("app_server/flare_sparse/*model.safetensors")}
    assert "encrypted_model.safetensors" in server_models
    assert "model.safetensors" not in server_models


@pytest.mark.long
def test_encrypted_simulator_run_equals_the_plain_run_and_only_its_key_decrypts_it(
    config: Path, tmp_path: Path
) -> None:
    run_in_process(Study.load(config), RunFolder(tmp_path / "plain"))
    out = tmp_path / "sim"
    encrypted = load_config(config, ["wire.encryption=ckks"])
    summary = run_in_simulator(Study(encrypted, config), RunFolder(out)).summary
    check_record(out, summary, tmp_path / "plain")
    kept = load_model(out).state_dict()
    (out / "model.safetensors").unlink()
    refused = CliRunner().invoke(app, ["save", str(out)])
    assert refused.exit_code == 2
    key = tmp_path / "other.tenseal"
    key.write_bytes(KeyContexts.generate().client)
    assert CliRunner().invoke(app, ["save", str(out), "--context", str(key)]).exit_code == 1
    decrypted = CliRunner().invoke(app, ["save", str(out), "--context", str(out / "he" / CLIENT_FILE)])
    assert decrypted.exit_code == 0, decrypted.output
    found = load_model(out).state_dict()
    assert all(torch.equal(found[name], kept[name]) for name in kept)


@pytest.mark.long
@pytest.mark.usefixtures("poc_ports")
def test_encrypted_poc_run_uses_the_keys_of_its_kits(config: Path, tmp_path: Path) -> None:
    run_in_process(Study.load(config), RunFolder(tmp_path / "plain"))
    out = tmp_path / "poc"
    line = ["flare-sparse", "run", str(config), "--env", "poc", "--set", "wire.encryption=ckks", "--out", str(out)]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check_record(out, json.loads((out / "summary.json").read_text()), tmp_path / "plain")
    assert not (out / "he").exists()
    server = list(out.rglob("server_context.tenseal"))
    assert len(server) == 1
    assert not list(server[0].parent.glob(CLIENT_FILE))
