"""Writes the golden messages of the present version, once, when a version of the wire format is new.

    PYTHONPATH=custom python tests/wire/golden/make.py

A message that was written once is read for ever: never write over the folder of a version that was released. Each
``.bin`` is a message; ``expected.json`` says what both ends knew and what the message means, with selections as packed
bits and values as little-endian float32, both in hex.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from flare_sparse.exchange import Patch
from flare_sparse.mask import Mask
from flare_sparse.params import Layout, TensorSpec
from flare_sparse.wire.codec import Decoded, decode, encode
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.envelope import HEADER_BYTES, VERSION, read_header, write_header
from flare_sparse.wire.plan import Plan, ValueType

FOLDER = Path(__file__).parent / f"v{VERSION}"
LAYOUT = Layout(
    (
        TensorSpec("conv.weight", (8, 4, 3, 3), "weight"),
        TensorSpec("conv.bias", (8,), "bias"),
        TensorSpec("norm.weight", (8,), "norm"),
        TensorSpec("nothing", (0, 3), "other"),
        TensorSpec("fc.weight", (10, 20), "weight"),
        TensorSpec("scale", (), "other"),
    )
)
DRAW = torch.Generator().manual_seed(1)
VECTOR = torch.randn(LAYOUT.size, generator=DRAW)
KNOWN = Mask(torch.rand(LAYOUT.size, generator=DRAW) < 0.5)
NESTED = KNOWN & Mask(torch.rand(LAYOUT.size, generator=DRAW) < 0.5)
FEW = Mask(torch.arange(LAYOUT.size) % 97 == 5)
CHANNELS = Mask(
    LAYOUT.flatten(
        {
            "conv.weight": (torch.arange(8) % 3 == 0)[:, None, None, None].expand(8, 4, 3, 3),
            "conv.bias": torch.zeros(8, dtype=torch.bool),
            "norm.weight": torch.ones(8, dtype=torch.bool),
            "nothing": torch.zeros(0, 3, dtype=torch.bool),
            "fc.weight": (torch.arange(20) % 7 == 2).expand(10, 20),
            "scale": torch.tensor(True),
        }
    ).bool()
)
SELECTIONS = {
    "dense": Mask.full(LAYOUT.size),
    "shared": KNOWN,
    "shrink": NESTED,
    "bitmap": ~NESTED,
    "csr": FEW,
    "slices": CHANNELS,
}
PLAN = Plan(LAYOUT, "00112233aabbccdd", base_mask=KNOWN, base_sequence=41, sequence=42, round=7, kind="train")


def said_by(name: str, values: ValueType) -> np.ndarray:
    """A message whose selection is said by the named encoding, whether or not it is the cheapest."""
    on, encoding = SELECTIONS[name], ENCODINGS[name]
    dense = encode(Patch.from_vector(VECTOR, on), PLAN, values=values).data
    picked = read_header(dense)
    raw = encoding.encode(on, KNOWN, LAYOUT)
    assert raw is not None
    known = bytes.fromhex(KNOWN.fingerprint) if encoding.requires_base else bytes(16)
    header = replace(picked, encoding=encoding.code, base_mask=known, selection_bytes=len(raw))
    message = np.zeros(header.values_start + dense.size - picked.values_start, np.uint8)
    message[HEADER_BYTES : HEADER_BYTES + len(raw)] = np.frombuffer(raw, np.uint8)
    message[header.values_start :] = dense[picked.values_start :]
    write_header(header, message)
    return message


def messages() -> dict[str, np.ndarray]:
    forced = {f"{name}_{values}": said_by(name, values) for name in ENCODINGS for values in get_args(ValueType)}
    sparse = Patch.from_vector(VECTOR, FEW, "previous")
    return forced | {
        "question": encode(Patch.from_vector(VECTOR, KNOWN, "previous"), PLAN, trainable=NESTED).data,
        "question_all_trainable": encode(sparse, PLAN, trainable=Mask.full(LAYOUT.size)).data,
        "bitmap_zstd": encode(Patch.from_vector(VECTOR, Mask(FEW.bits | (torch.arange(LAYOUT.size) < 200))), PLAN).data,
        "difference": encode(Patch.from_vector(VECTOR, NESTED), PLAN, content="delta", values="bfloat16").data,
        "scores": encode(Patch.from_vector(VECTOR.abs(), KNOWN), PLAN, content="scores").data,
        "nothing": encode(Patch.empty(LAYOUT.size), PLAN, content="metrics").data,
    }


def meaning(decoded: Decoded) -> dict[str, Any]:
    """What a message says, as plain JSON."""
    return {
        "encoding": decoded.encoding,
        "values": decoded.values,
        "content": decoded.content,
        "kind": decoded.kind,
        "round": decoded.round,
        "sequence": decoded.sequence,
        "base": decoded.patch.base,
        "mask": decoded.patch.mask.packed.hex(),
        "trainable": decoded.trainable.packed.hex() if decoded.trainable else None,
        "numbers": decoded.patch.values.numpy().astype("<f4").tobytes().hex(),
    }


def main() -> None:
    FOLDER.mkdir()
    expected = {
        "layout": [[entry.name, entry.shape, entry.role] for entry in LAYOUT.tensors],
        "run": PLAN.run,
        "base_mask": KNOWN.packed.hex(),
        "base_sequence": PLAN.base_sequence,
        "messages": {},
    }
    for name, data in messages().items():
        (FOLDER / f"{name}.bin").write_bytes(data.tobytes())
        expected["messages"][name] = meaning(decode(data, PLAN))
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
