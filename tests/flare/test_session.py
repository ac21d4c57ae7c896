"""What a site writes at the end of a job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from toy import Toy, ToyBench

from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.flare.session import MODELS_FOLDER, SITE_MODELS_VARIABLE, SiteSession
from flare_sparse.runs.model_files import list_site_models

RUN = "a" * 16


def end_job(kit: Path, personal: Any) -> None:
    """End a job at a site that has evaluated a model."""
    bench = ToyBench(Toy(), personal=personal)
    site = bench.site(1)
    site.evaluate(bench.weights)
    session = SiteSession()
    session._endpoint = SiteEndpoint(site, bench.method("fedavg"), RUN, "float32")
    engine = SimpleNamespace(get_workspace=lambda: SimpleNamespace(get_root_dir=lambda: str(kit)))
    session.handle_event(EventType.END_RUN, SimpleNamespace(get_engine=lambda: engine))  # type: ignore[arg-type]


def test_site_that_keeps_tensors_saves_its_network_in_its_startup_kit(tmp_path: Path) -> None:
    end_job(tmp_path, "norms")
    assert list(list_site_models(tmp_path / MODELS_FOLDER / RUN)) == ["site-1"]


def test_site_of_a_common_model_saves_nothing(tmp_path: Path) -> None:
    end_job(tmp_path, ())
    assert not any(tmp_path.iterdir())


def test_simulated_site_saves_its_network_beside_those_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SITE_MODELS_VARIABLE, str(tmp_path / "models"))
    end_job(tmp_path / "kit", "norms")
    assert list(list_site_models(tmp_path / "models")) == ["site-1"]
    assert not (tmp_path / "kit").exists()
