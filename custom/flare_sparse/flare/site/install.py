"""Put a site's guards and its policy into its startup kit; what the site's IT wrote there stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...policy.policy import POLICY_FILE, Policy, policy_file, read_policy
from .allow_list import RESOURCES, local_folder, read_resources
from .guards import GATE, GUARDS, RESULT_POLICY
from .kit_files import read_object, write_object, write_text

PRIVACY = "privacy.json"
AUTHORIZER = f"{GUARDS}SitePlanAuthorizer"
SCOPE = "flare_sparse"
LOG_STREAMING = "allow_log_streaming"


def install_guards(kit: Path, chosen: Path | None = None) -> Policy:
    """Write the guards into a kit's ``privacy.json`` and ``resources.json``, and the policy beside them.

    Every privacy scope gets ``SiteResultPolicy``, the site ``SiteLastGate`` and ``SitePlanAuthorizer``; logs are no
    longer streamed to the server. Run twice, it changes nothing.

    Args:
        kit: the startup kit, or its ``local`` folder.
        chosen: the policy's file, or the name of a ready one; None: the one that is there, or none: all that the package
            sends may leave.

    Returns:
        The policy in force.

    Raises:
        ConfigError: no kit, a malformed file in it, or a malformed policy; nothing is changed then.
    """
    local = local_folder(kit)
    file = local / POLICY_FILE if chosen is None else policy_file(chosen)
    policy = read_policy(file)
    privacy, resources = _guarded(_read(local / PRIVACY)), _authorized(read_resources(local))
    if chosen is not None:
        write_text(local / POLICY_FILE, file.read_text(encoding="utf-8"))
    write_object(local / PRIVACY, privacy)
    write_object(local / RESOURCES, resources)
    return policy


def _guarded(privacy: dict[str, Any]) -> dict[str, Any]:
    scopes = privacy.get("scopes") or [{"name": SCOPE, "properties": {}, "task_data_filters": []}]
    mine = {"path": RESULT_POLICY, "args": {}}
    for scope in scopes:
        filters = scope.setdefault("task_result_filters", [])
        if mine["path"] not in [part.get("path") for part in filters]:
            filters.append(mine)  # after the site's own: what it approves is what they left
    components = privacy.get("components") or []
    if GATE not in [part.get("path") for part in components]:
        components.append({"id": "flare_sparse_gate", "path": GATE, "args": {}})
    default = privacy.get("default_scope") or scopes[0]["name"]
    return {**privacy, "scopes": scopes, "default_scope": default, "components": components}


def _authorized(resources: dict[str, Any]) -> dict[str, Any]:
    components = list(resources.get("components", []))
    if AUTHORIZER not in [part.get("path") for part in components]:
        components.append({"id": "flare_sparse_authorizer", "path": AUTHORIZER, "args": {}})
    return {**resources, LOG_STREAMING: False, "components": components}


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = read_object(file)
    if not isinstance(content.get("scopes", []), list):
        raise ConfigError(f"{file}: expected a JSON object with a list of scopes")
    return content
