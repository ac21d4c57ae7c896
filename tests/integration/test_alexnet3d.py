"""NeuroSFL at 90 % sparsity on AlexNet3D at the paper's size: messages have the size of the live entries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

LIVE = 256_806
MASKABLE = 2_568_064


@pytest.mark.long
def test_messages_after_the_score_round_have_the_size_of_the_live_entries(tmp_path: Path) -> None:
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
    run_in_process(Study.load(file), RunFolder(tmp_path / "out"))
    lines = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    dense_rest = train[0]["scalars_total"] - MASKABLE
    assert {line["scalars_sent"] for line in train} == {LIVE + dense_rest}
    with_new_mask = [line for line in train if line["direction"] == "down" and line["round"] == 1]
    without_mask = [line for line in train if line not in with_new_mask]
    assert len(with_new_mask) == 2
    assert len(without_mask) == 6
    for line in without_mask:
        assert line["payload_bytes"] == pytest.approx(4 * (LIVE + dense_rest), rel=0.01)
        assert line["selection_bytes"] == 0
    assert all(line["selection_bytes"] <= MASKABLE / 8 for line in with_new_mask)
