"""A real FLARE job of MetaGater on a gated network, then its model at a new site."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from flare_sparse.api.local import run as run_in_process
from flare_sparse.api.start import launch
from flare_sparse.cli import app
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder


@pytest.mark.long
def test_gated_simulator_run_equals_a_local_run_and_adapts_to_a_new_site(
    tmp_path: Path,
) -> None:
    """Messages of a FLARE job shrink with the zero groups, and the model adapts from the result folder."""
    for i in (1, 2, 3, 9):
        rng = np.random.default_rng(i)
        labels = np.arange(30) % 2
        images = rng.integers(0, 90, (30, 8, 8)) + 120 * labels[:, None, None]
        np.savez(tmp_path / f"site-{i}.npz", train_images=images.astype(np.uint8), train_labels=labels)
    model = {"name": "image_cnn", "channels": [4, 6], "gates": {"layers": ["1"], "hidden": 4}}
    training = {"optimizer": "sgd", "lr": 0.5, "batch_size": 32}
    gater = {"lasso": 0.08, "closed_channels": "permanent", "targets": ["site-3"]}
    content = {
        "name": "gated",
        "seed": 5,
        "method": {"name": "metagater", "rounds": 8, **gater, "training": training},
        "task": {"name": "image_classification", "image": [1, 8, 8], "model": model},
        "federation": {"task_timeout_s": 600},
        "simulator": {"sites": 3, "data": {"path": str(tmp_path / "{site}.npz")}},
    }
    file = tmp_path / "gated.yaml"
    file.write_text(yaml.safe_dump(content))
    simulated = launch("sim", Study.load(file), RunFolder(tmp_path / "sim")).summary
    local = run_in_process(Study.load(file), RunFolder(tmp_path / "local")).summary
    assert simulated["model_sha256"] == local["model_sha256"]
    assert simulated["final"] == local["final"]
    assert list(simulated["final"]["sites"]) == ["site-3"]
    lines = [json.loads(line) for line in (tmp_path / "sim" / "ledger.jsonl").read_text().splitlines()]
    sent = [line["scalars_sent"] for line in lines if line["kind"] == "train"]
    assert sent[-1] < sent[0]
    arguments = ["evaluate", str(tmp_path / "sim"), "--data", str(tmp_path / "site-9.npz"), "--model", "adapted"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "sim" / "adapted" / "site-9" / "model.safetensors").is_file()
