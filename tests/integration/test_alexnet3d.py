"""NeuroSFL at 90 % on AlexNet3D in a real FLARE job: every message weighs what the paper's sparsity promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from flare_sparse.cli.run import run_in_simulator
from flare_sparse.config import load_config

LIVE = 256_806
MASKABLE = 2_568_064


def test_bytes_of_every_message_after_the_score_round(tmp_path: Path) -> None:
    (tmp_path / "alexnet_task.py").write_text((Path(__file__).parent / "alexnet_task.py").read_text())
    for site in ("site-1", "site-2"):
        (tmp_path / site).mkdir()
    training = {"batch_size": 2, "optimizer": "sgd", "lr": 1e-3}
    file = tmp_path / "config.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "alexnet3d",
                "seed": 1,
                "method": {"name": "neurosfl", "rounds": 2, "sparsity": 0.9, "training": training},
                "task": {"class": "alexnet_task.VolumeTask"},
                "federation": {"min_sites": 2, "task_timeout_s": 300},
                "simulator": {"sites": 2, "data": {"path": str(tmp_path / "{site}")}},
            }
        )
    )
    run_in_simulator(load_config(file), file, tmp_path / "out", Console(quiet=True))
    lines = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    dense_rest = train[0]["scalars_total"] - MASKABLE
    assert {line["scalars_sent"] for line in train} == {LIVE + dense_rest}
    announcing = [line for line in train if line["direction"] == "down" and line["round"] == 1]
    others = [line for line in train if line not in announcing]
    assert len(announcing) == 2
    assert len(others) == 6
    for line in others:
        assert line["payload_bytes"] == pytest.approx(4 * (LIVE + dense_rest), rel=0.01)
        assert line["selection_bytes"] == 0
    assert all(line["selection_bytes"] <= MASKABLE / 8 for line in announcing)
