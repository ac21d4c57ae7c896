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
CANARY = "CANARY-7f3a"
"""Stands in paths and rows of the sites' data; nothing that the server holds may show it."""
ENVIRONMENT = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def script(name: str, *arguments: str) -> str:
    """What ``poc/up`` or ``poc/down`` prints."""
    line = [str(ROOT / "poc" / name), *arguments]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that holds the startup kits of a running federation, beside the sites' data."""
    folder = tmp_path_factory.mktemp("federation")
    (folder / CANARY).mkdir()
    for number, site in enumerate(SITES, start=1):
        rows = [f"{CANARY}-{i},{(i * number) % 7 % 2},{i % 2},{i % 3 % 2},{i % 5 % 2}" for i in range(60)]
        (folder / CANARY / f"{site}.csv").write_text("stay,died,med_a,med_b,med_c\n" + "\n".join(rows) + "\n")
    try:
        script("up", str(folder / "workspace"), str(folder / CANARY / "{site}.csv"))
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
        f"simulator: {{sites: 3, data: {{path: '{federation / CANARY / '{site}.csv'}'}}}}\n"
    )
    return file


def run(config: Path, federation: Path, out: Path) -> subprocess.CompletedProcess[str]:
    kit = federation / "workspace" / "sparse" / "prod_00" / "lead@coordination.org"
    line = ["flare-sparse", "run", str(config), "--env", "prod", "--kit", str(kit), "--out", str(out)]
    return subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)


def shown_to_the_server(federation: Path) -> list[str]:
    """Files with the canary among all that the server holds: its kit with logs and job folders, and its job store."""
    workspace = federation / "workspace"
    held = [workspace / "sparse" / "prod_00" / "localhost", workspace / "store"]
    files = [path for place in held for path in place.rglob("*") if path.is_file()]
    assert any(path.name == "log.txt" for path in files)
    return [str(path) for path in files if CANARY.encode() in path.read_bytes()]


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
    assert shown_to_the_server(federation) == []


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


@pytest.mark.slow
def test_a_job_that_fails_at_a_site_shows_the_server_a_code_and_no_subject(
    config: Path, federation: Path, tmp_path: Path
) -> None:
    table = federation / CANARY / "site-2.csv"
    kept = table.read_text()
    table.write_text(kept.replace(f"{CANARY}-7,", f"{CANARY}-7,not a number and"))
    try:
        config.write_text(config.read_text().replace("seed: 3", "seed: 4").replace("task_timeout_s: 60", "retries: 0"))
        done = run(config, federation, tmp_path / "failed")
    finally:
        table.write_text(kept)
    assert done.returncode == 1
    assert "E_DATA" in done.stderr
    assert shown_to_the_server(federation) == []
    site = federation / "workspace" / "sparse" / "prod_00" / "site-2"
    reports = [path.read_text() for path in site.glob("*/site_error.txt")]
    assert any(CANARY in report for report in reports), "the site itself is told which subject it is"
