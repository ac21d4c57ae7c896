"""A real FLARE job whose sites differ in their capabilities: version, upload cap, rank budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flare_sparse.api.local import run as run_in_process
from flare_sparse.api.start import launch
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.wire.envelope import VERSION

HERE = Path(__file__).parent


def configuration(folder: Path) -> Path:
    (folder / "capable_task.py").write_text((HERE / "capable_task.py").read_text())
    for number in range(1, 5):
        (folder / f"site-{number}").mkdir()
    content = {
        "name": "capable",
        "seed": 3,
        "method": {"name": "lora_a2", "rank": 3, "rounds": 3, "training": {"epochs": 1, "lr": 0.01}},
        "task": {"class": "capable_task.CapableTask"},
        "federation": {"task_timeout_s": 600, "min_sites": 2},
        "simulator": {
            "sites": 4,
            "data": {"path": str(folder / "{site}")},
            "site_settings": {"site-1": {"lora_a2": {"rank": 1}}},
        },
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_job_continues_with_the_sites_whose_capabilities_suffice(tmp_path: Path) -> None:
    """It ends with the bits of a local run of those two sites, of which one has a rank budget of its own."""
    (tmp_path / "job").mkdir()
    file = configuration(tmp_path / "job")
    flare = launch("sim", Study.load(file), RunFolder(tmp_path / "flare")).summary
    local = run_in_process(Study.load(file, ["simulator.sites=2"]), RunFolder(tmp_path / "local")).summary
    assert flare["model_sha256"] == local["model_sha256"]
    *rounds, last = jsonl(tmp_path / "flare" / "rounds.jsonl")
    assert all(line["sites_contributed"] == ["site-1", "site-2"] and line["rejected"] == {} for line in rounds)
    assert last["sites_contributed"] == ["site-1", "site-2", "site-4"]
    for line in rounds:
        assert line["excluded"]["site-3"].startswith("E_VERSION")
        assert (
            f"flare-sparse 0.0.9 (wire format {VERSION}), the server runs flare-sparse 0.1.0"
            in line["excluded"]["site-3"]
        )
        assert line["excluded"]["site-4"].startswith("E_CAP")
        assert "at most 200 bytes" in line["excluded"]["site-4"]
    log = (tmp_path / "flare" / "flare.log").read_text()
    assert log.count("E_VERSION: site 'site-3' is excluded") == 1
    assert log.count("E_CAP: site 'site-4' is excluded") == 1
