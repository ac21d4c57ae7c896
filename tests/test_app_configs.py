"""Every file in app_configs/ is valid, named after itself and described by comments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flare_sparse.assemble import assemble
from flare_sparse.config import build_task, dump_config, load_config
from flare_sparse.endpoints.request_log import RequestLog
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.endpoints.site_state import RequestId
from flare_sparse.errors import ConfigError
from flare_sparse.exchange import Request
from flare_sparse.local.dry_run import DrySite, dry_run
from flare_sparse.methods import METHODS
from flare_sparse.params import Layout
from flare_sparse.policy.policy import PRESETS, read_policy

FOLDER = Path(__file__).parents[1] / "app_configs"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_configuration_is_valid_named_after_its_file_and_described(file: Path, tmp_path: Path) -> None:
    config = load_config(file)
    assert config.name == file.stem
    assert file.read_text().startswith("# ")
    copy = tmp_path / "resolved.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


def test_every_method_has_a_configuration() -> None:
    assert {load_config(file).method.name for file in FILES} == set(METHODS)


def test_files_named_in_comments_exist() -> None:
    named = {name for file in FILES for name in re.findall(r"app_configs/(\w+\.yaml)", file.read_text())}
    assert named <= {file.name for file in FILES}


def test_fedsparsify_preset_has_the_papers_settings() -> None:
    config = load_config(FOLDER / "fedsparsify_paper.yaml")
    settings = config.method.config.model_dump()
    assert config.simulator is not None
    assert (config.simulator.sites, settings["rounds"], settings["exponent"], settings["prune_every"]) == (8, 40, 3, 1)
    assert (
        settings["training"] | {"epochs": 4, "batch_size": 1, "optimizer": "sgd", "lr": 1e-5, "momentum": 0.0}
        == (settings["training"])
    )
    assert Layout.from_module(build_task(config).model()).size == 2_950_401


def test_neurosfl_preset_has_the_papers_network() -> None:
    layout = Layout.from_module(build_task(load_config(FOLDER / "neurosfl_alexnet3d.yaml")).model())
    assert layout.trainable_size == 2_570_241
    assert sum(entry.size for entry in layout.tensors if entry.role == "weight") == 2_568_064


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_sites_answer_every_request_of_an_undisturbed_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One start and one attempt suffice, and no request asks for fewer entries than the presets demand."""
    job = load_config(file).job
    try:
        assembly = assemble(job)
    except ConfigError as error:
        pytest.skip(str(error))
    if assembly.method.config.rounds > 60 or assembly.layout.size > 300_000:
        pytest.skip("too large for a unit test")
    logs: dict[str, RequestLog] = {}
    receive = SiteEndpoint.receive

    def receive_and_record(endpoint: SiteEndpoint, data: Any) -> Request:
        request = receive(endpoint, data)
        new = RequestLog(endpoint.run, endpoint.method.count_requests, attempts=1, max_starts=1)
        log = logs.setdefault(endpoint.site.name, new)
        # The mask tells the models of a dry run apart, whose weights do not change.
        content = torch.cat([endpoint.site.weights, request.model.mask.bits.float()])
        log.admit(RequestId(request.kind, request.round), content)
        refusals = [list(policy.check_request(request.kind, request.trainable.count)) for policy in policies]
        assert not any(refusals)
        return request

    policies = [read_policy(preset) for preset in PRESETS.values()]
    monkeypatch.setattr(SiteEndpoint, "receive", receive_and_record)
    sites = {name: DrySite(name, assembly.layout, examples=40) for name in ("site-1", "site-2")}
    dry_run(assembly.method, assembly.weights, sites, job.wire.values, encrypted=job.encrypted)
    assert sorted(logs) == ["site-1", "site-2"]
