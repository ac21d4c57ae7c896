"""Write the golden messages of the current version, once, when a version of the wire format is new.

    PYTHONPATH=custom python tests/wire/golden/make.py

A released version must stay readable: never overwrite its folder. Each ``.bin`` is a message; ``expected.json`` holds
the plan of both ends and the meaning of each message, with selections as packed bits and values as little-endian
float32, both in hex.
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
from flare_sparse.wire.plan import Plan, ValueType
from flare_sparse.wire.versions import CURRENT_VERSION, get_current_version

FOLDER = Path(__file__).parent / f"v{CURRENT_VERSION}"
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
GENERATOR = torch.Generator().manual_seed(1)
VECTOR = torch.randn(LAYOUT.size, generator=GENERATOR)
BASE_MASK = Mask(torch.rand(LAYOUT.size, generator=GENERATOR) < 0.5)
NESTED = BASE_MASK & Mask(torch.rand(LAYOUT.size, generator=GENERATOR) < 0.5)
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
    "shared": BASE_MASK,
    "shrink": NESTED,
    "bitmap": ~NESTED,
    "csr": FEW,
    "slices": CHANNELS,
}
PLAN = Plan(LAYOUT, "00112233aabbccdd", base_mask=BASE_MASK, base_sequence=41, sequence=42, round=7, kind="train")


def force_encoding(name: str, values: ValueType) -> np.ndarray:
    """Return a message whose selection is written by the named encoding, whether or not it is the shortest."""
    version, mask, encoding = get_current_version(), SELECTIONS[name], ENCODINGS[name]
    shortest = encode(Patch.from_vector(VECTOR, mask), PLAN, values=values).data
    header = version.read_header(shortest)
    value_words = shortest[header.values_start :]
    section = encoding.encode(mask, BASE_MASK, LAYOUT)
    assert section is not None
    fingerprint = bytes.fromhex(BASE_MASK.fingerprint) if encoding.requires_base else bytes(16)
    header = replace(header, encoding=encoding.code, base_mask=fingerprint, selection_bytes=len(section))
    message = np.zeros(header.values_start + value_words.size, np.uint8)
    message[version.header_bytes : version.header_bytes + len(section)] = np.frombuffer(section, np.uint8)
    message[header.values_start :] = value_words
    version.write_header(header, message)
    return message


def build_messages() -> dict[str, np.ndarray]:
    names = [encoding.name for encoding in get_current_version().encodings]
    forced = {f"{name}_{values}": force_encoding(name, values) for name in names for values in get_args(ValueType)}
    sparse = Patch.from_vector(VECTOR, FEW, "previous")
    return forced | {
        "question": encode(Patch.from_vector(VECTOR, BASE_MASK, "previous"), PLAN, trainable=NESTED).data,
        "question_all_trainable": encode(sparse, PLAN, trainable=Mask.full(LAYOUT.size)).data,
        "bitmap_zstd": encode(Patch.from_vector(VECTOR, Mask(FEW.bits | (torch.arange(LAYOUT.size) < 200))), PLAN).data,
        "difference": encode(Patch.from_vector(VECTOR, NESTED), PLAN, content="delta", values="bfloat16").data,
        "scores": encode(Patch.from_vector(VECTOR.abs(), BASE_MASK), PLAN, content="scores").data,
        "nothing": encode(Patch.empty(LAYOUT.size), PLAN, content="metrics").data,
    }


def describe(decoded: Decoded) -> dict[str, Any]:
    """Return the meaning of a message as plain JSON."""
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
        "base_mask": BASE_MASK.packed.hex(),
        "base_sequence": PLAN.base_sequence,
        "messages": {},
    }
    for name, data in build_messages().items():
        (FOLDER / f"{name}.bin").write_bytes(data.tobytes())
        expected["messages"][name] = describe(decode(data, PLAN))
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
