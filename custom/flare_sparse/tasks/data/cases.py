"""Cases: the files of images and of their label maps, in the three layouts that data sets come in, or their classes.

1. BIDS: ``sub-*/[ses-*/]anat/*_<suffix>.nii.gz`` and ``derivatives/*/sub-*/[ses-*/]anat/*_dseg.nii.gz``.
2. A folder of the Medical Segmentation Decathlon, with ``dataset.json`` (Antonelli et al. 2022).
3. Any other folder, by patterns of the files' names.

The class of an image is a column of ``participants.tsv`` in BIDS, the ``label`` of an entry of ``dataset.json``, or the
folder that it is in.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import Field, field_validator
from torch.utils.data import Dataset

from ...core.errors import DataError, list_first
from ...core.names import clean_name
from ...core.settings import Settings
from ..task import Examples, SiteData, TaskConfig, build_examples
from .bids import NO_ROW, TABLE, CaseFiles, DerivativeName, find_everywhere, list_volumes, read_rows
from .screening import screen_subjects


class CaseSettings(TaskConfig):
    """How the cases of a site are kept."""

    cache: bool = True
    """keep all cases in memory; false: read the files at each access"""
    skip_bad_subjects: bool = False
    """skip and count unusable cases; false: refuse to train if there are any"""


Derivative = Annotated[DerivativeName, Field(description="folder of the label maps in derivatives/; *: any")]

DECATHLON = "dataset.json"
EXPECTED = (
    f"expected a BIDS data set (sub-*/anat and derivatives/*/sub-*/anat/*_dseg.nii.gz), a folder with {DECATHLON}, or "
    "a folder of such folders; for other names set task.pairs, such as {images: ['imagesTr/{case}.nii.gz'], labels: "
    "'labelsTr/{case}.nii.gz'}"
)
CLASS = "label"
"""Column of ``participants.tsv``, and key of an entry of ``dataset.json``, with the number of a class."""
EXPECTED_CLASSES = (
    f"expected a BIDS data set with a column {CLASS} in {TABLE}, a folder with {DECATHLON} and a number as {CLASS} of "
    "each image, a folder for each class (0/, 1/, ...), or a folder of such folders"
)
VOLUMES = r"\.(nii|nrrd|mha|mhd|mgz|img)(\.gz)?$"
"""Ends of the names of files of volumes, also of formats that other tools read."""
IMAGES = rf"{VOLUMES}|\.(png|jpe?g|bmp|gif|tiff?|webp|dcm)$"
"""Ends of the names of files of volumes and of plane images, likewise."""
CASE = "{case}"
"""Part of a pattern that stands for the identifier of a case."""
_LETTER = r"(?:[^\W_]|-)"
_CASE_NAME = r"[^/.][^/]*?"
PHOTOGRAPHS = (".png", ".jpg", ".jpeg")
"""Extensions of plane images besides NIfTI."""


class Pairs(Settings):
    """Patterns of the files of a case, relative to the site's data; ``{case}`` is its identifier, ``*`` is any text."""

    images: tuple[str, ...] = Field(min_length=1)
    """image of each channel, such as imagesTr/{case}_0000.nii.gz"""
    labels: str
    """label map, such as labelsTr/{case}.nii.gz"""

    @field_validator("images", "labels")
    @classmethod
    def _check_patterns(cls, value: Any) -> Any:
        for pattern in [value] if isinstance(value, str) else value:
            path = PurePosixPath(pattern)
            # The pattern comes with a job, and the files that it may name are those of the site's data folder.
            if path.is_absolute() or ".." in path.parts or "**" in pattern:
                raise ValueError(f"{pattern!r}: expected a path inside the data folder, without .. and **")
            if CASE not in pattern:
                raise ValueError(f"{pattern!r}: expected {CASE} where the identifier of a case stands")
        return value


class FileSettings(CaseSettings):
    """Which files of a site's data are images and label maps."""

    suffixes: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9]+$")], ...] = Field(("T1w",), min_length=1)
    """BIDS suffix of the image of each channel, such as [T1w, FLAIR]"""
    derivative: Derivative = "*"
    pairs: Pairs | None = None
    """patterns of the files where the data is neither BIDS nor a Decathlon folder, {images:
    ['imagesTr/{case}_0000.nii.gz'], labels: 'labelsTr/{case}.nii.gz'}"""

    def find_cases(self, path: Path) -> dict[str, CaseFiles]:
        """Return the cases of a data set, as :func:`find_cases` does."""
        return find_cases(path, self.suffixes, self.derivative, self.pairs)


def find_cases(
    path: Path, suffixes: Sequence[str] = ("T1w",), derivative: str = "*", pairs: Pairs | None = None
) -> dict[str, CaseFiles]:
    """Return the cases of a data set, or of the data sets in the folders of ``path``, in name order.

    Args:
        path: folder of the data.
        suffixes: BIDS suffix of each image of a case.
        derivative: folder of the label maps in ``derivatives``; ``*`` is any text.
        pairs: patterns of the files; None: BIDS or Decathlon, whichever the folder is.

    Returns:
        Cases by identifier. With several data sets, identifiers are ``FOLDER/CASE`` and sites are the folders.

    Raises:
        DataError: there is no data set.
    """
    expected = f"expected files {', '.join([*pairs.images, pairs.labels])}" if pairs else EXPECTED
    message = f"{path}: no cases to segment; {expected}"
    return find_everywhere(
        path, partial(_find_in_folder, suffixes=suffixes, derivative=derivative, pairs=pairs), message
    )


def describe_left_out(cases: Mapping[str, CaseFiles], path: Path) -> list[str]:
    """Return warnings of what no case has: images, such as ``a.NII`` or ``a_01.nii``, and rows.

    Folders ``anat`` of BIDS hold images of other sequences, too.

    Args:
        cases: the cases of the data, also those that cannot be used.
        path: folder of the data.
    """
    used = {file for case in cases.values() for file in (*case.images, case.labels) if file is not None}
    folders = {file.parent for file in used if file.parent.name != "anat"}
    # Label maps that no case has may be in a folder of their own.
    if any(case.labels is None and not case.row for case in cases.values()):
        folders |= {place for folder in folders for place in folder.parent.glob("label*/")}
    # Folders of classes: one whose name is no number is none.
    folders |= {place for folder in folders - {path} if folder.name.isdecimal() for place in folder.parent.glob("*/")}
    endings = IMAGES if any(file.suffix.lower() in PHOTOGRAPHS for file in used) else VOLUMES
    beside = {file for folder in folders if folder.is_dir() for file in folder.iterdir()}
    left = sorted(
        f"{file.parent.name}/{file.name}"
        for file in beside - used
        if not file.name.startswith(".") and re.search(endings, file.name, re.IGNORECASE)
    )
    images = [f"{len(left)} images are left out, since no case has them: {list_first(left, 3)}"] if left else []
    return images + _compare_rows({case.subject for case in cases.values()}, path)


def _compare_rows(subjects: Set[str], path: Path) -> list[str]:
    """Return warnings of rows of ``participants.tsv`` without a folder, and of folders without a row."""
    sets = {"": path} if (path / TABLE).is_file() else {f"{each.name}/": each for each in sorted(path.glob("*/"))}
    rows = {
        f"{prefix}{name}"
        for prefix, folder in sets.items()
        if (folder / TABLE).is_file()
        for name in read_rows(folder / TABLE)
    }
    if not rows:
        return []
    without = {f"rows of {TABLE} have no folder with images": rows - subjects, NO_ROW: subjects - rows}
    return [f"{len(names)} {text}: {list_first(sorted(names), 3)}" for text, names in without.items() if names]


def find_classes(path: Path, suffixes: Sequence[str] = ("T1w",)) -> dict[str, CaseFiles]:
    """Return the cases of a data set whose images have a class, in its row: identifiers are as in :func:`find_cases`.

    Args:
        path: folder of the data.
        suffixes: BIDS suffix of each image of a case.

    Raises:
        DataError: there is no data set.
    """

    def find(folder: Path) -> dict[str, CaseFiles]:
        listed = _read_classes(folder)
        return (find_bids_cases(folder, suffixes) or _find_class_folders(folder)) if listed is None else listed

    return find_everywhere(path, find, f"{path}: no images to classify; {EXPECTED_CLASSES}")


def find_images(path: Path, suffixes: Sequence[str], derivative: str, pairs: Pairs | None) -> dict[str, CaseFiles]:
    """Return cases to predict: a single image, the cases as in training, or else each image of a folder.

    Raises:
        DataError: there is no image, or a folder has two of one name.
    """
    files = [path] if path.is_file() else sorted(list_volumes(path, "*"))
    try:
        cases = _find_in_folder(path, suffixes, derivative, pairs)
    except DataError:
        # Other tools put an index of another format beside their images.
        if not files:
            raise
        cases = {}
    # The images of a folder come before the data sets in the folders beside them.
    return cases or _build_unlabelled_cases(files) or find_cases(path, suffixes, derivative, pairs)


def _build_unlabelled_cases(files: Iterable[Path]) -> dict[str, CaseFiles]:
    """Return a case for each image, by its name without the extension."""
    cases: dict[str, CaseFiles] = {}
    for file in files:
        name = file.name.removesuffix(".gz").removesuffix(".nii")
        if name in cases:
            raise DataError(f"{file.parent}: {name}.nii and {name}.nii.gz are images of one case; remove one of them")
        cases[name] = CaseFiles((file,), None, subject=name)
    return cases


def select_cases(data: SiteData, cases: Mapping[str, CaseFiles]) -> dict[str, CaseFiles]:
    """Return a site's cases: those of its subset, without withdrawn subjects.

    Raises:
        DataError: there is no such case, or none is left.
    """
    names = data.select(cases, lambda name: cases[name].subject)
    if missing := [name for name in names if name not in cases]:
        raise DataError(f"{data.path}: {missing[0]}: there is no such case")
    if cases and not names:
        raise DataError(f"{data.path}: each of {len(cases)} cases is of a subject who has withdrawn")
    return {name: cases[name] for name in names}


class CaseDataset(Dataset[Any]):
    """Some cases as items.

    Args:
        files: the files of each case.
        items: what was read of each; None: it is read at each access.
        read: reads the files of a case.
    """

    def __init__(self, files: Sequence[CaseFiles], items: Sequence[Any], read: Callable[[CaseFiles], Any]):
        self._files, self._items, self._read = files, items, read

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        """Return one case.

        Raises:
            DataError: a file has become unreadable.
        """
        item = self._items[index]
        return self._read(self._files[index]) if item is None else item


def load_cases(
    config: CaseSettings,
    data: SiteData,
    seed: int,
    cases: Mapping[str, CaseFiles],
    read: Callable[[CaseFiles], Any],
    *,
    screen: Callable[[CaseFiles], Any] | None = None,
    read_evaluated: Callable[[CaseFiles], Any] | None = None,
    warnings: Sequence[str] = (),
) -> Examples:
    """Read every case of a site and split them, so that the cases of a subject are in the same part.

    Args:
        config: the task's settings.
        data: the site's data.
        seed: seed of the split.
        cases: files of all cases of the data, by name.
        read: returns the item of a case; raises a DataError if it is unusable.
        screen: likewise, for the first time, with checks that no later access repeats; None: ``read``.
        read_evaluated: returns the item of a case that does not train; None: as of those that do.
        warnings: what else may spoil the result.

    Raises:
        DataError: a case is missing or unusable and may not be skipped, or no usable case remains.
    """

    def read_case(name: str) -> Any:
        if name not in cases:
            raise DataError("there is no such case")
        item = (screen or read)(cases[name])
        return item if config.cache else None

    names = data.select(cases, lambda name: cases[name].subject)
    items, skipped = screen_subjects(names, read_case, skip_bad_subjects=config.skip_bad_subjects, source=data.path)
    subject_of = {name: cases[name].subject for name in items}
    split = config.split.assign_subjects(subject_of, seed)

    def build_dataset(names: Sequence[str]) -> CaseDataset:
        files = [cases[name] for name in names]
        if read_evaluated is None or names is split.train:
            return CaseDataset(files, [items[name] for name in names], read)
        return CaseDataset(files, [read_evaluated(f) if config.cache else None for f in files], read_evaluated)

    found = build_examples(split, build_dataset, skipped, subject_of=subject_of)
    return replace(found, warnings=(*found.warnings, *warnings))


def _find_in_folder(
    folder: Path, suffixes: Sequence[str], derivative: str, pairs: Pairs | None
) -> dict[str, CaseFiles]:
    """Return the cases of one data set; empty if the folder is none."""
    if pairs is not None:
        return _find_pairs(folder, pairs)
    listed = _read_decathlon(folder)
    return find_bids_cases(folder, suffixes, derivative) if listed is None else listed


def find_bids_cases(folder: Path, suffixes: Sequence[str], derivative: str = "*") -> dict[str, CaseFiles]:
    """Return the cases of a BIDS data set, one for each session; empty if the folder is none.

    Arguments are as in :func:`find_cases`.
    """
    rows = read_rows(folder / TABLE) if (folder / TABLE).is_file() else {}
    cases = {}
    for place in sorted([*folder.glob("sub-*/anat/"), *folder.glob("sub-*/ses-*/anat/")]):
        inner = place.relative_to(folder)
        found = [list_volumes(place, f"*_{suffix}") for suffix in suffixes]
        labels = [
            file for pipeline in sorted(folder.glob(f"derivatives/{derivative}/"))
            for file in list_volumes(pipeline / inner, "*_dseg")
        ]  # fmt: skip
        pairs = zip(suffixes, found, strict=True)
        problems = [f"{len(own)} images anat/*_{suffix}.nii.gz; expected one" for suffix, own in pairs if len(own) != 1]
        label_problem = ""
        if len(labels) > 1:
            names = ", ".join(str(file.relative_to(folder)) for file in labels[:2])
            label_problem = f"{len(labels)} label maps {names}, ...; set task.derivative or task.pairs"
        subject = inner.parts[0]
        images = tuple(file for files in found for file in files[:1])
        cases["_".join(inner.parts[:-1])] = CaseFiles(
            images, next(iter(labels), None), rows.get(subject, {}), subject, next(iter(problems), ""), label_problem
        )
    return cases


def _read_index(
    folder: Path, read: Callable[[Any], tuple[str, CaseFiles]], expected: str
) -> dict[str, CaseFiles] | None:
    """Return the cases of the file that lists those of a folder; None: there is no list."""
    file = folder / DECATHLON
    if not file.is_file():
        return None
    cases: dict[str, CaseFiles] = {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        # In BIDS it may be nnU-Net's, which has none.
        if isinstance(content, dict) and "training" not in content and any(folder.glob("sub-*/")):
            return None
        for entry in content["training"] if isinstance(content, dict) else content:
            name, case = read(entry)
            if name in cases:
                raise DataError(f"{file}: {name} occurs twice; remove one entry")
            cases[name] = case
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file}: expected {expected}, found {error!r}") from error
    return dict(sorted(cases.items()))


def _read_decathlon(folder: Path) -> dict[str, CaseFiles] | None:
    """Return the training cases of a Decathlon folder; those for testing have no label maps."""

    def read(entry: Any) -> tuple[str, CaseFiles]:
        image, labels = (folder / str(entry[name]) for name in ("image", "label"))
        name = labels.name.removesuffix(".gz").removesuffix(".nii")
        return name, CaseFiles((image,), labels, subject=name)

    expected = '{"training": [{"image": FILE, "label": FILE}, ...]} (for the names of nnU-Net set task.pairs)'
    return _read_index(folder, read, expected)


def _read_classes(folder: Path) -> dict[str, CaseFiles] | None:
    """Return the images of a list ``[{"image": ..., "label": ...}, ...]``, or of a Decathlon folder's."""

    def read(entry: Any) -> tuple[str, CaseFiles]:
        names = [str(name) for name in (entry["image"] if isinstance(entry["image"], list) else [entry["image"]])]
        files = tuple(folder / name for name in names)
        return names[0], CaseFiles(files, None, {CLASS: str(entry[CLASS])}, str(entry.get("subject") or names[0]))

    return _read_index(folder, read, f'[{{"image": FILE, "{CLASS}": NUMBER}}, ...], alone or as "training"')


def _find_class_folders(folder: Path) -> dict[str, CaseFiles]:
    """Return the images in the folders of a data set whose names are numbers of classes."""
    extensions = (".nii.gz", ".nii", *PHOTOGRAPHS)
    cases = {}
    for file in sorted(folder.glob("[0-9]*/*")):
        label = file.parent.name
        if label.isdecimal() and not file.name.startswith(".") and file.name.lower().endswith(extensions):
            name = f"{label}/{file.name}"
            cases[name] = CaseFiles((file,), None, {CLASS: label}, name)
    return cases


def _find_pairs(folder: Path, pairs: Pairs) -> dict[str, CaseFiles]:
    """Return the cases whose first image matches its pattern."""
    labels = match_files(folder, pairs.labels)
    maps = {file for files in labels.values() for file in files}
    channels = [_leave_out(match_files(folder, pattern), maps) for pattern in pairs.images]
    cases = {}
    for name, first in channels[0].items():
        images, found = [channel.get(name, []) for channel in channels], labels.get(name, [])
        problems = [
            f"{len(files)} files {pattern.replace(CASE, name)}; expected one"
            for pattern, files in zip(pairs.images, images, strict=True)
            if len(files) != 1
        ]
        label_problem = f"{len(found)} files {pairs.labels.replace(CASE, name)}; expected one" if len(found) > 1 else ""
        files = tuple(image[0] for image in images if image) or tuple(first)
        cases[name] = CaseFiles(files, next(iter(found), None), {}, name, "; ".join(problems), label_problem)
    return dict(sorted(cases.items()))


def match_files(folder: Path, pattern: str) -> dict[str, list[Path]]:
    """Return the files of a folder that match a pattern, by identifier of the case.

    Beside a ``*``, an identifier ends where letters, digits and ``-`` end: ``c{case}*`` finds 10 in ``c10_t1.nii.gz``.
    """
    parts = [part for part in re.split(r"(\{case\}|\*)", pattern) if part]
    # A second {case} must repeat the first one.
    text, is_first = "", True
    for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        if part == CASE:
            identifier = f"(?P<case>{_CASE_NAME})" if is_first else "(?P=case)"
            start, end = (rf"(?<!{_LETTER})" if before == "*" else ""), (rf"(?!{_LETTER})" if after == "*" else "")
            text, is_first = f"{text}{start}{identifier}{end}", False
        else:
            text += "[^/]*" if part == "*" else re.escape(part)
    found: dict[str, list[Path]] = {}
    # "{case}*" would become "**", which pathlib refuses.
    for file in sorted(folder.glob(re.sub(r"\*+", "*", pattern.replace(CASE, "*")))):
        # macOS writes a ._NAME without voxels beside each file that it copies.
        if not file.name.startswith(".") and (match := re.fullmatch(text, file.relative_to(folder).as_posix())):
            found.setdefault(clean_name(match["case"]), []).append(file)
    return found


def _leave_out(images: dict[str, list[Path]], maps: Set[Path]) -> dict[str, list[Path]]:
    """Return images without those that are label maps too, as with ``{case}.nii.gz`` and ``{case}_seg.nii.gz``.

    All of them stay where the pattern of the label maps matches every image.
    """
    remaining = {name: [file for file in files if file not in maps] for name, files in images.items()}
    return {name: files for name, files in remaining.items() if files} or images
