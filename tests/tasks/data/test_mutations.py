"""Mutated tables, folders and settings: each gives the values that a plain reading gives, or one error in words.

By default a fraction runs; ``pytest -m long tests/tasks/data/test_mutations.py`` runs 2,000 tables, 500 folders of
images, 500 BIDS trees and 300 files of settings. Judged: names are the characters of the file, numbers those of
``float``; every file, row and folder that is there is an example with its own age, named, or the reason of a DataError;
of a file of settings the accepted ones mean what YAML reads; no other exception.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from flare_sparse.config.loading import load_config
from flare_sparse.core.errors import ConfigError, DataError
from flare_sparse.core.names import find_number
from flare_sparse.tasks.data.cases import Pairs, describe_left_out, find_cases
from flare_sparse.tasks.data.partition import NaturalPartition
from flare_sparse.tasks.data.segmentation import Preparation, read_item
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.table_config import TableConfig
from flare_sparse.tasks.task import SiteData

CODES = (
    "007",
    "7",
    "4E1",
    "40",
    "1_000",
    "True",
    "NA",
    "260100023",
    "260100045",
    "Zo\u00eb",
    "Zoe\u0308",
    "a b",
    "A b",
    "12345678901234567890",
)
CELLS = (
    "<90",
    ">200",
    "neg",
    "132 mmHg",
    "#DIV/0!",
    "120,5",
    ".",
    "1,234.5",
    "inf",
    "1e3",
    "",
    "NA",
    "nan",
    "-0",
    "0x10",
    '"',
    "\n",
    "\u00a07",
    "\uff19",
)
TABLE = {"kind": "regression", "target": "y", "features": ["x"], "id": "id", "missing": "impute"}


def write_table(rng: random.Random, file: Path) -> list[list[str]]:
    """Write a table with two or three mutated cells, in one of the ways of spreadsheets; return its rows."""
    rows = [["id", "hospital", "x", "y"]]
    rows += [[f"{i:04d}", rng.choice(CODES), f"{rng.gauss(0, 1):.3f}", f"{rng.gauss(0, 1):.3f}"] for i in range(12)]
    for _ in range(rng.choice((0, 0, 1, 2))):
        rows[rng.randrange(1, 13)][rng.choice((0, 2, 3))] = rng.choice(CELLS + CODES)
    stream = io.StringIO()
    csv.writer(stream, delimiter=rng.choice(",,;\t|"), lineterminator=rng.choice(("\n", "\r\n"))).writerows(rows)
    encoding = rng.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16", "cp1252"))
    content = bytearray(stream.getvalue().encode(encoding, "replace"))
    rows = [[cell.encode(encoding, "replace").decode(encoding) for cell in row] for row in rows]
    if rng.random() < 0.3:
        position = rng.randrange(len(content))
        content[position : position + rng.choice((0, 1, 1))] = bytes([rng.choice(b'",;\n\x00\xe4A')])
        rows = []
    file.write_bytes(content)
    return rows


def clean(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 2 else pytest.mark.long) for s in range(20)])
def test_mutated_tables_are_read_as_they_are_or_refused_in_words(tmp_path: Path, seed: int) -> None:
    """100 tables a seed."""
    rng, outcomes = random.Random(seed), Counter[str]()
    texts: list[str] = []
    for number in range(100):
        file = tmp_path / f"{number}.csv"
        rows = write_table(rng, file)
        task = TASKS["table"](TABLE)
        try:
            cohort = task.cohort(file)
            sites = NaturalPartition(column="hospital").divide(cohort)
            examples = task.load(SiteData("a", file), seed=0)
        except DataError as error:
            texts.append(str(error))
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        if not rows:
            continue
        expected = Counter(clean(row[1]) for row in rows[1:])
        assert list(cohort.ids) == [clean(row[0]) for row in rows[1:]]
        assert sum(map(len, sites.values())) == len(rows) - 1
        assert len(sites) == len(expected)
        values = {tuple(pair[1].tolist()) for part in (examples.train, examples.test) for pair in part}  # type: ignore[attr-defined]
        assert values <= {(float(np.float32(float(row[3]))),) for row in rows[1:]}
    assert min(outcomes["read"], outcomes["refused"]) > 5
    assert all(texts)


PATTERNS = Pairs(images=("imagesTr/{case}_0000.nii.gz",), labels="labelsTr/{case}.nii.gz")
PREPARATION = Preparation(normalization="none", classes={"whole": 1})
NAMES = ("case1", "Pat 2", "Zo\u00eb3", "_case4", "case,5", "case+6", "case(7)", "c.8", "9")


def write_folder(rng: random.Random, root: Path) -> set[Path]:
    """Write three cases with one mutation of their geometry, labels or names; return the files."""
    for part in ("imagesTr", "labelsTr"):
        (root / part).mkdir(parents=True)
    for name in rng.sample(NAMES, 3):
        affine = np.diag([1.0, 1.0, 1.2, 1.0])
        image = nib.Nifti1Image(
            np.random.default_rng(rng.randrange(99)).normal(size=(6, 5, 4)).astype(np.float32), affine
        )
        values = np.zeros((6, 5, 4), np.float32)
        values[1:3, 1:3, 1:3] = rng.choice((1, 1, 0.99999994, 0.5, 2, np.nan))
        labels = nib.Nifti1Image(values, affine + (rng.random() < 0.1) * 5 * np.eye(4, k=3))
        if rng.random() < 0.3:
            turn = nib.orientations.axcodes2ornt(rng.choice(("LAS", "LPS", "ASR")))
            labels = labels.as_reoriented(nib.orientations.ornt_transform(nib.io_orientation(affine), turn))
        ending = rng.choice((".nii.gz",) * 6 + (".nii", ".NII.GZ"))
        nib.save(image, root / "imagesTr" / f"{name}_0000.nii.gz")
        file = root / "labelsTr" / f"{name}.nii.gz"
        nib.save(labels, file)
        if ending != ".nii.gz":
            file.rename(file.with_name(f"{name}{ending}"))
        if rng.random() < 0.1:
            file = rng.choice(sorted(root.glob("*/*")))
            content = bytearray(file.read_bytes())
            content[rng.randrange(len(content))] ^= 255
            file.write_bytes(content)
    return set(root.glob("*/*"))


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 1 else pytest.mark.long) for s in range(20)])
def test_each_file_of_a_mutated_folder_is_read_refused_or_named(tmp_path: Path, seed: int) -> None:
    """25 folders a seed; a label map that is read has the label where it was drawn, whatever its orientation."""
    rng, outcomes = random.Random(seed), Counter[str]()
    texts: list[str] = []
    for number in range(25):
        root = tmp_path / str(number)
        files = write_folder(rng, root)
        try:
            cases = find_cases(root, pairs=PATTERNS)
        except DataError as error:
            texts.append(str(error))
            continue
        used = {file for case in cases.values() for file in (*case.images, case.labels) if file is not None}
        left = " ".join(describe_left_out(cases, root))
        for file in files - used:
            assert file.name in left
        for case in cases.values():
            try:
                _, labels, _ = read_item(case, PREPARATION)
            except DataError as error:
                outcomes["refused"] += 1
                texts.append(str(error))
                continue
            outcomes["read"] += 1
            assert (labels.numpy()[1:3, 1:3, 1:3] == 1).all()
            assert int(labels.sum()) == 8
    assert outcomes["read"] > 5
    assert outcomes["refused"] > 5
    assert all(texts)


VOXELS = (4, 5, 4)
BRAINS = {"model": {"name": "voxel_mlp", "hidden": [2]}, "shape": VOXELS, "downsample": 1}
AGES = ("41", "41.5", "7", "119", "n/a", "", "130", "-3", "41,5", "forty", "1_0")
IMAGES = (
    "{0}_T1w.nii.gz",
    "{0}_T1w.nii",
    "{0}_run-1_T1w.nii.gz",
    "{0}_run-2_T1w.nii.gz",
    "._{0}_T1w.nii.gz",
    "{0}_T2w.nii.gz",
)


def write_bids(rng: random.Random, root: Path) -> dict[str, list[str]]:
    """Write a BIDS tree with mutations; return the ages that its tables give a subject, of which a session has one."""
    ages: dict[str, list[str]] = {}
    names = rng.sample([f"sub-{name}" for name in ("01", "1", "001", "A", "a", "x7")], 4)
    for name in names:
        if rng.random() < 0.9:
            ages[name] = [rng.choice(AGES) if rng.random() < 0.3 else str(rng.randrange(20, 90))]
        for session in rng.choice(([""], [""], ["ses-1"], ["ses-1", "ses-2"], ["", "ses-b"], [])):
            folder = root / rng.choice(("", "", "", "derivatives/prep")) / name / session / "anat"
            folder.mkdir(parents=True, exist_ok=True)
            stem = f"{name}_{session}".removesuffix("_")
            for image in rng.sample(IMAGES, rng.choice((0, 1, 1, 1, 2))):
                file, shape = folder / image.format(stem), VOXELS if rng.random() < 0.9 else (4, 4, 4)
                values = np.random.default_rng(rng.randrange(9)).normal(size=shape).astype(np.float32)
                nib.save(nib.Nifti1Image(values, np.eye(4)), file)
                if rng.random() < 0.1:
                    file.unlink()
                    file.symlink_to("../../.git/annex/objects/none")
                elif rng.random() < 0.1:
                    file.write_bytes(file.read_bytes()[: rng.randrange(1, 40)])
            if session and rng.random() < 0.3:
                age = str(rng.randrange(20, 90))
                (root / name).mkdir(exist_ok=True)
                (root / name / f"{name}_sessions.tsv").write_text(f"session_id\tage\n{session}\t{age}\n")
                ages.setdefault(name, []).append(age)
    rows = [f"{name}\t{of[0]}\tF" for name, of in ages.items()]
    (root / "participants.tsv").write_text("\n".join(["participant_id\tage\tsex", *rows]) + "\n")
    return ages


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 1 else pytest.mark.long) for s in range(20)])
def test_each_subject_of_a_mutated_bids_tree_is_read_refused_or_named(tmp_path: Path, seed: int) -> None:
    """25 trees a seed: of each, all subjects, and those that have a row, as a simulated site has them."""
    rng, outcomes = random.Random(seed), Counter[str]()
    for number in range(25):
        root = tmp_path / str(number)
        root.mkdir()
        ages = write_bids(rng, root)
        task = TASKS["brain_age"]
        task = task(task.Config.model_validate({**BRAINS, "skip_bad_subjects": True}))
        images = [file for file in root.glob("sub-*/**/anat/*_T1w.nii*") if not file.name.startswith(".")]
        folders = {file.name for file in root.glob("sub-*/")}
        for subset in (None, task.cohort(root).ids if ages else ()):
            try:
                examples = task.load(SiteData("a", root, subset), seed=0)
            except DataError as error:
                outcomes["refused"] += 1
                named, used = str(error), {}
            else:
                outcomes["read"] += 1
                named = " ".join(examples.warnings)
                parts: list[Any] = [examples.train, examples.test]
                names = [*examples.train_ids, *examples.test_ids]
                used = dict(
                    zip(names, [next(iter(one.images), None) for part in parts for one in part._files], strict=True)
                )
                targets = [part[index][1].item() for part in parts for index in range(len(part))]
                for name, target in zip(names, targets, strict=True):
                    assert target in {find_number(age) for age in ages[name.split("_")[0]]}
                    assert used[name] in images
            taken = {name.split("_")[0] for name in used}
            # A text names the first three of a kind, or 30 of a refusal, and counts all.
            is_counted = re.search(r" and \d+ more", named)
            # What is refused is refused for one reason first: folders without a row are named by what can be read.
            for subject in (folders | ages.keys() if used or subset is None else set(ages)) - taken:
                assert subject in named or is_counted, (subject, named)
            for file in images if used else ():
                is_used = file in used.values()
                stem = "_".join(part for part in (file.relative_to(root).parts[0], file.parent.parent.name) if part)
                # Of two formats and of several runs, the first is read and the others are named.
                assert is_used or file.name in named or stem.split("_")[0] in named or is_counted, (file, named)
    assert min(outcomes["read"], outcomes["refused"]) > 3, outcomes


VALUES = (
    "",
    "007",
    "1_000",
    "yes",
    "4E1",
    "-1",
    ".nan",
    "[]",
    "{}",
    "[x, x]",
    "null",
    "{a: {b: c}}",
    "'<90'",
    "2019-01-01",
    "*",
    "[[1]]",
    "half",
    "','",
)


JOB = """name: study
seed: 1
method: {name: fedavg, rounds: 1}
task:
  name: table
  kind: regression
  target: y
  features: [x]
simulator: {sites: 1, data: {path: "{site}.csv"}}
"""


def mutate_file(rng: random.Random, text: str) -> str:
    """Return a file of settings with one mutation of its characters, lines, keys or values."""
    lines, row = text.splitlines(), rng.randrange(text.count("\n"))
    position, letter = rng.randrange(len(text)), rng.choice("\t:{}[]'\"#&*!|>%@`-\u00e9\u00a0\ufeff\x00")
    key, colon, value = lines[row].partition(":")
    mutations = (
        lambda: text[:position] + letter + text[position:],
        lambda: text[:position] + text[position + 1 :],
        lambda: text[:position],
        lambda: "\n".join([*lines[:row], *lines[row + 1 :]]),
        lambda: "\n".join([*lines, lines[row]]),
        lambda: "\n".join([*lines[:row], " " + lines[row], *lines[row + 1 :]]),
        lambda: "\n".join([*lines[:row], f"{key}{colon} {rng.choice(VALUES)}", *lines[row + 1 :]]),
        lambda: "\n".join([*lines[:row], f"{key[:-1]}{colon}{value}", *lines[row + 1 :]]),
        lambda: "\n".join([*lines[:row], f"{key.swapcase()}{colon}{value}", *lines[row + 1 :]]),
        lambda: text.replace("\n", "\r\n"),
        lambda: "\ufeff" + text,
        lambda: "\n".join([*lines[:row], f"{lines[row]}  # {letter}", *lines[row + 1 :]]),
        lambda: "\n".join([*lines[:row], f"{lines[row]}   ", "", *lines[row + 1 :]]),
    )
    return rng.choice(mutations)()


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 1 else pytest.mark.long) for s in range(6)])
def test_mutated_files_of_settings_are_accepted_as_yaml_reads_them_or_refused(tmp_path: Path, seed: int) -> None:
    """50 files a seed."""
    rng, outcomes = random.Random(seed), Counter[str]()
    file, texts = tmp_path / "study.yaml", []
    for _ in range(50):
        text = mutate_file(rng, JOB)
        file.write_text(text, encoding="utf-8")
        try:
            config = load_config(file)
        except ConfigError as error:
            outcomes["refused"] += 1
            texts.append(str(error))
            continue
        outcomes["accepted"] += 1
        content, dumped = yaml.safe_load(text.removeprefix("\ufeff")), config.model_dump(mode="json")
        for name, value in content.items():
            if not isinstance(value, dict):
                assert dumped[name] == value, name
        given = {key: value for key, value in content["task"].items() if key != "name"}
        read = config.task.config.model_dump(mode="json")
        assert {key: read[key] for key in given if isinstance(given[key], (str, list))} == {
            key: value for key, value in given.items() if isinstance(value, (str, list))
        }
    assert min(outcomes["accepted"], outcomes["refused"]) > 3, outcomes
    assert all(texts)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 1 else pytest.mark.long) for s in range(6)])
def test_mutated_settings_of_a_table_are_accepted_or_refused_by_field(seed: int) -> None:
    """50 texts a seed."""
    rng, outcomes = random.Random(seed), Counter[str]()
    texts: list[str] = []
    for _ in range(50):
        settings = {key: json.dumps(value) for key, value in TABLE.items()}
        settings[rng.choice([*TableConfig.model_fields, "fetures"])] = rng.choice(VALUES)
        try:
            content = yaml.safe_load("\n".join(f"{key}: {value}" for key, value in settings.items()))
            config = TableConfig.model_validate(content)
        except (ValidationError, yaml.YAMLError) as error:
            outcomes["refused"] += 1
            texts.append(str(error))
            continue
        outcomes["accepted"] += 1
        assert TableConfig.model_validate(config.model_dump()) == config
    assert min(outcomes["accepted"], outcomes["refused"]) > 0
    assert all(texts)
