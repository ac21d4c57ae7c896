"""Who may send code to a site: FLARE's kits let a project's admins and leads do so (BYOC) until the site says no.

A job that carries code runs it in the site's own process, past allow-list and guards. The right is ``byoc`` in the
site's ``local/authorization.json``; without that file FLARE takes ``authorization.json.default``, where ``lead`` and
``project_admin`` have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .allow_list import local_folder
from .kit_files import find_active_file, read_object, write_object

AUTHORIZATION = "authorization.json"
BYOC = "byoc"
RIGHTS = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "shell_commands")
"""What a role with one word for all rights keeps, beside those that the file names for other roles."""


def read_permissions(local: Path) -> dict[str, Any]:
    """The site's authorization in force: ``authorization.json``, else ``authorization.json.default``.

    Raises:
        ConfigError: there is neither, or it is malformed.
    """
    file = find_active_file(local, AUTHORIZATION)
    if file is None:
        raise ConfigError(f"{local}: neither {AUTHORIZATION} nor {AUTHORIZATION}.default; unpack the kit again")
    content = read_object(file)
    if not isinstance(content.get("permissions"), dict):
        raise ConfigError(f"{file}: expected a JSON object with permissions")
    return content


def list_code_senders(authorization: dict[str, Any]) -> list[str]:
    """Roles to which anything but ``"none"`` is said for ``byoc``."""

    def may(rights: Any) -> bool:
        return bool(rights) and (rights.get(BYOC, "none") if isinstance(rights, dict) else rights) not in ("none", "no")

    return [role for role, rights in authorization["permissions"].items() if may(rights)]


def revoke_code_right(kit: Path) -> list[str]:
    """Take the right to send code away from every role, in a startup kit's ``local/authorization.json``; the rest stays.

    Args:
        kit: the startup kit, or its ``local`` folder.

    Returns:
        The roles that could send code until now; the file is written only when there are some.

    Raises:
        ConfigError: there is no such folder, or its authorization is missing or malformed.
    """
    local = local_folder(kit)
    authorization = read_permissions(local)
    roles = list_code_senders(authorization)
    if roles:
        permissions = authorization["permissions"]
        named = {right for rights in permissions.values() if isinstance(rights, dict) for right in rights}
        every = [*RIGHTS, *sorted(named - {*RIGHTS, BYOC})]
        for role in roles:
            rights = permissions[role]
            permissions[role] = {**(rights if isinstance(rights, dict) else dict.fromkeys(every, rights)), BYOC: "none"}
        write_object(local / AUTHORIZATION, authorization)
    return roles
