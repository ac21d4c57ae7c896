"""Settings of hubs and of sums in fixed point: what they mean, and what they exclude."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nvflare.recipe import PocEnv, SimEnv

from flare_sparse.config.loading import load_config, parse_job, serialize_job
from flare_sparse.core.errors import ConfigError
from flare_sparse.flare.recipe import SparseRecipe
from flare_sparse.privacy.secure_aggregation.limits import SumRules
from flare_sparse.rounds.federation import HubRules

FIXED = ("wire.aggregation=fixed_point", "method={name: fedsparsify}")
HUBS = "federation.hubs={north: {sites: [site-1, site-2], min_sites: 2, fetch_s: 9}, south: {sites: [site-3]}}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("name: hubs\nmethod: {name: fedavg}\ntask: {name: morphometry_age}\n")
    return path


def refuse(file: Path, *overrides: str) -> str:
    """Return the text with which settings are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value)


def test_hubs_travel_with_the_job_and_a_job_without_them_is_as_before(file: Path) -> None:
    job = load_config(file, [*FIXED, HUBS]).job
    expected = {"north": HubRules(("site-1", "site-2"), 2, 9.0), "south": HubRules(("site-3",), 1, 60.0)}
    assert parse_job(serialize_job(job)).hubs == expected
    # A job with hubs that does not set it keeps its run id.
    assert serialize_job(job)["federation"]["hubs"]["south"] == {"sites": ["site-3"], "min_sites": 1}
    assert "hubs" not in serialize_job(load_config(file).job)["federation"]
    assert load_config(file).hubs == {}


def test_sums_in_fixed_point_have_no_pads_and_need_no_minimum_of_sites(file: Path) -> None:
    config = load_config(file, FIXED)
    assert config.sum_rules == SumRules(64.0, 1, is_padded=False)
    assert not config.is_masked
    assert load_config(file, ["wire.aggregation=masked", "federation.min_sites=3"]).is_masked


@pytest.mark.parametrize(
    ("overrides", "reason", "fix"),
    [
        ((HUBS,), "wire.aggregation: plain: ", "set wire.aggregation to fixed_point or masked"),
        (
            (*FIXED, "federation.hubs={a: {sites: [x, y]}, b: {sites: [y]}}"),
            "hubs.a: y is listed more than once",
            "a site has one hub",
        ),
        ((*FIXED, "federation.hubs={a: {sites: [x, x]}}"), "hubs.a: x is listed more than once", "a site has one hub"),
        (
            (*FIXED, "federation.hubs={a: {sites: [b]}, b: {sites: [x]}}"),
            "hubs.b: a hub needs a name of its own",
            "not that of a site",
        ),
        ((*FIXED, "federation.hubs={server: {sites: [x]}}"), "hubs.server", "not that of a site or of the server"),
        ((*FIXED, "federation.hubs={a: {sites: [x], min_sites: 2}}"), "min_sites is 2", "sites lists only 1; lower it"),
        ((*FIXED, "federation.hubs={a: {sites: []}}"), "hubs.a: sites is empty", "leave the hub out"),
        (
            (*FIXED, "federation.min_sites=3", "method={name: fedsparsify, aggregation: {rule: median}}"),
            "but method fedsparsify: aggregation.rule median",
            "set wire.aggregation to plain",
        ),
        ((*FIXED, "federation.max_share=0.5"), "wire.aggregation: fixed_point: ", "but federation.max_share"),
        ((*FIXED, "federation.clip_norm=1.0"), "wire.aggregation: fixed_point: ", "but federation.clip_norm"),
        ((*FIXED, "audit.record_updates=true"), "wire.aggregation: fixed_point: ", "but audit.record_updates"),
        ((*FIXED, "wire.values=bfloat16"), "wire.aggregation: fixed_point: ", "but wire.values"),
    ],
)
def test_settings_that_hubs_exclude_are_refused_with_field_and_fix(
    file: Path, overrides: tuple[str, ...], reason: str, fix: str
) -> None:
    text = refuse(file, *overrides)
    assert reason in text
    assert fix in text


@pytest.mark.parametrize("environment", [SimEnv(num_clients=3), PocEnv(num_clients=3)], ids=["sim", "poc"])
def test_job_with_hubs_is_refused_where_no_client_is_a_hub(file: Path, environment: Any) -> None:
    recipe = SparseRecipe(load_config(file, [*FIXED, HUBS]))
    with pytest.raises(ConfigError, match=r"federation\.hubs: hubs run with --env local, and with --env prod"):
        recipe.execute(environment)


@pytest.mark.parametrize(("overrides", "tasks"), [((), 0), ((*FIXED, HUBS), 2)], ids=["flat", "hubs"])
def test_only_a_job_with_hubs_names_their_executors(file: Path, tmp_path: Path, overrides: Any, tasks: int) -> None:
    """A site that has allowed the classes of an older version runs jobs without hubs."""
    SparseRecipe(load_config(file, overrides)).export(str(tmp_path))
    meta = json.loads((tmp_path / "hubs" / "meta.json").read_text())
    # Hubs are clients, too; without its hub, a site would miss the whole job.
    assert (meta["min_clients"], meta.get("mandatory_clients")) == ((3, ["north", "south"]) if tasks else (1, None))
    (client,) = tmp_path.glob("hubs/*/config/config_fed_client.json")
    executors = json.loads(client.read_text())["executors"]
    paths = [entry["executor"]["path"] for entry in executors]
    assert sum("flare.hubs.executors" in path for path in paths) == tasks
    assert [entry["tasks"] for entry in executors][-tasks:] == [["collection"], ["join_hub"]] if tasks else True
