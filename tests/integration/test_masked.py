"""A real FLARE job with masked sums in the simulator; test_deployed.py has one with a federation's certificates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from egress import assert_logs_equal_ledger
from mortality_job import write_mortality_job
from safetensors.torch import load_file

from flare_sparse.api.local import run as run_in_process
from flare_sparse.api.sim import run as run_in_simulator
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder


@pytest.mark.long
def test_simulator_run_ends_with_the_bits_of_the_local_one(tmp_path: Path) -> None:
    config = write_mortality_job(tmp_path, "masked", 2, wire={"aggregation": "masked"})
    run_in_process(Study.load(config), RunFolder(tmp_path / "local"))
    out = tmp_path / "sim"
    run_in_simulator(Study.load(config), RunFolder(out))
    first, second = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "local"))
    assert first.keys() == second.keys()
    assert all(bool((first[name] == second[name]).all()) for name in second)
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    values = [line for line in lines if line["direction"] == "up" and line["scalars_sent"]]
    assert {line["values"] for line in values} == {"masked"}
    # Three sites: scores, then two rounds of weights.
    assert [line["content"] for line in values].count("scores") == 3
    assert [line["content"] for line in values].count("weights") == 6
    assert_logs_equal_ledger(out)
