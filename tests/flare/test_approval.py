"""The submitter of a job by FLARE's own signatures: verified, of another federation, changed, missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from nvflare.lighter.constants import AdminRole
from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert, sign_folders

from flare_sparse.flare.launch.approval import read_approval

META: dict[str, object] = {
    "submitter_name": "lead@study", "submitter_org": "clinic", "submitter_role": "lead",
    "submit_time_iso": "2026-01-02T03:04:05+00:00", "job_deploy_detail": ["server: OK", "site-1: OK"],
}  # fmt: skip


def write_signed_run(folder: Path, lead: Identity, meta: dict[str, object]) -> Path:
    """Write a result folder with a job that ``lead`` has signed, and the kits of its federation and of another one."""
    root = Identity("federation")
    for kit in ("kit", "other"):
        root_key, root_public = generate_keys()
        (folder / kit / "startup").mkdir(parents=True)
        certificate = generate_cert(root, root, root_key, root_public, ca=True)
        (folder / kit / "startup" / "rootCA.pem").write_bytes(serialize_cert(certificate))
        if kit == "kit":
            lead_key, lead_public = generate_keys()
            (folder / "lead.crt").write_bytes(serialize_cert(generate_cert(lead, root, root_key, lead_public)))
    run = folder / "run"
    app = run / "job" / "7" / "job" / "study" / "app"
    app.mkdir(parents=True)
    (app / "config.json").write_text("{}")
    (run / "job" / "7" / "meta.json").write_text(json.dumps(meta))
    (run / "job_id.txt").write_text("7\n")
    sign_folders(str(app.parent), lead_key, str(folder / "lead.crt"))
    return run


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result folder with a signed job, and the kits of its federation and of another one."""
    folder = tmp_path_factory.mktemp("signed")
    write_signed_run(folder, Identity("lead@study", "clinic", AdminRole.LEAD), META)
    return folder


def test_signature_of_the_federation_is_verified(signed: Path) -> None:
    approval = read_approval(signed / "run", signed / "kit")
    assert (approval.signature, approval.job_id) == ("verified", "7")
    assert approval.submitter == {"name": "lead@study", "org": "clinic", "role": "lead"}
    assert approval.deployed == ("server: OK", "site-1: OK")


def test_signature_of_another_federation_is_invalid(signed: Path) -> None:
    assert read_approval(signed / "run", signed / "other").signature == "invalid"


def test_job_that_was_changed_after_it_was_signed_is_invalid(signed: Path, tmp_path: Path) -> None:
    shutil.copytree(signed / "run", tmp_path / "run")
    (tmp_path / "run/job/7/job/study/app/config.json").write_text('{"epochs": 9}')
    assert read_approval(tmp_path / "run", signed / "kit").signature == "invalid"


def test_signature_without_a_root_certificate_is_not_checked(signed: Path) -> None:
    approval = read_approval(signed / "run", None)
    assert approval.signature == "unverified"
    assert "--kit" in approval.note


def test_root_certificate_of_the_runs_own_poc_is_used(signed: Path, tmp_path: Path) -> None:
    shutil.copytree(signed / "run", tmp_path / "run")
    shutil.copytree(signed / "kit", tmp_path / "run/poc/project/prod_00/server")
    approval = read_approval(tmp_path / "run", None)
    assert approval.signature == "verified"
    assert "which whoever made the folder chose" in approval.note
    assert "folder" not in read_approval(tmp_path / "run", signed / "kit").note


def test_texts_of_the_submitted_job_and_of_its_certificate_are_text_for_the_annex(tmp_path: Path) -> None:
    hostile, shown = "<img src=x>|[a](b)\n# lead", "(img src=x)/(a)(b) # lead"
    meta = {**META, "submitter_name": hostile, "submit_time_iso": hostile, "job_deploy_detail": [hostile]}
    run = write_signed_run(tmp_path, Identity(hostile, "clinic", AdminRole.LEAD), meta)
    approval = read_approval(run, None)
    assert approval.submitter == {"name": shown, "org": "clinic", "role": "lead"}
    assert (approval.submitted_at, approval.deployed) == (shown, (shown,))
    assert read_approval(run, tmp_path / "kit").submitter == {"name": shown, "org": "clinic", "role": "lead"}


def test_run_without_a_job_has_no_signature(tmp_path: Path) -> None:
    assert read_approval(tmp_path, None).signature == "none"
    (tmp_path / "job_id.txt").write_text("7\n")
    assert "is missing" in read_approval(tmp_path, None).note
