"""The estimate of the configurations in app_configs/ against the ledger of a run of the same settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rows import JOBS
from small_data import NATURAL_SITES, list_overrides

from flare_sparse.api.estimate import compare_methods, compute_figures, forecast_privacy, name_sites, parse_link
from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.loading import load_config
from flare_sparse.config.policy.policy import PRESETS, read_policy
from flare_sparse.config.schema import build_task
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Request, RequestId
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.rounds.endpoints.request_log import RequestLog
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.local.dry_run import DryTrainer
from flare_sparse.tasks.models.base import MODELS_VARIABLE

ROOT = Path(__file__).parents[3]
WAYS = ("down", "up")
TYPICAL_WITHIN = 1.5
"""Largest factor between the estimate and the ledger of these short runs."""
LARGE = {
    "fedsparsify_paper", "fedavg_hippocampus", "fedsparsify_hippocampus", "neurosfl_hippocampus",
    "dp_morphometry_age", "script_cifar10", "neurosfl_segmentation", "neurosfl_bundle", "flexlora_banking77",
    "hetlora_banking77",
}  # fmt: skip
"""Half a minute to a minute each, of methods that shorter ones run, or of the same network."""
SHORT = JOBS - {"lora_a2_banking77", "metagater_cifar10", "neurosfl_bundle"}
"""Without large networks."""
FILES = [file for file in sorted((ROOT / "app_configs").glob("*.yaml")) if file.stem not in LARGE]
EXACT = {
    "bf16_brain_age", "fedavg_brain_age", "fedavg_brain_base", "fedavg_ft_brain_age", "fedavg_image_classification",
    "fedavg_one_step_cifar10", "fedavg_readmission", "fedavg_scanner_age", "fedavg_voxels", "ffa_lora_banking77",
    "flexlora_banking77", "local_only_brain_age", "metagater_mnist", "metagater_morphometry_age", "metasnip_cifar10",
    "per_fedavg_cifar10",
}  # fmt: skip
"""Configurations whose settings decide every message."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=[] if f.stem in SHORT else [pytest.mark.long], id=f.stem) for f in FILES],
)
def test_check_passes_the_estimate_is_near_the_ledger_and_sites_admit_every_request(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start and one attempt suffice a site, and no request asks for fewer entries than the presets demand."""
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "models"))
    study = Study.load(file, list_overrides(file, tmp_path, rounds=2))
    assert [finding for finding in study.check() if finding.severity == "FAIL"] == []
    logs = record_requests(monkeypatch)
    found = compute_figures(study)
    ledger = run_in_process(study, RunFolder(tmp_path / "out")).summary["traffic"]
    assert 0 < len(logs) <= found["sites"], "a site may never be asked"
    assert [found["traffic"][way]["messages"] for way in WAYS] == [ledger[way]["messages"] for way in WAYS]
    sent = sum(ledger[way]["payload_bytes"] for way in WAYS)
    if file.stem in EXACT:
        assert found["bytes"]["total"] == sent
    assert sent / TYPICAL_WITHIN <= found["bytes"]["total"] <= sent * TYPICAL_WITHIN


def test_fewest_bytes_of_the_tutorial_are_those_of_the_estimate(tmp_path: Path) -> None:
    main = (ROOT / "app_configs" / "neurosfl_brain_age.yaml").read_text()
    file = tmp_path / "few.yaml"
    file.write_text(
        main.replace("  sparsity: 0.9 ", "  score_share: 0.1\n  sparsity: 0.9 ").replace(
            "values: float32 ", "initial_model: built\n  values: int4 "
        )
    )
    assert round(compute_figures(Study.load(file))["bytes"]["total"] / 1e6, 1) == 2.2


def record_requests(monkeypatch: pytest.MonkeyPatch) -> dict[str, RequestLog]:
    """Let every site admit its requests by a log of one start and one attempt, and by all presets; return the logs."""
    logs: dict[str, RequestLog] = {}
    policies = [read_policy(preset) for preset in PRESETS.values()]
    receive = SiteEndpoint.receive

    def receive_and_admit(endpoint: SiteEndpoint, data: Any, counted: str | None = None) -> Request:
        request = receive(endpoint, data, counted)
        # The estimate's own sites are not asked in a run.
        if isinstance(endpoint.site.trainer, DryTrainer):
            return request
        new = RequestLog(endpoint.run, endpoint.method.count_requests, attempts=1, max_starts=1)
        log = logs.setdefault(endpoint.site.name, new)
        log.admit(RequestId(request.kind, request.round), endpoint.compute_model_digest())
        refusals = [list(policy.find_request_refusals(request.kind, request.trainable.count)) for policy in policies]
        assert not any(refusals)
        return request

    monkeypatch.setattr(SiteEndpoint, "receive", receive_and_admit)
    return logs


def figures(name: str, *overrides: str) -> dict[str, Any]:
    file = ROOT / "app_configs" / f"{name}.yaml"
    return compute_figures(Study.load(file, overrides))


def test_methods_are_compared_on_the_settings_that_they_share() -> None:
    file = ROOT / "app_configs" / "neurosfl_brain_age.yaml"
    few = ("method.rounds=1",)
    found = compare_methods(file, few, ["fedavg", "lora_a2"])
    (fedavg, error), own = found.values(), figures("neurosfl_brain_age", *few, "method.name=fedavg")
    assert fedavg == own
    assert isinstance(error, ConfigError)
    assert "the network has no LoRA adapters" in str(error)


@pytest.mark.parametrize("text", ["10", "fast", "0mbit", "10 mb"])
def test_rate_of_a_link_has_a_unit(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a rate such as 10mbit"):
        parse_link(text)


@pytest.mark.parametrize("agreed", ["{}", "{site-1: 72, site-2: 72}"])
def test_forecast_counts_subjects_and_not_their_rows(agreed: str, tmp_path: Path) -> None:
    """Of 30 subjects at each site, six are for testing; each has three rows, which sites may have agreed on."""
    rows = [f"p{subject},{visit},{subject % 7}" for subject in range(60) for visit in range(3)]
    (tmp_path / "t.csv").write_text("\n".join(["patient,x,y", *rows]))
    study = tmp_path / "study.yaml"
    study.write_text(
        f"""name: visits
method: {{name: fedavg, rounds: 2, training: {{batch_size: 4}}}}
task: {{name: table, kind: regression, target: y, features: [x], group: patient, scaling: {{x: [1, 1]}}}}
privacy: {{noise_multiplier: 1.0}}
simulator: {{sites: 2, data: {{path: {tmp_path / "t.csv"}, partition: {{kind: iid}}}}}}
"""
    )
    sites = forecast_privacy(Study.load(study, [f"federation.examples={agreed}"]), None)["privacy"]["sites"]
    assert {name: site["subjects"] for name, site in sites.items()} == {"site-1": 24, "site-2": 24}


@pytest.mark.long
def test_table_of_the_overview_has_the_figures_of_the_estimate() -> None:
    page = (ROOT / "docs" / "results" / "bytes.md").read_text(encoding="utf-8")
    table = page.partition("| S_T |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in table]
    assert len(rows) == 5
    # The last alone: a row takes half a minute.
    sparsity, *cells = rows[-1]
    found = figures("fedsparsify_paper", f"method.sparsity={sparsity}")
    sent = found["bytes"]
    shown = [f"{found[name]:,}" for name in ("paper_scalars", "scalars")]
    assert cells == [*shown, f"{sent['down'] / 1e6:,.0f}", f"{sent['up']:,}"]


def test_targets_take_no_part_in_training_where_the_data_is_missing() -> None:
    """Two of the five sites are targets: two rounds of three sites, then one request and reply of each target."""
    settings = ("simulator.sites=5", "method.rounds=2", "method.participation=1.0")
    traffic = figures("metagater_morphometry_age", *settings)["traffic"]
    assert (traffic["down"]["messages"], traffic["up"]["messages"]) == (2 * 3 + 2, 2 * 3 + 2)


def test_natural_sites_are_read_from_the_data(tmp_path: Path) -> None:
    file = ROOT / "app_configs" / "metagater_morphometry_age.yaml"
    config = load_config(file, list_overrides(file, tmp_path, 2))
    assert set(NATURAL_SITES) < set(name_sites(config, build_task(config)))
    with pytest.raises(ConfigError, match=r"add --set simulator\.sites=N"):
        name_sites(load_config(file), build_task(config))


def test_settings_of_single_sites_count() -> None:
    settings = ("method.rounds=1", "simulator.sites=3")
    plain = figures("lora_a2_brain_age", *settings, "task.base=null")
    own = figures(
        "lora_a2_brain_age", *settings, "task.base=null", "simulator.site_settings={site-2: {lora_a2: {rank: 1}}}"
    )
    assert own["bytes"]["up"] < plain["bytes"]["up"]


def test_bytes_add_up_over_rounds_and_directions() -> None:
    result = figures("topk_ef_brain_age", "method.rounds=2")
    sums = [sum(line[f"bytes_{way}"] for line in result["per_round"]) for way in WAYS]
    assert result["bytes"] == {"down": sums[0], "up": sums[1], "total": sum(sums)}
