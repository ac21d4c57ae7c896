"""The keys of a federation, as bytes: those that FLARE's ``HEBuilder`` puts into the startup kits, or new ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..errors import ConfigError

CLIENT_FILE, SERVER_FILE = "client_context.tenseal", "server_context.tenseal"
"""Names of FLARE's, in ``startup`` of a site's kit and of the server's."""

DEGREE, MODULI, SCALE = 8192, (60, 40, 40), 2.0**40
"""Parameters of ``HEBuilder`` where a project sets none: 128 bits of security, one multiplication, 4096 values each."""


@dataclass(frozen=True)
class KeyContexts:
    """What both kinds of participants hold.

    Attributes:
        client: with the secret key; for sites only.
        server: without it.
    """

    client: bytes
    server: bytes

    @classmethod
    def generate(cls) -> KeyContexts:
        """Fresh keys, for a run in which one machine plays all parts.

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
        kept = {"save_galois_keys": False, "save_relin_keys": True}
        return cls(
            context.serialize(save_public_key=True, save_secret_key=True, **kept),
            context.serialize(save_public_key=False, save_secret_key=False, **kept),
        )

    @classmethod
    def read(cls, folder: Path) -> KeyContexts:
        """Those of :meth:`write`.

        Raises:
            ConfigError: they are not there.
        """
        try:
            return cls((folder / CLIENT_FILE).read_bytes(), (folder / SERVER_FILE).read_bytes())
        except OSError as error:
            raise ConfigError(f"{folder}: the keys of the run are missing: {error.strerror}") from error

    def write(self, folder: Path) -> None:
        """Two files with FLARE's names; only their owner may read the one with the key."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((CLIENT_FILE, self.client), (SERVER_FILE, self.server)):
            (folder / name).unlink(missing_ok=True)
            (folder / name).touch(mode=0o600)
            (folder / name).write_bytes(content)


def import_tenseal() -> ModuleType:
    """The library, which is heavy and optional.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import tenseal as found
    except ImportError as error:
        raise ConfigError("wire.encryption: ckks needs TenSEAL at every end: pip install 'flare-sparse[he]'") from error
    module: ModuleType = found
    return module
