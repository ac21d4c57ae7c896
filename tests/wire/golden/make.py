"""Write the golden messages, once, when a version of the wire format is new.

    PYTHONPATH=custom python tests/wire/golden/make.py

Each ``.bin`` is a message; ``expected.json`` holds
the plan of both ends and the meaning of each message, with selections as packed bits and values and the base vector as
little-endian float32, all in hex.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire.codec import Decoded, decode, encode
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.envelope import HEADER_BYTES, read_header, write_header
from flare_sparse.wire.formats import FORMATS, ValueType
from flare_sparse.wire.plan import Plan

FOLDER = Path(__file__).parent
LAYOUT = Layout(
    (
        TensorSpec("conv.weight", (8, 4, 3, 3), "weight"),
        TensorSpec("conv.bias", (8,), "bias"),
        TensorSpec("norm.weight", (8,), "norm"),
        TensorSpec("nothing", (0, 3), "other"),
        TensorSpec("fc.weight", (10, 20), "weight"),
        TensorSpec("scale", (), "other"),
        TensorSpec("norm.running_var", (8,), "buffer"),
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
            "norm.running_var": torch.ones(8, dtype=torch.bool),
        }
    ).bool()
)
SELECTIONS = {
    "dense": Mask.full(LAYOUT.size),
    "shared": BASE_MASK,
    "shrink": NESTED,
    "bitmap": ~NESTED,
    "slices": CHANNELS,
    "gaps": FEW,
}
BASE_VECTOR = BASE_MASK.put(
    BASE_MASK.take(VECTOR + 0.1 * torch.randn(LAYOUT.size, generator=GENERATOR)), torch.zeros(LAYOUT.size)
)
PLAN = Plan(
    LAYOUT,
    "00112233aabbccdd",
    base="0123456789abcdef",
    base_mask=BASE_MASK,
    base_vector=BASE_VECTOR,
    target="fedcba9876543210",
    request="0011223344556677",
    sequence=42,
    round=7,
    kind="train",
)


def write(patch: Patch, values: ValueType = "float32", plan: Plan = PLAN, **options: Any) -> np.ndarray:
    generator = torch.Generator().manual_seed(3)
    return encode(patch, plan, values=values, generator=generator, **options).data


def force_encoding(name: str, values: ValueType) -> np.ndarray:
    """Return a message whose selection is written by the named encoding, whether or not it is the shortest."""
    mask, encoding = SELECTIONS[name], ENCODINGS[name]
    shortest = write(Patch.from_vector(VECTOR, mask), values)
    header = read_header(shortest)
    value_words = shortest[header.values_start :]
    section = encoding.encode(mask, BASE_MASK, LAYOUT)
    assert section is not None
    base = PLAN.base if encoding.requires_base else header.base
    header = replace(header, encoding=encoding.code, base=base, selection_bytes=len(section))
    message = np.zeros(header.values_start + value_words.size, np.uint8)
    message[HEADER_BYTES : HEADER_BYTES + len(section)] = np.frombuffer(section, np.uint8)
    message[header.values_start :] = value_words
    write_header(header, message)
    return message


def build_messages() -> dict[str, np.ndarray]:
    forced = {f"{name}_{values}": force_encoding(name, values) for name in ENCODINGS for values in FORMATS}
    sparse = Patch.from_vector(VECTOR, FEW, "previous")
    nested = Patch.from_vector(VECTOR, NESTED)
    return forced | {
        "question": write(Patch.from_vector(VECTOR, BASE_MASK, "previous"), trainable=NESTED),
        "question_all_trainable": write(sparse, trainable=Mask.full(LAYOUT.size)),
        "bitmap_zstd": write(Patch.from_vector(VECTOR, Mask(FEW.bits | (torch.arange(LAYOUT.size) < 200)))),
        "difference": write(nested, "bfloat16_zstd", content="delta"),
        "first": write(nested, "int8", plan=replace(PLAN, base_vector=None)),
        "scores": write(Patch.from_vector(VECTOR.abs(), BASE_MASK), content="scores"),
        "nothing": write(Patch.empty(LAYOUT.size), content="metrics"),
    }


def describe(decoded: Decoded) -> dict[str, Any]:
    """Return the meaning of a message as plain JSON."""
    return {
        "encoding": decoded.encoding,
        "values": decoded.values,
        "content": decoded.content,
        "kind": decoded.header.kind,
        "round": decoded.header.round,
        "sequence": decoded.header.sequence,
        "target": decoded.header.target,
        "request": decoded.header.request,
        "patch_base": decoded.patch.base,
        "mask": decoded.patch.mask.packed.hex(),
        "trainable": decoded.trainable.packed.hex() if decoded.trainable else None,
        "numbers": decoded.patch.values.numpy().astype("<f4").tobytes().hex(),
    }


def main() -> None:
    expected = {
        "layout": [[entry.name, entry.shape, entry.role] for entry in LAYOUT.tensors],
        "run": PLAN.run,
        "base_mask": BASE_MASK.packed.hex(),
        "base": PLAN.base,
        "base_vector": BASE_VECTOR.numpy().astype("<f4").tobytes().hex(),
        "messages": {},
    }
    for name, data in build_messages().items():
        (FOLDER / f"{name}.bin").write_bytes(data.tobytes())
        expected["messages"][name] = describe(decode(data, PLAN))
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
