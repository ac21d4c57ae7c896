"""Software bill of materials of this Python environment, in the format CycloneDX 1.6."""

import json
from datetime import datetime
from importlib.metadata import Distribution, distributions
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseAcknowledgement
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from ...core.version import VERSION


def build_materials(run: str, created: datetime) -> dict[str, Any]:
    """Return the bill of materials: this package, and every distribution that is installed beside it.

    Args:
        run: run id, from which the serial number is derived.
        created: time of the bill.
    """
    subject = _build_component("flare-sparse", VERSION, "Apache-2.0", ComponentType.APPLICATION)
    installed = {str(part.name).lower(): part for part in distributions() if part.name}
    components = [
        _build_component(part.name, part.version, _find_license(part))
        for name, part in sorted(installed.items())
        if name != "flare-sparse"
    ]
    bom = Bom(
        components=components,
        serial_number=uuid5(NAMESPACE_URL, f"urn:flare-sparse:run:{run}"),
        metadata=BomMetaData(timestamp=created, component=subject),
    )
    bom.register_dependency(subject, components)
    content: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    return content


def _build_component(
    name: str, version: str, license_text: str, kind: ComponentType = ComponentType.LIBRARY
) -> Component:
    licenses = LicenseFactory()
    purl = PackageURL("pypi", name=name.lower().replace("_", "-"), version=version)
    declared = LicenseAcknowledgement.DECLARED
    return Component(
        type=kind, name=name, version=version, purl=purl, bom_ref=str(purl),
        licenses=[licenses.make_from_string(license_text, license_acknowledgement=declared)] if license_text else [],
    )  # fmt: skip


def _find_license(part: Distribution) -> str:
    """Return the license that a distribution declares, as an SPDX expression or by its name; empty if it has none."""
    fields = {name: part.metadata[name] for name in ("License-Expression", "License") if name in part.metadata}
    if expression := fields.get("License-Expression"):
        return expression
    text = fields.get("License", "").strip()
    # Some distributions put the whole text of the license into the field.
    if text and len(text) <= 80 and "\n" not in text:
        return text
    names = [str(line).split(" :: ")[-1] for line in part.metadata.get_all("Classifier") or []
             if str(line).startswith("License :: ")]  # fmt: skip
    return names[0] if names else ""
