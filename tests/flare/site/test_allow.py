"""The allow-list of a site: ours is added, nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

from flare_sparse.errors import ConfigError
from flare_sparse.flare.site.allow import PREFIX, allow, allowed, read_resources


def kit(folder: Path, **files: Any) -> Path:
    (folder / "local").mkdir(parents=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "local" / name.replace("_default", ".json.default").replace("_json", ".json")).write_text(text)
    return folder


def test_the_default_list_stays_and_the_default_file_is_not_touched(tmp_path: Path) -> None:
    shipped = {"format_version": 2, "class_allow_list": ["a.B", "c."], "components": [{"id": "x"}], "own": 1}
    site = kit(tmp_path / "kit", resources_default=shipped)
    assert allow(site) == [PREFIX]
    assert json.loads((site / "local" / "resources.json.default").read_text()) == shipped
    written = json.loads((site / "local" / "resources.json").read_text())
    assert written == {**shipped, "class_list_enforcement_mode": "enforce", "class_allow_list": ["a.B", "c.", PREFIX]}


def test_what_the_site_wrote_wins_over_the_default_file(tmp_path: Path) -> None:
    site = kit(
        tmp_path / "kit", resources_default={"class_allow_list": []}, resources_json={"class_allow_list": ["ours."]}
    )
    assert allow(site / "local", (PREFIX, "more.")) == [PREFIX, "more."]
    assert allowed(read_resources(site / "local")) == ["ours.", PREFIX, "more."]


def test_twice_changes_nothing(tmp_path: Path) -> None:
    site = kit(tmp_path / "kit", resources_json={"class_allow_list": []})
    allow(site)
    before = (site / "local" / "resources.json").read_bytes()
    assert allow(site) == []
    assert (site / "local" / "resources.json").read_bytes() == before


def test_without_a_list_flares_own_default_is_in_force_and_stays(tmp_path: Path) -> None:
    site = kit(tmp_path / "kit")
    allow(site)
    assert allowed(read_resources(site / "local")) == [*DEFAULT_CLASS_ALLOW_LIST, PREFIX]


def test_flare_itself_reads_the_list_as_meant(tmp_path: Path) -> None:
    """FLARE's own matching of a class path against the list that was written."""
    site = kit(tmp_path / "kit")
    allow(site)
    listed = allowed(read_resources(site / "local"))

    def matches(path: str) -> bool:
        return any(ComponentPathAuthorizer._path_matches_prefix(path, prefix) for prefix in listed)

    assert matches("flare_sparse.flare.controller.FederatedController")
    assert not matches("flare_sparse.cli.run.run")
    assert not matches("os.system")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "cannot be read as JSON"),
        ("[1]", "expected a JSON object"),
        ('{"class_allow_list": 3}', "expected a list"),
    ],
)
def test_resources_that_are_malformed_are_left_alone(content: str, message: str, tmp_path: Path) -> None:
    site = kit(tmp_path / "kit", resources_json=content)
    with pytest.raises(ConfigError, match=message):
        allow(site)
    assert (site / "local" / "resources.json").read_text() == content


def test_a_folder_that_is_no_kit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no startup kit"):
        allow(tmp_path)
