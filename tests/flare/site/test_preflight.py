"""What a site is told before a job comes: each verdict with its remedy."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from flare_sparse.config import load_config
from flare_sparse.flare.site.allow_list import CLASSES, allow
from flare_sparse.flare.site.install import install_guards
from flare_sparse.flare.site.preflight import Finding, preflight


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A startup kit of a site, without certificates, whose server is nobody."""
    site = tmp_path / "hospital"
    (site / "startup").mkdir(parents=True)
    (site / "local").mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    service = {"servers": [{"service": {"target": f"localhost:{port}"}}], "client": {"fqsn": "hospital"}}
    (site / "startup" / "fed_client.json").write_text(json.dumps(service))
    return site


def look(kit: Path, job: Path | None = None) -> dict[str, Finding]:
    config = load_config(job) if job else None
    return {finding.what: finding for finding in preflight(kit, config, environment={})}


def test_an_unprepared_site_is_told_what_to_do(kit: Path) -> None:
    found = look(kit)
    assert {what: finding.verdict for what, finding in found.items()} == {
        "startup kit": "FAIL",
        "nvflare": "PASS",
        "flare-sparse": "PASS",
        "torch": "PASS",
        "allow-list": "FAIL",
        "code": "FAIL",
        "policy": "WARN",
        "data": "FAIL",
        "disk": "PASS",
        "server": "FAIL",
    }
    assert "client.crt, client.key, rootCA.pem missing" in found["startup kit"].detail
    assert f"Run: flare-sparse site allow {kit}" in found["allow-list"].detail
    assert str(kit / "local" / "flare_sparse.yaml") in found["data"].detail


def test_the_data_is_read_as_the_job_would(kit: Path, tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 2},{i % 3 % 2},1\n" for i in range(20))
    (tmp_path / "stays.csv").write_text(f"stay,died,med_a,med_b\n{rows}")
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 'stays.csv'}\n")
    allow(kit)
    assert look(kit)["data"].verdict == "WARN"
    job = tmp_path / "job.yaml"
    job.write_text("name: job\nmethod: {name: fedavg}\ntask: {name: mortality, medications: 2}\n")
    found = look(kit, job)
    assert found["allow-list"].verdict == "PASS"
    assert found["data"].verdict == "PASS"
    assert "16 training examples, as mortality reads them" in found["data"].detail
    job.write_text("name: job\nmethod: {name: fedavg}\ntask: {name: mortality, medications: 5}\n")
    assert look(kit, job)["data"].verdict == "FAIL"
    assert "task.medications says 5" in look(kit, job)["data"].detail


@pytest.mark.parametrize(
    ("listed", "mode", "verdict", "said"),
    [
        ([*CLASSES], "enforce", "PASS", "the 9 classes"),
        ([*CLASSES[1:]], "enforce", "FAIL", f"{CLASSES[0]} not in class_allow_list: jobs are refused"),
        ([*CLASSES, "flare_sparse.flare."], "enforce", "FAIL", "flare_sparse.flare. in class_allow_list"),
        (["flare_sparse.flare."], "warn", "FAIL", "a job may call every function there"),
        ([*CLASSES, "*"], "enforce", "WARN", "Take it out"),
        ([*CLASSES], "warn", "WARN", "Make it 'enforce'"),
    ],
)
def test_a_list_that_is_too_short_or_too_wide_is_said(
    listed: list[str], mode: str, verdict: str, said: str, kit: Path
) -> None:
    resources = {"class_allow_list": listed, "class_list_enforcement_mode": mode}
    (kit / "local" / "resources.json").write_text(json.dumps(resources))
    found = look(kit)["allow-list"]
    assert found.verdict == verdict
    assert said in found.detail


def test_a_folder_that_is_no_kit_is_said_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert found["startup kit"].verdict == "FAIL"
    assert "no startup kit" in found["startup kit"].detail
    assert len(found) == 10


def test_the_policy_in_force_is_said(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("min_examples: 20\n")
    assert "nothing here checks what leaves" in look(kit)["policy"].detail
    install_guards(kit, tmp_path / "policy.yaml")
    assert look(kit)["policy"] == Finding("PASS", "policy", "min_examples: 20")
    resources = kit / "local" / "resources.json"
    resources.write_text(resources.read_text().replace('"allow_log_streaming": false', '"allow_log_streaming": true'))
    assert "this site's logs go to the server" in look(kit)["policy"].detail


def test_a_job_is_held_against_the_policy_here_and_the_data_that_was_read(kit: Path, tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 2},{i % 3 % 2},1\n" for i in range(20))
    (tmp_path / "stays.csv").write_text(f"stay,died,med_a,med_b\n{rows}")
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 'stays.csv'}\n")
    policy, job = tmp_path / "policy.yaml", tmp_path / "job.yaml"
    job.write_text(
        "name: study\nmethod: {name: neurosfl, saliency_batches: null}\ntask: {name: mortality, medications: 2}\n"
    )
    assert "job" not in look(kit)
    for terms, verdict, said in (
        ("min_score_examples: 16", "PASS", "the policy here lets study through"),
        ("min_score_examples: 17", "FAIL", "min_score_examples: scores of 16, wanted are 17 (hospital)"),
        ("methods: [fedavg]", "FAIL", "methods: neurosfl may not run there; allowed: fedavg"),
    ):
        policy.write_text(terms + "\n")
        install_guards(kit, policy)
        found = look(kit, job)["job"]
        assert (found.verdict, said in found.detail) == (verdict, True), found
    (tmp_path / "stays.csv").unlink()
    assert "job" not in look(kit, job)  # what could not be read is said once
