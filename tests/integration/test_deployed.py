"""A federation whose keys were made at each participant: a server, three hospitals, mTLS, no code sent."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import socket
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from commands import ENVIRONMENT
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate
from ports import find_processes_of, lock_ports
from safetensors.numpy import load_file
from typer.testing import CliRunner

from flare_sparse.api.local import run as run_in_process
from flare_sparse.cli import app
from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import build_task
from flare_sparse.config.study import Study
from flare_sparse.core.params import compute_digest
from flare_sparse.flare.launch.connection import JobFailed
from flare_sparse.flare.launch.submission import run_deployed
from flare_sparse.flare.payload import TASK
from flare_sparse.flare.recipe import SparseRecipe
from flare_sparse.flare.site.setup import AUTHORIZATION, revoke_code_right
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.rounds.endpoints.egress import find_logs, read_chain
from flare_sparse.rounds.local.run import Course, run_locally
from flare_sparse.tasks.task import SiteData

ROOT = Path(__file__).parents[2]
SITES = ("site-1", "site-2", "site-3")
FEDAVG = "method={name: fedavg, rounds: 2, training: {lr: 0.01}}"
PATIENCE_S = 240
"""How long a site may take to stop or to start: on a busy machine each of its processes takes a minute."""
CANARY = "CANARY-7f3a"
"""Text in paths and rows of the sites' data; no file of the server may contain it."""


def run_script(name: str, *arguments: str) -> str:
    """Run ``poc/up`` or ``poc/down`` and return its output."""
    line = [str(ROOT / "poc" / name), *arguments]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a running federation: its startup kits, and the data of its sites."""
    folder = tmp_path_factory.mktemp("federation")
    (folder / CANARY).mkdir()
    for number, site in enumerate(SITES, start=1):
        rows = [f"{CANARY}-{i},{(i * number) % 7 % 2},{i % 2},{i % 3 % 2},{i % 5 % 2}" for i in range(60)]
        (folder / CANARY / f"{site}.csv").write_text("stay,died,med_a,med_b,med_c\n" + "\n".join(rows) + "\n")
    with lock_ports("provisioned"):
        try:
            run_script("up", "--own-keys", str(folder / "workspace"), str(folder / CANARY / "{site}.csv"))
            yield folder
        finally:
            run_script("down", str(folder / "workspace"))


@pytest.fixture
def config(federation: Path, tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: hospitals\nseed: 3\n"
        "method: {name: neurosfl, sparsity: 0.5, rounds: 3, training: {lr: 0.01}}\n"
        "task: {name: table, kind: binary, target: died, id: stay, "
        "features: [med_a, med_b, med_c], scaling: none, model: {name: mlp, hidden: [128]}}\n"
        "federation: {min_sites: 3, task_timeout_s: 300}\n"
        f"simulator: {{sites: 3, data: {{path: '{federation / CANARY / '{site}.csv'}'}}}}\n"
    )
    return file


@pytest.fixture
def user_task(federation: Path, tmp_path: Path) -> Path:
    """A configuration of a task that is installed nowhere and therefore travels as code."""
    (tmp_path / "own_task.py").write_text((Path(__file__).parent / "own_task.py").read_text())
    file = tmp_path / "own.yaml"
    file.write_text(
        "name: own\nseed: 3\n"
        "method: {name: neurosfl, sparsity: 0.5, rounds: 2, training: {lr: 0.01}}\n"
        "task: {class: own_task.SumTask, width: 64}\n"
        "federation: {min_sites: 3, task_timeout_s: 300}\n"
        f"simulator: {{sites: 3, data: {{path: '{federation / CANARY / '{site}.csv'}'}}}}\n"
    )
    return file


def run(config: Path, federation: Path, out: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    kit = federation / "workspace" / "sparse" / "prod_00" / "lead@coordination.org"
    options = [word for setting in settings for word in ("--set", setting)]
    return command("run", str(config), "--env", "prod", "--kit", str(kit), "--out", str(out), *options)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = ["flare-sparse", *arguments]
    return subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)


def fingerprint(model: Path) -> str:
    """Return the sha256 of names and values; that of the file depends on the order of its metadata, which varies."""
    tensors = load_file(model)
    return hashlib.sha256(b"".join(name.encode() + tensors[name].tobytes() for name in sorted(tensors))).hexdigest()


def nvflare_job(kit: Path, *arguments: str, may_fail: bool = False) -> dict[str, Any]:
    """Run a ``nvflare job`` command with an admin's kit and return its JSON output."""
    line = ["nvflare", "--format", "json", "job", *arguments, "--startup-kit", str(kit)]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert may_fail or done.returncode == 0, done.stdout + done.stderr
    output: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["data"]
    return output


@contextmanager
def without_allow_lists(federation: Path) -> Iterator[None]:
    """Use FLARE's default resources everywhere: without the package's classes and ``SitePlanAuthorizer``."""
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
    """Stop a site as its ``stop_fl.sh`` does, start it again and wait until it is connected."""
    (kit / "shutdown.fl").touch()
    for _ in range(PATIENCE_S):
        found = subprocess.run(["pgrep", "-f", "--", f"-m {kit} "], capture_output=True, check=False)
        # The shell that starts the client outlives it, and refuses a second one until it has removed this file.
        if found.returncode and not (kit / "daemon_pid.fl").exists():
            break
        time.sleep(1)
    else:
        raise TimeoutError(f"{kit} does not stop")
    output = kit / "process.log"
    earlier = output.stat().st_size
    with output.open("a") as log:
        subprocess.run([kit / "startup" / "start.sh"], cwd=kit, env=ENVIRONMENT, stdout=log, stderr=log, check=True)
    # FLARE schedules a job without the sites that are not connected, so a test must not submit one before that.
    for _ in range(PATIENCE_S):
        if b"Successfully registered client" in output.read_bytes()[earlier:]:
            return
        time.sleep(1)
    raise TimeoutError(f"{kit} does not connect to the server")


def list_server_files(federation: Path) -> list[Path]:
    """Return all files of the server: its kit with logs and job folders, and its job store."""
    workspace = federation / "workspace"
    folders = [workspace / "sparse" / "prod_00" / "localhost", workspace / "store"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "log.txt" for path in files)
    return files


def read_parts(file: Path) -> list[bytes]:
    """Return the content of a file, and that of each file in an archive."""
    parts = [file.read_bytes()]
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            parts += [archive.read(name) for name in archive.namelist()]
    return parts


def count_egress(kits: Path) -> Counter[tuple[str, str, int, int]]:
    """Return the messages in the sites' egress logs by site, kind, round and bytes, without the hellos."""
    return Counter(
        (site, line["kind"], line["round"], line["bytes"])
        for site in SITES
        for folder in find_logs(kits / site).values()
        for line in read_chain(folder)[0]
        if line["run"]
    )


def list_leaks(federation: Path) -> list[str]:
    """Return the files of the server that contain the canary."""
    return [str(path) for path in list_server_files(federation) if CANARY.encode() in path.read_bytes()]


def run_locally_without(file: Path, absent: str) -> str:
    """Return the digest of the model of a local FedAvg run without one site."""
    config = load_config(file, [FEDAVG])
    assembly = assemble(config, build_task(config))
    data = {name: SiteData(name, file.parent) for name in SITES if name != absent}
    sites = {name: open_site(assembly, where) for name, where in data.items()}
    rules = config.federation.model_copy(update={"min_sites": len(sites)})
    outcome, _ = run_locally(
        assembly.method, assembly.weights, sites, assembly.task.metric, course=Course(run=assembly.run_id, rules=rules)
    )
    return compute_digest(outcome.weights)


@pytest.mark.long
def test_masked_job_ends_with_the_bits_of_a_local_run_and_leaks_nothing(
    config: Path, federation: Path, tmp_path: Path
) -> None:
    kits = federation / "workspace" / "sparse" / "prod_00"
    before = count_egress(kits)
    done = run(config, federation, tmp_path / "prod", "wire.aggregation=masked")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "prod" / "summary.json").read_text())
    masked = Study.load(config, ["wire.aggregation=masked"])
    local = run_in_process(masked, RunFolder(tmp_path / "local")).summary
    assert summary["model_sha256"] == local["model_sha256"]
    assert summary["sites"] == list(SITES)
    lines = [json.loads(line) for line in (tmp_path / "prod" / "ledger.jsonl").read_text().splitlines()]
    up = [line for line in lines if line["direction"] == "up"]
    assert {line["values"] for line in up if line["scalars_sent"]} == {"masked"}
    sent = Counter((line["site"], line["kind"], line["round"], line["payload_bytes"]) for line in up)
    assert count_egress(kits) - before == sent
    # Polling a job that is still starting would leave tracebacks in the server's log.
    server = federation / "workspace" / "sparse" / "prod_00" / "localhost"
    logs = "".join(file.read_text(errors="replace") for file in server.glob("*.log"))
    assert "Server runner starting" in logs
    assert "get_widget" not in logs
    exported = next((tmp_path / "prod" / "job").glob("*/job/hospitals/app"))
    assert [folder.name for folder in exported.iterdir() if folder.name == "custom"] == []
    assert list_leaks(federation) == []


@pytest.mark.long
def test_no_private_key_is_outside_its_own_kit(federation: Path) -> None:
    workspace = federation / "workspace"
    kits = workspace / "sparse" / "prod_00"
    certificates = [*kits.glob("*/startup/client.crt"), *kits.glob("*/startup/server.crt")]
    assert len(certificates) == 1 + len(SITES) + 1
    homes = [workspace, Path.home() / ".nvflare"]
    files = [path for folder in homes for path in folder.rglob("*") if path.is_file()]
    contents = [(path, part) for path in files for part in read_parts(path)]
    own_keys = [certificate.with_suffix(".key") for certificate in certificates]
    for own in [*own_keys, workspace / "centre" / "rootCA.key"]:
        body = "".join(own.read_text().splitlines()[1:-1]).encode()
        # A copy in other lines, or in an archive, is found, too.
        assert [path for path, part in contents if body in part.replace(b"\n", b"")] == [own]
        assert own.stat().st_mode & 0o077 == 0
    keys = [path for path, part in contents if b"PRIVATE KEY" in part]
    assert len(keys) == len(certificates) + 1
    for certificate, own in zip(certificates, own_keys, strict=True):
        signed = load_pem_x509_certificate(certificate.read_bytes()).public_key()
        key = load_pem_private_key(own.read_bytes(), None)
        assert isinstance(signed, RSAPublicKey)
        assert isinstance(key, RSAPrivateKey)
        assert key.public_key().public_numbers() == signed.public_numbers()
    result = CliRunner().invoke(app, ["check", "--site", str(kits / "site-1")])
    assert "its private key was made by nvflare cert request" in " ".join(result.output.split())


@pytest.mark.long
def test_site_without_the_allow_list_refuses_the_job_and_names_the_log_with_the_reason(
    config: Path, federation: Path, tmp_path: Path
) -> None:
    kits = federation / "workspace" / "sparse" / "prod_00"
    resources = kits / "site-3" / "local" / "resources.json"
    kept = resources.read_bytes()
    resources.unlink()
    try:
        done = run(config, federation, tmp_path / "refused")
        result = CliRunner().invoke(app, ["check", "--site", str(kits / "site-3")])
    finally:
        resources.write_bytes(kept)
    assert done.returncode == 1
    assert "E_JOB" in done.stderr
    assert "flare-sparse check --site" in done.stderr
    log = "".join(file.read_text(errors="replace") for file in (kits / "site-3").glob("*/log.txt"))
    assert "is not in allow_list" in log
    verdicts = dict(line.split(":")[0].split(maxsplit=1)[::-1] for line in result.output.splitlines() if ":" in line)
    assert verdicts["allow-list"] == "FAIL"
    assert verdicts["server"] == "PASS"


@pytest.mark.long
def test_error_at_a_site_reaches_the_server_as_a_code_only(config: Path, federation: Path, tmp_path: Path) -> None:
    table = federation / CANARY / "site-2.csv"
    kept = table.read_text()
    table.write_text(kept.replace(f"{CANARY}-7,", f"{CANARY}-7,not a number and"))
    try:
        config.write_text(config.read_text().replace("seed: 3", "seed: 4").replace("task_timeout_s: 300", "retries: 0"))
        done = run(config, federation, tmp_path / "failed")
    finally:
        table.write_text(kept)
    assert done.returncode == 1
    assert "E_DATA" in done.stderr
    assert list_leaks(federation) == []
    site = federation / "workspace" / "sparse" / "prod_00" / "site-2"
    reports = [path.read_text() for path in site.glob("*/site_error.txt")]
    assert any(CANARY in report for report in reports), "the report at the site names the subject"


@pytest.mark.long
def test_site_without_byoc_right_refuses_code(user_task: Path, federation: Path, tmp_path: Path) -> None:
    site = federation / "workspace" / "sparse" / "prod_00" / "site-3"
    assert revoke_code_right(site) == ["project_admin", "lead"]
    try:
        restart(site)  # FLARE reads the authorization when a site starts
        done = run(user_task, federation, tmp_path / "refused")
    finally:
        (site / "local" / AUTHORIZATION).unlink()
        restart(site)
    assert done.returncode == 1
    assert "FAILED_TO_RUN" in done.stderr
    assert "site-3: NVFLARE_ERROR: BYOC not permitted" in " ".join(done.stderr.split())


@pytest.fixture
def overwriting(user_task: Path, monkeypatch: pytest.MonkeyPatch) -> SparseRecipe:
    """A FedAvg job with a filter that writes 777 over the updates of site-2."""
    folder = user_task.parent
    (folder / "hostile_site.py").write_text((Path(__file__).parent / "hostile_site.py").read_text())
    monkeypatch.syspath_prepend(str(folder))
    # FLARE copies the module's file, and that of an earlier test is gone.
    monkeypatch.delitem(sys.modules, "hostile_site", raising=False)
    rules = "federation={min_sites: 2, quarantine_after: 0, task_timeout_s: 60}"
    config = load_config(user_task, [FEDAVG, rules, "deployment.packaging=byoc"])
    recipe = SparseRecipe(config, modules=(folder / "own_task.py", folder / "hostile_site.py"))
    recipe.add_client_output_filter(importlib.import_module("hostile_site").Overwriter("site-2"), tasks=[TASK])
    return recipe


@pytest.mark.long
def test_values_written_by_a_filter_of_the_job_never_leave_the_hospital(
    overwriting: SparseRecipe, user_task: Path, federation: Path, tmp_path: Path
) -> None:
    """Only SiteLastGate is active: code needs no allow-list, and SitePlanAuthorizer was removed with the list."""
    kits, out = federation / "workspace" / "sparse" / "prod_00", tmp_path / "prod"
    with without_allow_lists(federation):
        summary = run_deployed(overwriting, kits / "lead@coordination.org", out)
    *training, _ = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [line["rejected"] for line in training] == [{"site-2": "E_POLICY"}] * 2
    reports = "".join(file.read_text() for file in (kits / "site-2").glob("*/site_error.txt"))
    assert "a filter of the job changed it" in reports
    assert summary["model_sha256"] == run_locally_without(user_task, "site-2")
    forged = np.full(4, 777, "<f4").tobytes()
    assert not [path for path in list_server_files(federation) if forged in path.read_bytes()]


@pytest.mark.long
def test_job_with_its_own_filter_is_refused_by_the_plan_authorizer(
    overwriting: SparseRecipe, federation: Path, tmp_path: Path
) -> None:
    kits = federation / "workspace" / "sparse" / "prod_00"
    with pytest.raises(JobFailed):
        run_deployed(overwriting, kits / "lead@coordination.org", tmp_path / "refused")
    log = "".join(file.read_text(errors="replace") for file in (kits / "site-2").glob("*/log.txt"))
    assert "hostile_site.Overwriter' is not a class of flare_sparse; this site runs no others" in log


@pytest.mark.long
def test_sites_of_a_federation_are_described_from_their_own_data(
    config: Path, federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = (federation / "workspace" / "sparse" / "prod_00" / "lead@coordination.org").absolute()
    monkeypatch.chdir(tmp_path)
    done = command("describe", str(config), "--kit", str(kit), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    record, (folder,) = json.loads(done.stdout), tmp_path.glob("runs/*-description")
    assert record == json.loads((folder / "description.json").read_text())
    assert (folder / "description.html").is_file()
    assert record["sites"] == list(SITES)
    deaths = {site: round(own["count"] * own["mean"]) for site, own in record["columns"]["died=1"].items()}
    assert deaths == {"site-1": 26, "site-2": 24, "site-3": 25}


@pytest.mark.long
@pytest.mark.usefixtures("poc_ports")
def test_poc_runs_a_user_task_and_ends_with_the_bits_of_a_local_run(user_task: Path, tmp_path: Path) -> None:
    done = command("run", str(user_task), "--env", "poc", "--out", str(tmp_path / "poc"))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "poc" / "summary.json").read_text())
    local = run_in_process(Study.load(user_task), RunFolder(tmp_path / "local")).summary
    assert summary["model_sha256"] == local["model_sha256"]
    assert summary["traffic"] == local["traffic"]


@pytest.mark.long
@pytest.mark.usefixtures("poc_ports")
def test_commands_of_the_poc_page_run_and_the_console_accepts_a_job_folder(tmp_path: Path) -> None:
    """Run the shell commands of docs/provisioned.md, then FLARE's admin console."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "provisioned.md").read_text(), flags=re.DOTALL)
    (commands,) = (block for block in blocks if "nvflare poc prepare" in block)
    (tmp_path / "app_configs").symlink_to(ROOT / "app_configs")
    workspace = tmp_path / "poc-workspace"
    admin = workspace / "example_project" / "prod_00" / "admin@nvidia.com"
    # nvflare stores its last federation in the user's home and finds it by the variable.
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
        output = shell(console, typed=f"submit_job {tmp_path}/my-jobs/fedavg_brain_age\nlist_jobs\nbye\n")
        submitted = re.search(r"Submitted job: (\S+)", output)
        assert submitted, output
        assert nvflare_job(admin, "wait", submitted[1], "--timeout", "600")["status"] == "FINISHED:COMPLETED"
        found = nvflare_job(admin, "download", submitted[1], "-o", str(tmp_path / "fetched"))["artifacts"]
        assert {"global_model", "metrics_summary", "round_metrics"} <= set(found)
    finally:
        # Without --no-wait FLARE fails after 30 seconds, which busy cores exceed.
        shell("nvflare poc stop --no-wait")
    _, alive = psutil.wait_procs(find_processes_of(workspace), timeout=180)
    assert alive == []
    config = load_config(
        ROOT / "app_configs" / "fedavg_brain_age.yaml",
        [f"simulator={{sites: 2, data: {{path: '{tmp_path / 'data' / '{site}'}'}}}}"],
    )
    run_in_process(Study(config, tmp_path / "job.yaml"), RunFolder(tmp_path / "local"))
    assert fingerprint(Path(found["global_model"])) == fingerprint(tmp_path / "local" / "model.safetensors")


@pytest.mark.long
def test_federation_restarts_with_the_same_kits_and_policies(config: Path, federation: Path, tmp_path: Path) -> None:
    kits = federation / "workspace" / "sparse" / "prod_00"
    files = [*kits.glob("*/local/flare_sparse*.yaml"), *kits.glob("*/startup/*.crt"), *kits.glob("*/local/*.json")]
    before = {file: file.read_bytes() for file in files}
    assert len(before) >= 3 + 3 + 5
    line = [str(ROOT / "poc" / "up"), str(federation / "workspace")]
    twice = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert (twice.returncode, "is already running" in twice.stderr) == (2, True)
    run_script("down", str(federation / "workspace"))
    # A shell that started a process removes this file when the process, and so its port, is gone.
    assert list(kits.glob("*/daemon_pid.fl")) == []
    with socket.create_server(("localhost", 8102)):
        taken = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
        assert (taken.returncode, "port 8102 is in use" in taken.stderr) == (2, True)
    assert "using the startup kits of the last start" in run_script("up", str(federation / "workspace"))
    assert {file: file.read_bytes() for file in files} == before
    done = run(config, federation, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
