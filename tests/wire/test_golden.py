"""The golden messages keep their meaning."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from golden import FILES, FOLDER, check_meaning, load_expected

from flare_sparse.core.errors import MissingBase
from flare_sparse.wire.codec import decode
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.envelope import HEADER_BYTES, VERSION
from flare_sparse.wire.formats import FORMATS


@pytest.mark.parametrize("file", FILES)
def test_golden_message_keeps_its_meaning(file: str) -> None:
    check_meaning(file)


@pytest.mark.parametrize(
    "file", [file for file in FILES if Path(file).stem.startswith(("shared", "shrink", "question"))]
)
def test_golden_message_requires_the_mask_or_base_it_refers_to(file: str) -> None:
    plan, _ = load_expected(file)
    with pytest.raises(MissingBase):
        decode((FOLDER / file).read_bytes(), replace(plan, base=None, base_mask=None))


def test_format_page_matches_header_and_encodings() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
    assert page.startswith(f"# Wire format, version {VERSION}\n")
    header, encodings = (
        page.split(f"## {title}\n")[1].split("\n## ")[0] for title in ("Header", "Encodings of a selection")
    )
    fields = [(int(at), int(size)) for at, size in re.findall(r"^\| (\d+) \| (\d+) \|", header, re.MULTILINE)]
    ends = [at + size for at, size in fields]
    assert [at for at, _ in fields] == [0, *ends[:-1]]
    assert ends[-1] == HEADER_BYTES
    rows = dict(re.findall(r"^\| (\d+) \| (\w+) \|", encodings, re.MULTILINE))
    assert rows == {str(encoding.code): encoding.name for encoding in ENCODINGS.values()}


def test_table_of_codes_lists_every_error_code_of_the_wire() -> None:
    root = Path(__file__).parents[2]
    sources = (root / "custom" / "flare_sparse" / "wire").rglob("*.py")
    raised = {code for path in sources for code in re.findall(r'"(E_[A-Z_]+)"', path.read_text())}
    table = (root / "docs" / "error_codes.csv").read_text()
    assert raised <= set(re.findall(r"^(E_[A-Z_]+),", table, re.MULTILINE))


def test_every_encoding_has_a_golden_message_in_every_number_format() -> None:
    assert {f"{encoding}_{values}.bin" for encoding in ENCODINGS for values in FORMATS} <= set(FILES)


def test_value_formats_keep_their_codes() -> None:
    assert {name: row.code for name, row in FORMATS.items()} == {
        "float32": 1, "float16": 2, "bfloat16": 3, "int8": 5, "int4": 6, "int2": 7, "float32_zstd": 8,
        "bfloat16_zstd": 9, "int1": 10,
    }  # fmt: skip
