"""Tables of admissions as array files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.data.admissions import AdmissionColumns, read_admissions

COLUMNS = AdmissionColumns("died", "med", None, None, None)


def test_damaged_array_file_is_a_data_error_wherever_a_byte_changes(tmp_path: Path) -> None:
    buffer, file = io.BytesIO(), tmp_path / "stays.npz"
    np.savez_compressed(buffer, med=np.eye(8, dtype=np.uint8), died=np.arange(8) % 2)
    content = buffer.getvalue()
    refused = 0
    for position in range(len(content)):
        file.write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        try:
            read_admissions(file, COLUMNS)
        except DataError:
            refused += 1
    assert refused > len(content) / 2
