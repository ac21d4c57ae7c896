"""RO-Crate of a run: the Workflow Run Crate profile 0.5 and the Federated Learning profile 0.1, on RO-Crate 1.1.

Sources: https://w3id.org/ro/wfrun/workflow/0.5 and the draft
https://esciencelab.org.uk/federated-learning-ro-crate-profile/federated-learning-profile.html.

Software bill of materials of this Python environment, in the format CycloneDX 1.6.
"""

import json
import tempfile
from datetime import datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseAcknowledgement
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from rocrate.model.computationalworkflow import ComputationalWorkflow
from rocrate.model.computerlanguage import ComputerLanguage
from rocrate.model.contextentity import ContextEntity
from rocrate.model.entity import Entity
from rocrate.rocrate import ROCrate

from ...core.checkpoint.store import compute_file_digest
from ...core.version import VERSION
from ..runs.results import RunResult
from .dpia import format_readme
from .facts import find_crate_files


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


FACTS, MATERIALS, README, CONFIG, POLICIES = "evidence.json", "sbom.cdx.json", "README.md", "config.yaml", "policies"
PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": ("Workflow RO-Crate", "1.0"),
    "https://esciencelab.org.uk/federated-learning-ro-crate-profile/federated-learning-profile.html": (
        "Federated Learning RO-Crate Profile (draft)",
        "0.1",
    ),
}
"""Profiles of the crate: name and version by identifier."""
TERMS = {name: f"https://w3id.org/ro/terms/workflow-run#{name}" for name in ("sha256", "resourceUsage", "environment")}
"""Terms of the Workflow Run profiles that the context of RO-Crate 1.1 lacks."""
FORMATS = {
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".md": "text/markdown",
    ".py": "text/x-python",
    ".safetensors": "application/vnd.safetensors",
    ".yaml": "application/yaml",
}
DESCRIPTIONS = {
    FACTS: "Facts of the run: cohorts, privacy, policies, audit, traffic, versions, approval, deviations",
    MATERIALS: "Software bill of materials in the format CycloneDX 1.6",
    README: "The evidence in words, and the commands that repeat the run",
    "summary.json": "Summary of the run: final metrics, contributions of the sites, events, bytes",
    "rounds.jsonl": "Record of every round",
    "ledger.jsonl": "Every message of the run with its bytes",
    "model_card.md": "Model card",
    "audit.json": "Results of privacy attacks on the run",
    "model.safetensors": "The model that the run ended with",
    "best_model.safetensors": "The best model by validation examples",
}


def write_crate(run: RunResult, facts: dict[str, Any], policies: dict[str, Path], out: Path, license_text: str) -> Path:
    """Write the crate of a run into a folder, or into an archive if ``out`` ends with ``.zip``.

    Args:
        run: the run.
        facts: result of :func:`~flare_sparse.results.evidence.facts.collect_facts`.
        policies: files of the sites' policies.
        out: folder or archive; it must not exist.
        license_text: license of the crate and its model: a URL, an SPDX identifier or a sentence.

    Returns:
        ``out``.
    """
    crate = ROCrate(version="1.1", gen_preview=True)
    crate.metadata.extra_terms.update(TERMS)
    with tempfile.TemporaryDirectory() as folder:
        generated = _write_generated(run, facts, Path(folder))
        sources = {path.name: path for path in generated}
        sources |= {str(name): run.path / name for name in find_crate_files(run.path)}
        sources |= {f"{POLICIES}/{site}.yaml": file for site, file in sorted(policies.items())}
        entities = {name: _add_file(crate, name, source) for name, source in sources.items()}
        workflow = _add_workflow(crate, run)
        _describe_root(crate, run, license_text)
        _add_execution(crate, run, facts, workflow, entities)
        # The files are read here, so the temporary folder must still exist.
        if out.suffix == ".zip":
            crate.write_zip(out)
        else:
            crate.write(out)
    return out


def _write_generated(run: RunResult, facts: dict[str, Any], folder: Path) -> list[Path]:
    """Write the files that are made for the crate; return their paths."""
    _, end = run.times
    contents = {
        FACTS: json.dumps(facts, indent=2) + "\n",
        MATERIALS: json.dumps(build_materials(str(facts["run"]), end), indent=2) + "\n",
        README: format_readme(run, facts),
    }
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in contents]


def _add_file(crate: ROCrate, name: str, source: Path) -> Entity:
    properties = {
        "name": name,
        "description": DESCRIPTIONS.get(name, "Code of the user's task" if name.startswith("code/") else name),
        "encodingFormat": FORMATS.get(source.suffix, "application/octet-stream"),
        "sha256": compute_file_digest(source),
        "contentSize": str(source.stat().st_size),
    }
    if name == README:
        properties["about"] = crate.root_dataset
    return crate.add_file(source, name, properties=properties)


def _add_workflow(crate: ROCrate, run: RunResult) -> Entity:
    """Add the configuration as the workflow, in this package's own language of configurations."""
    versions = run.summary.get("versions", {})
    package = _add(crate, "#flare-sparse", {
        "@type": "SoftwareApplication", "name": "flare-sparse", "version": versions.get("flare-sparse", VERSION),
        "description": "Sparse federated learning for NVIDIA FLARE; a configuration file is its job",
        "softwareRequirements": {"@id": MATERIALS},
    })  # fmt: skip
    framework = _add(crate, "https://github.com/NVIDIA/NVFlare", {
        "@type": "SoftwareApplication", "name": "NVIDIA FLARE", "version": versions.get("nvflare", "unknown"),
        "url": "https://github.com/NVIDIA/NVFlare", "description": "Framework for federated learning",
    })  # fmt: skip
    language = crate.add(ComputerLanguage(crate, "#configuration", properties={
        "name": "flare-sparse configuration", "alternateName": "YAML", "version": VERSION,
        "identifier": {"@id": "https://yaml.org/"}, "url": {"@id": "https://yaml.org/"},
    }))  # fmt: skip
    source = run.path / CONFIG
    return crate.add_workflow(source, CONFIG, main=True, lang=language, cls=ComputationalWorkflow, properties={
        "name": f"Configuration of {run.summary['name']}", "version": str(run.summary["run"]),
        "description": f"Federated training with {run.summary['method']}; every setting is written out",
        "encodingFormat": FORMATS[".yaml"], "sha256": compute_file_digest(source),
        "softwareRequirements": [package, framework],
    })  # fmt: skip


def _describe_root(crate: ROCrate, run: RunResult, license_text: str) -> None:
    root = crate.root_dataset
    root["name"] = f"Evidence of the federated training run {run.summary['name']}"
    root["description"] = (
        f"Configuration, model, record and evidence of run {run.summary['run']}: {run.summary['method']} over "
        f"{len(run.sites)} sites. The training data stayed at the sites and is not in this crate."
    )
    root["license"] = _add_license(crate, license_text)
    root["datePublished"] = run.times[1].isoformat()
    root["conformsTo"] = [
        _add(crate, identifier, {"@type": "CreativeWork", "name": name, "version": version})
        for identifier, (name, version) in PROFILES.items()
    ]


def _add_license(crate: ROCrate, text: str) -> Entity | str:
    """Return the entity of a license that is a URL or an SPDX identifier; a sentence stays text."""
    if " " in text:
        return text
    identifier = text if text.startswith(("http://", "https://")) else f"https://spdx.org/licenses/{text}"
    return _add(crate, identifier, {"@type": "CreativeWork", "name": text, "description": "License", "url": identifier})


def _add_execution(
    crate: ROCrate, run: RunResult, facts: dict[str, Any], workflow: Entity, files: dict[str, Entity]
) -> None:
    """Add the run as an action: cohorts and configuration in; model, records and metrics out."""
    start, end = run.times
    inputs = [entity for name, entity in files.items() if name.split("/")[0] in ("code", POLICIES)]
    outputs = [entity for entity in files.values() if entity not in inputs]
    (files.get("model.safetensors") or files["encrypted_model.safetensors"])["subjectOf"] = files["model_card.md"]
    cohorts = [_add_cohort(crate, site, cohort) for site, cohort in facts["cohorts"].items()]
    unit = run.summary["metric"]["unit"]
    metrics = [
        _add_figure(crate, "metric", name, value, unit if name == run.metric else "")
        for name, value in sorted(facts["metrics"].items())
    ]
    action = crate.add_action(
        workflow, f"#run-{run.summary['run']}", [workflow, *cohorts, *inputs], [*outputs, *metrics], {
            "@type": "CreateAction", "name": f"Federated training run {run.summary['run']}",
            "description": f"{run.summary['rounds']} rounds of {run.summary['method']}",
            "startTime": start.isoformat(), "endTime": end.isoformat(),
            "actionStatus": "http://schema.org/CompletedActionStatus",
        })  # fmt: skip
    action["resourceUsage"] = [
        _add_figure(crate, "usage", name, run.sum_directions(name)) for name in ("payload_bytes", "messages")
    ]
    if facts["approval"]["submitter"]:
        action["agent"] = _add_submitter(crate, facts["approval"])
    crate.root_dataset["mentions"] = action


def _add_cohort(crate: ROCrate, site: str, cohort: dict[str, Any]) -> Entity:
    counts = {part: "?" if cohort[part] is None else cohort[part] for part in ("train", "validation", "test")}
    sizes = ", ".join(f"{count} {part}" for part, count in counts.items())
    return _add(crate, f"#cohort-{site}", {
        "@type": "Dataset", "name": f"Cohort of {site}",
        "description": f"Examples: {sizes}. The data stayed at the site.",
        "license": "The site decides on access; none of the data is in this crate.",
    })  # fmt: skip


def _add_figure(crate: ROCrate, kind: str, name: str, value: float, unit: str = "") -> Entity:
    units = {"unitText": unit} if unit else {}
    return _add(crate, f"#{kind}-{name}", {
        "@type": "PropertyValue", "name": name, "propertyID": f"urn:flare-sparse:{kind}:{name}", "value": value,
        **units,
    })  # fmt: skip


def _add_submitter(crate: ROCrate, approval: dict[str, Any]) -> Entity:
    submitter = approval["submitter"]
    organization = _add(crate, f"#organization-{submitter['org']}", {"@type": "Organization", "name": submitter["org"]})
    return _add(crate, f"#submitter-{submitter['name']}", {
        "@type": "Person", "name": submitter["name"], "jobTitle": submitter["role"], "affiliation": organization,
        "description": f"Submitter of the job; signature: {approval['signature']}. {approval['note']}",
    })  # fmt: skip


def _add(crate: ROCrate, identifier: str, properties: dict[str, Any]) -> Entity:
    return crate.add(ContextEntity(crate, identifier, properties=properties))
