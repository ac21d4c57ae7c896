"""Names, line lengths and comments follow CONTRIBUTING.md; ``python tests/test_language.py`` prints the counts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "custom" / "flare_sparse"
MAX_COLUMNS = 120

PREPOSITIONS = {
    "about",
    "above",
    "across",
    "after",
    "against",
    "along",
    "among",
    "around",
    "as",
    "at",
    "before",
    "behind",
    "below",
    "beside",
    "between",
    "beyond",
    "by",
    "during",
    "for",
    "in",
    "inside",
    "into",
    "of",
    "off",
    "on",
    "out",
    "outside",
    "over",
    "per",
    "since",
    "through",
    "toward",
    "towards",
    "under",
    "until",
    "up",
    "upon",
    "via",
    "with",
    "within",
    "without",
}
PARTICIPLES = {
    "begun",
    "built",
    "chosen",
    "done",
    "drawn",
    "driven",
    "fallen",
    "felt",
    "found",
    "given",
    "gone",
    "grown",
    "heard",
    "held",
    "hidden",
    "kept",
    "known",
    "laid",
    "led",
    "left",
    "lent",
    "lost",
    "made",
    "meant",
    "met",
    "paid",
    "said",
    "seen",
    "sent",
    "shown",
    "shut",
    "spent",
    "spoken",
    "taken",
    "taught",
    "thought",
    "told",
    "understood",
    "withheld",
    "won",
    "written",
}
NOT_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}
NOT_ADVERBS = {"apply", "comply", "imply", "multiply", "only", "rely", "reply", "supply"}
FIELD_TERMS = {"masked", "weighted_sum"}
"""Names that begin with a participle and are terms of the field all the same."""
CALLBACKS = {"handle_event"}
COMMENTED = ("aggregation", "endpoints", "federation", "wire")
"""Folders whose code is stateful or numerical: every 100 lines of it have 3 to 6 comments that say why."""
FEWEST, MOST = 3.0, 6.0


def list_files(*patterns: str) -> list[Path]:
    """Files of the repository that match a pattern, without what tools leave behind."""
    folders = (".ci", "app_configs", "benchmarks", "custom", "docs", "jobs", "poc", "tests")
    matches = {path for pattern in patterns for path in ROOT.glob(pattern)}
    matches |= {path for pattern in patterns for folder in folders for path in (ROOT / folder).rglob(pattern)}
    generated = ("__pycache__", ".egg-info", "workspace")
    return sorted(p for p in matches if p.is_file() and not any(part.endswith(generated) for part in p.parts))


def iterate_functions(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Name, line, and whether it is a property, of every function in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            decorators = {getattr(d, "attr", getattr(d, "id", "")) for d in node.decorator_list}
            yield node.name, node.lineno, bool(decorators & {"property", "cached_property"})


def is_participle(word: str) -> bool:
    return word in PARTICIPLES or (word.endswith("ed") and len(word) > 3 and word not in NOT_PARTICIPLES)


def is_adverb(word: str) -> bool:
    return word.endswith("ly") and word not in NOT_ADVERBS


def is_badly_named(name: str, *, is_property: bool) -> bool:
    """Whether a function is called by a participle, a preposition or an adverb.

    A property may be one participle (``rejected``): it is read as a field.
    """
    words = name.strip("_").split("_")
    if name.startswith("__") or name in FIELD_TERMS:
        return False
    if words[0] in PREPOSITIONS or is_adverb(words[0]):
        return True
    return not is_property and is_participle(words[0])


def find_badly_named_functions() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, line, is_property in iterate_functions(path)
        if is_badly_named(name, is_property=is_property)
    ]


def find_long_lines() -> list[str]:
    files = list_files("*.py", "*.md", "*.yaml", "*.yml", "*.toml", "*.jinja", "*.cff", "run", "up", "down")
    return [
        f"{path.relative_to(ROOT)}:{number} {len(line)}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]


def count_comments(folder: str) -> tuple[int, int]:
    """Whole-line comments, and all lines, of a folder of the package."""
    lines = [
        line.strip()
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sum(line.startswith("#") for line in lines), len(lines)


@pytest.mark.parametrize(
    ("name", "is_property", "bad"),
    [
        ("heard", False, True),
        ("within", False, True),
        ("_joined", False, True),
        ("by_rate", False, True),
        ("exactly", False, True),
        ("select_top_k", False, False),
        ("reply", False, False),
        ("rejected", True, False),
        ("over", True, True),
    ],
)
def test_names_of_participles_prepositions_and_adverbs_are_found(name: str, is_property: bool, bad: bool) -> None:
    assert is_badly_named(name, is_property=is_property) is bad


def test_every_function_of_the_package_is_called_by_a_verb() -> None:
    assert find_badly_named_functions() == []


def test_no_line_is_longer_than_120_columns() -> None:
    assert find_long_lines() == []


@pytest.mark.parametrize("folder", COMMENTED)
def test_stateful_and_numerical_code_has_3_to_6_comments_per_100_lines(folder: str) -> None:
    comments, lines = count_comments(folder)
    assert FEWEST <= 100 * comments / lines <= MOST, f"{folder}: {comments} comments in {lines} lines"


if __name__ == "__main__":
    print(f"functions called by a participle, a preposition or an adverb: {len(find_badly_named_functions())}")
    print(f"lines over {MAX_COLUMNS} columns: {len(find_long_lines())}")
    for one in COMMENTED:
        found, total = count_comments(one)
        print(f"{one}: {found} whole-line comments in {total} lines, {100 * found / total:.1f} per 100")
