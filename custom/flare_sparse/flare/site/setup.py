"""A site made ready at once: where its data is, what may leave, which classes it builds, and no code in jobs.

FLARE builds only those classes of a job that ``class_allow_list`` in the site's ``local/resources.json`` names. A list
given there replaces FLARE's default list, so the package's classes are added to the list in force, one by one. FLARE
calls whatever a job's class path leads to, functions and imported names, too: a prefix would allow everything in a
module.

The code of a job runs in the site's own process, past allow-list and guards. The right to send it (BYOC), which FLARE's
startup kits give to a project's admins and leads, is ``byoc`` in the site's ``local/authorization.json``; without that
file FLARE reads ``authorization.json.default``, where ``lead`` and ``project_admin`` have it.

Guards and policy are written into the site's startup kit; other entries of its files stay.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from getpass import getuser
from pathlib import Path
from typing import Any

import yaml
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from ...config.policy.policy import POLICY_FILE, Policy, find_policy_file, read_policy
from ...core.checkpoint.writing import replace_atomically, write_json
from ...core.errors import ConfigError
from ...tasks.data.source import LOCAL_FILE, find_site_data


def find_active_file(local: Path, name: str) -> Path | None:
    """Return the file that FLARE reads: the site's own, else the kit's ``.default``; None if there is neither."""
    return next((file for file in (local / name, local / f"{name}.default") if file.is_file()), None)


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


PACKAGE = "flare_sparse."
CLASSES = (
    "flare_sparse.flare.controller.FederatedController",
    "flare_sparse.flare.executor.EncodeUpdate",
    "flare_sparse.flare.executor.SparseExecutor",
    "flare_sparse.flare.questions.FingerprintController",
    "flare_sparse.flare.questions.FingerprintExecutor",
    "flare_sparse.flare.session.UserPart",
    "flare_sparse.flare.session.SiteSession",
    "flare_sparse.flare.questions.DescriptionController",
    "flare_sparse.flare.questions.StatisticsExecutor",
)
"""The classes of this package that a job may name; none of them takes an import string or a path."""
SERVER_CLASSES = ("flare_sparse.flare.tracking.Tracker",)
"""Further classes that a job may name at the server alone: what sends figures to a service has no place at a site."""
CODE_CLASSES = ("flare_sparse.tasks.script.ScriptTask", "flare_sparse.tasks.bundles.task.BundleTask")
"""Further classes that a job with code (BYOC) may name; no allow-list has them, so a job without code may not."""
COMPONENTS = {
    "aggregators": (
        *("FlexLoRAMean", "MagnitudePruning", "MetaStep", "OrderedMean", "RankMean", "ScoredMask", "SelectiveSum"),
    ),
    "controllers": ("MetaGaterController", "NeuroSFLController"),
    "csr": ("FromCSR", "ToCSR"),
    "masking": ("KeepMask", "MaskedTraining"),
    "score_executor": ("ScoreExecutor",),
    "sparse_exchange": ("SparseExchange",),
    "uploads": ("ChannelUpload", "RankUpload"),
}
"""Classes of ``flare_sparse.components`` by module."""
RECIPE_CLASSES = tuple(f"flare_sparse.components.{part}.{name}" for part, names in COMPONENTS.items() for name in names)
"""Further classes, for jobs of FLARE's own recipes without code; they are allowed by name only (``--also``)."""
SERVER_FILE = "startup/fed_server.json"
"""File that only the startup kit of a server holds."""
EVERYTHING = "*"
LOG_STREAMING = "allow_log_streaming"
"""Whether FLARE may stream logs of this site to the server; it is on where ``resources.json`` does not name it."""
LIST, MODE = "class_allow_list", "class_list_enforcement_mode"
RESOURCES = "resources.json"


def find_local_folder(kit: Path) -> Path:
    """Return the ``local`` folder of a startup kit; the folder itself may be given, too.

    Raises:
        ConfigError: the folder is neither.
    """
    for folder in (kit / "local", kit):
        if folder.name == "local" and folder.is_dir():
            return folder
    raise ConfigError(
        f"{kit}: this is no startup kit: it has no folder 'local'. Give the folder that holds startup/ and local/"
    )


def read_resources(local: Path) -> dict[str, Any]:
    """Read the site's resources in force: ``resources.json``, else ``resources.json.default``, else empty ones.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    file = find_active_file(local, RESOURCES)
    return {"format_version": 2} if file is None else read_object(file)


def get_allow_list(resources: dict[str, Any]) -> list[str]:
    """Return the entries in force: class paths, or prefixes that end with a dot.

    Raises:
        ConfigError: the list is malformed.
    """
    entries = resources.get(LIST, list(DEFAULT_CLASS_ALLOW_LIST))
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"{LIST}: expected a list of class paths, found {str(entries)[:80]}; correct resources.json")
    return entries


def find_broad_entries(entries: Sequence[str], classes: Sequence[str] = CLASSES) -> list[str]:
    """Return the entries that let a job call more of this package than ``classes``, such as the package's prefix."""
    return [entry for entry in entries if entry.startswith(PACKAGE) and entry not in (*classes, *RECIPE_CLASSES)]


def allow_classes(kit: Path, also: Sequence[str] = (), *, at_server: bool = False) -> tuple[list[str], list[str]]:
    """Add this package's classes to the allow-list in a startup kit's ``local/resources.json``.

    Broader entries of this package are removed, and logs are no longer streamed to the server: one of FLARE's default
    classes sends any file of the job's folder as a log. Everything else in the file stays.

    Args:
        kit: the startup kit, or its ``local`` folder.
        also: further class paths; one that ends with a dot allows everything below it.
        at_server: allow ``SERVER_CLASSES``, too, as in the kit of a server.

    Returns:
        The entries that were added, and those that were removed; the file is written only when there are some.

    Raises:
        ConfigError: the folder is no kit, its resources are malformed, or ``also`` names other parts of this package.
    """
    if broad := find_broad_entries(also):
        raise ConfigError(
            f"--also {broad[0]}: leave it out. Of flare_sparse, jobs may name the classes that are allowed in any case "
            f"and, each by its name, {', '.join(RECIPE_CLASSES)}"
        )
    local = find_local_folder(kit)
    resources = read_resources(local)
    entries = get_allow_list(resources)
    classes = (*CLASSES, *SERVER_CLASSES) if at_server or is_server(local.parent) else CLASSES
    added = [entry for entry in (*classes, *also) if entry not in entries]
    broad = find_broad_entries(entries, classes)
    if added or broad or resources.get(LOG_STREAMING, True):
        remaining = [entry for entry in entries if entry not in broad]
        # Written out, so that enforcement does not depend on FLARE's default.
        mode = resources.get(MODE, "enforce")
        write_json(local / RESOURCES, {**resources, MODE: mode, LOG_STREAMING: False, LIST: [*remaining, *added]})
    return added, broad


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


GATE = "flare_sparse.flare.site.guards.SiteLastGate"
RESULT_POLICY = "flare_sparse.flare.site.guards.SiteResultPolicy"
AUTHORIZER = "flare_sparse.flare.site.authorizer.SitePlanAuthorizer"
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


UNIT_FILE = "flare-sparse-site.service"
"""Service of systemd that starts a site; the package has it as a template of the same name."""
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
    folder = kit.resolve()
    unit = Path(__file__).with_name(UNIT_FILE).read_text(encoding="utf-8")
    text = unit.format(name=UNIT_FILE, site=folder.name, user=getuser(), kit=shlex.quote(str(folder)))
    (folder / UNIT_FILE).write_text(text, encoding="utf-8")
    yield f"service: {folder / UNIT_FILE}; its first line says where it goes"


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
