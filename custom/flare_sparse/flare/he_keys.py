"""Load the CKKS key context of the server or a site: from the signed startup kit, in the simulator from a folder."""

import os
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.sec.security_content_service import LoadResult, SecurityContentService

from ..core.errors import ConfigError
from ..privacy.encryption import CLIENT_FILE, SERVER_FILE, ServerCipher, SiteCipher

KEYS_VARIABLE = "FLARE_SPARSE_HE"
"""Folder of the key contexts in the simulator, which has no startup kits; ignored in a secure federation."""


def load_server_cipher(fl_ctx: FLContext) -> ServerCipher:
    """Return the server's cipher, which aggregates encrypted values without a secret key.

    Raises:
        ConfigError: the startup kit has no key context, or not the server's.
    """
    return ServerCipher(_load_context(SERVER_FILE, fl_ctx))


def load_site_cipher(fl_ctx: FLContext) -> SiteCipher:
    """Return the site's cipher, which encrypts and decrypts.

    Raises:
        ConfigError: the startup kit has no key context, or not a site's.
    """
    return SiteCipher(_load_context(CLIENT_FILE, fl_ctx))


def _load_context(name: str, fl_ctx: FLContext) -> bytes:
    secure = bool(fl_ctx.get_prop(FLContextKey.SECURE_MODE, True))
    folder = os.environ.get(KEYS_VARIABLE)
    # The variable counts only outside secure mode: otherwise a site's environment could replace its keys.
    if folder and not secure:
        return (Path(folder) / name).read_bytes()
    data, result = SecurityContentService.load_content(name)
    # FLARE returns the content of a file with a wrong signature, too; only the result tells.
    accepted = (LoadResult.OK,) if secure else (LoadResult.OK, LoadResult.NOT_SIGNED)
    if data is None or result not in accepted:
        raise ConfigError(
            f"wire.encryption: startup/{name}: {result.value}. Provision the project with "
            "nvflare.lighter.impl.he.HEBuilder before the signature builder (docs/encryption.md)"
        )
    return bytes(data)
