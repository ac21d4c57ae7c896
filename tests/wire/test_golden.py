"""Messages of every version of the wire format are read for ever, whatever the encoder does today."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flare_sparse.errors import MissingBase
from flare_sparse.mask import Mask
from flare_sparse.params import Layout, TensorSpec
from flare_sparse.wire.codec import decode
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.envelope import HEADER_BYTES, VERSION
from flare_sparse.wire.plan import Plan
from flare_sparse.wire.values import CODES

FOLDER = Path(__file__).parent / "golden"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("v*/*.bin"))


def bits(text: str, size: int) -> Mask:
    packed = np.frombuffer(bytes.fromhex(text), np.uint8)
    return Mask(torch.from_numpy(np.unpackbits(packed, count=size).astype(bool)))


def expected(file: str) -> tuple[Plan, dict[str, Any]]:
    """The plan of both ends, and what this message means."""
    path = FOLDER / file
    told = json.loads((path.parent / "expected.json").read_text())
    layout = Layout(tuple(TensorSpec(name, tuple(shape), role) for name, shape, role in told["layout"]))
    plan = Plan(
        layout, told["run"], base_mask=bits(told["base_mask"], layout.size), base_sequence=told["base_sequence"]
    )
    return plan, told["messages"][path.stem]


@pytest.mark.parametrize("file", FILES)
def test_it_still_means_what_it_meant(file: str) -> None:
    plan, means = expected(file)
    size = plan.layout.size
    plan = replace(plan, sequence=means["sequence"], round=means["round"], kind=means["kind"])
    read = decode((FOLDER / file).read_bytes(), plan)
    assert (read.encoding, read.values, read.content) == (means["encoding"], means["values"], means["content"])
    assert (read.kind, read.round, read.sequence) == (means["kind"], means["round"], means["sequence"])
    assert (read.patch.base, read.patch.mask) == (means["base"], bits(means["mask"], size))
    assert read.trainable == (bits(means["trainable"], size) if means["trainable"] is not None else None)
    assert read.patch.values.numpy().tobytes().hex() == means["numbers"]


@pytest.mark.parametrize(
    "file", [file for file in FILES if Path(file).stem.startswith(("shared", "shrink", "question"))]
)
def test_what_it_leans_on_must_be_held(file: str) -> None:
    plan, _ = expected(file)
    with pytest.raises(MissingBase):
        decode((FOLDER / file).read_bytes(), replace(plan, base_mask=None, base_sequence=None))


def test_the_format_page_says_what_the_code_does() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
    assert page.startswith(f"# Wire format, version {VERSION}\n")
    header, encodings = (
        page.split(f"## {title}\n")[1].split("\n## ")[0] for title in ("Header", "Encodings of a selection")
    )
    fields = [(int(at), int(size)) for at, size in re.findall(r"^\| (\d+) \| (\d+) \|", header, re.MULTILINE)]
    ends = [at + size for at, size in fields]
    assert [at for at, _ in fields] == [0, *ends[:-1]]
    assert ends[-1] == HEADER_BYTES
    named = dict(re.findall(r"^\| (\d+) \| (\w+) \|", encodings, re.MULTILINE))
    assert named == {str(encoding.code): name for name, encoding in ENCODINGS.items()}


def test_every_code_that_is_raised_is_on_the_format_page() -> None:
    root = Path(__file__).parents[2]
    sources = (root / "custom" / "flare_sparse" / "wire").rglob("*.py")
    raised = {code for path in sources for code in re.findall(r'"(E_[A-Z_]+)"', path.read_text())}
    table = (root / "docs" / "wire-format.md").read_text().split("## Codes\n")[1]
    assert raised <= set(re.findall(r"`(E_[A-Z_]+)`", table))


def test_every_version_has_every_encoding_in_every_format() -> None:
    for version in range(1, VERSION + 1):
        stems = {Path(file).stem for file in FILES if file.startswith(f"v{version}/")}
        assert {f"{encoding}_{values}" for encoding in ENCODINGS for values in CODES} <= stems
