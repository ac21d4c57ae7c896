"""Segmentation with every method: the whole run, in one process, on phantoms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import parse_job
from flare_sparse.core.errors import ConfigError
from flare_sparse.methods.registry import METHODS
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.tasks.data.phantom import write_phantoms
from flare_sparse.tasks.task import SiteData

LORA = ("ffa_lora", "flexlora", "hetlora", "lora_a2")
BLOCKED = {
    "scbfwp": "channels cannot be traced through it",
    "fawp": "channels cannot be traced through it",
}
"""Methods that remove units of a network, which a network with transposed convolutions does not allow."""


@pytest.fixture(scope="module")
def brains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_phantoms(tmp_path_factory.mktemp("p") / "p", 1, 3, 0, (8, 10, 8), labels=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_and_evaluates_a_segmentation(name: str, brains: Path) -> None:
    task: dict[str, Any] = {
        "name": "segmentation",
        "classes": {"grey": 1, "white": 2, "ventricles": 3},
        "model": {"name": "dyn_unet", "channels": [2, 2, 4]},
        "patch": [8, 8, 8],
        **({"adapter": {"rank": 1}} if name in LORA else {}),
    }
    job = parse_job({"name": "a", "method": {"name": name, "rounds": 1}, "task": task})
    if name in BLOCKED:
        with pytest.raises(ConfigError, match=BLOCKED[name]):
            assemble(job)
        return
    assembly = assemble(job)
    sites = {site: open_site(assembly, SiteData(site, brains)) for site in ("a", "b")}
    outcome, _ = run_locally(assembly.method, assembly.weights, sites, assembly.task.metric)
    assert set(outcome.evaluation.overall) >= {"dice", "dice_ventricles", "hd95"}
    assert outcome.evaluation.sites["a"]["test_examples"] == 1
