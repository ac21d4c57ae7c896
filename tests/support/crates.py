"""Validation of RO-Crates by roc-validator, which lives in an environment of its own, without the network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from skips import require

SCHEMA_ORG = (
    "ComputerLanguage CreateAction CreativeWork Dataset Organization Person PropertyValue SoftwareApplication "
    "SoftwareSourceCode about actionStatus affiliation agent alternateName contentSize datePublished description "
    "encodingFormat endTime hasPart identifier instrument jobTitle license mainEntity mentions name object "
    "programmingLanguage propertyID result softwareRequirements startTime subjectOf unitText url value version"
)
CONTEXT = {
    **{term: f"http://schema.org/{term}" for term in SCHEMA_ORG.split()},
    "File": "http://schema.org/MediaObject",
    "ComputationalWorkflow": "https://bioschemas.org/ComputationalWorkflow",
    "conformsTo": "http://purl.org/dc/terms/conformsTo",
}
"""The terms of https://w3id.org/ro/crate/1.1/context that our crates use; the validator refuses any other term."""
SCRIPT = """
import json, sys
from pathlib import Path
import requests
from rocrate_validator import services
from rocrate_validator.models import ValidationSettings
from rocrate_validator.utils.http import HttpRequester

def get(self, url, **options):
    assert url == "https://w3id.org/ro/crate/1.1/context", url
    response = requests.Response()
    response.status_code, response.url, response._content = 200, url, sys.argv[2].encode()
    response.headers["Content-Type"] = "application/ld+json"
    return response

HttpRequester.get = get
settings = ValidationSettings(
    rocrate_uri=sys.argv[1], profile_identifier=sys.argv[3], offline=True, skip_availability_check=True,
    cache_path=Path(sys.argv[4]),
)
print(json.dumps([issue.message for issue in services.validate(settings).get_issues()]))
"""


def validate_crate(crate: Path, profile: str = "workflow-run-crate") -> list[str]:
    """Return what the validator finds wrong with a crate: every requirement of the profile that it does not meet."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = shutil.which("rocrate-validator", path=path)
    require(command is not None, "rocrate-validator is needed: pipx install roc-validator")
    assert command is not None
    python = Path(command).resolve().parent / "python"
    context = json.dumps({"@context": CONTEXT})
    arguments = [python, "-c", SCRIPT, crate, context, profile, crate.parent / "validator-cache"]
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    issues: list[str] = json.loads(done.stdout.splitlines()[-1])
    return issues
