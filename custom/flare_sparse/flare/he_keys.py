"""Where an end of a job finds its keys: in the startup kit, signed; in the simulator, in a folder made for the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.sec.security_content_service import LoadResult, SecurityContentService

from ..encryption import CLIENT_FILE, SERVER_FILE, ServerCipher, SiteCipher
from ..errors import ConfigError

KEYS_VARIABLE = "FLARE_SPARSE_HE"
"""Folder of the keys in the simulator, which has no startup kits; ignored by a secure end."""


def server_cipher(fl_ctx: FLContext) -> ServerCipher:
    """The server's end of an encrypted sum.

    Raises:
        ConfigError: the kit has no context, or not the server's.
    """
    return ServerCipher(_content(SERVER_FILE, fl_ctx))


def site_cipher(fl_ctx: FLContext) -> SiteCipher:
    """A site's end of an encrypted sum.

    Raises:
        ConfigError: the kit has no context, or not a site's.
    """
    return SiteCipher(_content(CLIENT_FILE, fl_ctx))


def _content(name: str, fl_ctx: FLContext, environment: Mapping[str, str] = os.environ) -> bytes:
    secure = bool(fl_ctx.get_prop(FLContextKey.SECURE_MODE, True))
    folder = environment.get(KEYS_VARIABLE)
    if folder and not secure:
        return (Path(folder) / name).read_bytes()
    data, found = SecurityContentService.load_content(name)
    good = (LoadResult.OK,) if secure else (LoadResult.OK, LoadResult.NOT_SIGNED)
    if data is None or found not in good:
        raise ConfigError(
            f"wire.encryption: startup/{name}: {found.value}. Provision the project with nvflare.lighter.impl.he.HEBuilder "
            "before the signature builder (docs/encryption.md)"
        )
    return bytes(data)
