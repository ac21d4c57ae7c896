"""YAML files are read within bounds: no aliases, no deep nesting, no huge files or numbers, only plain keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flare_sparse.config.policy.policy import read_policy
from flare_sparse.config.yaml_files import MAX_BYTES, MAX_DEPTH, parse_yaml, read_yaml
from flare_sparse.core.errors import ConfigError

# Each level stands for ten of the one before: a billion values in half a kilobyte.
ALIAS_BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ALIAS_BOMB, r"aliases such as \*a0 are not allowed"),
        ("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested deeper than 32 levels"),
        ("a: " + "[" * 100_000, "nested deeper than 32 levels"),
        (" " * (MAX_BYTES + 1), "more than 1048576 bytes"),
        ("a: " + "9" * 5000, "'9{40}' cannot be read as int"),
        ("a: 0x" + "f" * 5000, "an integer of 20000 bits; expected at most 256"),
        ("? [a, b]\n: 1", "a list cannot be a key"),
        ("? {a: 1}\n: 1", "a dict cannot be a key"),
        ("a: 2021-13-01", "'2021-13-01' cannot be read as timestamp"),
        ("a: !!bool z", "'z' cannot be read as bool"),
    ],
)
def test_settings_that_no_file_needs_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_yaml(file)
    with pytest.raises(ConfigError, match=problem):
        read_policy(file)


def test_override_with_an_alias_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="aliases"):
        parse_yaml("[&a [x], *a]")
