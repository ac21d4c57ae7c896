"""Check whether a site is ready for a job; every problem is reported with its remedy."""

import json
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.x509 import ExtendedKeyUsage, load_pem_x509_certificate

from ...config.assemble import Assembly, assemble, check_kernels, open_site, plan_sampling
from ...config.checks import find_problems
from ...config.policy.check import find_policy_conflicts
from ...config.policy.policy import POLICY_FILE, read_policy
from ...config.schema import JobConfig
from ...core.errors import ConfigError
from ...core.findings import Finding, Severity, attempt
from ...privacy.dp.account import LEDGER_FILE, PRIVACY_FOLDER, read_ledger
from ...privacy.dp.forecast import Forecast
from ...tasks.data.source import find_site_data
from ...tasks.script import ScriptTask
from ...tasks.task import Task
from . import setup

ALLOW_COMMAND = "flare-sparse site setup"
CONNECT_TIMEOUT_S = 5.0
RENEWAL = timedelta(days=30)
"""Time before the end of a certificate in which a new one is asked for."""
REFUSAL_TIMEOUT_S = 1.0
_WRONG_KIT = "Is this the kit of this project?"


def check_site(
    kit: Path,
    job: JobConfig | None = None,
    user_task: Task | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    needs_server: bool = True,
) -> Iterator[Finding]:
    """Yield the findings of all checks at a site; nothing is changed and no data leaves.

    Args:
        kit: the site's startup kit.
        job: settings of a planned job; the site's data is then read as that job would read it, and the job is checked
            against the site's policy.
        user_task: the user task of that job, if it has one.
        environment: variables that may name the location of the data.
        needs_server: whether a server that cannot be reached is a failure; else it may start later, a warning.
    """
    if not kit.is_dir():
        raise ConfigError(f"{kit}: there is no such folder; give the startup kit of this site")
    yield _run_check("startup kit", lambda: _check_kit(kit))
    yield _run_check("allow-list", lambda: _check_allow_list(kit))
    yield _run_check("code", lambda: _check_code(kit))
    yield _run_check("log streaming", lambda: _check_log_streaming(kit))
    yield (policy := _run_check("policy", lambda: _check_policy(kit)))
    if job is None:
        yield _run_check("data", lambda: _check_data_path(kit, environment))
    else:
        yield from _check_job(kit, job, user_task, environment, is_guarded=policy.severity != "FAIL")
    yield _run_check("server", lambda: _check_server(kit, "FAIL" if needs_server else "WARN"))


def _run_check(subject: str, check: Callable[[], tuple[Severity, str]]) -> Finding:
    tried = attempt(subject, check)
    return tried.finding if tried.result is None else Finding(tried.result[0], subject, tried.result[1])


def _check_kit(kit: Path) -> tuple[Severity, str]:
    setup.find_local_folder(kit)
    startup = kit / "startup"
    missing = [
        name for name in ("fed_client.json", "client.crt", "client.key", "rootCA.pem") if not (startup / name).is_file()
    ]
    if missing:
        return "FAIL", f"{startup}: {', '.join(missing)} missing; unpack the kit from the coordinating centre again"
    # FLARE 2.9 states the usage of a key in the certificates that it approves, not in those of central provisioning.
    certificate = load_pem_x509_certificate((startup / "client.crt").read_bytes())
    if any(isinstance(extension.value, ExtendedKeyUsage) for extension in certificate.extensions):
        origin = "not provisioned centrally: its private key was made by nvflare cert request"
    else:
        origin = "provisioned centrally: the coordinating centre has held this site's private key"
    authority = load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
    end = min(certificate.not_valid_after_utc, authority.not_valid_after_utc)
    left = end - datetime.now(UTC)
    detail = f"{kit}: {origin}; certificates end on {end:%Y-%m-%d}"
    if left >= RENEWAL:
        return "PASS", detail
    # Without a valid certificate no site can connect.
    verdict: Severity = "FAIL" if left < timedelta() else "WARN"
    return verdict, f"{detail}: ask the coordinating centre for a new kit (docs/operate.md)"


def _check_allow_list(kit: Path) -> tuple[Severity, str]:
    resources = setup.read_resources(setup.find_local_folder(kit))
    listed, remedy = setup.get_allow_list(resources), f"Run: {ALLOW_COMMAND} {kit}"
    if broad := setup.find_broad_entries(listed):
        return "FAIL", f"{', '.join(broad)} in {setup.LIST}: jobs can call every function below it. {remedy}"
    if setup.EVERYTHING in listed:
        return "WARN", f"'*' in {setup.LIST}: jobs can call everything that is installed. Remove it. {remedy}"
    if resources.get(setup.MODE) == "warn":
        return (
            "WARN",
            f"{setup.MODE} is 'warn': jobs can call everything installed; FLARE only logs it. Set it to 'enforce'",
        )
    if missing := [name for name in setup.CLASSES if name not in listed]:
        return "FAIL", f"{', '.join(missing)} not in {setup.LIST}: the site refuses jobs. {remedy}"
    return "PASS", f"the {len(setup.CLASSES)} classes of the package are in {setup.LIST}"


def _check_code(kit: Path) -> tuple[Severity, str]:
    if roles := setup.list_code_senders(setup.read_permissions(setup.find_local_folder(kit))):
        may = f"{', '.join(roles)} may send code to this site (BYOC)"
        return "WARN", f"{may}. To refuse it, run: flare-sparse site setup {kit}"
    return "PASS", "no role may send code to this site"


def _check_policy(kit: Path) -> tuple[Severity, str]:
    local = setup.find_local_folder(kit)
    policy = read_policy(local / POLICY_FILE)
    if missing := setup.find_missing_guard(local):
        return "WARN", f"{missing}: this site does not check what leaves it. Run: flare-sparse site setup {kit}"
    settings = policy.model_dump(exclude_defaults=True)
    description = "; ".join(f"{name}: {value}" for name, value in settings.items())
    return "PASS", description or "everything that the package sends may leave"


def _check_log_streaming(kit: Path) -> tuple[Severity, str]:
    if setup.read_resources(setup.find_local_folder(kit)).get(setup.LOG_STREAMING, True):
        return (
            "FAIL",
            f"{setup.LOG_STREAMING} is on: a job can send this site's logs to the server. Run: {ALLOW_COMMAND} {kit}",
        )
    return "PASS", "off: the site's logs stay here"


def _check_data_path(kit: Path, environment: Mapping[str, str]) -> tuple[Severity, str]:
    data = find_site_data(read_site_name(kit), setup.find_local_folder(kit), environment)
    return (
        "WARN",
        f"{data.path} exists but was not read; flare-sparse check CONFIG --site {kit} reads it as that job would",
    )


def _check_job(
    kit: Path, job: JobConfig, user_task: Task | None, environment: Mapping[str, str], *, is_guarded: bool
) -> Iterator[Finding]:
    """Read the site's data as the job would; if data and policy can be read, check the job against the policy."""
    loaded: list[tuple[Assembly, int, int]] = []
    found: list[Finding] = []

    def read_data() -> tuple[Severity, str]:
        data = find_site_data(read_site_name(kit), setup.find_local_folder(kit), environment)
        assembly = assemble(job, user_task)
        if isinstance(assembly.task, ScriptTask):
            loaded.append((assembly, 0, 0))
            return "WARN", f"{data.path} exists; what is in it only the job's script reads"
        check_kernels(assembly.method)
        site = open_site(assembly, data)
        examples = site.num_examples
        loaded.append((assembly, examples, site.trainer.examples.count_train_subjects()))
        found.extend(find_problems(assembly, site.trainer.examples, data))
        without = f", without {len(data.withdrawn)} withdrawn subjects" if data.withdrawn else ""
        return "PASS", f"{data.path}: {examples} training examples, as read by task {job.task.name}{without}"

    yield _run_check("data", read_data)
    yield from found
    if loaded and is_guarded:
        yield _run_check("job", lambda: _check_policy_allows(kit, job, *loaded[0]))


def _check_policy_allows(
    kit: Path, job: JobConfig, assembly: Assembly, examples: int, subjects: int
) -> tuple[Severity, str]:
    """Check a job against the site's policy; with privacy also compute what it charges the site's subjects."""
    local, name = setup.find_local_folder(kit).absolute(), read_site_name(kit)
    policy = read_policy(local / POLICY_FILE)
    limit = policy.privacy_budget
    # What all jobs so far have charged this site's subjects.
    charges = read_ledger(local.parent / PRIVACY_FOLDER / name / LEDGER_FILE).list_charges()
    if reasons := find_policy_conflicts(policy, job, assembly, {name: examples}, {name: subjects}, charges):
        return "FAIL", f"this site's policy would refuse updates of {job.name}: {' | '.join(reasons)}"
    allowed = f"this site's policy allows {job.name}"
    # The loader of a script decides what is charged.
    if assembly.privacy is None or not subjects:
        return "PASS", allowed
    forecast = Forecast.compute(assembly.privacy, plan_sampling(assembly.method, subjects), limit, charges)
    if limit is None:
        return "WARN", f"{allowed}; {forecast}; it has no epsilon, so that every job has a budget of its own"
    spent = f"earlier jobs have spent {forecast.spent:.2f} of {limit.epsilon:g} at {limit.delta:g}"
    return "PASS", f"{allowed}; {forecast}; {spent}"


def _check_server(kit: Path, absent: Severity) -> tuple[Severity, str]:
    """Connect to the server over TCP and do a TLS handshake with the kit's own certificate.

    Args:
        kit: the startup kit.
        absent: verdict where no server replies at the address.
    """
    target = _read_client(kit)["servers"][0]["service"]["target"]
    host, _, port = str(target).rpartition(":")
    startup = kit / "startup"
    try:
        context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
        context.load_cert_chain(str(startup / "client.crt"), str(startup / "client.key"))
        # FLARE's server certificate names the server's identity in the project, not its address.
        context.check_hostname = False
        # FLARE's gRPC server closes connections that do not offer HTTP/2.
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as plain,
            context.wrap_socket(plain) as secure,
        ):
            # In TLS 1.3 the handshake is complete before the server has checked this certificate. A server that
            # accepts it waits for the first request.
            secure.settimeout(REFUSAL_TIMEOUT_S)
            with suppress(TimeoutError):
                if not secure.recv(1):
                    return "FAIL", f"{target} refuses this certificate after the handshake. {_WRONG_KIT}"
            return "PASS", f"{target} answers with {secure.version()}; both certificates are valid"
    except ssl.SSLError as error:
        return "FAIL", f"{target} refuses the TLS handshake: {error.reason}. {_WRONG_KIT}"
    except (OSError, ValueError) as error:
        verdict = absent if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)) else "FAIL"
        return verdict, f"{target} cannot be reached: {error}. Allow outgoing connections to it, or start the server"


def read_site_name(kit: Path) -> str:
    return str(_read_client(kit)["client"].get("fqsn") or kit.resolve().name)


def _read_client(kit: Path) -> dict[str, Any]:
    file = kit / "startup" / "fed_client.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        content["client"], content["servers"][0]["service"]["target"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{file}: expected the file of a site's startup kit: {error!r}") from error
    return content
