"""YAML files and ``--set key.path=value`` overrides, as plain values before validation against the schema.

Configurations that travel with the package: found by name, and copied as the start of a study.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import ConfigError, abbreviate, suggest

MAX_DEPTH = 32
"""Levels of nested sections and lists; the package's own settings have fewer than ten."""
MAX_BYTES = 2**20
"""Size limit of a file with settings; a list of 10,000 subjects takes about 200 kB."""
MAX_BITS = 256
"""Size limit of an integer; Python refuses to print one of more than 4,300 digits in an error."""


class _Loader(yaml.SafeLoader):
    """Loader that reads YAML 1.2 numbers such as ``1e-3`` and refuses what no setting needs.

    That is: a key given twice or no scalar, an alias, deep nesting, and text or a number that is no value.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node.

        Raises:
            yaml.YAMLError: the node is an alias, or lies too deep.
        """
        event = self.peek_event()  # type: ignore[no-untyped-call]
        # A few aliases of aliases stand for more values than fit into memory, and no setting needs one.
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem=f"aliases such as *{event.anchor} are not allowed")
        if self.depth >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node.

        Raises:
            yaml.YAMLError: the text is no value of its kind, such as a date in month 13, or an integer is too large.
        """
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        # PyYAML lets through whatever Python raises for the text of a scalar.
        except Exception as error:
            problem = f"{abbreviate(node.value)} cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            problem = f"an integer of {value.bit_length()} bits; expected at most {MAX_BITS}"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.MarkedYAMLError(None, None, f"a {type(key).__name__} cannot be a key", key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that puts quotes around text that :class:`_Loader` would read as a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def parse_yaml(text: str) -> Any:
    """Parse one YAML document.

    Raises:
        yaml.YAMLError: the document is malformed or too large, gives a key twice, has an alias or is nested too deep.
    """
    if len(text) > MAX_BYTES:
        raise yaml.YAMLError(f"the text has {len(text)} characters; the limit is {MAX_BYTES}")
    # _Loader is a SafeLoader.
    return yaml.load(text, _Loader)  # noqa: S506


def format_yaml(data: Mapping[str, Any]) -> str:
    """Return settings as YAML, from which :func:`parse_yaml` reads the same values."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the top-level section of a file.

    Raises:
        ConfigError: there is no such file, it is not YAML, or its top level is not a section.
    """
    data = read_content(path)
    if data is None:
        raise ConfigError(f"{path}: is empty; expected a section of `key: value` lines")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a section of `key: value` lines, found {type(data).__name__}")
    return data


def read_content(path: Path, purpose: str = "") -> Any:
    """Return the content of a file with settings; None if it is empty.

    Args:
        path: the file.
        purpose: what the error of a malformed file begins with.

    Raises:
        ConfigError: there is no such file, it is larger than ``MAX_BYTES``, or it is not YAML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise yaml.YAMLError(f"the file has more than {MAX_BYTES} bytes")
        return parse_yaml(content.decode("utf-8"))
    except FileNotFoundError as error:
        siblings = [p.name for p in path.parent.glob("*.y*ml")]
        raise ConfigError(f"{path}: no such file.{suggest(path.name, siblings)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {purpose}cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {purpose}not YAML: {error}") from error


def apply_overrides(data: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return a copy of ``data`` with each assignment ``key.path=value`` applied; values are YAML.

    Raises:
        ConfigError: assignments are malformed, or lead through a value that is not a section. The text lists all.
    """
    result, problems = dict(data), []
    for assignment in assignments:
        try:
            result = _assign(result, assignment)
        except (ValueError, yaml.YAMLError) as error:
            problems.append(f"--set {assignment}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return result


def _assign(data: dict[str, Any], assignment: str) -> dict[str, Any]:
    path, sign, value = assignment.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise ValueError("expected key.path=value, such as method.sparsity=0.95")
    return set_value(data, keys, parse_yaml(value))


def set_value(data: Any, keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return nested sections with a value at some keys.

    Raises:
        ValueError: the keys lead through a value that is not a section.
    """
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ValueError(f"{keys[0]!r} cannot be set in {data!r}, which is not a section")
    return {**data, keys[0]: set_value(data.get(keys[0]), keys[1:], value) if keys[1:] else value}


def find_value(data: Any, keys: Sequence[int | str]) -> Any:
    """Return the value at some keys of nested sections; None where there is none."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


_INSTALLED, _SOURCE = Path(__file__).parents[1] / "app_configs", Path(__file__).parents[3] / "app_configs"
CONFIGURATIONS = _INSTALLED if _INSTALLED.is_dir() else _SOURCE
"""Folder of the configurations: in the wheel below the package, in the repository beside it."""
STARTERS = {
    "table": ("starters/table/study.yaml", "starters/table/patients.csv"),
    "segmentation": ("neurosfl_segmentation.yaml",),
    "brain_age": ("neurosfl_brain_age.yaml",),
    "script": ("starters/script/study.yaml", "starters/script/client.py", "starters/script/model.py"),
    "bundle": ("neurosfl_bundle.yaml", "unet_bundle"),
    "nnunet": ("starters/nnunet/study.yaml",),
    "method": ("starters/method/study.yaml", "starters/method/random_masks.py"),
    "component": ("starters/component/job.py", "starters/script/client.py", "starters/script/model.py"),
}
"""Files of the study that ``flare-sparse init`` writes, by kind; the first one is the one to run."""


def list_configurations() -> list[str]:
    """Return the names of the configurations, as :func:`find_configuration` accepts them."""
    return sorted(file.stem for file in CONFIGURATIONS.glob("*.yaml"))


def find_configuration(file: Path) -> Path:
    """Return a file as it is if it exists, or else the configuration of this name, such as ``neurosfl_brain_age``.

    Pages name it as in the repository, ``app_configs/neurosfl_brain_age.yaml``.
    """
    name = file.stem if file.parent == Path(CONFIGURATIONS.name) else str(file)
    named = CONFIGURATIONS / f"{name}.yaml"
    return named if "/" not in name and not file.exists() and named.is_file() else file
