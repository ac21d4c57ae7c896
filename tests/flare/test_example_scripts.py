"""The benchmark of FLARE's example scripts: what it changes in a script, its bundle, and the cells it calls not run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import nvflare.client
import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[2] / "benchmarks" / "exchange"


class AllForeground(nn.Module):
    """Predicts the second of two classes for every voxel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(x), torch.ones_like(x)], dim=1)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("examples")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "client.py").write_text("".join(f"line{n} = {n}\n" for n in range(20)))
    (folder / "model.py").write_text("net = 1\n")
    return folder


def test_copy_differs_from_the_script_by_the_patch_alone(examples: ModuleType, source: Path, tmp_path: Path) -> None:
    replacements = (("line3 = 3", 'line3 = "{data}"'), ("line9 = 9", "line9 = 0"))
    example = examples.Example("model.Net", "", 1, examples.write_images, replacements)
    patch = examples.write_example(source, example, tmp_path, Path("/data")).splitlines()
    changed = [line for line in patch if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == ["-line3 = 3", '+line3 = "/data"', "-line9 = 9", "+line9 = 0"]
    assert examples.count_lines(patch) == 2
    lines, original = ((folder / "client.py").read_text().splitlines() for folder in (tmp_path, source))
    assert [n for n in range(20) if lines[n] != original[n]] == [3, 9]
    assert (tmp_path / "model.py").read_text() == "net = 1\n"


def test_patch_of_more_than_six_lines_or_of_a_missing_line_is_refused(
    examples: ModuleType, source: Path, tmp_path: Path
) -> None:
    def write(*replacements: tuple[str, str]) -> None:
        example = examples.Example("model.Net", "", 1, examples.write_images, replacements)
        examples.write_example(source, example, tmp_path, tmp_path)

    with pytest.raises(SystemExit, match="7 lines changed; at most 6"):
        write(*((f"line{n} = {n}", f"line{n} = 0") for n in range(10, 17)))
    with pytest.raises(SystemExit, match="expected the line 'path = 1' once"):
        write(("path = 1", "path = 2"))


def test_every_script_runs_with_every_method_and_some_cells_as_a_process(examples: ModuleType) -> None:
    cells = examples.list_cells()
    assert len(cells) == len(set(cells)) == 3 * (6 + 2)
    assert {exchange for _, exchange, mode in cells if mode == "external process"} == {"fedavg_recipe", "fedsparsify"}


def test_page_names_cells_that_were_not_run(examples: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    report = importlib.import_module("scripts_report")
    dense = {"script": "hello-pt", "exchange": "fedavg_recipe", "mode": "in process", "accuracy": 0.52, "ledger": None,
             "measured": 10000, "changed": 1, "patch": "--- client.py\n+++ client.py\n-a\n+b"}  # fmt: skip
    sparse = {**dense, "exchange": "fedsparsify", "accuracy": 0.5, "ledger": 1234, "measured": 5678}
    rows = report.format_table([dense, sparse], "hello-pt").splitlines()
    assert "| fedavg_recipe | in process | 0.520 |  |  | 10,000 |  |" in rows
    assert "| fedsparsify | in process | 0.500 | -0.020 | 1,234 | 5,678 | 0.57 |" in rows
    assert sum("not run" in row for row in rows) == 6
    section = report.format_section([dense, sparse], "hello-pt")
    assert "Lines changed: 1.\n\n```diff\n--- client.py\n+++ client.py\n-a\n+b\n```\n\n| exchange" in section


def test_bundle_gives_each_site_its_own_volumes_of_two_classes(
    examples: ModuleType, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from monai.bundle import ConfigParser

    examples.EXAMPLES["monai-spleen"].write_data(shared_data, tmp_path / "bundle")
    configuration = json.loads((tmp_path / "bundle" / "configs" / "train.json").read_text())
    cases = {}
    for site in ("site-1", "site-2"):
        parser = ConfigParser({**configuration, "bundle_root": str(tmp_path / "bundle")})
        monkeypatch.setattr(nvflare.client, "get_site_name", lambda site=site: site)
        for part, count in (("train", 24), ("validate", 10)):
            cases[site, part] = parser.get_parsed_content(f"{part}#dataset#data")
            assert len(cases[site, part]) == count
    images = [case["image"] for part in cases.values() for case in part]
    assert len(set(images)) == 68
    item = parser.get_parsed_content("validate#dataset#transform")(cases["site-2", "validate"][0])
    assert item["image"].shape == item["label"].shape == (1, 32, 48, 32)
    assert item["label"].unique().tolist() == [0, 1]

    (tmp_path / "bundle" / "site-1.json").write_text(json.dumps({"test": []}))
    (tmp_path / "bundle" / "site-2.json").write_text(json.dumps({"test": cases["site-2", "validate"][:1]}))
    foreground, size = int(item["label"].sum()), 32 * 48 * 32
    score = importlib.import_module("score_model").score_volumes(AllForeground(), tmp_path / "bundle")
    assert score == pytest.approx(2 * foreground / (foreground + size))
