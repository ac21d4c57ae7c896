"""Real FLARE jobs in the simulator, one process per site."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors
import yaml
from egress import assert_logs_equal_ledger

from flare_sparse.api.local import run as run_in_process
from flare_sparse.api.start import launch
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.observer import Observer
from flare_sparse.flare.launch import simulator
from flare_sparse.flare.launch.connection import JobFailed
from flare_sparse.flare.polling import SHARE
from flare_sparse.results.runs.folder import RunFolder

HERE = Path(__file__).parent


def configuration(folder: Path, method: dict[str, Any], **more: Any) -> Path:
    """Write a configuration of SumTask on three sites, beside a copy of its module."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own_task.py").write_text((HERE / "own_task.py").read_text())
    for site in ("site-1", "site-2", "site-3"):
        (folder / site).mkdir(exist_ok=True)
    content: dict[str, Any] = {
        "name": "sum",
        "seed": 3,
        "method": {"rounds": 3, "training": {"epochs": 1, "lr": 0.01}, **method},
        "task": {"class": "own_task.SumTask", "width": 32},
        "federation": {"task_timeout_s": 600},
        "simulator": {"sites": 3, "data": {"path": str(folder / "{site}")}},
    }
    for section, settings in more.items():
        content[section] = {**content.get(section, {}), **settings}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def simulate(file: Path, out: Path) -> dict[str, Any]:
    return launch("sim", Study.load(file), RunFolder(out)).summary


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_digests(folder: Path) -> dict[str, str]:
    """Return the digest of each model in a folder; the order of a file's metadata differs between processes."""
    digests = {}
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, framework="pt") as file:
            digests[path.stem] = (file.metadata() or {})["sha256"]
    return digests


def check_equal_to_a_local_run(file: Path, folder: Path) -> None:
    """Check that the run in ``folder / "sim"`` has the model, metrics and messages of a local run."""
    local = run_in_process(Study.load(file), RunFolder(folder / "local")).summary
    simulated = json.loads((folder / "sim" / "summary.json").read_text())
    assert simulated["model_sha256"] == local["model_sha256"]
    assert simulated["final"] == json.loads(json.dumps(local["final"]))
    ledgers = [Counter(map(str, jsonl(folder / run / "ledger.jsonl"))) for run in ("sim", "local")]
    for run in ("sim", "local"):
        assert_logs_equal_ledger(folder / run)
    assert ledgers[0] == ledgers[1]


METHODS = {
    "neurosfl": {"name": "neurosfl", "sparsity": 0.8},
    "fedavg": {
        "name": "fedavg",
        "personal": "head",
        "server": {"optimizer": "yogi", "lr": 0.05},
        "model_average": {"kind": "swa", "start": 0},
    },
    "scbfwp": {"name": "scbfwp", "rate": 0.2, "prunings": 2, "pruning_rate": 0.3},
}


@pytest.mark.long
def test_simulation_whose_site_dies_before_the_first_round_starts_again(tmp_path: Path) -> None:
    """It ends with the bits of a local run, though the structure of the network changes during the run."""
    file = configuration(
        tmp_path / "config",
        METHODS["scbfwp"],
        task={"failures": {"site-2": "die"}},
        simulator={"site_settings": {"site-2": {"scbfwp": {"rate": 0.05}}}},
    )
    said: list[str] = []
    observer = Observer()
    observer.say = said.append  # type: ignore[method-assign]
    launch("sim", Study.load(file), RunFolder(tmp_path / "sim"), observer)
    assert sum("site-2 died before the first round" in line for line in said) == 1
    check_equal_to_a_local_run(file, tmp_path)


@pytest.mark.long
def test_server_and_sites_follow_a_policy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("max_model_entries: 10\n")
    monkeypatch.setattr(simulator, "Workplace", partial(simulator.Workplace, policy=policy))
    file = configuration(tmp_path / "config", METHODS["neurosfl"])
    with pytest.raises(JobFailed, match=r"E_CONFIG: .* the policy here allows max_model_entries 10"):
        simulate(file, tmp_path / "out")


@pytest.mark.slow
def test_bits_depend_on_the_seed_only(tmp_path: Path) -> None:
    """Simulations end with the bits of local runs (:func:`check_equal_to_a_local_run`)."""
    file = configuration(tmp_path / "config", METHODS["neurosfl"])
    runs = {"first": 3, "second": 3, "other": 4}
    digests = [
        run_in_process(Study.load(file, [f"seed={seed}"]), RunFolder(tmp_path / name)).summary["model_sha256"]
        for name, seed in runs.items()
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.long
def test_failing_sites_are_rejected_as_in_a_local_run_and_only_a_code_leaves_them(tmp_path: Path) -> None:
    """This holds for errors of the package and for any other error of a task, in loading and in training.

    The heads of the sites that can train stay there, and are the same as in a local run, too.
    """
    failures = {"site-1": "data", "site-2": "load", "site-3": "diverge", "site-4": "train"}
    codes = {"site-1": "E_DATA", "site-2": "E_SITE", "site-3": "E_DIVERGED", "site-4": "E_SITE"}
    folder = tmp_path / "config"
    file = configuration(folder, METHODS["fedavg"], task={"failures": failures}, simulator={"sites": 5})
    for site in ("site-4", "site-5"):
        (folder / site).mkdir()
    out = tmp_path / "out"
    summary = simulate(file, out)
    rounds = jsonl(out / "rounds.jsonl")
    # After three misses in a row the sites are quarantined for one round. A site that cannot train can evaluate.
    trained, last = rounds[:3], rounds[3]
    assert [line["rejected"] for line in trained] == [codes] * 3
    assert all(line["sites_contributed"] == ["site-5"] for line in trained)
    assert (last["rejected"], last["quarantined"]) == ({}, ["site-1", "site-2", "site-3", "site-4"])
    assert sorted(summary["final"]["sites"]) == ["site-5"]
    reports = [p for p in out.rglob("*") if p.is_file() and "CANARY-4711" in p.read_text(errors="replace")]
    assert [p.name for p in reports] == ["site_error.txt"] * 3
    assert {site for site in failures for p in reports if site in str(p)} == {"site-1", "site-2", "site-4"}
    local = run_in_process(Study.load(file), RunFolder(tmp_path / "local")).summary
    fields = ("kind", "round", "rejected", "quarantined", "sites_contributed", "timed_out", "attempts")
    assert [[line[f] for f in fields] for line in jsonl(tmp_path / "local" / "rounds.jsonl")] == [
        [line[f] for f in fields] for line in rounds
    ]
    assert local["model_sha256"] == summary["model_sha256"]
    own_models = [read_digests(run / "site_models") for run in (out, tmp_path / "local")]
    assert own_models[0] == own_models[1]
    assert "site-5" in own_models[0]
    written = {p.stem: p.read_text() for p in (tmp_path / "local" / "site_errors").iterdir()}
    assert {site: text.partition(":")[0] for site, text in written.items()} == codes


@pytest.mark.long
def test_waiting_site_polls_less_and_less_often(tmp_path: Path) -> None:
    """Another site trains for six seconds in each of two rounds."""
    file = configuration(tmp_path / "config", {"name": "fedavg", "rounds": 2, "training": {"batch_size": 8}})
    (file.parent / "waiting_task.py").write_text((HERE / "waiting_task.py").read_text())
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**content, "task": {"class": "waiting_task.WaitingTask"}}))
    simulate(file, tmp_path / "out")
    lines = [line.split() for line in (file.parent / "site-2" / "waits.txt").read_text().splitlines()]
    worked = [number for number, line in enumerate(lines) if line[2] == "1"]
    assert len(worked) == 3  # two rounds and the last evaluation; recording begins after the hello
    rounds = [lines[begin + 1 : end] for begin, end in pairwise(worked)]
    for waits in ([(float(since), float(wait)) for since, wait, _ in asked] for asked in rounds):
        (early, short), *_, (late, long) = [(since, wait) for since, wait in waits if wait > 0.051]
        assert late - early > 1, waits
        assert (long - short) / (late - early) == pytest.approx(SHARE, rel=0.3), waits
    assert float(rounds[1][0][1]) < max(float(wait) for _, wait, _ in rounds[0]), (
        "the interval restarts with the next round"
    )


@pytest.mark.slow
def test_run_writes_a_consistent_record(tmp_path: Path) -> None:
    out = tmp_path / "sim"
    masked: dict[str, Any] = {"wire": {"aggregation": "masked"}, "federation": {"min_sites": 3}}
    file = configuration(tmp_path / "config", METHODS["neurosfl"], task={"split": {"validation": 0.1}}, **masked)
    summary = simulate(file, out)
    check_equal_to_a_local_run(file, tmp_path)
    assert summary["best"]["metrics"].keys() >= {"mse", "validation_mse"}
    assert {
        "summary.json",
        "ledger.jsonl",
        "rounds.jsonl",
        "model.safetensors",
        "best_model.safetensors",
        "config.yaml",
        "metrics_summary.json",
        "round_metrics.jsonl",
        "flare.log",
    } <= {path.name for path in out.iterdir()}
    ledger = jsonl(out / "ledger.jsonl")
    for direction in ("down", "up"):
        lines = [line for line in ledger if line["direction"] == direction]
        assert summary["traffic"][direction]["payload_bytes"] == sum(line["payload_bytes"] for line in lines)
    values = [line for line in ledger if line["direction"] == "up" and line["scalars_sent"]]
    assert {line["values"] for line in values} == {"masked"}
    # Three sites: scores, then three rounds of weights.
    assert Counter(line["content"] for line in values) == {"scores": 3, "weights": 9}
    assert [line["kind"] for line in jsonl(out / "rounds.jsonl")] == ["score", "train", "train", "train", "evaluate"]
    metrics = json.loads((out / "metrics_summary.json").read_text())
    assert metrics["best_round"] == summary["best"]["round"]
    app = out / "workspace" / "sum" / "server" / "simulate_job" / "app_server"
    manifest = json.loads((app / "artifact_manifest.json").read_text())
    model = app / manifest["artifacts"]["global_model"]
    assert model.read_bytes() == (out / "model.safetensors").read_bytes()


def test_path_with_a_space_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = configuration(tmp_path / "config", METHODS["neurosfl"])
    with pytest.raises(ConfigError, match="contains a space"):
        simulate(file, tmp_path / "with space")
