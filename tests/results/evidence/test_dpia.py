"""Evidence of a run: cohorts, terms, deviations, digests, and a model that is the one of the record."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flare_sparse.api.run import Run
from flare_sparse.cli import app
from flare_sparse.config.policy.policy import Policy
from flare_sparse.core.errors import ConfigError
from flare_sparse.results.evidence.dpia import format_dpia
from flare_sparse.results.evidence.facts import Approval, describe_egress, list_deviations, list_files
from flare_sparse.results.report.card import format_card
from flare_sparse.results.runs.load import load_study
from flare_sparse.results.runs.model_files import read_model, save_model
from flare_sparse.results.runs.results import RunResult
from flare_sparse.rounds.endpoints.egress import find_logs, read_chain

NO_JOB = Approval("none", "one process")
PAGE = Path(__file__).parents[3] / "docs" / "evidence.md"
QUIET: dict[str, Any] = {
    "attempts": 1, "excluded": {}, "quarantined": [], "rejected": {}, "timed_out": [], "abstained": [], "capped": {},
    "clipped": {},
}  # fmt: skip


def test_cohorts_are_the_examples_of_every_part_at_every_site(phantom_run: Path) -> None:
    run = RunResult.read(phantom_run)
    # 10 subjects a site.
    text = format_dpia(run, NO_JOB, {}, {})
    assert "| site-1 | 6 | 2 | 2 |" in text
    assert "| site-2 | 6 | 2 | 2 |" in text
    assert list_deviations(run) == []
    egress = describe_egress(run, {})
    for site, folder in find_logs(phantom_run).items():
        last = (folder / "egress.jsonl").read_bytes().splitlines()[-1]
        assert egress[site]["head"] == hashlib.sha256(last).hexdigest()
        assert egress[site]["lines"] == json.loads(last)["line"]


def test_permit_of_a_job_stands_in_evidence_model_card_and_egress_log(phantom_run: Path) -> None:
    run = RunResult.read(phantom_run)
    assert "| permit | EA 12/2026 | `config.yaml` |" in format_dpia(run, NO_JOB, {}, {})
    assert "Permit: EA 12/2026." in format_card(run)
    logs = [read_chain(folder)[0] for folder in find_logs(phantom_run).values()]
    assert {line["permit"] for log in logs for line in log} == {"EA 12/2026"}
    assert len(logs) == 2


@pytest.mark.slow
def test_annex_states_figures_with_their_sources_and_claims_nothing(phantom_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(phantom_run, run)
    result = CliRunner().invoke(app, ["evidence", str(run), "--out", str(run / "dpia.md"), "--site", "site-1=careful"])
    assert result.exit_code == 0, result.output
    text = (run / "dpia.md").read_text()
    assert "| permit | EA 12/2026 | `config.yaml` |" in text
    assert "| site-2 | 6 | 2 | 2 | 2 of 2 | `summary.json` |" in text
    assert "claims no compliance" in text
    assert "| policy of site-2 | none in force" in text
    assert "An outsider with the final model and similar models of their own (RMIA) (rmia)" in text
    assert "| checkpoints in the result folder | until they are removed | `config.yaml` |" in text
    assert "| purpose of the processing |  |" in text
    assert "| checkpoints of site-1 | 90 days, the default |" in text
    _, head = read_chain(find_logs(run)["site-1"])
    assert f"| {head} | the same messages and bytes as the server's ledger | egress log of the site, chain" in text
    up = RunResult.read(run).summary["traffic"]["up"]
    # One hello of each site beside the messages of the ledger.
    assert sum_egress(text, "egress log of the site") == (up["messages"] + 2, up["payload_bytes"])
    moved = tmp_path / "handed-out"
    shutil.move(find_logs(run)["site-1"], moved)
    shutil.rmtree(find_logs(run)["site-2"])
    options = ["--site", f"site-1={moved}", "--out", str(tmp_path / "annex.md")]
    result = CliRunner().invoke(app, ["evidence", str(run), *options])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "annex.md").read_text()
    parts = [sum_egress(text, source) for source in ("egress log of the site", "`ledger.jsonl` of the server")]
    assert all(messages for messages, _ in parts)
    assert sum(size for _, size in parts) == up["payload_bytes"]
    printed = CliRunner().invoke(app, ["evidence", str(run), *options[:3], str(tmp_path / "annex.pdf")])
    assert printed.exit_code == 0, printed.output
    assert (tmp_path / "annex.pdf").read_bytes().startswith(b"%PDF-")
    with (moved / "egress.jsonl").open("a") as log:
        log.write("{}\n")
    result = CliRunner().invoke(app, ["evidence", str(run), *options])
    assert result.exit_code == 1
    assert "is no line of this log" in " ".join(result.stderr.split())


def sum_egress(text: str, source: str) -> tuple[int, int]:
    """Return the messages and bytes in the rows of a source."""
    rows = [line.split(" | ") for line in text.splitlines() if line.endswith(f"| {source} |")]
    return sum(int(row[3]) for row in rows), sum(int(row[4].replace(",", "")) for row in rows)


def test_statement_of_another_party_adds_no_row_or_heading(phantom_run: Path) -> None:
    run = RunResult.read(phantom_run)
    hostile = replace(NO_JOB, note="signed |\n\n## Approved |\r\u2028\x85yes")
    text = format_dpia(run, hostile, {}, {})
    assert "Signature none: signed /  ## Approved /   yes | the job's signatures |" in text
    assert "\n\n## Approved" not in text
    # Each row has as many cells as its head; each paragraph is one line.
    for block in text.strip().split("\n\n"):
        assert len({line.count("|") for line in block.splitlines()}) == 1


@pytest.mark.slow
def test_policy_of_a_site_is_shown_with_every_term_and_a_missing_one_is_named(phantom_run: Path) -> None:
    run = RunResult.read(phantom_run)
    text = format_dpia(run, replace(NO_JOB, job_id="7"), {"site-1": Policy(min_examples=20)}, {})
    assert "| policy of site-1 | min_examples: 20 | given with `--site` |" in text
    assert "| policy of site-2 | not given: a site's policy stays at the site;" in text
    assert "| policy of site-1, site-2 | none in force" in format_dpia(run, NO_JOB, {}, {})
    with pytest.raises(ConfigError, match="no such site; its sites are site-1, site-2"):
        format_dpia(run, NO_JOB, {"site-9": Policy()}, {})


@pytest.mark.slow
def test_budget_and_audit_of_a_run_are_passed_on(phantom_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(phantom_run, run)
    summary = json.loads((run / "summary.json").read_text())
    summary["privacy"] = {"epsilon": 3.0, "spent": {"site-1": 2.5}, "delta": 1e-5, "outside_budget": []}
    (run / "summary.json").write_text(json.dumps(summary))
    attack = {
        "attacker": "outsider", "attack": "loss threshold", "auc": 0.5, "balanced_accuracy": 0.5,
        "tpr_at_1_percent_fpr": 0.0, "interval": [0.4, 0.6],
    }  # fmt: skip
    audit = {"model_sha256": summary["model_sha256"], "attacks": [attack], "skipped": []}
    (run / "audit.json").write_text(json.dumps(audit))
    text = format_dpia(RunResult.read(run), NO_JOB, {}, {})
    assert "| privacy parameters | epsilon 3.0, delta 1e-05 |" in text
    assert "| spent by site | site-1 2.50 |" in text
    (not_tried,) = [line for line in text.splitlines() if line.startswith("Not tried: ")]
    assert "(loss threshold)" not in not_tried
    assert "(rmia)" in not_tried
    assert Path("audit.json") in list_files(run)
    (run / "audit.json").write_text("{")
    assert "`audit.json` is damaged" in Run(run).evidence().read_text()


def test_model_that_was_changed_after_the_run_is_refused(phantom_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(phantom_run, run)
    file = run / "model.safetensors"
    layout = load_study(run).assembly.layout
    save_model(file, layout, read_model(file, layout) + 1e-6)
    with pytest.raises(ConfigError, match="the folder was changed after the run"):
        format_dpia(RunResult.read(run), NO_JOB, {}, {})


def test_every_deviation_names_its_round_and_site(phantom_run: Path) -> None:
    lines = [
        {**QUIET, "round": 1, "attempts": 2, "timed_out": ["b"], "excluded": {"c": "E_VERSION"}},
        {**QUIET, "round": 2, "rejected": {"b": "E_FINITE"}, "quarantined": ["d"], "clipped": {"a": 12.0}},
        {**QUIET, "round": 3},
    ]
    run = RunResult.read(phantom_run)
    events = [{"round": 2, "site": "server", "event": "stepped_back", "detail": "the run steps back"}]
    idle = {"asked": 3, "contributed": 0, "missed": {"timed_out": 3}}
    summary = {
        **run.summary, "events": events, "contributions": {"d": idle},
        "versions": {**run.summary["versions"], "torch": "1.0"},
    }  # fmt: skip
    found = list_deviations(replace(run, summary=summary, rounds=lines))
    assert {(part["kind"], part["round"], part["site"]) for part in found} == {
        ("event", 2, "server"), ("no_contribution", None, "d"), ("version", None, None), ("retried", 1, None),
        ("timed_out", 1, "b"), ("excluded", 1, "c"), ("rejected", 2, "b"), ("quarantined", 2, "d"), ("clipped", 2, "a"),
    }  # fmt: skip
    assert next(part for part in found if part["kind"] == "excluded")["detail"] == "not asked: E_VERSION"


@pytest.mark.slow
def test_annex_states_the_digest_of_each_file_but_of_no_prediction_or_model_of_a_site(
    phantom_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(phantom_run, run)
    for name in ("evaluations/predictions.json", "site_models/site-1.safetensors"):
        (run / name).parent.mkdir()
        (run / name).write_text("ages of subjects")
    text = Run(run).evidence().read_text()
    digests = dict(re.findall(r"^\| `(.+)` \| [\d,]+ \| ([0-9a-f]{64}) \|$", text, flags=re.MULTILINE))
    assert {"config.yaml", "summary.json", "ledger.jsonl", "model.safetensors", "model_card.md"} <= digests.keys()
    for name, digest in digests.items():
        assert hashlib.sha256((run / name).read_bytes()).hexdigest() == digest
    assert "site_models" not in text
    assert "predictions.json" not in text


@pytest.mark.long
def test_command_of_the_annex_ends_in_the_digest_that_it_states(
    phantom_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Run(phantom_run).evidence(tmp_path / "annex.md").read_text()
    (command,) = re.findall(r"^ +(flare-sparse run .+)$", text, flags=re.MULTILINE)
    shutil.copy(phantom_run / "config.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.exit_code == 0, result.output
    assert json.loads(Path("again/summary.json").read_text())["model_sha256"] in text


@pytest.mark.slow
def test_commands_of_the_page_run(phantom_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(phantom_run, run)
    (tmp_path / "kit").mkdir()
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    for line in blocks[0].splitlines():
        line_here = line.replace("RUN", "run").replace("KIT", "kit").replace("=LOG", "=run/flare_sparse_egress/site-1")
        result = CliRunner().invoke(app, line_here.split()[1:])
        assert result.exit_code == 0, result.output
    assert (run / "dpia.md").is_file()
    assert Path("annex.pdf").is_file()
