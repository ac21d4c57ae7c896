"""The crate of a run: valid by the profiles, complete, free of data, and enough to repeat the run."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from crates import validate_crate
from typer.testing import CliRunner

from flare_sparse.cli import app

PAGE = Path(__file__).parents[3] / "docs" / "evidence.md"


def pack(run: Path, out: Path, *options: str) -> dict[str, Any]:
    """Write the crate of a run and return its entities by identifier."""
    result = CliRunner().invoke(app, ["evidence", str(run), "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    return read_entities(out)


def read_entities(crate: Path) -> dict[str, Any]:
    graph = json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]
    return {entity["@id"]: entity for entity in graph}


@pytest.mark.slow
def test_crate_meets_every_requirement_of_workflow_run_crate(phantom_run: Path, tmp_path: Path) -> None:
    pack(phantom_run, tmp_path / "crate", "--license", "CC-BY-4.0")
    assert validate_crate(tmp_path / "crate") == []


@pytest.mark.slow
def test_validator_finds_what_is_missing(phantom_run: Path, tmp_path: Path) -> None:
    pack(phantom_run, tmp_path / "crate")
    file = tmp_path / "crate" / "ro-crate-metadata.json"
    content = json.loads(file.read_text())
    root = next(entity for entity in content["@graph"] if entity["@id"] == "./")
    del root["license"]
    file.write_text(json.dumps(content))
    assert any("license" in message for message in validate_crate(tmp_path / "crate"))


@pytest.mark.slow
def test_crate_describes_the_run_as_the_federated_learning_profile_asks(phantom_run: Path, tmp_path: Path) -> None:
    entities = pack(phantom_run, tmp_path / "crate")
    profiles = {part["@id"] for part in entities["./"]["conformsTo"]}
    assert any("federated-learning-ro-crate-profile" in profile for profile in profiles)
    action = next(entity for entity in entities.values() if entity["@type"] == "CreateAction")
    assert action["instrument"] == {"@id": "config.yaml"}
    assert {"#cohort-site-1", "#cohort-site-2"} <= {part["@id"] for part in action["object"]}
    results = [part["@id"] for part in action["result"]]
    assert {"model.safetensors", "model_card.md", "#metric-mae"} <= set(results)
    assert len(results) == len(set(results))
    assert entities["model.safetensors"]["subjectOf"] == {"@id": "model_card.md"}
    assert entities["#metric-mae"]["propertyID"] == "urn:flare-sparse:metric:mae"
    assert entities["#metric-mae"]["unitText"] == "years"


@pytest.mark.slow
def test_digests_of_the_crate_are_those_of_its_files(phantom_run: Path, tmp_path: Path) -> None:
    entities = pack(phantom_run, tmp_path / "crate")
    digests = {name: entity["sha256"] for name, entity in entities.items() if "sha256" in entity}
    assert {"config.yaml", "evidence.json", "sbom.cdx.json", "ledger.jsonl", "model.safetensors"} <= digests.keys()
    for name, digest in digests.items():
        assert hashlib.sha256((tmp_path / "crate" / name).read_bytes()).hexdigest() == digest


@pytest.mark.slow
def test_no_prediction_checkpoint_or_model_of_a_site_goes_into_the_crate(phantom_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(phantom_run, run)
    for name in ("evaluations/predictions.json", "site_models/site-1.safetensors", "site_errors/site-1.txt"):
        (run / name).parent.mkdir()
        (run / name).write_text("ages of subjects")
    pack(run, tmp_path / "crate")
    assert (run / "final_checkpoints").is_dir()
    folders = {path.name for path in (tmp_path / "crate").iterdir() if path.is_dir()}
    assert folders == set()
    assert "ages of subjects" not in "".join(
        path.read_text(errors="replace") for path in (tmp_path / "crate").iterdir() if path.suffix != ".safetensors"
    )


@pytest.mark.long
def test_configuration_of_the_crate_alone_ends_in_the_digest_of_its_evidence(
    phantom_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(app, ["evidence", str(phantom_run), "--out", str(tmp_path / "crate.zip")])
    assert result.exit_code == 0, result.output
    stranger = tmp_path / "stranger"
    with zipfile.ZipFile(tmp_path / "crate.zip") as archive:
        archive.extractall(stranger)
    monkeypatch.chdir(stranger)
    # The command that the README of the crate shows.
    command = next(
        line.strip() for line in (stranger / "README.md").read_text().splitlines() if "flare-sparse run" in line
    )
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.exit_code == 0, result.output
    repeated = json.loads((stranger / "again" / "summary.json").read_text())
    assert repeated["model_sha256"] == json.loads((stranger / "evidence.json").read_text())["model_sha256"]


@pytest.mark.slow
def test_commands_of_the_page_run(phantom_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(phantom_run, run)
    (tmp_path / "kit").mkdir()
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    for line in blocks[0].splitlines():
        line_here = line.replace("RUN", "run").replace("KIT", "kit").replace("=LOG", "=run/flare_sparse_egress/site-1")
        result = CliRunner().invoke(app, line_here.split()[1:])
        assert result.exit_code == 0, result.output
    with zipfile.ZipFile("study.zip") as archive:
        assert "policies/site-1.yaml" in archive.namelist()
        facts = json.loads(archive.read("evidence.json"))
    assert facts["policies"]["site-1"]["terms"]["min_examples"] > 0
    assert (run / "evidence.zip").is_file()
    repeated = CliRunner().invoke(app, ["evidence", "run"])
    assert "exists" in repeated.output
