"""``flare-sparse site setup``: one call makes a kit ready, a second one changes nothing, and what is wrong stops it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flare_sparse.cli import app
from flare_sparse.core.errors import ConfigError
from flare_sparse.flare.site.setup import CLASSES, UNIT_FILE, set_up_site


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A startup kit of a site with FLARE's default rights, and a table beside it."""
    kit = tmp_path / "hospital"
    (kit / "local").mkdir(parents=True)
    (kit / "startup").mkdir()
    (kit / "startup" / "fed_client.json").write_text(json.dumps({"servers": [{}], "client": {"fqsn": "hospital"}}))
    (kit / "startup" / "start.sh").touch()
    rights = {
        "format_version": "1.0",
        "permissions": {"project_admin": "any", "lead": {"submit_job": "any", "byoc": "any"}},
    }
    (kit / "local" / "authorization.json.default").write_text(json.dumps(rights))
    (tmp_path / "patients.csv").write_text("patient,age\n" + "".join(f"p{i},{40 + i}\n" for i in range(30)))
    return kit


def read_files(kit: Path) -> dict[str, str]:
    return {str(p.relative_to(kit)): p.read_text() for p in sorted(kit.rglob("*")) if p.is_file()}


def test_one_call_prepares_a_kit_and_a_second_one_changes_nothing(kit: Path) -> None:
    table = kit.parent / "patients.csv"
    lines = list(set_up_site(kit, table, Path("careful"), "patient"))
    assert [line.partition(":")[0] for line in lines] == [
        "data",
        "policy",
        "classes that jobs may name",
        "code in jobs",
        "service",
    ]
    local = kit / "local"
    assert yaml.safe_load((local / "flare_sparse.yaml").read_text()) == {"data": str(table), "id": "patient"}
    assert (local / "flare_sparse.yaml").stat().st_mode & 0o077 == 0
    assert set(CLASSES) <= set(json.loads((local / "resources.json").read_text())["class_allow_list"])
    assert json.loads((local / "authorization.json").read_text())["permissions"]["lead"]["byoc"] == "none"
    before = read_files(kit)
    list(set_up_site(kit, None, None))
    assert read_files(kit) == before


def test_site_file_with_other_settings_is_kept_and_named(kit: Path) -> None:
    file = kit / "local" / "flare_sparse.yaml"
    file.write_text("data: /elsewhere\n")
    with pytest.raises(ConfigError, match="has other settings already; change that file"):
        list(set_up_site(kit, kit.parent / "patients.csv", None))
    assert file.read_text() == "data: /elsewhere\n"
    file.unlink()
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        list(set_up_site(kit, kit.parent / "nothing", None))
    assert not file.exists()
    with pytest.raises(ConfigError, match="does not exist yet; give --data, too"):
        list(set_up_site(kit, None, None, "patient"))
    assert not file.exists()


def test_command_ends_with_the_checks_and_says_what_is_left(kit: Path) -> None:
    result = CliRunner().invoke(app, ["site", "setup", str(kit), "--data", str(kit.parent / "patients.csv")])
    assert result.exit_code == 1, "the kit has no certificates"
    assert "policy: min_examples: 20" in result.output
    assert "FAIL startup kit" in result.output
    assert "left for you: read the policy" in result.output
    unit = (kit / UNIT_FILE).read_text()
    assert f"ExecStart={kit}/startup/start.sh" in unit
    assert "Restart=always" in unit
