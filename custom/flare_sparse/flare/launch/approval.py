"""Submitter of a finished job, by the signatures that FLARE's admin client puts on every file of it."""

from dataclasses import replace
from pathlib import Path

from nvflare.lighter.tool_consts import NVFLARE_SUBMITTER_CRT_FILE
from nvflare.lighter.utils import verify_folder_signature_and_get_signers

from ...results.evidence.facts import Approval
from ...results.runs.received import neutralize, parse_record
from .submission import JOB_FILE

ROOT_CERTIFICATE = "rootCA.pem"


def read_approval(run: Path, kit: Path | None) -> Approval:
    """Return who submitted the job of a run, with the state of its signature.

    Args:
        run: result folder; a run in a federation keeps its downloaded job there.
        kit: startup kit of a participant, whose root certificate checks the signature; None: the one of the run's POC
            federation, if it had one.
    """
    file = run / JOB_FILE
    if not file.is_file():
        return Approval("none", "The run has no job of a federation: it ran in one process or in FLARE's simulator, "
                                "which sign nothing.")  # fmt: skip
    job_id = neutralize(file.read_text(encoding="utf-8").strip())
    downloaded = run / "job" / job_id
    if not (downloaded / "meta.json").is_file():
        return Approval("none", f"The downloaded job {downloaded} is missing.", job_id)
    meta = parse_record((downloaded / "meta.json").read_text(encoding="utf-8"))
    claimed = {part: str(meta.get(f"submitter_{part}", "unknown")) for part in ("name", "org", "role")}
    approval = Approval(
        "none", "The job has no signature of a submitter.", job_id, claimed, str(meta.get("submit_time_iso", "")),
        tuple(map(str, meta.get("job_deploy_detail") or [])),
    )  # fmt: skip
    folders = [path for path in sorted((downloaded / "job").glob("*")) if path.is_dir()]
    certificate = folders[0] / NVFLARE_SUBMITTER_CRT_FILE if folders else None
    if certificate is None or not certificate.is_file():
        return approval
    root = _find_root(run, kit)
    if root is None:
        note = "The signature was not checked: add the startup kit of a participant with --kit."
        return replace(approval, signature="unverified", note=note)
    is_valid, signers = verify_folder_signature_and_get_signers(str(folders[0]), str(root))
    if not is_valid or len(signers) != 1:
        note = "The job's files do not match their signatures, or their certificate is not of this federation."
        return replace(approval, signature="invalid", note=note)
    signer = neutralize(dict(zip(("name", "org", "role"), map(str, signers[0]), strict=True)))
    owner = "the federation's root" if kit else "the root in poc/ of this folder, which whoever made the folder chose"
    note = f"Every file of the job is signed with a certificate of {owner}."
    return replace(approval, signature="verified", note=note, submitter=signer)


def _find_root(run: Path, kit: Path | None) -> Path | None:
    """Return the federation's root certificate, from an admin's kit or from those of a POC run; None: there is none."""
    kits = [kit] if kit is not None else sorted((run / "poc").glob("*/prod_*/*"))
    files = [folder / "startup" / ROOT_CERTIFICATE for folder in kits]
    return next((file for file in files if file.is_file()), None)
