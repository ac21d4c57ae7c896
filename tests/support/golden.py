"""Golden messages of the wire format: load one and compare it with its recorded meaning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire.codec import decode
from flare_sparse.wire.plan import Plan

FOLDER = Path(__file__).parents[1] / "wire" / "golden"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*.bin"))


def unpack_mask(text: str, size: int) -> Mask:
    packed = np.frombuffer(bytes.fromhex(text), np.uint8)
    return Mask(torch.from_numpy(np.unpackbits(packed, count=size).astype(bool)))


def unpack_vector(text: str | None) -> torch.Tensor | None:
    return None if text is None else torch.from_numpy(np.frombuffer(bytes.fromhex(text), "<f4").copy())


def load_expected(file: str) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of both ends and the meaning of a golden message."""
    path = FOLDER / file
    expected = json.loads((FOLDER / "expected.json").read_text())
    layout = Layout(tuple(TensorSpec(name, tuple(shape), role) for name, shape, role in expected["layout"]))
    plan = Plan(
        layout,
        expected["run"],
        base=expected["base"],
        base_mask=unpack_mask(expected["base_mask"], layout.size),
        base_vector=unpack_vector(expected.get("base_vector")),
    )
    return plan, expected["messages"][path.stem]


def check_meaning(file: str) -> None:
    """Decode a golden message and compare every part with its recorded meaning."""
    plan, meaning = load_expected(file)
    size = plan.layout.size
    plan = replace(plan, **{name: meaning[name] for name in ("target", "request", "sequence", "round", "kind")})
    decoded = decode((FOLDER / file).read_bytes(), plan)
    found = (decoded.encoding, decoded.values, decoded.content)
    assert found == (meaning["encoding"], meaning["values"], meaning["content"])
    assert (decoded.header.kind, decoded.header.round, decoded.header.sequence) == (
        meaning["kind"],
        meaning["round"],
        meaning["sequence"],
    )
    assert (decoded.patch.base, decoded.patch.mask) == (meaning["patch_base"], unpack_mask(meaning["mask"], size))
    trainable = meaning["trainable"]
    assert decoded.trainable == (unpack_mask(trainable, size) if trainable is not None else None)
    assert decoded.patch.values.numpy().tobytes().hex() == meaning["numbers"]
