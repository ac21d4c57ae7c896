"""The guard that checks a job before it runs, and the paths of all guards of a site.

``SitePlanAuthorizer`` refuses jobs that carry their own filters or executors or that name other parts of this package
than a job's classes, and refuses every job while one of the other guards is missing.

The right to send code to a site (BYOC), which FLARE's startup kits give to a project's admins and leads.

The code of a job runs in the site's own process, past allow-list and guards. The right is ``byoc`` in the site's
``local/authorization.json``; without that file FLARE reads ``authorization.json.default``, where ``lead`` and
``project_admin`` have it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.fuel.utils.components_utils import create_classes_table_static

from ...config.policy.policy import POLICY_FILE, read_policy
from ...core.checkpoint.writing import write_json
from ...core.errors import ConfigError
from .allow_list import (
    CLASSES,
    CODE_CLASSES,
    PACKAGE,
    RECIPE_CLASSES,
    find_active_file,
    find_local_folder,
    read_object,
)

GATE = "flare_sparse.flare.site.guards.SiteLastGate"
RESULT_POLICY = "flare_sparse.flare.site.guards.SiteResultPolicy"
AUTHORIZER = "flare_sparse.flare.site.authorizer.SitePlanAuthorizer"
_RESTRICTED_SECTIONS = ("executors", "components", "task_result_filters", "task_data_filters")
"""Sections of a job's configuration for a site, which may hold only classes of this package."""
_FLARE = "nvflare."
"""Prefix of FLARE's own classes; a job of this package names none for a site. One of them sends any file as a log."""
_LOG_STREAMER = "nvflare.app_common.logging.job_log_streamer.JobLogStreamer"
_RESTART = ". FLARE adds it to each job at a site that was started before flare-sparse site setup: restart the site"


class SitePlanAuthorizer(FLComponent):
    """Checks every component of a job before FLARE builds it, whether or not the job carries code."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Refuse a component of a job that this site does not allow.

        Raises:
            UnsafeComponentError: an executor or filter of another package, a name of this package that is not one of a
            job's classes, or a site without its other guards.
        """
        if event_type != EventType.BEFORE_BUILD_COMPONENT:
            return
        try:
            self._check_component(fl_ctx)
        except UnsafeComponentError:
            raise
        # Fail closed: FLARE continues after any other kind of exception.
        except Exception as error:
            raise UnsafeComponentError(
                f"E_POLICY: {type(error).__name__} while a component of the job was checked"
            ) from error

    def _check_component(self, fl_ctx: FLContext) -> None:
        config, node = fl_ctx.get_prop(FLContextKey.COMPONENT_CONFIG), fl_ctx.get_prop(FLContextKey.COMPONENT_NODE)
        location = str(node.path()) if node is not None else ""
        path = str(config.get("path") or config.get("class_path") or config.get("name") or "")
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        local = Path(workspace.get_site_config_dir())
        # Arguments of a component may name other classes: a user task, which the site has allowed by name.
        is_argument = location.startswith("components") and ".args" in location
        is_restricted = location.startswith(_RESTRICTED_SECTIONS) and not is_argument
        runs_foreign_jobs = read_policy(local / POLICY_FILE).foreign_jobs
        if is_restricted and path not in CLASSES and not runs_foreign_jobs:
            raise UnsafeComponentError(
                f"E_POLICY: {location}: {path!r} is not a class of flare_sparse; this site runs no others"
                + (_RESTART if path == _LOG_STREAMER else "")
            )
        known = (*CLASSES, *CODE_CLASSES, *(RECIPE_CLASSES if runs_foreign_jobs else ()))
        for class_path in _iterate_class_paths(config):
            if class_path.startswith(_FLARE) and not runs_foreign_jobs:
                raise UnsafeComponentError(f"E_POLICY: {location}: {class_path!r}: jobs name no classes of FLARE here")
            if class_path.startswith(PACKAGE) and class_path not in known:
                raise UnsafeComponentError(f"E_POLICY: {location}: {class_path!r} is not a class that a job may name")
        if missing := find_missing_guard(local):
            raise UnsafeComponentError(f"E_POLICY: {missing}. Run: flare-sparse site setup KIT")


def _iterate_class_paths(config: Any) -> Iterator[str]:
    """Yield the class paths in a component's configuration, at any depth; FLARE also finds its classes by their names.

    Some of FLARE's own classes build objects from class paths that they find in their arguments.
    """
    if isinstance(config, dict):
        yield from (str(config[key]) for key in ("path", "class_path") if key in config)
        name = config.get("name")
        modules = create_classes_table_static().get(name, ()) if isinstance(name, str) else ()
        yield from (f"{module}.{name}" for module in ([modules] if isinstance(modules, str) else modules))
    if isinstance(config, dict | list | tuple):
        for part in config.values() if isinstance(config, dict) else config:
            yield from _iterate_class_paths(part)


def find_missing_guard(local: Path) -> str:
    """Return which guard is missing in a site's ``local`` folder; empty when all are installed."""
    file = local / "privacy.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "privacy.json is missing or malformed"
    components = [part.get("path") for part in content.get("components", []) if isinstance(part, dict)]
    if GATE not in components:
        return "privacy.json: the components lack SiteLastGate"
    for scope in content.get("scopes", []):
        filters = [part.get("path") for part in scope.get("task_result_filters", [])]
        if RESULT_POLICY not in filters:
            return f"privacy.json: scope {scope.get('name')!r} lacks SiteResultPolicy"
    return "" if content.get("scopes") else "privacy.json has no scope"


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
        write_json(local / AUTHORIZATION, authorization)
    return roles
