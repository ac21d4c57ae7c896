"""Declaration of a site's people in its startup kit."""

from pathlib import Path

from ...config.people import PEOPLE_FILE, ReleaseGate, find_table, propose
from ...config.policy.policy import POLICY_FILE, read_policy
from ...config.yaml_files import format_yaml
from ...core.errors import ConfigError
from ...privacy.release.record import Rule
from ...privacy.release.site import RELEASE_FOLDER
from ...tasks.data.source import LOCAL_FILE, find_site_data
from ...tasks.data.tables import read_table
from .allow_list import find_local_folder, write_text
from .preflight import read_site_name

FOLDS = 5
"""Folds that are proposed; a declaration may have another number."""


def declare_people(kit: Path, *, write: bool = False) -> tuple[str, list[str]]:
    """Return the text of a proposed declaration, and the columns that it leaves out.

    Args:
        kit: the startup kit.
        write: write the text to the kit.

    Raises:
        ConfigError: the folder is no kit, has a declaration already, or names no column of identifiers.
        DataError: the table cannot be read, or has no such column.
    """
    local = find_local_folder(kit).absolute()
    file, name = local / PEOPLE_FILE, read_site_name(local.parent)
    if write and file.exists():
        raise ConfigError(f"{file}: this site has declared its people; change the file by hand before the first job")
    rule = Rule(read_policy(local / POLICY_FILE).min_cell)
    gate = ReleaseGate(local, local.parent / RELEASE_FOLDER / name, rule)
    data = find_site_data(name, local)
    id_column = data.id or ("participant_id" if data.path.is_dir() else None)
    if id_column is None:
        raise ConfigError(f"{local / LOCAL_FILE}: names no column of identifiers; add a line such as id: patient")
    declaration, left = propose(read_table(find_table(data.path)), id_column, FOLDS, rule, gate.split_seed)
    text = format_yaml(declaration.model_dump(mode="json", exclude_none=True))
    if write:
        write_text(file, text)
    return text, left
