"""The package's classes are added to a site's allow-list, and no other entry is lost."""

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
from flare_sparse.core.errors import ConfigError
from flare_sparse.flare.site.setup import CLASSES, SERVER_CLASSES, allow_classes, get_allow_list, read_resources


def kit(folder: Path, **files: Any) -> Path:
    (folder / "local").mkdir(parents=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "local" / name.replace("_default", ".json.default").replace("_json", ".json")).write_text(text)
    return folder


def test_default_entries_stay_and_the_default_file_is_not_changed(tmp_path: Path) -> None:
    shipped = {"format_version": 2, "class_allow_list": ["a.B", "c."], "components": [{"id": "x"}], "own": 1}
    site = kit(tmp_path / "kit", resources_default=shipped)
    assert allow_classes(site) == ([*CLASSES], [])
    assert json.loads((site / "local" / "resources.json.default").read_text()) == shipped
    written = json.loads((site / "local" / "resources.json").read_text())
    listed = ["a.B", "c.", *CLASSES]
    assert written == {
        **shipped,
        "class_list_enforcement_mode": "enforce",
        "allow_log_streaming": False,
        "class_allow_list": listed,
    }


def test_file_of_the_site_overrides_the_default_file(tmp_path: Path) -> None:
    site = kit(
        tmp_path / "kit", resources_default={"class_allow_list": []}, resources_json={"class_allow_list": ["ours."]}
    )
    assert allow_classes(site / "local", ["more."]) == ([*CLASSES, "more."], [])
    assert get_allow_list(read_resources(site / "local")) == ["ours.", *CLASSES, "more."]


def test_class_that_sends_figures_to_mlflow_is_allowed_at_the_server_and_removed_at_a_site(tmp_path: Path) -> None:
    server = kit(tmp_path / "server", resources_json={"class_allow_list": []})
    (server / "startup").mkdir()
    (server / "startup" / "fed_server.json").write_text("{}")
    assert allow_classes(server) == ([*CLASSES, *SERVER_CLASSES], [])
    assert allow_classes(server / "local") == ([], [])
    site = kit(tmp_path / "site", resources_json={"class_allow_list": [*CLASSES, *SERVER_CLASSES]})
    assert allow_classes(site) == ([], [*SERVER_CLASSES])


def test_second_allow_list_call_writes_nothing(tmp_path: Path) -> None:
    site = kit(tmp_path / "kit", resources_json={"class_allow_list": []})
    allow_classes(site)
    before = (site / "local" / "resources.json").read_bytes()
    assert allow_classes(site) == ([], [])
    assert (site / "local" / "resources.json").read_bytes() == before


def test_without_a_list_the_classes_are_added_to_flares_default(tmp_path: Path) -> None:
    site = kit(tmp_path / "kit")
    allow_classes(site)
    assert get_allow_list(read_resources(site / "local")) == [*DEFAULT_CLASS_ALLOW_LIST, *CLASSES]


def test_broad_entries_of_this_package_are_removed(tmp_path: Path) -> None:
    listed = ["ours.", "flare_sparse.flare.", "flare_sparse.flare.site", CLASSES[0]]
    site = kit(tmp_path / "kit", resources_json={"class_allow_list": listed})
    assert allow_classes(site) == ([*CLASSES[1:]], ["flare_sparse.flare.", "flare_sparse.flare.site"])
    assert get_allow_list(read_resources(site / "local")) == ["ours.", *CLASSES]
    with pytest.raises(ConfigError, match=r"--also flare_sparse\.tasks"):
        allow_classes(site, ["flare_sparse.tasks."])


def is_refused(site: Path, path: str) -> bool:
    """Whether FLARE refuses a class path at a site."""
    workspace = SimpleNamespace(get_resources_file_path=lambda: str(site / "local" / "resources.json"))
    try:
        FLARE.authorize_component_config({"path": path}, workspace=workspace)
    except UnsafeComponentError:
        return True
    return False


FLARE = ComponentPathAuthorizer()


def test_of_all_callables_of_the_flare_modules_a_job_may_name_the_classes_only(tmp_path: Path) -> None:
    site = kit(tmp_path / "kit")
    allow_classes(site)
    modules = [module.name for module in pkgutil.walk_packages(flare_sparse.__path__, "flare_sparse.")]
    flare_modules = [importlib.import_module(name) for name in modules if name.startswith("flare_sparse.flare")]
    callables = [
        f"{module.__name__}.{name}"
        for module in flare_modules
        for name, thing in vars(module).items()
        if callable(thing)
    ]
    assert len(callables) > 300  # FLARE would call functions and imported names, too
    assert {path for path in callables if not is_refused(site, path)} == {*CLASSES}
    for path in ("flare_sparse.cli.run.run", "os.system", "flare_sparse.flare.executor.SparseExecutorX"):
        assert is_refused(site, path)


def test_user_task_that_the_site_listed_may_be_named(tmp_path: Path) -> None:
    site = kit(tmp_path / "kit")
    allow_classes(site, ["our_hospital.tasks.Dose"])
    assert not is_refused(site, "our_hospital.tasks.Dose")
    assert is_refused(site, "our_hospital.tasks.TensorDataset")


def test_job_cannot_change_the_allow_list_through_nested_components(tmp_path: Path) -> None:
    """FLARE builds arguments before the component, so that functions of the package could be chained."""
    site = kit(tmp_path / "kit")
    allow_classes(site)
    (site / "startup").mkdir()
    workspace = {
        "path": "flare_sparse.flare.checkpoints.Workspace",
        "args": {"root_dir": str(site), "site_name": "kit"},
    }
    root = {
        "path": "flare_sparse.flare.checkpoints.find_checkpoint_folder",
        "args": {"participant": "x", "workspace": workspace},
    }
    root["args"]["environment"] = {"FLARE_SPARSE_CHECKPOINTS": str(site)}
    hostile = {"path": "flare_sparse.flare.site.setup.allow_classes", "args": {"kit": root, "also": ["*"]}}
    before = (site / "local" / "resources.json").read_bytes()
    file = tmp_path / "config_fed_client.json"
    file.write_text(json.dumps({"format_version": 2, "executors": [], "components": [{"id": "x", **hostile}]}))
    builder = FedJsonConfigurator(str(file), ["nvflare"], ["apis"], is_server=False)

    def authorized(config: Any, context: Any, node: Any) -> str:
        return "not in the list" if is_refused(site, config["path"]) else ""

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
def test_malformed_resources_are_refused_and_kept(content: str, message: str, tmp_path: Path) -> None:
    site = kit(tmp_path / "kit", resources_json=content)
    with pytest.raises(ConfigError, match=message):
        allow_classes(site)
    assert (site / "local" / "resources.json").read_text() == content


def test_folder_that_is_no_startup_kit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is no startup kit"):
        allow_classes(tmp_path)
