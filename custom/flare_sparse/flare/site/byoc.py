"""The right to send code to a site (BYOC), which FLARE's startup kits give to a project's admins and leads.

The code of a job runs in the site's own process, past allow-list and guards. The right is ``byoc`` in the site's
``local/authorization.json``; without that file FLARE reads ``authorization.json.default``, where ``lead`` and
``project_admin`` have it.
"""

from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .allow_list import find_active_file, find_local_folder, read_object, write_object

AUTHORIZATION = "authorization.json"
BYOC = "byoc"
RIGHTS = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "shell_commands")
"""Rights that a role with one word for all rights keeps, besides those that the file names for other roles."""


def read_permissions(local: Path) -> dict[str, Any]:
    """Read the site's authorization in force: ``authorization.json``, else ``authorization.json.default``.

    Raises:
        ConfigError: neither file exists, or the one in force is malformed.
    """
    file = find_active_file(local, AUTHORIZATION)
    if file is None:
        raise ConfigError(
            f"{local}: there is neither {AUTHORIZATION} nor {AUTHORIZATION}.default; unpack the startup kit again"
        )
    content = read_object(file)
    if not isinstance(content.get("permissions"), dict):
        raise ConfigError(f"{file}: expected a JSON object with an object 'permissions'")
    return content


def list_code_senders(authorization: dict[str, Any]) -> list[str]:
    """Return the roles that may send code: those whose rule for ``byoc`` is anything but ``"none"``."""

    def may_send_code(rights: Any) -> bool:
        return bool(rights) and (rights.get(BYOC, "none") if isinstance(rights, dict) else rights) not in ("none", "no")

    return [role for role, rights in authorization["permissions"].items() if may_send_code(rights)]


def revoke_code_right(kit: Path) -> list[str]:
    """Take the right to send code from every role in a startup kit's ``local/authorization.json``; all else stays.

    Args:
        kit: the startup kit, or its ``local`` folder.

    Returns:
        The roles that lost the right; the file is written only when there are some.

    Raises:
        ConfigError: there is no such folder, or its authorization is missing or malformed.
    """
    local = find_local_folder(kit)
    authorization = read_permissions(local)
    roles = list_code_senders(authorization)
    if roles:
        permissions = authorization["permissions"]
        named_rights = {right for rights in permissions.values() if isinstance(rights, dict) for right in rights}
        # A role may have one rule for all rights, such as "any". FLARE has no "any but byoc", so the other rights are
        # written out.
        all_rights = [*RIGHTS, *sorted(named_rights - {*RIGHTS, BYOC})]
        for role in roles:
            rights = permissions[role]
            permissions[role] = {
                **(rights if isinstance(rights, dict) else dict.fromkeys(all_rights, rights)),
                BYOC: "none",
            }
        write_object(local / AUTHORIZATION, authorization)
    return roles
