"""The allow-list of a site: ours is added, nothing is lost."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.common.excepts import ComponentNotAuthorized
from nvflare.private.fed_json_config import FedJsonConfigurator

import flare_sparse
from flare_sparse.errors import ConfigError
from flare_sparse.flare.site.allow_list import CLASSES, allow, allowed, read_resources


def kit(folder: Path, **files: Any) -> Path:
    (folder / "local").mkdir(parents=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "local" / name.replace("_default", ".json.default").replace("_json", ".json")).write_text(text)
    return folder


def test_the_default_list_stays_and_the_default_file_is_not_touched(tmp_path: Path) -> None:
    shipped = {"format_version": 2, "class_allow_list": ["a.B", "c."], "components": [{"id": "x"}], "own": 1}
    site = kit(tmp_path / "kit", resources_default=shipped)
    assert allow(site) == ([*CLASSES], [])
    assert json.loads((site / "local" / "resources.json.default").read_text()) == shipped
    written = json.loads((site / "local" / "resources.json").read_text())
    listed = ["a.B", "c.", *CLASSES]
    assert written == {**shipped, "class_list_enforcement_mode": "enforce", "class_allow_list": listed}


def test_what_the_site_wrote_wins_over_the_default_file(tmp_path: Path) -> None:
    site = kit(
        tmp_path / "kit", resources_default={"class_allow_list": []}, resources_json={"class_allow_list": ["ours."]}
    )
    assert allow(site / "local", ["more."]) == ([*CLASSES, "more."], [])
    assert allowed(read_resources(site / "local")) == ["ours.", *CLASSES, "more."]


def test_twice_changes_nothing(tmp_path: Path) -> None:
    site = kit(tmp_path / "kit", resources_json={"class_allow_list": []})
    allow(site)
    before = (site / "local" / "resources.json").read_bytes()
    assert allow(site) == ([], [])
    assert (site / "local" / "resources.json").read_bytes() == before


def test_without_a_list_flares_own_default_is_in_force_and_stays(tmp_path: Path) -> None:
    site = kit(tmp_path / "kit")
    allow(site)
    assert allowed(read_resources(site / "local")) == [*DEFAULT_CLASS_ALLOW_LIST, *CLASSES]


def test_the_wide_entries_of_earlier_versions_go(tmp_path: Path) -> None:
    listed = ["ours.", "flare_sparse.flare.", "flare_sparse.flare.site", CLASSES[0]]
    site = kit(tmp_path / "kit", resources_json={"class_allow_list": listed})
    assert allow(site) == ([*CLASSES[1:]], ["flare_sparse.flare.", "flare_sparse.flare.site"])
    assert allowed(read_resources(site / "local")) == ["ours.", *CLASSES]
    with pytest.raises(ConfigError, match=r"--also flare_sparse\.tasks"):
        allow(site, ["flare_sparse.tasks."])


def refused(site: Path, path: str) -> bool:
    """What FLARE itself says of a class path, with the list that was written."""
    workspace = SimpleNamespace(get_resources_file_path=lambda: str(site / "local" / "resources.json"))
    try:
        FLARE.authorize_component_config({"path": path}, workspace=workspace)
    except UnsafeComponentError:
        return True
    return False


FLARE = ComponentPathAuthorizer()


def test_of_all_that_can_be_called_in_the_shell_a_job_may_name_the_classes_only(tmp_path: Path) -> None:
    site = kit(tmp_path / "kit")
    allow(site)
    modules = [module.name for module in pkgutil.walk_packages(flare_sparse.__path__, "flare_sparse.")]
    shell = [importlib.import_module(name) for name in modules if name.startswith("flare_sparse.flare")]
    found = [f"{module.__name__}.{name}" for module in shell for name, thing in vars(module).items() if callable(thing)]
    assert len(found) > 300  # functions and imported names, too: FLARE calls them all
    assert {path for path in found if not refused(site, path)} == {*CLASSES}
    for path in ("flare_sparse.cli.run.run", "os.system", "flare_sparse.flare.executor.SparseExecutorX"):
        assert refused(site, path)


def test_a_users_own_class_that_the_site_listed_may_be_named(tmp_path: Path) -> None:
    site = kit(tmp_path / "kit")
    allow(site, ["our_hospital.tasks.Dose"])
    assert not refused(site, "our_hospital.tasks.Dose")
    assert refused(site, "our_hospital.tasks.TensorDataset")


def test_a_job_of_settings_alone_cannot_write_the_list_that_it_is_held_against(tmp_path: Path) -> None:
    """FLARE builds an argument before it calls what it is for, so functions of ours could be strung together."""
    site = kit(tmp_path / "kit")
    allow(site)
    (site / "startup").mkdir()
    workspace = {
        "path": "flare_sparse.flare.checkpoints.Workspace",
        "args": {"root_dir": str(site), "site_name": "kit"},
    }
    root = {"path": "flare_sparse.flare.checkpoints.checkpoint_folder", "args": {"end": "x", "workspace": workspace}}
    root["args"]["environment"] = {"FLARE_SPARSE_CHECKPOINTS": str(site)}
    hostile = {"path": "flare_sparse.flare.site.allow_list.allow", "args": {"kit": root, "also": ["*"]}}
    before = (site / "local" / "resources.json").read_bytes()
    file = tmp_path / "config_fed_client.json"
    file.write_text(json.dumps({"format_version": 2, "executors": [], "components": [{"id": "x", **hostile}]}))
    builder = FedJsonConfigurator(str(file), ["nvflare"], ["apis"], is_server=False)

    def authorized(config: Any, context: Any, node: Any) -> str:
        return "not in the list" if refused(site, config["path"]) else ""

    builder.set_component_build_authorizer(authorized)
    with pytest.raises(ComponentNotAuthorized):
        builder.configure()
    assert (site / "local" / "resources.json").read_bytes() == before


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
