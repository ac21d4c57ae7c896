"""The TenSEAL contexts of a federation: from the startup kits (FLARE's ``HEBuilder``), or freshly generated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ...core.errors import ConfigError

CLIENT_FILE, SERVER_FILE = "client_context.tenseal", "server_context.tenseal"
"""FLARE's file names, in the folder ``startup`` of a site's and of the server's startup kit."""

DEGREE, MODULI, SCALE = 8192, (60, 40, 40), 2.0**40
"""Defaults of ``HEBuilder``: 128 bits of security, one multiplication, 4096 values in a ciphertext."""


@dataclass(frozen=True)
class KeyContexts:
    """Serialized TenSEAL contexts with CKKS keys.

    Attributes:
        client: context with the secret key, for sites only.
        server: context without the secret key.
    """

    client: bytes
    server: bytes

    @classmethod
    def generate(cls) -> KeyContexts:
        """Generate fresh keys, for a run with server and sites on one machine.

        Raises:
            ConfigError: TenSEAL is not installed.
        """
        ts = import_tenseal()
        context = ts.context(
            ts.SCHEME_TYPE.CKKS,
            poly_modulus_degree=DEGREE,
            coeff_mod_bit_sizes=list(MODULI),
            encryption_type=ts.ENCRYPTION_TYPE.SYMMETRIC,
        )
        context.generate_relin_keys()
        context.global_scale = SCALE
        options = {"save_galois_keys": False, "save_relin_keys": True}
        return cls(
            context.serialize(save_public_key=True, save_secret_key=True, **options),
            context.serialize(save_public_key=False, save_secret_key=False, **options),
        )

    @classmethod
    def read(cls, folder: Path) -> KeyContexts:
        """Read the files that :meth:`write` wrote.

        Raises:
            ConfigError: a file is missing or unreadable.
        """
        try:
            return cls((folder / CLIENT_FILE).read_bytes(), (folder / SERVER_FILE).read_bytes())
        except OSError as error:
            raise ConfigError(f"{folder}: the keys of the run are missing: {error.strerror}") from error

    def write(self, folder: Path) -> None:
        """Write both contexts to ``folder`` under FLARE's file names, readable by their owner only."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((CLIENT_FILE, self.client), (SERVER_FILE, self.server)):
            (folder / name).unlink(missing_ok=True)
            # Created with its mode before the content is written: at no time can others read the key.
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)


def import_tenseal() -> ModuleType:
    """Import TenSEAL, which is large and optional.

    Raises:
        ConfigError: TenSEAL is not installed.
    """
    try:
        import tenseal
    except ImportError as error:
        raise ConfigError("wire.encryption: ckks needs TenSEAL at every end: pip install 'flare-sparse[he]'") from error
    module: ModuleType = tenseal
    return module
