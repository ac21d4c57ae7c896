"""Federated standardisation: one exchange before round 1, the same in a run that is resumed, at every site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy import estimate_traffic

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.assemble import assemble
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import build_task
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.observer import SILENT, Observer
from flare_sparse.methods.registry import METHODS
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.results.runs.model_files import read_model
from flare_sparse.tasks.task import SiteData, load_examples

SIZES = {"site-1": 30, "site-2": 25, "site-3": 1}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A configuration over three tables with missing values; one site has a single subject."""
    generator = torch.Generator().manual_seed(0)
    for site, size in SIZES.items():
        rows = torch.randn(size, 2, generator=generator)
        lines = [f"{60 + 10 * a:.3f},{'' if i % 7 == 3 else f'{2019 + b:.3f}'},{'FM'[i % 2]},{a:.3f}"
                 for i, (a, b) in enumerate(rows.tolist())]  # fmt: skip
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,year,sex,score", *lines]) + "\n")
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: scaled\nseed: 2\nmethod: {name: fedavg, rounds: 2, training: {batch_size: 8}}\n"
        "task: {name: table, kind: regression, target: score, features: [age, sex, year], categories: {sex: [F, M]},\n"
        "  missing: impute, scaling: federated, split: {test: 0.2}}\n"
        f"simulator: {{sites: 3, data: {{path: '{tmp_path}/{{site}}.csv'}}}}\n"
    )
    return file


def run(job: Path, out: Path, *overrides: str, resume: bool = False, observer: Observer = SILENT) -> dict[str, Any]:
    return run_in_process(Study.load(job, overrides), RunFolder(out, resume), observer).summary


def read_statistics(out: Path) -> torch.Tensor:
    layout = assemble(load_config(out / "config.yaml")).layout
    return layout.unflatten(read_model(out / "model.safetensors", layout))["scaler.statistics"].double()


def load_training_inputs(job: Path) -> dict[str, torch.Tensor]:
    """Return the inputs ``(n, 7)`` of the training examples of every site."""
    config = load_config(job)
    task = build_task(config)
    examples = {site: load_examples(task, SiteData(site, job.parent / f"{site}.csv"), config.seed) for site in SIZES}
    return {site: torch.stack([x for x, _ in part.train]) for site, part in examples.items()}


def test_model_holds_the_statistics_of_one_pooled_table(job: Path, tmp_path: Path) -> None:
    run(job, tmp_path / "out")
    inputs = load_training_inputs(job)
    assert len(inputs["site-3"]) == 1
    statistics = read_statistics(tmp_path / "out")
    # Inputs: age, sex=F, sex=M, year, and an indicator for each column.
    for index in (0, 3):
        column = torch.cat(list(inputs.values()))[:, index].double()
        column = column[~column.isnan()]
        assert statistics[0, index] == len(column)
        assert torch.isclose(statistics[1:3, index].sum(), column.mean(), rtol=1e-12, atol=0)
        assert torch.isclose(statistics[3:5, index].sum(), column.std(correction=0), rtol=1e-12, atol=0)
    assert statistics[:, [1, 2, 4, 5, 6]].abs().sum() == 0


def test_exchange_is_one_message_to_and_from_every_site_in_the_ledger(job: Path, tmp_path: Path) -> None:
    summary = run(job, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    exchange = [line for line in lines if line["kind"] == "statistics"]
    assert [(line["site"], line["direction"]) for line in exchange if line["direction"] == "up"] == [
        (site, "up") for site in SIZES
    ]
    assert {line["scalars_sent"] for line in exchange if line["direction"] == "up"} == {35}
    assert lines.index(exchange[-1]) == len(exchange) - 1
    assert summary["examples"] == {site: len(x) for site, x in load_training_inputs(job).items()}
    first = json.loads((tmp_path / "out" / "rounds.jsonl").read_text().splitlines()[0])
    assert (first["kind"], first["round"], first["attempts"]) == ("statistics", 0, 1)


def test_estimate_counts_the_bytes_of_the_exchange(job: Path, tmp_path: Path) -> None:
    run(job, tmp_path / "out")
    assembly = assemble(load_config(job))
    _, ledger = estimate_traffic(assembly.method, assembly.weights, 3, "float32")
    lines = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    assert [line.payload_bytes for line in ledger.lines if line.kind == "statistics"] == [
        line["payload_bytes"] for line in lines if line["kind"] == "statistics"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 2])
def test_resumed_run_ends_in_the_same_model(job: Path, tmp_path: Path, stop: int) -> None:
    expected = run(job, tmp_path / "whole")["model_sha256"]
    lines: list[Any] = []

    class Interruption(Observer):
        def see_round(self, line: dict[str, Any]) -> None:
            lines.append(line)
            if len(lines) == stop:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "out", observer=Interruption())
    assert lines[0]["kind"] == "statistics"
    resumed = run(job, tmp_path / "out", resume=True)
    assert resumed["model_sha256"] == expected
    records = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in records] == [0, 1, 2, 3]


EXCLUDED = {"lora_a2", "ffa_lora", "flexlora", "hetlora", "metagater", "metasnip"}
"""Methods whose networks have adapters or gates, which the network of this table lacks."""


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS.keys() - EXCLUDED))
def test_statistics_stay_the_same_through_the_rounds_of_every_method(job: Path, tmp_path: Path, method: str) -> None:
    run(job, tmp_path / "fedavg", "method={name: fedavg, rounds: 1}")
    run(job, tmp_path / "out", f"method={{name: {method}, rounds: 2}}", "federation.retries=0")
    assert torch.equal(read_statistics(tmp_path / "out"), read_statistics(tmp_path / "fedavg"))


def test_site_without_a_column_says_which_one_and_the_others_continue(job: Path, tmp_path: Path) -> None:
    file = tmp_path / "site-2.csv"
    rows = [line.split(",") for line in file.read_text().splitlines()]
    file.write_text("\n".join(",".join([row[0], *row[2:]]) for row in rows) + "\n")
    summary = run(job, tmp_path / "out")
    assert summary["examples"].keys() == {"site-1", "site-3"}
    error = (tmp_path / "out" / "site_errors" / "site-2.txt").read_text()
    assert "site-2.csv: no column 'year'" in error
    assert "Found: age, sex, score" in error


@pytest.mark.parametrize("values", ["float16", "bfloat16", "bfloat16_zstd"])
def test_statistics_in_a_format_that_rounds_them_are_refused(job: Path, values: str) -> None:
    with pytest.raises(ConfigError, match=r"wire\.values: .*values are rounded, but the network: the statistics"):
        assemble(load_config(job, [f"wire.values={values}"]))


@pytest.mark.slow
@pytest.mark.parametrize(("values", "method"), [("int2", "fedavg"), ("int8", "topk_ef"), ("float32_zstd", "fedavg")])
def test_statistics_are_those_of_float32_in_formats_that_round_no_buffers(
    job: Path, tmp_path: Path, values: str, method: str
) -> None:
    for name in ("float32", values):
        run(job, tmp_path / name, f"method={{name: {method}, rounds: 2}}", f"wire.values={name}")
    assert torch.equal(read_statistics(tmp_path / values), read_statistics(tmp_path / "float32"))
    lines = [json.loads(line) for line in (tmp_path / values / "ledger.jsonl").read_text().splitlines()]
    formats = {line["values"] for line in lines if line["kind"] == "statistics" and line["direction"] == "up"}
    assert formats == {"float32"}


COMBAT = (
    "task.scaling=combat", "task.covariates=[sex]", "task.missing=refuse", "task.skip_bad_subjects=true",
    "method.personal=site",
)  # fmt: skip


def test_sites_harmonise_by_the_statistics_of_all_sites_and_their_own(job: Path, tmp_path: Path) -> None:
    run(job, tmp_path / "out", *COMBAT)
    config = load_config(job, [*COMBAT])
    task = build_task(config)
    inputs = {}
    for site in SIZES:
        examples = load_examples(task, SiteData(site, job.parent / f"{site}.csv"), config.seed)
        inputs[site] = torch.stack([x for x, _ in examples.train])
    scaler: Any = task.config.build_scaler()  # type: ignore[attr-defined]
    parts = [scaler.compute_statistics(values) for values in inputs.values()]
    pooled = scaler.pool_statistics(parts)
    for site, part in zip(SIZES, parts, strict=True):
        tensors = load_file(tmp_path / "out" / "site_models" / f"{site}.safetensors")
        assert torch.equal(tensors["scaler.statistics"], pooled)
        assert torch.equal(tensors["scaler.site"], part)
    # The model that travels has the pooled statistics alone.
    assert "scaler.site" not in load_file(tmp_path / "out" / "model.safetensors")
    network: Any = task.model()
    network.load_state_dict(load_file(tmp_path / "out" / "site_models" / "site-1.safetensors"))
    harmonized = network.scaler(inputs["site-1"])
    # Age and year are harmonised, sex is scaled.
    assert harmonized[:, [0, 3]].abs().mean() < 2
    assert not torch.equal(harmonized, inputs["site-1"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("task.covariates=[height]", "'height' is not among the features"),
        ("task.scaling=site", "covariates have an effect with scaling combat alone"),
        ("task.missing=impute", "scaling combat needs complete numbers"),
        ("method.personal=[]", "scaler.site describes the data of one site and must stay there"),
    ],
)
def test_settings_that_cannot_be_harmonised_are_refused(job: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assemble(load_config(job, [*COMBAT, setting]))
