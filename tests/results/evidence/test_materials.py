"""The bill of materials: every installed distribution, in valid CycloneDX."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from flare_sparse.results.evidence.crate import build_materials


@pytest.mark.long
def test_bill_of_materials_is_valid_and_names_versions_and_licenses() -> None:
    created = datetime(2026, 1, 2, tzinfo=UTC)
    bill = build_materials("abc", created)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None
    components = {part["name"].lower(): part for part in bill["components"]}
    assert components["torch"]["version"] == version("torch")
    assert components["nvflare"]["purl"] == f"pkg:pypi/nvflare@{version('nvflare')}"
    assert components["nvflare"]["licenses"]
    assert bill["metadata"]["component"]["name"] == "flare-sparse"
    assert "flare-sparse" not in components
    assert build_materials("abc", created) == bill
