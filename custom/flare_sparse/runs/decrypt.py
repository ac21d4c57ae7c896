"""The model of an encrypted run, made readable by who holds the sites' key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..assemble import Assembly
from ..encryption import SiteCipher
from ..errors import RejectedMessage
from ..exchange import Patch
from .model_files import ENCRYPTED, load_mask, load_encrypted, save_model
from ..checkpoint.writing import write_json
from ..params import compute_digest
from ..wire.ciphertexts import measure_ciphertexts


def decrypt_run(run: Path, assembly: Assembly, context: bytes) -> list[Path]:
    """Decrypt what a run left encrypted; the models are written beside, and the summary gets the last one's digest.

    Args:
        run: result folder.
        assembly: of its configuration.
        context: of a site, with the secret key.

    Returns:
        The files written; none when the run left nothing encrypted.

    Raises:
        ConfigError: the context is unusable, or a file is not of this run's network.
        RejectedMessage: the run was encrypted with another key, or its file is damaged.
    """
    return list(_unsealed(run, assembly, SiteCipher(context)))


def _unsealed(run: Path, assembly: Assembly, cipher: SiteCipher) -> Iterator[Path]:
    layout = assembly.layout
    for file in sorted(run.glob(f"{ENCRYPTED}*model.safetensors")):
        name = file.name.removeprefix(ENCRYPTED)
        mask, sealed = load_mask(run / name.replace("model", "mask"), layout), load_encrypted(file, layout)
        if (wanted := measure_ciphertexts(sealed.data.numpy(), mask.count, cipher.ciphertext_format)) != sealed.data.numel():
            raise RejectedMessage("E_LEN", file.name, f"{wanted} bytes", sealed.data.numel())
        weights = Patch(cipher.decrypt(sealed, mask.count), mask).to_vector()
        save_model(run / name, layout, weights)
        if name == "model.safetensors":
            summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
            write_json(run / "summary.json", {**summary, "model_sha256": compute_digest(weights)})
        yield run / name
