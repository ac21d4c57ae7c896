"""A provisioned federation: certificates, a server and three hospitals as processes of their own, mTLS, no code sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flare_sparse.cli import app
from flare_sparse.cli.rehearse import rehearse_config
from flare_sparse.config import load_config

ROOT = Path(__file__).parents[2]
SITES = ("site-1", "site-2", "site-3")
ENVIRONMENT = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def script(name: str, *arguments: str) -> str:
    """What ``poc/up`` or ``poc/down`` prints."""
    line = [str(ROOT / "poc" / name), *arguments]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that holds the startup kits of a running federation, beside ``data/SITE.csv``."""
    folder = tmp_path_factory.mktemp("federation")
    (folder / "data").mkdir()
    for number, site in enumerate(SITES, start=1):
        rows = [f"{i},{(i * number) % 7 % 2},{i % 2},{i % 3 % 2},{i % 5 % 2}" for i in range(60)]
        (folder / "data" / f"{site}.csv").write_text("stay,died,med_a,med_b,med_c\n" + "\n".join(rows) + "\n")
    try:
        script("up", str(folder / "workspace"), str(folder / "data" / "{site}.csv"))
        yield folder
    finally:
        script("down", str(folder / "workspace"))


@pytest.fixture
def config(federation: Path, tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: hospitals\nseed: 3\n"
        "method: {name: neurosfl, sparsity: 0.5, rounds: 3, training: {lr: 0.01}}\n"
        "task: {name: mortality, medications: 3, model: {name: mlp, hidden: [8]}}\n"
        "federation: {min_sites: 3, task_timeout_s: 60}\n"
        f"simulator: {{sites: 3, data: {{path: '{federation / 'data' / '{site}.csv'}'}}}}\n"
    )
    return file


def run(config: Path, federation: Path, out: Path) -> subprocess.CompletedProcess[str]:
    kit = federation / "workspace" / "sparse" / "prod_00" / "lead@coordination.org"
    line = ["flare-sparse", "run", str(config), "--env", "prod", "--kit", str(kit), "--out", str(out)]
    return subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_hospitals_end_with_the_bits_of_the_rehearsal(config: Path, federation: Path, tmp_path: Path) -> None:
    done = run(config, federation, tmp_path / "prod")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "prod" / "summary.json").read_text())
    rehearsed = rehearse_config(load_config(config), config, tmp_path / "rehearsal")
    assert summary["model_sha256"] == rehearsed["model_sha256"]
    assert summary["traffic"] == rehearsed["traffic"]
    assert summary["sites"] == list(SITES)
    exported = next((tmp_path / "prod" / "job").glob("*/job/hospitals/app"))
    assert [folder.name for folder in exported.iterdir() if folder.name == "custom"] == []


@pytest.mark.slow
def test_a_site_that_has_not_allowed_us_refuses_and_the_submitter_is_told_where_to_look(
    config: Path, federation: Path, tmp_path: Path
) -> None:
    kits = federation / "workspace" / "sparse" / "prod_00"
    resources = kits / "site-3" / "local" / "resources.json"
    kept = resources.read_bytes()
    resources.unlink()
    try:
        done = run(config, federation, tmp_path / "refused")
        result = CliRunner().invoke(app, ["site", "preflight", str(kits / "site-3")])
    finally:
        resources.write_bytes(kept)
    assert done.returncode == 1
    assert "E_JOB" in done.stderr
    assert "flare-sparse site preflight" in done.stderr
    log = "".join(file.read_text(errors="replace") for file in (kits / "site-3").glob("*/log.txt"))
    assert "is not in allow_list" in log
    verdicts = dict(line.split(":")[0].split(maxsplit=1)[::-1] for line in result.output.splitlines() if ":" in line)
    assert verdicts["allow-list"] == "FAIL"
    assert verdicts["server"] == "PASS"
