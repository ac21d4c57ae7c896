"""The estimate of the configurations in app_configs/ against the ledger of a run of the same settings."""

from __future__ import annotations

import csv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rows import JOBS
from scripts import load_script

from flare_sparse.api.estimate import compute_figures, name_sites
from flare_sparse.config.loading import load_config
from flare_sparse.config.policy.policy import PRESETS, read_policy
from flare_sparse.config.schema import build_task
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Request
from flare_sparse.rounds.endpoints.request_log import RequestLog
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.endpoints.site_state import RequestId
from flare_sparse.rounds.local.dry_run import DryTrainer
from flare_sparse.tasks.models.base import MODELS_VARIABLE

ROOT = Path(__file__).parents[3]
TYPICAL_WITHIN = 1.5
"""Largest factor between the typical figure and the ledger of these short runs."""
ONLY_IN_TABLE = {
    "fedsparsify_paper", "fedavg_hippocampus", "fedsparsify_hippocampus", "neurosfl_hippocampus",
    "dp_morphometry_age", "script_cifar10",
}  # fmt: skip
"""Half a minute to a minute each, of methods that shorter ones run; benchmarks/performance/estimate_table.py compares
them, too."""
SHORT = JOBS - {"lora_a2_banking77", "metagater_cifar10", "neurosfl_bundle", "neurosfl_segmentation"}
"""Without large networks."""
FILES = [file for file in sorted((ROOT / "app_configs").glob("*.yaml")) if file.stem not in ONLY_IN_TABLE]
EXACT = {
    "bf16_brain_age", "fedavg_brain_age", "fedavg_brain_base", "fedavg_ft_brain_age", "fedavg_image_classification",
    "fedavg_one_step_cifar10", "fedavg_readmission", "fedavg_scanner_age", "fedavg_voxels", "ffa_lora_banking77",
    "flexlora_banking77", "local_only_brain_age", "metagater_mnist", "metagater_morphometry_age", "metasnip_cifar10",
    "per_fedavg_cifar10",
}  # fmt: skip


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """The script that writes docs/results/estimate.csv."""
    return load_script("performance/estimate_table")


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=[] if f.stem in SHORT else [pytest.mark.long], id=f.stem) for f in FILES],
)
def test_ledger_lies_within_the_estimate_and_sites_admit_every_request(
    file: Path, table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start and one attempt suffice a site, and no request asks for fewer entries than the presets demand."""
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "models"))
    logs = record_requests(monkeypatch)
    row = table.compare(file, tmp_path, rounds=2)
    assert 0 < len(logs) <= row.sites, "a site may never be asked"
    estimated, sent = row.messages
    assert estimated == sent
    assert row.is_exact == (file.stem in EXACT)
    if row.is_exact:
        assert row.least == row.typical == row.most == row.sent
        assert not row.reasons
    else:
        assert row.least <= row.sent <= row.most
        assert row.sent / TYPICAL_WITHIN <= row.typical <= row.sent * TYPICAL_WITHIN


@pytest.mark.slow
def test_fewest_bytes_of_the_tutorial_lie_within_the_estimate(table: ModuleType, tmp_path: Path) -> None:
    main = (ROOT / "app_configs" / "neurosfl_brain_age.yaml").read_text()
    file = tmp_path / "few.yaml"
    file.write_text(
        main.replace("  sparsity: 0.9 ", "  score_share: 0.1\n  sparsity: 0.9 ").replace(
            "values: float32 ", "initial_model: built\n  values: int4 "
        )
    )
    row = table.compare(file, tmp_path, rounds=2)
    assert row.messages[0] == row.messages[1]
    assert row.least <= row.sent <= row.most
    assert row.sent / TYPICAL_WITHIN <= row.typical <= row.sent * TYPICAL_WITHIN
    total = compute_figures(Study.load(file))["bytes"]["total"]
    assert round(total["typical"] / 1e6, 1) == 2.2


def record_requests(monkeypatch: pytest.MonkeyPatch) -> dict[str, RequestLog]:
    """Let every site admit its requests by a log of one start and one attempt, and by all presets; return the logs."""
    logs: dict[str, RequestLog] = {}
    policies = [read_policy(preset) for preset in PRESETS.values()]
    receive = SiteEndpoint.receive

    def receive_and_admit(endpoint: SiteEndpoint, data: Any, acknowledged: int | None = None) -> Request:
        request = receive(endpoint, data, acknowledged)
        # The estimate's own sites are not asked in a run.
        if isinstance(endpoint.site.trainer, DryTrainer):
            return request
        new = RequestLog(endpoint.run, endpoint.method.traffic.count_requests, attempts=1, max_starts=1)
        log = logs.setdefault(endpoint.site.name, new)
        log.admit(RequestId(request.kind, request.round), endpoint.compute_model_digest())
        refusals = [list(policy.check_request(request.kind, request.trainable.count)) for policy in policies]
        assert not any(refusals)
        return request

    monkeypatch.setattr(SiteEndpoint, "receive", receive_and_admit)
    return logs


def figures(name: str, *overrides: str) -> dict[str, Any]:
    file = ROOT / "app_configs" / f"{name}.yaml"
    return compute_figures(Study.load(file, overrides))


@pytest.mark.long
def test_table_of_the_overview_has_the_figures_of_the_estimate() -> None:
    with (ROOT / "docs" / "results" / "bytes_paper.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert len(rows) == 5
    for sparsity, *cells in rows:
        found = figures("fedsparsify_paper", f"method.sparsity={sparsity}")
        down = {key: f"{value / 1e6:,.0f}" for key, value in found["bytes"]["down"].items()}
        shown = down["typical"] if found["exact"] else f"{down['typical']} ({down['least']} to {down['most']})"
        up = f"{found['bytes']['up']['typical']:,}"
        assert cells == [f"{found['paper_scalars']:,}", f"{found['scalars']:,}", shown, up]


def test_targets_take_no_part_in_training_where_the_data_is_missing() -> None:
    """Two of the five sites are targets: two rounds of three sites, then one request and reply of each target."""
    settings = ("simulator.sites=5", "method.rounds=2", "method.participation=1.0")
    traffic = figures("metagater_morphometry_age", *settings)["traffic"]
    assert (traffic["down"]["messages"], traffic["up"]["messages"]) == (2 * 3 + 2, 2 * 3 + 2)


def test_run_that_may_end_early_has_at_least_the_bytes_of_its_shortest_form() -> None:
    settings = ("method.rounds=20", "simulator.sites=6", "federation.early_stopping.patience=4")
    figures_of_run = figures("fedavg_readmission", *settings)
    shortest = figures("fedavg_readmission", *settings, "method.rounds=5")
    assert shortest["exact"]
    assert figures_of_run["bytes"]["total"]["least"] == shortest["bytes"]["total"]["most"]
    assert figures_of_run["bytes"]["total"]["least"] < figures_of_run["bytes"]["total"]["typical"]
    assert not figures_of_run["exact"]
    assert figures_of_run["depends_on"] == [
        "validation examples decide how many rounds the run has (federation.early_stopping)"
    ]


def test_natural_sites_are_read_from_the_data(table: ModuleType, tmp_path: Path) -> None:
    file = ROOT / "app_configs" / "metagater_morphometry_age.yaml"
    config = load_config(file, table.list_overrides(file, tmp_path, 2))
    assert set(table.NATURAL_SITES) < set(name_sites(config, build_task(config)))
    with pytest.raises(ConfigError, match="add --sites N"):
        name_sites(load_config(file), build_task(config))


def test_settings_of_single_sites_count() -> None:
    settings = ("method.rounds=1", "simulator.sites=3")
    plain = figures("lora_a2_brain_age", *settings, "task.base=null")
    own = figures(
        "lora_a2_brain_age", *settings, "task.base=null", "simulator.site_settings={site-2: {lora_a2: {rank: 1}}}"
    )
    assert own["bytes"]["up"]["most"] < plain["bytes"]["up"]["most"]
    assert own["depends_on"] == ["the scores decide which ranks a site sends"]


def test_bounds_add_up_over_rounds_and_directions() -> None:
    torch.set_num_threads(1)
    result = figures("topk_ef_brain_age", "method.rounds=2")
    for name in ("least", "typical", "most"):
        by_round = sum(line["bytes"]["total"][name] for line in result["per_round"])
        total = result["bytes"]
        assert total["total"][name] == total["down"][name] + total["up"][name] == by_round
    assert [line["bytes"]["total"]["typical"] for line in result["per_round"]] == [
        line["bytes_down"] + line["bytes_up"] for line in result["per_round"]
    ]
