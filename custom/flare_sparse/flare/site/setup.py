"""A site made ready at once: where its data is, what may leave, which classes it builds, and no code in jobs.

Guards and policy are written into the site's startup kit; other entries of its files stay.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...config.policy.policy import POLICY_FILE, Policy, find_policy_file, read_policy
from ...core.checkpoint.writing import replace_atomically, write_json
from ...core.errors import ConfigError
from ...tasks.data.source import LOCAL_FILE, find_site_data
from .allow_list import (
    LOG_STREAMING,
    RESOURCES,
    SERVER_FILE,
    allow_classes,
    find_local_folder,
    read_object,
    read_resources,
)
from .authorizer import AUTHORIZER, GATE, RESULT_POLICY, revoke_code_right

PRIVACY = "privacy.json"
SCOPE = "flare_sparse"


def install_guards(kit: Path, name_or_file: Path | None = None) -> Policy:
    """Write the guards into a kit's ``privacy.json`` and ``resources.json``, and the policy beside them.

    Every privacy scope gets ``SiteResultPolicy``, the site gets ``SiteLastGate`` and ``SitePlanAuthorizer``, and logs
    are no longer streamed to the server. A second call changes nothing.

    Args:
        kit: the startup kit, or its ``local`` folder.
        name_or_file: the policy's file, or the name of a preset; None: keep the policy in the kit. Without any policy
            everything that the package sends may leave.

    Returns:
        The policy in force.

    Raises:
        ConfigError: there is no such kit, or the policy or a file in the kit is malformed; nothing is changed then.
    """
    local = find_local_folder(kit)
    file = local / POLICY_FILE if name_or_file is None else find_policy_file(name_or_file)
    policy = read_policy(file)
    # Everything is read before the first write, so that a malformed file leaves the kit as it was.
    privacy, resources = _add_filters(_read_privacy(local / PRIVACY)), _add_authorizer(read_resources(local))
    if name_or_file is not None:
        with replace_atomically(local / POLICY_FILE) as part:
            part.write_bytes(file.read_bytes())
    write_json(local / PRIVACY, privacy)
    write_json(local / RESOURCES, resources)
    return policy


def _add_filters(privacy: dict[str, Any]) -> dict[str, Any]:
    scopes = privacy.get("scopes") or [{"name": SCOPE, "properties": {}, "task_data_filters": []}]
    result_policy = {"path": RESULT_POLICY, "args": {}}
    for scope in scopes:
        filters = scope.setdefault("task_result_filters", [])
        # Last of the scope: it approves the values that the site's other filters left.
        if RESULT_POLICY not in [part.get("path") for part in filters]:
            filters.append(result_policy)
    components = privacy.get("components") or []
    if GATE not in [part.get("path") for part in components]:
        components.append({"id": "flare_sparse_gate", "path": GATE, "args": {}})
    default = privacy.get("default_scope") or scopes[0]["name"]
    return {**privacy, "scopes": scopes, "default_scope": default, "components": components}


def _add_authorizer(resources: dict[str, Any]) -> dict[str, Any]:
    components = list(resources.get("components", []))
    if AUTHORIZER not in [part.get("path") for part in components]:
        components.append({"id": "flare_sparse_authorizer", "path": AUTHORIZER, "args": {}})
    return {**resources, LOG_STREAMING: False, "components": components}


def _read_privacy(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = read_object(file)
    if not isinstance(content.get("scopes", []), list):
        raise ConfigError(f"{file}: expected a JSON object with a list 'scopes'")
    return content


NO_POLICY = Path("none")
"""Policy of a site without guards: what a job asks for leaves."""
DEFAULT_POLICY = Path("careful")


def is_server(kit: Path) -> bool:
    """Return whether a startup kit is that of a server."""
    return (kit / SERVER_FILE).is_file()


def set_up_site(
    kit: Path,
    data: Path | None,
    policy: Path | None,
    id_column: str | None = None,
    also: Sequence[str] = (),
    *,
    keeps_code: bool = False,
) -> Iterator[str]:
    """Make a site ready; yield what was done, a line each. What is there already stays, and a second call adds nothing.

    Args:
        kit: the site's startup kit.
        data: folder or file of the site's data; None: keep the site file of the kit, if it has one.
        policy: file or preset of what may leave, or ``none``; None: keep the policy in the kit, or else careful.
        id_column: column of a table with the identifiers of subjects.
        also: further classes that jobs may name.
        keeps_code: leave the right to send code with jobs to the roles that have it.

    Raises:
        ConfigError: there is no such kit or data, or the site file has other settings.
    """
    local = find_local_folder(kit)
    file, settings = local / LOCAL_FILE, {"data": str(data.absolute())} if data else {}
    if id_column is not None:
        settings["id"] = id_column
    if settings and file.is_file() and yaml.safe_load(file.read_text(encoding="utf-8")) != settings:
        raise ConfigError(f"{file} has other settings already; change that file, and leave --data and --id out")
    if id_column is not None and data is None and not file.is_file():
        raise ConfigError(f"--id {id_column}: {file} does not exist yet; give --data, too")
    if data is not None and not data.exists():
        raise ConfigError(f"--data {data}: there is no such file or folder")
    if settings and not file.is_file():
        file.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")
        file.chmod(0o600)
    if file.is_file():
        yield f"data: {find_site_data(kit.resolve().name, local, {}).path}"
    if policy is None and not (local / POLICY_FILE).is_file():
        policy = DEFAULT_POLICY
    if policy == NO_POLICY:
        yield "policy: none, and no guards"
    else:
        in_force = install_guards(kit, policy).model_dump(exclude_defaults=True)
        yield f"policy: {'; '.join(f'{name}: {value}' for name, value in in_force.items()) or 'everything may leave'}"
    yield from set_up_server(kit, also, keeps_code=keeps_code)


def set_up_server(kit: Path, also: Sequence[str] = (), *, keeps_code: bool = False) -> Iterator[str]:
    """Allow the classes of the package, and refuse code in jobs unless ``keeps_code``; yield what was done."""
    added, removed = allow_classes(kit, also)
    gone = f"; removed: {', '.join(removed)}" if removed else ""
    yield f"classes that jobs may name: {len(added)} added, by name{gone}"
    if keeps_code:
        yield "code in jobs: as the kit says"
        return
    roles = revoke_code_right(kit)
    yield f"code in jobs: refused{', also from ' + ', '.join(roles) if roles else ''}"
