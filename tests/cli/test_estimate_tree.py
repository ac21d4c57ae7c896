"""The links of a tree in an estimate are those of a run's ledger."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from flare_sparse.api.estimate import compute_figures
from flare_sparse.api.local import run as run_in_process
from flare_sparse.cli import app
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

HUBS = "federation.hubs={north: {sites: [site-1, site-2]}, south: {sites: [site-3]}}"
FILE = """
name: tree
method: {name: fedavg, rounds: 2, training: {lr: 0.01}}
task: {name: mortality, medications: 20, model: {name: mlp, hidden: [8]}}
simulator: {sites: 4, data: {path: DATA, partition: {kind: iid}}}
"""


def write(folder: Path) -> Path:
    rows = "".join(f"{i},{i % 2}," + ",".join(str((i >> b) & 1) for b in range(20)) + "\n" for i in range(80))
    header = ",".join(["stay", "died", *(f"med_{i}" for i in range(20))])
    (folder / "stays.csv").write_text(f"{header}\n{rows}")
    file = folder / "tree.yaml"
    file.write_text(FILE.replace("DATA", str(folder / "stays.csv")))
    return file


def test_links_of_a_tree_are_those_of_the_ledger_but_the_metrics_in_collections(tmp_path: Path) -> None:
    file = write(tmp_path)
    study = Study.load(file, ["wire.aggregation=fixed_point", HUBS])
    figures = compute_figures(study)
    run_in_process(study, RunFolder(tmp_path / "run"))
    ran = json.loads((tmp_path / "run" / "summary.json").read_text())["links"]
    for hub in ("north", "south"):
        assert figures["links"][hub] == ran[hub]
    assert figures["links"]["server"]["down"] == ran["server"]["down"]
    # Names and values of metrics, and numbers of examples, as text: some 60 bytes of each reply.
    replies = 3 * 3
    assert 0 < ran["server"]["up"] - figures["links"]["server"]["up"] < 200 * replies
    # What a site sends does not depend on whether it has a hub.
    flat = compute_figures(Study.load(file, ["wire.aggregation=fixed_point"]))
    assert {name: figures[name] for name in flat} == flat
    assert figures["per_site"]["site-4"] == figures["per_site"]["site-1"]
    of_north = [figures["per_site"][site]["up"] for site in figures["hubs"]["north"]]
    assert sum(of_north) == ran["north"]["up"]


def test_links_are_a_table_on_the_terminal(tmp_path: Path) -> None:
    line = ["estimate", str(write(tmp_path)), "--set", "wire.aggregation=fixed_point", "--set", HUBS]
    text = CliRunner().invoke(app, line, env={"COLUMNS": "200"}).stdout
    assert "server and 2 hubs, 1 sites" in text
    assert "north and 2 sites" in text
    assert "which are not counted here" in text


def test_hub_with_a_site_that_the_run_has_not_is_refused(tmp_path: Path) -> None:
    line = ["estimate", str(write(tmp_path)), "--set", "wire.aggregation=fixed_point", "--set", HUBS, "--sites", "2"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
    assert "federation.hubs: site-3: no such site in this run" in result.stderr
