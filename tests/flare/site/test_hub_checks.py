"""Preflight for a job with hubs: at a hub, at a site of one, and at a site without."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_kits import Authority

from flare_sparse.config.loading import load_config
from flare_sparse.core.errors import ConfigError
from flare_sparse.flare.hubs.addresses import HUBS_FILE
from flare_sparse.flare.hubs.listener import HubListener
from flare_sparse.flare.hubs.mailboxes import Mailboxes
from flare_sparse.flare.hubs.tls import build_server_credentials
from flare_sparse.flare.site.hub_checks import check_hub_role
from flare_sparse.flare.site.install import install_guards
from flare_sparse.flare.site.preflight import check_site
from flare_sparse.rounds.federation import HubRules

HUBS = {"hub-1": HubRules(("site-1", "site-2")), "hub-2": HubRules(("site-3",))}


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    authority = Authority()
    for name in ("hub-1", "hub-2", "site-1", "site-9"):
        (tmp_path / name / "local").mkdir(parents=True)
        authority.write_kit(tmp_path / name / "startup", name)
    return tmp_path


@pytest.fixture
def port(kits: Path) -> Iterator[int]:
    """The port of hub-1 while a job runs."""
    credentials = build_server_credentials(kits / "hub-1" / "startup")
    listener = HubListener(("127.0.0.1", 0), Mailboxes(HUBS["hub-1"].sites, 60.0), credentials, "job")
    yield listener.port
    listener.close()


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def check(kits: Path, name: str, line: str = "") -> tuple[str, str]:
    if line:
        (kits / name / "local" / HUBS_FILE).write_text(line)
    return check_hub_role(kits / name, name, HUBS)


def test_hub_needs_an_address_of_its_own_that_is_free(kits: Path, port: int) -> None:
    with pytest.raises(ConfigError, match="Write a line 'hub-1: HOST:PORT'"):
        check(kits, "hub-1")
    verdict, detail = check(kits, "hub-1", f"hub-1: 127.0.0.1:{find_port()}")
    assert (verdict, detail[:30]) == ("PASS", "hub of 2 sites, without data; ")
    assert detail.endswith("for connections of site-1, site-2")
    assert check(kits, "hub-1", f"hub-1: 127.0.0.1:{port}")[0] == "WARN"
    verdict, detail = check(kits, "hub-1", "hub-1: 192.0.2.1:8110")
    assert (verdict, "set an address of this host" in detail) == ("FAIL", True)


def test_hub_with_guards_would_keep_back_its_sums(kits: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("min_examples: 20\n")
    install_guards(kits / "hub-1", tmp_path / "policy.yaml")
    verdict, detail = check(kits, "hub-1", f"hub-1: 127.0.0.1:{find_port()}")
    assert (verdict, "remove the policy" in detail) == ("FAIL", True)


def test_hub_without_certificates_fails(kits: Path) -> None:
    (kits / "hub-1" / "startup" / "client.key").unlink()
    with pytest.raises(ConfigError, match="provisioned federation"):
        check(kits, "hub-1", f"hub-1: 127.0.0.1:{find_port()}")


def test_site_of_a_hub_reaches_the_hub_that_it_means(kits: Path, port: int) -> None:
    assert check(kits, "site-1", f"hub-1: 127.0.0.1:{port}") == (
        "PASS",
        f"hub-1 at 127.0.0.1:{port} answers with its certificate",
    )
    assert check(kits, "site-1", f"hub-1: 127.0.0.1:{find_port()}")[0] == "PASS"
    # Another participant at the address of the hub.
    hubs = {"hub-2": HubRules(("site-1",))}
    (kits / "site-1" / "local" / HUBS_FILE).write_text(f"hub-2: 127.0.0.1:{port}")
    verdict, detail = check_hub_role(kits / "site-1", "site-1", hubs)
    assert (verdict, "the other end is hub-1; correct its address" in detail) == ("FAIL", True)
    with pytest.raises(ConfigError, match="hub-1: no address"):
        check(kits, "site-1")


def test_certificate_of_another_federation_is_a_failure(kits: Path, port: int) -> None:
    Authority().write_kit(kits / "other", "site-1")
    (kits / "site-1" / "startup").rename(kits / "unused")
    (kits / "other").rename(kits / "site-1" / "startup")
    verdict, detail = check(kits, "site-1", f"hub-1: 127.0.0.1:{port}")
    assert (verdict, "Is this the kit of this project?" in detail) == ("FAIL", True)


def test_site_without_a_hub_needs_nothing(kits: Path) -> None:
    assert check(kits, "site-9") == ("PASS", "no hub of the job lists site-9: it reaches the server directly")


@pytest.mark.parametrize(("name", "reads_data"), [("hub-1", False), ("site-1", True)])
def test_preflight_of_a_job_with_hubs_reads_no_data_at_a_hub(kits: Path, name: str, reads_data: bool) -> None:
    service = {"servers": [{"service": {"target": f"localhost:{find_port()}"}}], "client": {}}
    (kits / name / "startup" / "fed_client.json").write_text(json.dumps(service))
    (kits / name / "local" / HUBS_FILE).write_text(f"hub-1: 127.0.0.1:{find_port()}\n")
    job = kits / "job.yaml"
    job.write_text(
        "name: job\nmethod: {name: fedavg}\ntask: {name: morphometry_age}\nwire: {aggregation: fixed_point}\n"
        "federation: {hubs: {hub-1: {sites: [site-1]}}}\n"
    )
    findings = {finding.subject: finding for finding in check_site(kits / name, load_config(job), environment={})}
    assert findings["hub"].verdict == "PASS"
    assert ("data" in findings) == reads_data
