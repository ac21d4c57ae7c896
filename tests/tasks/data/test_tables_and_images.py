"""Tables and image files: every format reads the same, and errors name the file."""

from __future__ import annotations

import gzip
import io
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from openpyxl import Workbook

from flare_sparse.core.errors import DataError
from flare_sparse.tasks import images
from flare_sparse.tasks.data.partition import Cohort, NaturalPartition
from flare_sparse.tasks.data.table_files import read_header
from flare_sparse.tasks.data.tables import Spelling, Table, read_table

CSV = "subject,site,age,icv\n007,A,30.5,1.5\n8,B,,2\n"


def write(path: Path, suffix: str) -> Path:
    """The table ``CSV`` in each format."""
    file = path / f"table{suffix}"
    frame = pd.read_csv(io.StringIO(CSV), dtype={"subject": str})
    if suffix.startswith((".csv", ".tsv")):
        text = CSV.replace(",", "\t") if suffix.startswith(".tsv") else CSV
        file.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    elif suffix == ".npz":
        texts = {"subject", "site"}
        np.savez(file, **{name: frame[name].to_numpy(dtype=str if name in texts else None) for name in frame})
    elif suffix == ".sqlite":
        with closing(sqlite3.connect(file)) as database:
            frame.to_sql("patients", database, index=False)
    else:
        (frame.to_parquet if suffix == ".parquet" else partial(frame.to_excel, index=False))(file)
    return file


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".tsv", ".npz", ".parquet", ".xlsx", ".sqlite"])
def test_every_table_format_reads_the_same(tmp_path: Path, suffix: str) -> None:
    table = read_table(write(tmp_path, suffix))
    assert list(table.columns) == read_header(table.source) == ["subject", "site", "age", "icv"]
    assert table.get_ids("subject") == ("007", "8")
    assert table.get_names("site") == ["A", "B"]
    np.testing.assert_array_equal(table.get_numbers("age"), [30.5, np.nan])
    np.testing.assert_array_equal(table.get_numbers("icv"), [1.5, 2.0])
    assert NaturalPartition().divide(Cohort(table.get_ids("subject"), table.columns)) == {"A": ("007",), "B": ("8",)}


@pytest.mark.parametrize(
    "content",
    [
        CSV.replace(",", ";").encode(),
        CSV.replace(",", "|").encode(),
        CSV.encode("utf-8-sig"),
        CSV.encode("utf-16"),
        b"\xfe\xff" + CSV.replace(",", "\t").encode("utf-16-be"),
        CSV.replace("\n", "\r\n").encode(),
        CSV.replace("A", '"A"').encode() + b",,,\n\n",
        CSV.replace("\n", ",\n").encode(),
    ],
    ids=["semicolons", "bars", "mark", "UTF-16", "tabs in UTF-16", "CRLF", "quotes, an empty row", "an empty column"],
)
def test_a_table_reads_the_same_as_each_spreadsheet_writes_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    table = read_table(tmp_path / "a.csv")
    assert list(table.columns) == ["subject", "site", "age", "icv"]
    assert (table.get_ids("subject"), table.get_names("site")) == (("007", "8"), ["A", "B"])
    np.testing.assert_array_equal(table.get_numbers("age"), [30.5, np.nan])


def test_empty_lines_at_the_end_of_a_file_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n\n\r\n")
    assert read_table(tmp_path / "a.csv").get_numbers("y").tolist() == [2]


def test_names_keep_the_characters_of_a_workbook(tmp_path: Path) -> None:
    """Also the leading zeros that a format of a cell shows, and not more than Excel's 15 digits."""
    book = Workbook()
    sheet = book.active
    for row in (["id", "long", "code", "truth"], [7, 123456789012345, "4E1", True], [42, 12.5, "40", False]):
        sheet.append(row)
    for cell in sheet["A"]:
        cell.number_format = "00000"
    book.save(tmp_path / "a.xlsx")
    table = read_table(tmp_path / "a.xlsx")
    assert table.get_names("id") == ["00007", "00042"]
    assert table.get_names("long") == ["123456789012345", "12.5"]
    assert (table.get_names("code"), table.get_names("truth")) == (["4E1", "40"], ["TRUE", "FALSE"])
    sheet["B2"] = 1.2e18
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(DataError, match="cannot be told from its neighbours; store names as text"):
        read_table(tmp_path / "a.xlsx")
    sheet["B2"] = "=A2"
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(DataError, match="cell B2 has a formula without a stored result"):
        read_table(tmp_path / "a.xlsx")
    book.create_sheet("more")
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(DataError, match="the workbook has 2 sheets; expected one"):
        read_table(tmp_path / "a.xlsx")


@pytest.mark.parametrize(
    ("cell", "spelling", "value"),
    [
        ("<90", Spelling(censored="half"), 45.0),
        ("< 90", Spelling(censored="limit"), 90.0),
        (">200", Spelling(censored="half"), 200.0),
        ("≤0,5", Spelling(",", "half"), 0.25),
        ("120,5", Spelling(","), 120.5),
        ("1e-3", Spelling(","), 0.001),
        ("n/a", Spelling(","), np.nan),
    ],
)
def test_cells_of_other_conventions_are_numbers_where_the_job_says_so(
    cell: str, spelling: Spelling, value: float
) -> None:
    table = Table(Path("t.csv"), {"x": np.array(["7", cell])}, spelling=spelling)
    np.testing.assert_array_equal(table.get_numbers("x"), [7, value])


@pytest.mark.parametrize(
    ("cell", "remedy"),
    [
        ("<90", "Set task.censored: half or limit, to compute with 90"),
        ("120,5", "Set task.decimal: ','"),
        ("1,234.5", "Remove the marks of thousands"),
        ("1'234", "Remove the marks of thousands"),
        ("132 mmHg", "Remove 'mmHg' from the cells"),
        ("#DIV/0!", "It is an error of a spreadsheet"),
        ("inf", "It is no finite number"),
        ("neg", "If it stands for a missing value, set task.missing_codes: {x: 'neg'}"),
        (".", "set task.missing_codes: {x: '.'}"),
        ("1_000", "Remove the marks of thousands"),
        ("two\nlines", "correct the cell"),
        ("{}", "correct the cell"),
    ],
)
def test_one_bad_cell_is_shown_with_its_row_and_remedy(cell: str, remedy: str) -> None:
    table = Table(Path("t.csv"), {"x": np.array(["7", "8", cell, "9"])})
    assert not table.is_text("x")
    with pytest.raises(DataError) as caught:
        table.get_numbers("x")
    text = str(caught.value)
    assert f"t.csv: column 'x' contains text such as {cell!r} (row 3; the only such cell)" in text
    assert remedy in text
    assert "'7'" not in text


def test_column_of_numbers_with_one_unit_is_no_column_of_categories() -> None:
    table = Table(Path("t.csv"), {"x": np.array([f"{i}.5 %" for i in range(12)]), "stage": np.array(["1a", "2a"] * 6)})
    assert (table.is_text("x"), table.is_text("stage")) == (False, True)
    with pytest.raises(DataError, match=r"'0\.5 %' \(row 1; 12 of 12 cells\); expected numbers\. Remove '%' from the"):
        table.get_numbers("x")


def test_a_column_with_both_decimal_marks_is_refused() -> None:
    table = Table(Path("t.csv"), {"x": np.array(["1,5", "1.234"])}, spelling=Spelling(","))
    with pytest.raises(DataError, match=r"'1\.234' \(row 2; the only such cell\).*write all cells of the column alike"):
        table.get_numbers("x")


def test_codes_of_missing_values_are_texts_of_names_and_numbers_of_numbers() -> None:
    table = Table(Path("t.csv"), {"x": np.array(["9", "9.0", "09"])}, {"x": {"9"}})
    assert table.get_names("x") == ["", "9.0", "09"]
    assert np.isnan(table.get_numbers("x")).all()


def test_numbers_that_only_python_reads_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y,z\n1_000,\uff11\uff12,1e3\n", encoding="utf-8")
    table = read_table(tmp_path / "a.csv")
    assert (table.get_names("x"), table.get_names("y")) == (["1_000"], ["\uff11\uff12"])
    assert table.get_numbers("z").tolist() == [1000]
    with pytest.raises(DataError, match="column 'x' contains text such as '1_000'"):
        table.get_numbers("x")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "no name for any column in the first line (empty); expected one for each column"),
        ("a.csv", b"x,,\n1,2,\n", "no name for column 2 in the first line (x); expected one for each column"),
        ("a.csv", b"x,x \n1,2\n", "two columns 'x'; expected one"),
        ("a.csv", b"x,y\n\n1,2\n", "line 2 has 0 fields, the first line 2"),
        ("a.csv", b"x,y\n1\n", "line 2 has 1 fields, the first line 2"),
        ("a.csv", b"Export\nx,y\n1,2\n", "the first line 1; the names of all columns stand there: remove a title"),
        ("a.csv", b"sep=;\nx;y\n1;2\n", "the first line, sep=, is meant for Excel alone; remove it"),
        (
            "a.csv",
            b"x\n\xe4\n",
            "line 2 is not in UTF-8 (invalid continuation byte: byte 0xe4); save the file as UTF-8",
        ),
        ("a.csv", b'x,y\n1,"2\n3,4\n', "unexpected end of data"),
        ("a.csv", b'x,y\n1,"2\n3,"4\n', "',' expected after '\"'"),
        ("a.csv.gz", gzip.compress(CSV.encode(), mtime=0)[:40], "cannot be read as a table"),
        ("a.npz", b"PK", "cannot be read as a table"),
        ("a.parquet", b"PAR1", "cannot be read as a table"),
        ("a.xlsx", b"PK", "it is no xlsx workbook, or has a password"),
        ("a.sqlite", b"", "the database has 0 tables"),
        ("a.xls", b"", "expected a file that ends with one of .csv, .csv.gz, .tsv, .tsv.gz, .xlsx, .parquet"),
    ],
)
def test_malformed_table_is_explained(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_table(tmp_path / name)
    assert message in str(caught.value)
    assert name in str(caught.value)


def test_npz_arrays_that_form_no_table_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2, 2)))
    np.savez(tmp_path / "b.npz", x=np.zeros(2), y=np.zeros(3))
    np.savez(tmp_path / "c.npz", x=np.array([{}], dtype=object))
    np.savez(tmp_path / "d.npz", **{"x": np.zeros(2), "x ": np.ones(2)})
    problems = {
        "a": "'x' has 3 dimensions",
        "b": "arrays have 2 and 3 rows",
        "c": "allow_pickle",
        "d": "two columns 'x'",
    }
    for name, message in problems.items():
        with pytest.raises(DataError, match=message):
            read_table(tmp_path / f"{name}.npz")


@pytest.mark.parametrize("name", ["a.csv", "a.npz"])
def test_table_without_rows_is_refused(tmp_path: Path, name: str) -> None:
    if name == "a.csv":
        (tmp_path / name).write_text("subject,age\n")
    else:
        np.savez(tmp_path / name, subject=np.array([], str), age=np.zeros(0))
    with pytest.raises(DataError, match="the table has no rows; expected one row per subject"):
        read_table(tmp_path / name)


def test_missing_table_names_the_closest_file(tmp_path: Path) -> None:
    write(tmp_path, ".csv")
    with pytest.raises(DataError, match=r"there is no such file\. Did you mean 'table\.csv'\?"):
        read_table(tmp_path / "tabel.csv")


def test_unusable_column_is_explained() -> None:
    table = Table(
        Path("t.csv"), {"subject": np.array(["a", "a"]), "age": np.array([1.0, 2.0]), "dose": np.array(["1", "<5"])}
    )
    for call, message in (
        (lambda: table.get_numbers("aeg"), "no column 'aeg'. Did you mean 'age'?"),
        (
            lambda: Table(Path("t.csv"), {"age [years]": np.array(["1"])}).get_numbers("age"),
            "no column 'age'. Did you mean 'age [years]'?",
        ),
        (lambda: table.get_numbers("subject"), "column 'subject' contains text such as 'a' (row 1; 2 of 2 cells)"),
        (lambda: table.get_numbers("dose"), "column 'dose' contains text such as '<5' (row 2; the only such cell)"),
        (lambda: table.get_ids("subject"), "1 identifiers in column 'subject' occur more than once (first: 'a')"),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert message in str(caught.value)


def test_real_morphometry_table_has_the_expected_size(shared_data: Path) -> None:
    table = read_table(shared_data / "brain_morphometry" / "destrieux_fcon1000.csv.gz")
    assert (len(table.get_ids("subject")), len(table.columns), len(set(table.get_names("site")))) == (1078, 197, 23)


PIXELS = np.random.default_rng(1).integers(0, 255, (5, 4, 3), dtype=np.uint8)


def test_images_are_returned_in_the_requested_order(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(
        file, train_images=PIXELS, train_labels=np.arange(5), test_images=PIXELS + 1, test_labels=np.array([[3]] * 5)
    )
    assert images.read_cohort(file, images_per_split=2).ids == ("train/0", "train/1", "test/0", "test/1")
    assert images.read_cohort(file).columns["label"].tolist() == [0, 1, 2, 3, 4, 3, 3, 3, 3, 3]
    pixels, labels = images.read_images(file, ["test/0", "train/4", "train/0"])
    assert pixels.shape == (3, 4, 3, 1)
    assert np.array_equal(pixels[..., 0], np.stack([PIXELS[0] + 1, PIXELS[4], PIXELS[0]]))
    assert labels.tolist() == [3, 4, 0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": PIXELS}, "no array <split>_labels"),
        ({"train_labels": np.arange(5)}, "neither train_images nor train_blob and train_ends"),
        ({"train_labels": np.arange(5.0)}, "train_labels is float64; expected whole numbers"),
        ({"train_labels": np.arange(5), "train_images": PIXELS * 1.0}, "expected uint8"),
        ({"train_labels": np.arange(5), "train_images": PIXELS[:0]}, "out of bounds"),
        ({"train_labels": np.arange(5), "train_blob": PIXELS[0], "train_ends": np.array([9])}, "cannot identify"),
    ],
)
def test_malformed_image_file_is_explained(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, **arrays)
    with pytest.raises(DataError) as caught:
        images.read_images(file, ["train/0"])
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["train/5", "train/-1", "train/x", "val/0", "0"])
def test_unknown_image_identifier_is_refused(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "a.npz", train_images=PIXELS, train_labels=np.arange(5))
    with pytest.raises(DataError, match=r"no image '.*'; the file has train/0 to train/4"):
        images.read_images(tmp_path / "a.npz", [name])


def test_encoded_images_are_decoded(shared_data: Path) -> None:
    pixels, labels = images.read_images(shared_data / "cifar10" / "cifar10_jpeg.npz", ["test/9999", "train/0"])
    assert (pixels.shape, str(pixels.dtype), labels.tolist()) == ((2, 32, 32, 3), "uint8", [9, 0])


def test_needed_columns_of_parquet_are_read_as_those_of_csv(tmp_path: Path) -> None:
    """Numbers of every type, whole ones beyond float32, and types that are read as text."""
    frame = pd.DataFrame(
        {
            "whole": pd.array([2**53 + 1, None, -3], dtype="Int64"),
            "short": np.array([0.1, np.nan, 2], dtype=np.float32),
            "truth": [True, False, True],
            "text": ["A", None, "7"],
            "unused": [1, 2, 3],
        }
    )
    frame.to_parquet(tmp_path / "a.parquet")
    needed = ["text", "truth", "short", "whole"]
    table = read_table(tmp_path / "a.parquet", needed)
    assert list(table.columns) == ["whole", "short", "truth", "text"]
    np.testing.assert_array_equal(table.get_numbers("whole"), [float(2**53 + 1), np.nan, -3])
    assert table.get_names("whole") == [str(2**53 + 1), "", "-3"]
    np.testing.assert_array_equal(table.get_numbers("short"), [float(np.float32(0.1)), np.nan, 2])
    assert (table.get_names("truth"), table.get_names("text")) == (["True", "False", "True"], ["A", "", "7"])
    with pytest.raises(DataError, match=r"no column 'txt'\. Did you mean 'text'"):
        read_table(tmp_path / "a.parquet", ["txt"]).get_column("txt")
