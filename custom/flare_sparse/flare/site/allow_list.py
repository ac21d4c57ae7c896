"""Allow the package's classes at a site, one by one, so that its jobs run there without their own code.

FLARE builds only those classes of a job that ``class_allow_list`` in the site's ``local/resources.json`` names. A list
given there replaces FLARE's default list, so the package's classes are added to the list in force. FLARE calls whatever
a job's class path leads to, functions and imported names, too: a prefix would allow everything in a module.

Files in a site's ``local`` folder: find the one that FLARE reads.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from ...core.checkpoint.writing import write_json
from ...core.errors import ConfigError


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
    "flare_sparse.flare.fingerprints.FingerprintController",
    "flare_sparse.flare.fingerprints.FingerprintExecutor",
    "flare_sparse.flare.session.UserPart",
    "flare_sparse.flare.session.SiteSession",
    "flare_sparse.flare.questions.DescriptionController",
    "flare_sparse.flare.questions.StatisticsExecutor",
)
"""The classes of this package that a job may name; none of them takes an import string or a path."""
CODE_CLASSES = ("flare_sparse.tasks.script.ScriptTask", "flare_sparse.tasks.bundles.task.BundleTask")
"""Further classes that a job with code (BYOC) may name; no allow-list has them, so a job without code may not."""
COMPONENTS = (
    "aggregators.FlexLoRAMean",
    "aggregators.MagnitudePruning",
    "aggregators.MetaStep",
    "aggregators.OrderedMean",
    "aggregators.RankMean",
    "aggregators.ScoredMask",
    "aggregators.SelectiveSum",
    "controllers.MetaGaterController",
    "controllers.NeuroSFLController",
    "csr.FromCSR",
    "csr.ToCSR",
    "masking.KeepMask",
    "masking.MaskedTraining",
    "score_executor.ScoreExecutor",
    "sparse_exchange.SparseExchange",
    "uploads.ChannelUpload",
    "uploads.RankUpload",
)
"""Classes of ``flare_sparse.components``."""
RECIPE_CLASSES = (*(f"flare_sparse.components.{name}" for name in COMPONENTS),)
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


def find_broad_entries(entries: Sequence[str]) -> list[str]:
    """Return the entries that let a job call more of this package than its classes, such as the package's prefix."""
    return [entry for entry in entries if entry.startswith(PACKAGE) and entry not in (*CLASSES, *RECIPE_CLASSES)]


def allow_classes(kit: Path, also: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Add this package's classes to the allow-list in a startup kit's ``local/resources.json``.

    Broader entries of this package are removed, and logs are no longer streamed to the server: one of FLARE's default
    classes sends any file of the job's folder as a log. Everything else in the file stays.

    Args:
        kit: the startup kit, or its ``local`` folder.
        also: further class paths; one that ends with a dot allows everything below it.

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
    added = [entry for entry in (*CLASSES, *also) if entry not in entries]
    broad = find_broad_entries(entries)
    if added or broad or resources.get(LOG_STREAMING, True):
        remaining = [entry for entry in entries if entry not in broad]
        # Written out, so that enforcement does not depend on FLARE's default.
        mode = resources.get(MODE, "enforce")
        write_json(local / RESOURCES, {**resources, MODE: mode, LOG_STREAMING: False, LIST: [*remaining, *added]})
    return added, broad
