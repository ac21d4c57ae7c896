"""A provisioned federation: certificates, a server and three hospitals as processes of their own, mTLS, no code sent."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from flare_sparse.assemble import assemble, build_rules, open_site
from flare_sparse.cli import app
from flare_sparse.cli.local import rehearse_config
from flare_sparse.config import build_task, import_task_class, load_config
from flare_sparse.flare.launch.simulator import JobFailed
from flare_sparse.flare.launch.submission import run_deployed
from flare_sparse.flare.payload import TASK
from flare_sparse.flare.recipe import SparseRecipe
from flare_sparse.flare.site.byoc import AUTHORIZATION, revoke_code_right
from flare_sparse.local.run import run_locally
from flare_sparse.params import compute_digest
from flare_sparse.task import SiteData

ROOT = Path(__file__).parents[2]
SITES = ("site-1", "site-2", "site-3")
FEDAVG = "method={name: fedavg, rounds: 2, training: {lr: 0.01}}"
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


@pytest.fixture
def user_task(federation: Path, tmp_path: Path) -> Path:
    """A configuration whose task nobody has installed: it travels as code."""
    (tmp_path / "own_task.py").write_text((Path(__file__).parent / "own_task.py").read_text())
    file = tmp_path / "own.yaml"
    file.write_text(
        "name: own\nseed: 3\n"
        "method: {name: neurosfl, sparsity: 0.5, rounds: 2, training: {lr: 0.01}}\n"
        "task: {class: own_task.SumTask, width: 8}\n"
        "federation: {min_sites: 3, task_timeout_s: 60}\n"
        f"simulator: {{sites: 3, data: {{path: '{federation / CANARY / '{site}.csv'}'}}}}\n"
    )
    return file


def run(config: Path, federation: Path, out: Path) -> subprocess.CompletedProcess[str]:
    kit = federation / "workspace" / "sparse" / "prod_00" / "lead@coordination.org"
    return command("run", str(config), "--env", "prod", "--kit", str(kit), "--out", str(out))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = ["flare-sparse", *arguments]
    return subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)


def fingerprint(model: Path) -> str:
    """sha256 of names and values; the file's own has the order of its metadata in it, which is not fixed."""
    tensors = load_file(model)
    return hashlib.sha256(b"".join(name.encode() + tensors[name].tobytes() for name in sorted(tensors))).hexdigest()


def nvflare_job(kit: Path, *arguments: str) -> dict[str, Any]:
    """What a ``nvflare job`` command says, with an admin's kit."""
    line = ["nvflare", "--format", "json", "job", *arguments, "--startup-kit", str(kit)]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["data"]
    return said


@contextmanager
def nobody_allows(federation: Path) -> Iterator[None]:
    """FLARE's default ``resources.json`` everywhere: no allow-list of ours, no ``SitePlanAuthorizer``."""
    files = list((federation / "workspace" / "sparse" / "prod_00").glob("*/local/resources.json"))
    assert len(files) == 4
    kept = {file: file.read_bytes() for file in files}
    for file in files:
        file.unlink()
    try:
        yield
    finally:
        for file, content in kept.items():
            file.write_bytes(content)


def restart(kit: Path) -> None:
    """Stop a site as its ``stop_fl.sh`` does, and start it again."""
    (kit / "shutdown.fl").touch()
    for _ in range(60):
        if subprocess.run(["pgrep", "-f", "--", f"-m {kit} "], capture_output=True, check=False).returncode:
            break
        time.sleep(1)
    else:
        raise TimeoutError(f"{kit} does not stop")
    with (kit / "process.log").open("a") as log:
        subprocess.run([kit / "startup" / "start.sh"], cwd=kit, env=ENVIRONMENT, stdout=log, stderr=log, check=True)


def held_by_the_server(federation: Path) -> list[Path]:
    """All files that the server has: its kit with logs and job folders, and its job store."""
    workspace = federation / "workspace"
    places = [workspace / "sparse" / "prod_00" / "localhost", workspace / "store"]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert any(path.name == "log.txt" for path in files)
    return files


def shown_to_the_server(federation: Path) -> list[str]:
    """Files with the canary among all that the server holds."""
    return [str(path) for path in held_by_the_server(federation) if CANARY.encode() in path.read_bytes()]


def rehearsed_without(file: Path, absent: str) -> str:
    """Digest of the model of a FedAvg run of the other sites alone."""
    config = load_config(file, [FEDAVG])
    assembly = assemble(config, build_task(config, import_task_class(config.task.name, file.parent)))
    data = {name: SiteData(name, file.parent) for name in SITES if name != absent}
    sites = {name: open_site(assembly, where) for name, where in data.items()}
    outcome, _ = run_locally(
        assembly.method, assembly.weights, sites, assembly.task.metric, run=assembly.run_id, rules=build_rules(config)
    )
    return compute_digest(outcome.weights)


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


@pytest.mark.long
def test_a_job_that_brings_its_code_needs_no_allow_list_and_ends_with_the_bits_of_the_rehearsal(
    user_task: Path, federation: Path, tmp_path: Path
) -> None:
    with nobody_allows(federation):
        done = run(user_task, federation, tmp_path / "prod")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "prod" / "summary.json").read_text())
    rehearsed = rehearse_config(load_config(user_task), user_task, tmp_path / "rehearsal")
    assert summary["model_sha256"] == rehearsed["model_sha256"]
    assert list((tmp_path / "prod" / "job").rglob("custom/own_task.py"))


@pytest.mark.long
def test_a_site_that_takes_no_code_refuses_it(user_task: Path, federation: Path, tmp_path: Path) -> None:
    site = federation / "workspace" / "sparse" / "prod_00" / "site-3"
    assert revoke_code_right(site) == ["project_admin", "lead"]
    try:
        restart(site)  # FLARE reads it when a site starts
        done = run(user_task, federation, tmp_path / "refused")
    finally:
        (site / "local" / AUTHORIZATION).unlink()
        restart(site)
    assert done.returncode == 1
    assert "FAILED_TO_RUN" in done.stderr
    assert "site-3: NVFLARE_ERROR: BYOC not permitted" in " ".join(done.stderr.split())


@pytest.fixture
def overwriting(user_task: Path, monkeypatch: pytest.MonkeyPatch) -> SparseRecipe:
    """FedAvg with a filter of the job's own that writes 777 over the answers of site-2."""
    folder = user_task.parent
    (folder / "hostile_site.py").write_text((Path(__file__).parent / "hostile_site.py").read_text())
    monkeypatch.syspath_prepend(str(folder))
    config = load_config(user_task, [FEDAVG, "federation={min_sites: 2, quarantine_after: 0, task_timeout_s: 60}"])
    recipe = SparseRecipe(config, packaging="byoc", modules=(folder / "own_task.py", folder / "hostile_site.py"))
    recipe.add_client_output_filter(importlib.import_module("hostile_site").Overwriter("site-2"), tasks=[TASK])
    return recipe


@pytest.mark.long
def test_what_a_filter_of_the_job_writes_over_an_answer_never_leaves_the_hospital(
    overwriting: SparseRecipe, user_task: Path, federation: Path, tmp_path: Path
) -> None:
    """Only the gate is in its way here: code may travel, and the authorizer is gone with ``resources.json``."""
    kits, out = federation / "workspace" / "sparse" / "prod_00", tmp_path / "prod"
    with nobody_allows(federation):
        summary = run_deployed(overwriting, kits / "lead@coordination.org", out, timeout_s=200)
    *training, _ = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [line["rejected"] for line in training] == [{"site-2": "E_POLICY"}] * 2
    said = "".join(file.read_text() for file in (kits / "site-2").glob("*/site_error.txt"))
    assert "a filter of the job changed it" in said
    assert summary["model_sha256"] == rehearsed_without(user_task, "site-2")
    written = np.full(4, 777, "<f4").tobytes()
    assert not [path for path in held_by_the_server(federation) if written in path.read_bytes()]


@pytest.mark.long
def test_a_job_with_a_filter_of_its_own_is_refused_where_the_site_looks_at_plans(
    overwriting: SparseRecipe, federation: Path, tmp_path: Path
) -> None:
    kits = federation / "workspace" / "sparse" / "prod_00"
    with pytest.raises(JobFailed):
        run_deployed(overwriting, kits / "lead@coordination.org", tmp_path / "refused", timeout_s=200)
    log = "".join(file.read_text(errors="replace") for file in (kits / "site-2").glob("*/log.txt"))
    assert "hostile_site.Overwriter' is not of flare_sparse; this site runs no other" in log


@pytest.mark.long
def test_one_configuration_in_three_ways_ends_in_one_model(config: Path, federation: Path, tmp_path: Path) -> None:
    """Simulator; POC; and an exported folder submitted and fetched by FLARE's own commands. No code travels."""
    for env in ("sim", "poc"):
        done = command("run", str(config), "--env", env, "--out", str(tmp_path / env))
        assert done.returncode == 0, done.stdout + done.stderr
    done = command("export", str(config), "--out", str(tmp_path / "jobs"))
    assert done.returncode == 0, done.stdout + done.stderr
    kit = federation / "workspace" / "sparse" / "prod_00" / "lead@coordination.org"
    job = str(nvflare_job(kit, "submit", "-j", str(tmp_path / "jobs" / "hospitals"))["job_id"])
    nvflare_job(kit, "wait", job, "--timeout", "200")
    found = nvflare_job(kit, "download", job, "-o", str(tmp_path / "prod"))["artifacts"]
    assert {"global_model", "metrics_summary", "round_metrics"} <= set(found)
    models = [Path(found["global_model"]), *(tmp_path / env / "model.safetensors" for env in ("sim", "poc"))]
    assert len({fingerprint(file) for file in models}) == 1


@pytest.mark.long
def test_poc_takes_a_task_of_the_users_own_and_ends_with_the_bits_of_the_rehearsal(
    user_task: Path, tmp_path: Path
) -> None:
    """FLARE's own proof of concept; it needs the ports 8002 and 8003."""
    done = command("run", str(user_task), "--env", "poc", "--out", str(tmp_path / "poc"))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "poc" / "summary.json").read_text())
    rehearsed = rehearse_config(load_config(user_task), user_task, tmp_path / "rehearsal")
    assert summary["model_sha256"] == rehearsed["model_sha256"]
    assert summary["traffic"] == rehearsed["traffic"]


@pytest.mark.long
def test_the_page_of_poc_works_as_it_stands_and_the_console_takes_a_folder_of_jobs(tmp_path: Path) -> None:
    """The shell commands of docs/poc.md, by hand; then FLARE's admin console. It needs the ports 8002 and 8003."""
    commands = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "poc.md").read_text(), flags=re.DOTALL)[1]
    assert "nvflare poc prepare" in commands
    (tmp_path / "app_configs").symlink_to(ROOT / "app_configs")
    workspace = tmp_path / "poc-workspace"
    admin = workspace / "example_project" / "prod_00" / "admin@nvidia.com"
    # nvflare notes its last federation in the user's home, and finds it by the variable.
    environment = {**ENVIRONMENT, "HOME": str(tmp_path), "NVFLARE_POC_WORKSPACE": str(workspace)}

    def shell(line: str, typed: str = "") -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=tmp_path, env=environment, input=typed, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    try:
        shell(commands)
        assert shell(f"diff -r my-jobs/fedavg_brain_age {ROOT / 'jobs' / 'fedavg_brain_age'}") == ""
        console = f"{admin}/startup/fl_admin.sh"
        said = shell(console, typed=f"submit_job {tmp_path}/my-jobs/fedavg_brain_age\nlist_jobs\nbye\n")
        submitted = re.search(r"Submitted job: (\S+)", said)
        assert submitted, said
        assert nvflare_job(admin, "wait", submitted[1], "--timeout", "200")["status"] == "FINISHED:COMPLETED"
        found = nvflare_job(admin, "download", submitted[1], "-o", str(tmp_path / "fetched"))["artifacts"]
    finally:
        shell("nvflare poc stop")
    config = load_config(
        ROOT / "app_configs" / "fedavg_brain_age.yaml",
        [f"simulator={{sites: 2, data: {{path: '{tmp_path / 'data' / '{site}'}'}}}}"],
    )
    rehearse_config(config, tmp_path / "job.yaml", tmp_path / "rehearsal")
    assert fingerprint(Path(found["global_model"])) == fingerprint(tmp_path / "rehearsal" / "model.safetensors")


@pytest.mark.long
def test_what_went_down_comes_up_again_as_it_was(config: Path, federation: Path, tmp_path: Path) -> None:
    kits = federation / "workspace" / "sparse" / "prod_00"
    files = [*kits.glob("*/local/flare_sparse*.yaml"), *kits.glob("*/startup/*.crt"), *kits.glob("*/local/*.json")]
    before = {file: file.read_bytes() for file in files}
    assert len(before) >= 3 + 3 + 5
    line = [str(ROOT / "poc" / "up"), str(federation / "workspace")]
    twice = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert (twice.returncode, "it is up already" in twice.stderr) == (2, True)
    script("down", str(federation / "workspace"))
    with socket.create_server(("localhost", 8102)):
        taken = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
        assert (taken.returncode, "port 8102 is in use" in taken.stderr) == (2, True)
    assert "the startup kits of last time" in script("up", str(federation / "workspace"))
    assert {file: file.read_bytes() for file in files} == before
    done = run(config, federation, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
