"""Is a site ready for a job? Everything that can be found out before one comes, each with its remedy."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from ...assemble import Assembly, assemble, open_site
from ...config import JobConfig
from ...data.source import site_data
from ...errors import ConfigError, FlareSparseError
from ...policy.check import find_policy_conflicts
from ...policy.policy import POLICY_FILE, read_policy
from ...task import Task
from .allow_list import CLASSES, EVERYTHING, LIST, MODE, allowed, is_too_broad, local_folder, read_resources
from .byoc import list_code_senders, read_permissions
from .guards import unguarded
from .install import LOG_STREAMING

Verdict = Literal["PASS", "WARN", "FAIL"]
FLARE_SERIES = "2.9"
DISK_NEEDED = 2 * 10**9
CONNECT_TIMEOUT_S = 5.0
REFUSAL_TIMEOUT_S = 1.0
_WHOSE = "Is this the kit of this project?"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    verdict: Verdict
    what: str
    detail: str


def preflight(
    kit: Path, job: JobConfig | None = None, user_task: Task | None = None, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Look at a site, one finding after the other; nothing is changed and no data leaves.

    Args:
        kit: the site's startup kit.
        job: settings of a job: the site's data is then read as that job would, and the site's policy held against it.
        user_task: the task of that job when it is the user's own.
        environment: variables that may say where the data lies.
    """
    yield _attempt("startup kit", lambda: _kit(kit))
    yield from (
        _version(name, series) for name, series in (("nvflare", FLARE_SERIES), ("flare-sparse", ""), ("torch", ""))
    )
    yield _attempt("allow-list", lambda: _allow_list(kit))
    yield _attempt("code", lambda: _code(kit))
    yield (policy := _attempt("policy", lambda: _policy(kit)))
    if job is None:
        yield _attempt("data", lambda: _there(kit, environment))
    else:
        yield from _job(kit, job, user_task, environment, guarded=policy.verdict != "FAIL")
    yield _attempt("disk", lambda: _disk(kit))
    yield _attempt("server", lambda: _server(kit))


def _attempt(what: str, look: Callable[[], tuple[Verdict, str]]) -> Finding:
    try:
        verdict, detail = look()
    except FlareSparseError as error:
        return Finding("FAIL", what, str(error))
    return Finding(verdict, what, detail)


def _version(package: str, series: str) -> Finding:
    try:
        found = version(package)
    except PackageNotFoundError:
        return Finding("FAIL", package, "not installed here; install the wheel that the federation agreed on")
    if series and not found.startswith(f"{series}."):
        return Finding("WARN", package, f"{found}; tested with {series}: install the same series as the server")
    return Finding("PASS", package, found)


def _kit(kit: Path) -> tuple[Verdict, str]:
    local_folder(kit)
    startup = kit / "startup"
    missing = [
        name for name in ("fed_client.json", "client.crt", "client.key", "rootCA.pem") if not (startup / name).is_file()
    ]
    if missing:
        return (
            "FAIL",
            f"{startup}: {', '.join(missing)} missing; unpack the kit that the coordinating centre sent again",
        )
    return "PASS", str(kit)


def _allow_list(kit: Path) -> tuple[Verdict, str]:
    resources = read_resources(local_folder(kit))
    listed, remedy = allowed(resources), f"Run: flare-sparse site allow {kit}"
    if wide := is_too_broad(listed):
        return "FAIL", f"{', '.join(wide)} in {LIST}: a job may call every function there. {remedy}"
    if EVERYTHING in listed:
        return (
            "WARN",
            f"'*' in {LIST}: a job may call whatever is installed here. Take it out, then run site allow {kit}",
        )
    if resources.get(MODE) == "warn":
        return "WARN", f"{MODE} is 'warn': a job may call whatever is installed here, and is logged. Make it 'enforce'"
    if missing := [name for name in CLASSES if name not in listed]:
        return "FAIL", f"{', '.join(missing)} not in {LIST}: jobs are refused. {remedy}"
    return "PASS", f"the {len(CLASSES)} classes that a job may name are in {LIST}"


def _code(kit: Path) -> tuple[Verdict, str]:
    if roles := list_code_senders(read_permissions(local_folder(kit))):
        return (
            "WARN",
            f"{', '.join(roles)} may send code here (BYOC). Unless you want that: flare-sparse site no-code {kit}",
        )
    return "PASS", "nobody may send code here"


def _policy(kit: Path) -> tuple[Verdict, str]:
    local = local_folder(kit)
    policy = read_policy(local / POLICY_FILE)
    if missing := unguarded(local):
        return "WARN", f"{missing}: nothing here checks what leaves. Run: flare-sparse site policy {kit}"
    if read_resources(local).get(LOG_STREAMING, True):
        return "WARN", f"{LOG_STREAMING} is on: this site's logs go to the server. Run: flare-sparse site policy {kit}"
    said = policy.model_dump(exclude_defaults=True)
    return "PASS", "; ".join(
        f"{name}: {value}" for name, value in said.items()
    ) or "all that the package sends may leave"


def _there(kit: Path, environment: Mapping[str, str]) -> tuple[Verdict, str]:
    where = site_data(_name(kit), local_folder(kit), environment)
    return "WARN", f"{where.path} is there; give --job CONFIG to have it read as that job would"


def _job(
    kit: Path, job: JobConfig, user_task: Task | None, environment: Mapping[str, str], *, guarded: bool
) -> Iterator[Finding]:
    """The site's data as a job reads it; then, where both can be read, the job held against the policy here."""
    read: list[tuple[Assembly, int]] = []

    def data() -> tuple[Verdict, str]:
        where = site_data(_name(kit), local_folder(kit), environment)
        assembly = assemble(job, user_task)
        examples = open_site(assembly, where).num_examples
        read.append((assembly, examples))
        if not examples:
            return "WARN", f"{where.path}: no training examples; this site would only judge models"
        return "PASS", f"{where.path}: {examples} training examples, as {job.task.name} reads them"

    yield _attempt("data", data)
    if read and guarded:
        yield _attempt("job", lambda: _let_through(kit, job, *read[0]))


def _let_through(kit: Path, job: JobConfig, assembly: Assembly, examples: int) -> tuple[Verdict, str]:
    policy = read_policy(local_folder(kit) / POLICY_FILE)
    if reasons := find_policy_conflicts(policy, job, assembly, {_name(kit): examples}):
        return "FAIL", f"the policy here would not let {job.name} through: {' | '.join(reasons)}"
    return "PASS", f"the policy here lets {job.name} through"


def _disk(kit: Path) -> tuple[Verdict, str]:
    free = shutil.disk_usage(kit).free
    detail = f"{free / 1e9:.1f} GB free"
    return (
        ("PASS", detail)
        if free >= DISK_NEEDED
        else ("WARN", f"{detail}; logs and models may need {DISK_NEEDED / 1e9:.0f} GB")
    )


def _server(kit: Path) -> tuple[Verdict, str]:
    """A TCP connection and a TLS handshake with the kit's own certificate."""
    target = _client(kit)["servers"][0]["service"]["target"]
    host, _, port = str(target).rpartition(":")
    startup = kit / "startup"
    try:
        context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
        context.load_cert_chain(str(startup / "client.crt"), str(startup / "client.key"))
        context.check_hostname = False  # FLARE names the server by its identity, not by its address
        context.set_alpn_protocols(["h2"])  # without it FLARE's gRPC server hangs up
        with (
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as plain,
            context.wrap_socket(plain) as secure,
        ):
            if _hangs_up(secure):
                return "FAIL", f"{target} hangs up after the handshake: it does not take this certificate. {_WHOSE}"
            return "PASS", f"{target} answers with {secure.version()}, and both certificates are good"
    except ssl.SSLError as error:
        return "FAIL", f"{target} is there, but refuses the handshake: {error.reason}. {_WHOSE}"
    except (OSError, ValueError) as error:
        return (
            "FAIL",
            f"{target} cannot be reached: {error}. Ask for an outgoing TCP connection to it, or start the server",
        )


def _hangs_up(secure: ssl.SSLSocket) -> bool:
    """In TLS 1.3 a server that does not take our certificate says so only after the handshake.

    Raises:
        ssl.SSLError: it says so.
    """
    secure.settimeout(REFUSAL_TIMEOUT_S)
    try:
        return not secure.recv(1)
    except TimeoutError:  # silence: it waits for us to speak
        return False


def _name(kit: Path) -> str:
    return str(_client(kit)["client"].get("fqsn") or kit.resolve().name)


def _client(kit: Path) -> dict[str, Any]:
    file = kit / "startup" / "fed_client.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        content["client"], content["servers"][0]["service"]["target"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{file}: not the file of a client's startup kit: {error!r}") from error
    return content
