"""Preflight reports each problem of a site with its remedy."""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from line import LineTask

from flare_sparse.config.loading import load_config
from flare_sparse.core.findings import Finding
from flare_sparse.flare.site.preflight import check_site
from flare_sparse.flare.site.setup import CLASSES, allow_classes, install_guards
from flare_sparse.privacy.dp.account import PRIVACY_FOLDER, PrivacyAccount, build_entry
from flare_sparse.privacy.dp.accounting import Charge, compute_epsilon
from flare_sparse.tasks.data.source import WITHDRAWN_FILE
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Examples, SiteData
from flare_sparse.training import compute


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A startup kit of a site, without certificates and without a server."""
    site = tmp_path / "hospital"
    (site / "startup").mkdir(parents=True)
    (site / "local").mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    service = {"servers": [{"service": {"target": f"localhost:{port}"}}], "client": {"fqsn": "hospital"}}
    (site / "startup" / "fed_client.json").write_text(json.dumps(service))
    return site


def check(kit: Path, job: Path | None = None) -> dict[str, Finding]:
    config = load_config(job) if job else None
    return {finding.place: finding for finding in check_site(kit, config, environment={})}


def test_preflight_of_an_unprepared_site_names_each_remedy(kit: Path) -> None:
    findings = check(kit)
    assert {what: finding.severity for what, finding in findings.items()} == {
        "startup kit": "FAIL",
        "allow-list": "FAIL",
        "code": "FAIL",
        "log streaming": "FAIL",
        "policy": "WARN",
        "data": "FAIL",
        "server": "FAIL",
    }
    assert "client.crt, client.key, rootCA.pem missing" in findings["startup kit"].text
    assert f"Run: flare-sparse site setup {kit}" in findings["allow-list"].text
    assert str(kit / "local" / "flare_sparse.yaml") in findings["data"].text


@pytest.mark.parametrize(("days", "severity"), [(-1, "FAIL"), (10, "WARN"), (31, "PASS")])
def test_end_of_the_certificates_is_named_before_it_comes(kit: Path, days: int, severity: str) -> None:
    write_certificates(kit, days)
    finding = check(kit)["startup kit"]
    assert finding.severity == severity
    assert f"{datetime.now(UTC) + timedelta(days=days):%Y-%m-%d}" in finding.text


@pytest.mark.parametrize(("is_approved", "origin"), [(False, "provisioned centrally"), (True, "nvflare cert request")])
def test_kit_says_whether_the_centre_has_held_its_key(kit: Path, is_approved: bool, origin: str) -> None:
    """FLARE 2.9 states the usage of the key in a certificate that it approves, and in no other one."""
    write_certificates(kit, 90, is_approved=is_approved)
    finding = check(kit)["startup kit"]
    assert finding.severity == "PASS"
    assert ("not provisioned" in finding.text) == is_approved
    assert origin in finding.text


def write_certificates(kit: Path, days: int, *, is_approved: bool = False) -> None:
    """Write one certificate as the site's and as that of the authority, with the days until its end."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hospital")])
    start, end = now - timedelta(days=2), now + timedelta(days=days)
    certificate = x509.CertificateBuilder(name, name, key.public_key(), 1, start, end)
    certificate = certificate.add_extension(x509.SubjectAlternativeName([x509.DNSName("hospital")]), critical=False)
    if is_approved:
        usage = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = certificate.add_extension(usage, critical=True)
    pem = certificate.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    for file in ("client.crt", "client.key", "rootCA.pem"):
        (kit / "startup" / file).write_bytes(pem)


def test_data_is_read_as_the_job_would_read_it(kit: Path, tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 2},{i % 3 % 2},1\n" for i in range(20))
    (tmp_path / "stays.csv").write_text(f"stay,died,med_a,med_b\n{rows}")
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 'stays.csv'}\n")
    allow_classes(kit)
    assert check(kit)["data"].severity == "WARN"
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: job\nmethod: {name: fedavg}\ntask: {name: table, kind: binary, target: died, id: stay, "
        "features: [med_a, med_b], scaling: none}\n"
    )
    findings = check(kit, job)
    assert findings["allow-list"].severity == "PASS"
    assert findings["data"].severity == "PASS"
    assert findings["data"].text.endswith("16 training examples, as read by task table")
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 'stays.csv'}\nid: stay\n")
    (kit / "local" / WITHDRAWN_FILE).write_text("7\n8\nno such stay\n")
    assert "1 of 3 withdrawn identifiers match nothing" in check(kit, job)["data"].text
    (kit / "local" / WITHDRAWN_FILE).write_text("7\n8\n")
    assert "14 training examples, as read by task table, without 2 withdrawn subjects" in check(kit, job)["data"].text
    job.write_text(
        "name: job\nmethod: {name: fedavg}\ntask: {name: table, kind: binary, target: died, id: stay, "
        "features: [med_a, med_z], scaling: none}\n"
    )
    assert check(kit, job)["data"].severity == "FAIL"
    assert "no column 'med_z'" in check(kit, job)["data"].text


def test_kernels_that_a_job_demands_and_the_site_lacks_are_reported(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(f"{i},{i % 2},{i % 3 % 2},1\n" for i in range(20))
    (tmp_path / "stays.csv").write_text(f"stay,died,med_a,med_b\n{rows}")
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 'stays.csv'}\n")
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: job\nmethod: {name: fedavg, training: {compute: sparse}}\n"
        "task: {name: table, kind: binary, target: died, id: stay, "
        "features: [med_a, med_b], scaling: none}\n"
    )
    assert check(kit, job)["data"].severity == "PASS"
    monkeypatch.setattr(compute, "find_spec", lambda name: None)
    assert check(kit, job)["data"].severity == "FAIL"
    assert "pip install 'flare-sparse[fast]'" in check(kit, job)["data"].text


@pytest.mark.parametrize(
    ("listed", "mode", "verdict", "detail"),
    [
        ([*CLASSES], "enforce", "PASS", f"the {len(CLASSES)} classes"),
        ([*CLASSES[1:]], "enforce", "FAIL", f"{CLASSES[0]} not in class_allow_list: the site refuses jobs"),
        ([*CLASSES, "flare_sparse.flare."], "enforce", "FAIL", "flare_sparse.flare. in class_allow_list"),
        (["flare_sparse.flare."], "warn", "FAIL", "jobs can call every function below it"),
        ([*CLASSES, "*"], "enforce", "WARN", "Remove it"),
        ([*CLASSES], "warn", "WARN", "Set it to 'enforce'"),
    ],
)
def test_allow_list_that_is_too_short_or_too_broad_is_reported(
    listed: list[str], mode: str, verdict: str, detail: str, kit: Path
) -> None:
    resources = {"class_allow_list": listed, "class_list_enforcement_mode": mode}
    (kit / "local" / "resources.json").write_text(json.dumps(resources))
    finding = check(kit)["allow-list"]
    assert finding.severity == verdict
    assert detail in finding.text


def test_folder_that_is_no_kit_fails_and_the_other_checks_still_run(tmp_path: Path) -> None:
    findings = check(tmp_path)
    assert findings["startup kit"].severity == "FAIL"
    assert "this is no startup kit" in findings["startup kit"].text
    assert len(findings) == 7


def test_error_of_the_users_task_or_of_a_library_fails_and_the_other_checks_still_run(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: LineTask, data: SiteData, seed: int) -> Examples:
        raise KeyError("age")

    monkeypatch.setitem(TASKS, "line", LineTask)
    monkeypatch.setattr(LineTask, "load", load)
    for file in ("client.crt", "client.key", "rootCA.pem"):
        (kit / "startup" / file).write_text("no certificate")
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path}\n")
    job = tmp_path / "job.yaml"
    job.write_text("name: job\nmethod: {name: fedavg}\ntask: {name: line}\n")
    findings = check(kit, job)
    assert (findings["data"].severity, findings["startup kit"].severity) == ("FAIL", "FAIL")
    assert "KeyError: 'age'" in findings["data"].text
    assert "test_preflight.py" in findings["data"].text
    assert "server" in findings


def test_policy_in_force_is_shown(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("min_examples: 20\n")
    assert "this site does not check what leaves it" in check(kit)["policy"].text
    install_guards(kit, tmp_path / "policy.yaml")
    assert check(kit)["policy"] == Finding("PASS", "policy", "min_examples: 20")


def test_budget_of_the_site_is_compared_with_the_job_and_with_what_is_spent(kit: Path, tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 2},{i % 7}\n" for i in range(20))
    (tmp_path / "table.csv").write_text(f"id,x,y\n{rows}")
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 'table.csv'}\n")
    (tmp_path / "policy.yaml").write_text("epsilon: 8\n")
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: job\nmethod: {name: fedavg, rounds: 4, training: {batch_size: 64}}\nprivacy: {noise_multiplier: 2.0}\n"
        "task: {name: table, kind: regression, target: y, features: [x], scaling: none, model: {name: mlp}}\n"
    )
    assert "no epsilon, so that every job has a budget of its own" in check(kit, job)["job"].text
    install_guards(kit, tmp_path / "policy.yaml")
    rate_one = [Charge(2.0, 1.0, 1)]
    spent, whole = compute_epsilon(rate_one, 1e-5), compute_epsilon(rate_one * 4, 1e-5)
    (kit / "local" / "flare_sparse_policy.yaml").write_text(f"epsilon: {whole:.6f}\n")
    assert f"earlier jobs have spent 0.00 of {whole:g}" in check(kit, job)["job"].text
    account = PrivacyAccount(kit / PRIVACY_FOLDER / "hospital")
    account.charge(build_entry("a" * 16, "earlier", 1, "q", "a", rate_one[0]), None)
    findings = check(kit, job)
    assert findings["job"].severity == "FAIL"
    assert f"of which {spent:.2f} is spent. It covers 3 of 4 rounds" in findings["job"].text


def test_streaming_of_logs_fails_until_the_classes_are_allowed(kit: Path) -> None:
    finding = check(kit)["log streaming"]
    assert finding.severity == "FAIL"
    assert f"Run: flare-sparse site setup {kit}" in finding.text
    allow_classes(kit)
    assert check(kit)["log streaming"].severity == "PASS"
    resources = kit / "local" / "resources.json"
    resources.write_text(resources.read_text().replace('"allow_log_streaming": false', '"allow_log_streaming": true'))
    assert check(kit)["log streaming"].severity == "FAIL"
    # A second call repairs a file in which nothing else is missing.
    assert allow_classes(kit) == ([], [])
    assert check(kit)["log streaming"].severity == "PASS"


def test_job_is_checked_against_the_policy_and_the_data_of_the_site(kit: Path, tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 2},{i % 3 % 2},1\n" for i in range(20))
    (tmp_path / "stays.csv").write_text(f"stay,died,med_a,med_b\n{rows}")
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 'stays.csv'}\n")
    policy, job = tmp_path / "policy.yaml", tmp_path / "job.yaml"
    job.write_text(
        "name: study\nmethod: {name: neurosfl, saliency_batches: null}\n"
        "task: {name: table, kind: binary, target: died, id: stay, "
        "features: [med_a, med_b], scaling: none}\n"
    )
    assert "job" not in check(kit)
    for terms, verdict, detail in (
        ("min_score_examples: 16", "PASS", "this site's policy allows study"),
        (
            "min_score_examples: 17",
            "FAIL",
            "min_score_examples: scores were computed from 16 examples, the minimum is 17 (hospital)",
        ),
        ("methods: [fedavg]", "FAIL", "methods: neurosfl may not run at this site; allowed: fedavg"),
    ):
        policy.write_text(terms + "\n")
        install_guards(kit, policy)
        finding = check(kit, job)["job"]
        assert (finding.severity, detail in finding.text) == (verdict, True), finding
    (tmp_path / "stays.csv").unlink()
    assert "job" not in check(kit, job)  # the finding about the data reports it already
