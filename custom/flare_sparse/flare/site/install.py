"""Install a site's guards and its policy in its startup kit; other entries of the site's files stay."""

from pathlib import Path
from typing import Any

from ...config.policy.policy import POLICY_FILE, Policy, find_policy_file, read_policy
from ...core.errors import ConfigError
from .allow_list import LOG_STREAMING, RESOURCES, find_local_folder, read_resources
from .authorizer import AUTHORIZER, GATE, RESULT_POLICY
from .kit_files import read_object, write_object, write_text

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
        write_text(local / POLICY_FILE, file.read_text(encoding="utf-8"))
    write_object(local / PRIVACY, privacy)
    write_object(local / RESOURCES, resources)
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
