"""The guard that checks a job before it runs.

``SitePlanAuthorizer`` refuses jobs that carry their own filters or executors or that name other parts of this package
than a job's classes, and refuses every job while one of the other guards is missing.
"""

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
from .setup import CLASSES, CODE_CLASSES, PACKAGE, RECIPE_CLASSES, find_missing_guard

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
