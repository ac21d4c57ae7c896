"""Decryption of the model of an encrypted run, at a site with the secret key."""

import json
from collections.abc import Iterator
from pathlib import Path

from ...config.assemble import Assembly
from ...core.checkpoint.writing import write_json
from ...core.errors import RejectedMessage
from ...core.exchange import Patch
from ...core.params import compute_digest
from ...privacy.encryption import SiteCipher
from ...wire.ciphertexts import measure_ciphertexts
from .model_files import ENCRYPTED, read_encrypted, read_mask, save_model
from .record import SUMMARY


def decrypt_run(run: Path, assembly: Assembly, context: bytes) -> list[Path]:
    """Decrypt the encrypted models of a run and write them beside the encrypted files.

    The summary receives the digest of the final model.

    Args:
        run: result folder.
        assembly: assembly of the run's configuration.
        context: serialized TenSEAL context of a site, with the secret key.

    Returns:
        The files written; empty if the run has no encrypted models.

    Raises:
        ConfigError: the context is unusable, or a file belongs to another network.
        RejectedMessage: the run was encrypted with another key, or a file is damaged.
    """
    return list(_decrypt_models(run, assembly, SiteCipher(context)))


def _decrypt_models(run: Path, assembly: Assembly, cipher: SiteCipher) -> Iterator[Path]:
    """Decrypt one model after the other; yield the files written."""
    layout = assembly.layout
    for file in sorted(run.glob(f"{ENCRYPTED}*model.safetensors")):
        name = file.name.removeprefix(ENCRYPTED)
        mask, values = read_mask(file, layout), read_encrypted(file, layout)
        expected = measure_ciphertexts(values.data.numpy(), mask.count, cipher.ciphertext_format)
        if expected != values.data.numel():
            raise RejectedMessage("E_LEN", file.name, f"{expected} bytes", values.data.numel())
        weights = Patch(cipher.decrypt(values, mask.count), mask).to_vector()
        save_model(run / name, layout, weights, mask)
        if name == "model.safetensors":
            summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
            size = {**summary["model"], "bytes": (run / name).stat().st_size}
            write_json(run / SUMMARY, {**summary, "model_sha256": compute_digest(weights), "model": size})
        yield run / name
