"""A provisioned federation with two hubs of two sites: mTLS, separate processes, the bits of the run without hubs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ENVIRONMENT

from flare_sparse.cli.local import run_config_locally
from flare_sparse.config import load_config

ROOT = Path(__file__).parents[2]
MASKED = ROOT / "app_configs" / "masked_brain_age.yaml"
HUBS = (
    "federation.hubs={hub-1: {sites: [site-1, site-2], fetch_s: 300}, "
    "hub-2: {sites: [site-3, site-4], min_sites: 2, fetch_s: 300}}"
)
SMALL = ("method.rounds=2", "method.training.epochs=1", "task.downsample=4", "federation.task_timeout_s=300")


def run_command(*line: str, timeout_s: float = 900) -> str:
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a running federation; it needs the ports 8102, 8103, 8111 and 8112."""
    folder = tmp_path_factory.mktemp("tree") / "workspace"
    try:
        run_command(str(ROOT / "poc" / "up"), "--tree", str(folder))
        yield folder
    finally:
        run_command(str(ROOT / "poc" / "down"), str(folder))


@pytest.mark.long
@pytest.mark.parametrize("aggregation", ["masked", "fixed_point"])
def test_provisioned_tree_ends_in_the_bits_of_the_flat_local_run(
    workspace: Path, tmp_path: Path, aggregation: str
) -> None:
    data = f"simulator.data={{path: '{workspace / 'data' / '{site}'}'}}"
    flat = [*SMALL, data, f"wire.aggregation={aggregation}"]
    run_config_locally(load_config(MASKED, flat), MASKED, tmp_path / "flat")
    kit, out = workspace / "sparse" / "prod_00" / "lead@coordination.org", tmp_path / "tree"
    settings = [word for setting in [*flat, HUBS] for word in ("--set", setting)]
    run_command("flare-sparse", "run", str(MASKED), "--env", "prod", "--kit", str(kit), "--out", str(out), *settings)
    of_tree, of_flat = (json.loads((folder / "summary.json").read_text()) for folder in (out, tmp_path / "flat"))
    assert of_tree["model_sha256"] == of_flat["model_sha256"]
    assert set(of_tree["links"]) == {"server", "hub-1", "hub-2"}
    for line in (out / "rounds.jsonl").read_text().splitlines():
        assert json.loads(line)["sites_contributed"] == ["site-1", "site-2", "site-3", "site-4"]
    # Values reach the server as one sum of each hub: as many messages with values as hubs, in every step.
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    sums = [
        line
        for line in lines
        if line["direction"] == "up" and line["scalars_sent"] and line["site"] in of_tree["links"]
    ]
    assert [line["site"] for line in sums].count("hub-1") == [line["site"] for line in sums].count("hub-2") == 3
