"""Location of a site's data: three sources in a fixed order, and the error if none is present."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.data.source import (
    DATA_VARIABLE,
    SITE_FILE_VARIABLE,
    find_site_data,
    has_site_data,
    write_site_files,
)
from flare_sparse.tasks.task import SiteData


def write_file(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_sources_of_data_are_tried_in_order(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("named", "local", "variable")}
    for folder in folders.values():
        folder.mkdir()
    named = write_file(tmp_path / "files" / "A.yaml", "data: ../named\nsubset: [x, y]\n")
    write_file(folders["local"] / "flare_sparse.yaml", "data: .\n")
    environment = {
        "FLARE_SPARSE_SITE_FILE": str(named.parent / "{site}.yaml"),
        "FLARE_SPARSE_DATA": str(tmp_path / "{site}"),
    }
    first = find_site_data("A", folders["local"], environment)
    assert (first.site, first.path.resolve(), first.subset) == ("A", folders["named"], ("x", "y"))
    environment.pop("FLARE_SPARSE_SITE_FILE")
    assert find_site_data("A", folders["local"], environment) == SiteData("A", folders["local"])
    assert find_site_data("variable", folders["named"], environment) == SiteData("variable", folders["variable"])


def test_missing_location_names_all_sources_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_site_data("A", tmp_path, {})
    for part in ("$FLARE_SPARSE_SITE_FILE", str(tmp_path / "flare_sparse.yaml"), "$FLARE_SPARSE_DATA", "'data: /path"):
        assert part in str(caught.value)
    with pytest.raises(DataError, match=r"flare_sparse\.yaml in the local folder of the site \(there is none\)"):
        find_site_data("A", None, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dta: x\n", "dta: no such field. Did you mean 'data'?"),
        ("subset: []\n", "data: Field required"),
        ("data: [", "cannot be read as a site file"),
        ("", "content: Input should be"),
        ("data: nowhere\n", "nowhere; there is no such file or folder"),
    ],
)
def test_malformed_site_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    write_file(tmp_path / "flare_sparse.yaml", text)
    with pytest.raises(DataError) as caught:
        find_site_data("A", tmp_path, {})
    assert message in str(caught.value)
    assert str(tmp_path / "flare_sparse.yaml") in str(caught.value)


def test_named_site_file_must_exist(tmp_path: Path) -> None:
    write_file(tmp_path / "flare_sparse.yaml", "data: .\n")
    with pytest.raises(DataError, match="cannot be read as a site file"):
        find_site_data("A", tmp_path, {"FLARE_SPARSE_SITE_FILE": str(tmp_path / "missing.yaml")})


def test_missing_data_of_the_variable_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\$FLARE_SPARSE_DATA: data is .*nowhere; there is no such"):
        find_site_data("A", None, {"FLARE_SPARSE_DATA": str(tmp_path / "nowhere")})


def test_written_site_files_are_read_back(tmp_path: Path) -> None:
    sites = [SiteData("A", tmp_path, ("x/1", "ü")), SiteData("B-2", tmp_path)]
    variable = write_site_files(tmp_path / "new" / "files", sites)
    assert [find_site_data(name, None, {"FLARE_SPARSE_SITE_FILE": variable}) for name in ("A", "B-2")] == sites


@pytest.mark.slow
def test_deeply_nested_site_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "flare_sparse.yaml").write_text("data: " + "[" * 100_000)
    with pytest.raises(DataError, match="cannot be read as a site file"):
        find_site_data("site-1", tmp_path, {})


def test_site_that_has_set_no_location_is_told_apart_from_a_wrong_one(tmp_path: Path) -> None:
    """A training script may know itself where its data is; a location that is set must exist."""
    assert not has_site_data(None, {})
    assert not has_site_data(tmp_path, {})
    assert has_site_data(tmp_path, {DATA_VARIABLE: "/nowhere"})
    assert has_site_data(None, {SITE_FILE_VARIABLE: "/nowhere.yaml"})
    (tmp_path / "flare_sparse.yaml").write_text("data: nowhere")
    assert has_site_data(tmp_path, {})
