"""Load the certificates that sign the keys of a sum: from the startup kit, in the simulator from a folder."""

import os
from collections.abc import Iterable
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from ..core.errors import ConfigError
from ..privacy.secure_aggregation.identities import RootCertificate, SiteIdentity, generate_kits

KITS_VARIABLE = "FLARE_SPARSE_KITS"
"""Folder of the certificates in the simulator, which has no startup kits; ignored in a secure federation."""
ROOT_FILE, CERTIFICATE_FILE, KEY_FILE = "rootCA.pem", "client.crt", "client.key"
"""FLARE's file names, in the folder ``startup`` of a startup kit."""


def load_root(fl_ctx: FLContext) -> RootCertificate:
    """Return the federation's root certificate at the server.

    Raises:
        ConfigError: the startup kit has none.
    """
    return RootCertificate(_read(_find_folder(fl_ctx), ROOT_FILE))


def load_identity(fl_ctx: FLContext) -> SiteIdentity:
    """Return what this site signs with.

    Raises:
        ConfigError: a file of the startup kit is missing or cannot be read.
    """
    name, folder = fl_ctx.get_identity_name(), _find_folder(fl_ctx)
    return SiteIdentity.from_pem(name, *(_read(folder, file) for file in (CERTIFICATE_FILE, KEY_FILE, ROOT_FILE)))


def write_kits(folder: Path, sites: Iterable[str]) -> None:
    """Write new certificates of simulated sites, readable by their owner only.

    They prove nothing: the process of the simulator holds every key.
    """
    for name, kit in generate_kits(sites).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, content in ((CERTIFICATE_FILE, kit.certificate), (KEY_FILE, kit.key), (ROOT_FILE, kit.root)):
            path = folder / name / file
            path.unlink(missing_ok=True)
            # Created with its mode before the content is written: at no time can others read the key.
            path.touch(mode=0o600)
            path.write_bytes(content)
        (folder / ROOT_FILE).write_bytes(kit.root)


def _find_folder(fl_ctx: FLContext) -> Path:
    folder = os.environ.get(KITS_VARIABLE)
    # The variable counts only outside secure mode: otherwise an environment could replace certificates.
    if folder and not fl_ctx.get_prop(FLContextKey.SECURE_MODE, True):
        site = Path(folder) / fl_ctx.get_identity_name()
        return site if site.is_dir() else Path(folder)
    workspace: Workspace = fl_ctx.get_engine().get_workspace()
    return Path(workspace.get_startup_kit_dir())


def _read(folder: Path, file: str) -> bytes:
    try:
        return (folder / file).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"wire.aggregation: masked: {folder / file}: {error.strerror}. Start the job with flare-sparse run, or in "
            "a provisioned federation, whose startup kits have certificates (docs/secure-aggregation.md)"
        ) from error
