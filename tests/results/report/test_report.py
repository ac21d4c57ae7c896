"""The report in a real browser without a network: it is complete and agrees with the record."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from skips import require
from typer.testing import CliRunner

from flare_sparse.cli import app
from flare_sparse.cli.console import build_table
from flare_sparse.cli.watch import write_page
from flare_sparse.core.errors import ConfigError
from flare_sparse.results.report.card import format_card
from flare_sparse.results.report.figures import draw_sites, render_png
from flare_sparse.results.report.findings import describe_caveat, describe_data, describe_findings, describe_weight
from flare_sparse.results.report.page import write_report
from flare_sparse.results.report.tables import (
    build_contributions,
    build_matrices,
    build_seed_averages,
    compare_bytes,
    describe_means,
)
from flare_sparse.results.runs.progress import format_bytes
from flare_sparse.results.runs.results import RunResult, read_runs


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium without a network."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    reason = "chromium and chromedriver are missing; apt-get install chromium chromium-driver"
    require(chromium is not None and driver is not None, reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield window
    window.quit()


@pytest.fixture(scope="module")
def page(finished: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    result = CliRunner().invoke(app, ["report", *map(str, finished.values()), "--out", str(out)])
    assert result.exit_code == 0, result.output
    figures = "learning", "traffic", "sites", "predicted", "layers"
    assert {"report.html", *(f"{name}.png" for name in figures)} == {p.name for p in out.iterdir()}
    return out / "report.html"


@pytest.mark.slow
def test_page_of_a_run_fits_a_phone(browser: Any, finished: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "live.html"
    result = CliRunner().invoke(app, ["watch", str(finished["neurosfl"]), "--page", str(page)])
    assert result.exit_code == 0, result.output
    of_site = tmp_path / "site.html"
    rows = [["study (run 4f1c09aa51d2e7b3): 22 models, to round 21"], ["site-1: round 4, epoch 1 of 2, step 7 of 20"]]
    write_page(of_site, build_table("site site-1", ["now"], rows, left=["now"]))
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    for file, text in ((page, "all rounds done"), (of_site, "site-1: round 4")):
        browser.get(file.as_uri())
        assert text in browser.find_element("tag name", "body").text
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), file
        assert browser.execute_script("return parseFloat(getComputedStyle(document.querySelector('pre')).fontSize)") > 9
        assert browser.get_log("browser") == []


@pytest.mark.slow
def test_page_works_offline_and_shows_the_record(browser: Any, page: Path, finished: dict[str, Path]) -> None:
    browser.get(page.as_uri())
    text = browser.find_element("tag name", "body").text
    # One call for all rows: a call for each takes seconds.
    every = browser.execute_script("return [...document.querySelectorAll('tbody tr')].map(row => row.innerText)")
    runs = {name: RunResult.read(folder) for name, folder in finished.items()}
    for name, run in runs.items():
        rows = [row for row in every if row.startswith(name)]
        assert f"{run.final_metric:.3f}" in rows[0]
        assert format_bytes(run.sum_directions("payload_bytes")) in rows[0]
        # The table of models by site; the row of a run of local_only is that of the sites' own models.
        (row,) = [row for row in every if row.startswith((f"{name}: final model", f"{name}: each site"))]
        assert [f"{figure:.3f}" for figure in run.site_metrics.values()] == row.split("\t")[1:]
    sent, dense = (runs["neurosfl"].sum_directions(key) for key in ("payload_bytes", "dense_bytes"))
    assert f"{dense / sent:.1f}x less than dense FedAvg (" in text
    assert "One seed per run" in text
    images = browser.find_elements("tag name", "img")
    assert [browser.execute_script("return arguments[0].naturalWidth", image) > 500 for image in images] == [True] * 5
    assert all(image.get_attribute("alt") for image in images)
    assert [h.text for h in browser.find_elements("tag name", "h2")][:11] == [
        "The runs",
        "Compared with trivial baselines",
        "Runs on the same test subjects",
        "All metrics",
        "Cohorts",
        "Contributions",
        "Quality",
        "Bytes",
        "Sites",
        "Predicted and true",
        "Sparsity",
    ]
    ended = max(run.times[1] for run in runs.values())
    assert f"ended {ended:%Y-%m-%d %H:%M} UTC; synthetic data, of no patients" in text


def test_positive_gain_is_an_improvement_for_any_metric(finished: dict[str, Path]) -> None:
    run, alone = RunResult.read(finished["neurosfl"]), RunResult.read(finished["local_only"])
    gains = run.compute_gains(alone)
    assert gains == {site: alone.site_metrics[site] - run.site_metrics[site] for site in ("site-1", "site-2")}
    run.summary["metric"]["mode"] = "max"
    assert run.compute_gains(alone) == {site: -gain for site, gain in gains.items()}
    sentence = next(
        line for line in describe_findings([RunResult.read(finished["neurosfl"]), alone]) if "alone" in line
    )
    least = min(gains, key=lambda site: gains[site])
    assert f"at {sum(gain > 0 for gain in gains.values())} of 2 sites" in sentence
    assert f"smallest gain {gains[least]:+.3g} at {least}." in sentence


@pytest.mark.parametrize(
    ("simulator", "text"),
    [
        (None, "never left the sites"),
        ({"data": {"path": "data/{site}"}}, "simulated on one machine"),
        ({"sites": 3, "data": {"phantom": {"subjects": 4}}}, "synthetic"),
    ],
)
def test_data_is_named_as_what_it_is(simulator: Any, text: str, tmp_path: Path, finished: dict[str, Path]) -> None:
    run = replace(RunResult.read(finished["neurosfl"]), path=tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"simulator": simulator} if simulator else {"name": "x"}))
    assert text in describe_data(run)
    assert describe_caveat([run, run]).count(text) == 1


def with_seed(run: RunResult, seed: int, label: str) -> RunResult:
    return replace(run, label=label, summary={**run.summary, "seed": seed})


def test_runs_are_compared_within_their_seed(finished: dict[str, Path]) -> None:
    read = {name: RunResult.read(folder) for name, folder in finished.items()}
    runs = [with_seed(run, seed, f"{name}-{seed}") for name, run in read.items() for seed in (1, 2)]
    runs.append(with_seed(read["neurosfl"], 3, "neurosfl-3"))
    sentences = describe_findings(runs)
    compared = [line.split()[0] for line in sentences if " than dense FedAvg (" in line and " ended " in line]
    assert compared == ["neurosfl-1", "neurosfl-2", "local_only-1", "local_only-2"]
    gains = [line.split()[0] for line in sentences if "than training alone" in line]
    assert gains == ["neurosfl-1", "neurosfl-2", "fedavg-1", "fedavg-2"]
    assert describe_weight(runs).startswith("3 seeds on 4 test examples")
    assert "in all 3 seeds with probability 1/4" in describe_weight(runs)
    apart = [
        with_seed(read["neurosfl"], 1, "a"),
        with_seed(read["fedavg"], 2, "b"),
        with_seed(read["local_only"], 3, "c"),
    ]
    assert not [line for line in describe_findings(apart) if " ended " in line or "training alone" in line]
    assert describe_weight(runs[:1]).startswith("This is the result of one run on 4 test examples")


def test_names_in_figures_are_no_formulas(finished: dict[str, Path]) -> None:
    run = replace(RunResult.read(finished["fedavg"]), label=r"a $\frac$ b")
    names: list[tuple[str, bool]] = []

    def draw(runs: list[RunResult]) -> Any:
        figure = draw_sites(runs)
        (axes,) = figure.axes
        legend: Any = axes.get_legend()
        names.extend((text.get_text(), text.get_parse_math()) for text in legend.get_texts())
        return figure

    assert render_png(draw, [run]).startswith(b"\x89PNG")
    assert names == [(r"a $\frac$ b", False)]


@pytest.mark.long
def test_sites_are_drawn_with_their_gain_where_a_run_trained_alone(finished: dict[str, Path]) -> None:
    runs = {run.label: run for run in read_runs([finished[name] for name in ("neurosfl", "local_only")])}
    (metrics,) = draw_sites([runs["neurosfl"]]).axes
    sites = sorted(runs["neurosfl"].site_metrics)
    drawn = np.asarray(metrics.collections[0].get_offsets())
    assert drawn.tolist() == [[runs["neurosfl"].site_metrics[site], row] for row, site in enumerate(sites)]
    _, gains = draw_sites(list(runs.values())).axes
    expected = runs["neurosfl"].compute_gains(runs["local_only"])
    assert np.asarray(gains.collections[0].get_offsets())[:, 0].tolist() == [expected[site] for site in sites]


@pytest.mark.slow
def test_page_makes_no_requests_and_logs_no_errors(browser: Any, page: Path) -> None:
    browser.get_log("performance")
    browser.get(page.as_uri())
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in events if m["method"] == "Network.requestWillBeSent"]
    assert [url[:40] for url in urls if not url.startswith(("file:", "data:"))] == []
    assert browser.get_log("browser") == []
    assert not re.search(r'(src|href)="(?!data:)', page.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("width", [375, 1200])
def test_page_fits_the_width_of_the_screen(width: int, browser: Any, page: Path) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_missing_record_and_mixed_metrics_are_refused(finished: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no record of a finished run"):
        RunResult.read(tmp_path)
    # What a recipe leaves in FLARE's workspace.
    shutil.copytree(finished["fedavg"], record := tmp_path / "job/server/flare_sparse")
    with pytest.raises(ConfigError, match=rf"expected {record}$"):
        RunResult.read(tmp_path / "job")
    (tmp_path / "a").mkdir()
    for name in ("summary.json", "rounds.jsonl", "ledger.jsonl"):
        shutil.copy(finished["fedavg"] / name, tmp_path / "a" / name)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    summary["metric"]["name"] = "auc"
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match="have different metrics"):
        read_runs([finished["fedavg"], tmp_path / "a"])


@pytest.mark.slow
def test_run_writes_a_model_card(finished: dict[str, Path]) -> None:
    run, card = RunResult.read(finished["neurosfl"]), (finished["neurosfl"] / "model_card.md").read_text()
    assert card.startswith("---\nlibrary_name: pytorch\n")
    assert f"**{run.final_metric:.3f}**" in card
    assert run.summary["model_sha256"] in card
    assert all(f"| {site} |" in card for site in run.site_metrics)
    assert "load_model" in card


@pytest.mark.slow
def test_front_matter_of_the_card_is_read_by_the_hub_with_every_final_metric(finished: dict[str, Path]) -> None:
    run = RunResult.read(finished["neurosfl"])
    data = ModelCard(format_card(run)).data
    assert data.library_name == "pytorch"
    assert {"federated-learning", "neurosfl"} <= set(data.tags)
    metrics = {result.metric_type: result.metric_value for result in data.eval_results}
    assert metrics == {name: run.summary["final"]["metrics"][name] for name in run.metric_names}
    assert data.eval_results[0].task_name == "brain_age"
    without = change_summary(run, final={"metrics": {"mae": float("nan")}, "sites": {}})
    assert ModelCard(format_card(without)).data.eval_results is None


def change_summary(run: RunResult, **changes: Any) -> RunResult:
    return replace(run, summary={**run.summary, **changes})


def test_card_and_page_say_which_sites_contributed_and_which_have_no_test_examples(finished: dict[str, Path]) -> None:
    run = RunResult.read(finished["fedavg"])
    sites = {"site-1": run.summary["final"]["sites"]["site-1"]}
    contributions = {
        "site-1": {"asked": 2, "contributed": 2, "missed": {}},
        "site-2": {"asked": 2, "contributed": 1, "missed": {"timed_out": 1}},
        "site-3": {"asked": 2, "contributed": 0, "missed": {"E_DATA": 2}},
        "site-4": {"asked": 0, "contributed": 0, "missed": {"excluded": 2}},
        "target": {"asked": 0, "contributed": 0, "missed": {}},
    }
    events = [{"round": 2, "site": "site-2", "event": "residual dropped", "detail": "damaged"}]
    final = {**run.summary["final"], "sites": sites}
    run = change_summary(run, contributions=contributions, events=events, final=final)
    card = format_card(run)
    assert "on the data of 2 of 5 sites for 2" in card
    assert "contributed to no round: site-3 (2 x E_DATA), site-4 (2 x excluded)" in card
    assert "| site-4 | 0 of 2 |" in card
    assert "| target | never asked |" in card
    assert "| site-2 | 1 of 2 | no test examples | - |" in card
    assert f"| site-2 | {run.label} | 2 | residual dropped | damaged |" in card
    table = build_contributions([run])
    assert table.rows == [
        ["site-1", "2 of 2"],
        ["site-2", "1 of 2 (1 x timed out)"],
        ["site-3", "none of 2 (2 x E_DATA)"],
        ["site-4", "none of 2 (2 x excluded)"],
        ["target", "never asked"],
    ]
    assert any(
        "learned nothing from site-3 (2 x E_DATA), site-4 (2 x excluded)" in line for line in describe_findings([run])
    )
    text = describe_means([run])
    assert "for AUC, C-index, F1 and RMSE it is not" in text
    assert "site-2 (all); site-3 (all); site-4 (all)" in text
    assert "The best model was selected by its metric on validation examples" in text
    matrix = build_matrices([run])[0]
    assert matrix.columns == [
        "model",
        "site-1 (2)",
        *(f"{site} (no test examples)" for site in ("site-2", "site-3", "site-4", "target")),
    ]


def test_contributions_are_those_of_training_also_where_the_only_request_trains(finished: dict[str, Path]) -> None:
    run = RunResult.read(finished["neurosfl"])
    assert {site: (part.asked, part.contributed) for site, part in run.contributions.items()} == {
        "site-1": (len(run.rounds) - 1, len(run.rounds) - 1),
        "site-2": (len(run.rounds) - 1, len(run.rounds) - 1),
    }
    alone = RunResult.read(finished["local_only"])
    assert {site: part.contributed for site, part in alone.contributions.items()} == {"site-1": 1, "site-2": 1}


@pytest.mark.slow
def test_runs_that_differ_by_seed_only_are_averaged(finished: dict[str, Path], tmp_path: Path) -> None:
    read = {name: RunResult.read(folder) for name, folder in finished.items()}
    runs = [with_seed(run, seed, f"{name}-{seed}") for name, run in read.items() for seed in (1, 2, 3)]
    for shift, run in enumerate(runs[:3]):
        metrics = {**run.summary["final"]["metrics"], "mae": 10.0 + shift}
        run.summary["final"] = {**run.summary["final"], "metrics": metrics}
    table = build_seed_averages(runs)
    assert table is not None
    assert table.rows[0][:3] == ["neurosfl (3 seeds)", "3", "11.000 ± 1.000 [10.000, 12.000]"]
    assert [row[0] for row in table.rows] == ["neurosfl (3 seeds)", "fedavg (3 seeds)", "local_only (3 seeds)"]
    averaged = [line.split(" sent")[0] for line in describe_findings(runs) if " on average" in line]
    assert averaged[:1] == ["neurosfl (3 seeds)"]
    assert {"learning.png", "traffic.png", "sites.png", "layers.png"} <= {p.name for p in write_report(runs, tmp_path)}
    # Runs with other settings, or with the same seed, are no repetitions of one another.
    assert build_seed_averages([runs[0], runs[3]]) is None
    assert build_seed_averages([runs[0], runs[0]]) is None


@pytest.mark.slow
def test_matrix_has_a_row_for_every_model_and_a_column_for_every_site(finished: dict[str, Path]) -> None:
    alone, dense = RunResult.read(finished["local_only"]), RunResult.read(finished["fedavg"])
    results = {"site-1": {"site-1": {"mae": 1.0}, "site-2": {"mae": 2.0}}}
    matrix = {"examples": {"site-1": 2, "site-2": 2}, "results": results}
    # cached_property keeps its value in the instance.
    alone.__dict__["cross_site"] = matrix
    table = build_matrices([dense, alone])[0]
    assert table.columns == ["model", "site-1 (2)", "site-2 (2)"]
    name, own = dense.label, [f"{alone.site_metrics[site]:.3f}" for site in ("site-1", "site-2")]
    final = [f"{dense.site_metrics[site]:.3f}" for site in ("site-1", "site-2")]
    assert [f"{name}: final model", *final] in table.rows
    assert [f"{name}: each site's own model", *own] in table.rows
    assert [f"{name}: model of site-2", "2.000", "-"] in table.rows


def test_bytes_above_dense_fedavg_are_called_more() -> None:
    assert compare_bytes(200, 100) == "2.0x more"
    assert compare_bytes(100, 250) == "2.5x less"
    assert compare_bytes(102, 100) == "as much"
    assert compare_bytes(100, 0) == "-"
