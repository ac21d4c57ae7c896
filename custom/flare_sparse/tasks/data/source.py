"""Location of a site's data: set at the site, never in the job.

A site sets it in a *site file* (YAML or JSON) or in an environment variable. A site file reads::

    data: brains          # folder or file, relative to the site file
    subset: [sub-01]      # optional: use only these identifiers
    methods:              # optional: settings that a method leaves to the site
      scbf: {rate: 0.1}
    checkpoints: /scratch # optional: folder of the site's checkpoints; off: keep none
    id: patient           # column of a table with the identifiers of subjects, by which withdrawn ones are left out
    device: cuda:1        # optional: where the site computes, for jobs with device: auto
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError

from ...core.errors import DataError
from ...core.names import clean_name, read_names
from ...core.settings import Settings, explain
from ..task import SiteData
from .absence import require_known_subjects

SITE_FILE_VARIABLE = "FLARE_SPARSE_SITE_FILE"
DATA_VARIABLE = "FLARE_SPARSE_DATA"
LOCAL_FILE = "flare_sparse.yaml"
WITHDRAWN_FILE = "flare_sparse_withdrawn.txt"
"""List of withdrawn subjects in the local folder of a site's startup kit, one identifier a line."""


def _read_name(value: object) -> str:
    """Return an identifier; YAML reads ``007``, ``1_000`` and ``yes`` as numbers and as true."""
    if not isinstance(value, str):
        raise ValueError(f"found {value!r}; expected text: write identifiers in quotes, ['007']")
    return clean_name(value)


Name = Annotated[str, BeforeValidator(_read_name)]


class SiteFile(Settings):
    """Content of a site file; an unknown field is an error."""

    data: Path
    """folder or file of the site's data, relative to the site file"""
    subset: tuple[Name, ...] | None = None
    """identifiers of the site's examples; default: all"""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """settings by method, for those that a method leaves to the site"""
    id: Name | None = None
    """column of a table with the identifiers of subjects, by which withdrawn ones are left out"""
    withdrawn: tuple[Name, ...] = ()
    """identifiers of subjects that must not be used"""
    checkpoints: Path | Literal[False] | None = None
    """folder of the site's checkpoints, from which it resumes after a crash; off: keep none"""
    device: str | None = Field(None, pattern=r"^(cpu|cuda(:\d{1,2})?)$")
    """where this site computes if the job leaves it open"""


SAME_FIELDS = ("subset", "methods", "device", "id")
"""Fields that a site file and :class:`SiteData` have in common."""


def has_site_data(local_dir: Path | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether one of the sources of :func:`find_site_data` is present."""
    is_set = any(environment.get(name) for name in (SITE_FILE_VARIABLE, DATA_VARIABLE))
    return is_set or (local_dir is not None and (local_dir / LOCAL_FILE).is_file())


def find_site_data(
    site: str, local_dir: Path | None, environment: Mapping[str, str] = os.environ, *, heeds_list: bool = True
) -> SiteData:
    """Return the location of a site's data, from the first of three sources that is present.

    1. The site file named by ``FLARE_SPARSE_SITE_FILE``; ``{site}`` in it stands for the site's name.
    2. ``flare_sparse.yaml`` in the site's local folder.
    3. The path in ``FLARE_SPARSE_DATA``; ``{site}`` in it stands for the site's name.

    Args:
        site: name of the site.
        local_dir: local folder of the site's startup kit; None if there is none.
        environment: environment variables.
        heeds_list: leave out who is on the site's list of withdrawn subjects; otherwise the data is not for reading.

    Raises:
        DataError: no source is present, a site file is malformed, the data does not exist, or it is not known which
            part of it is of a withdrawn subject.
    """
    found = _locate(site, local_dir, environment)
    if not heeds_list:
        return found
    gone = read_withdrawn(local_dir) if local_dir else frozenset()
    return require_known_subjects(replace(found, withdrawn=found.withdrawn | gone))


def read_withdrawn(local_dir: Path) -> frozenset[str]:
    """Return the identifiers in a site's list of withdrawn subjects, one a line; empty without the list.

    Raises:
        DataError: the list cannot be read. A list that is not read would let data back in.
    """
    return read_names(local_dir / WITHDRAWN_FILE) if (local_dir / WITHDRAWN_FILE).exists() else frozenset()


def _locate(site: str, local_dir: Path | None, environment: Mapping[str, str]) -> SiteData:
    local_file = local_dir / LOCAL_FILE if local_dir else None
    if named_file := environment.get(SITE_FILE_VARIABLE):
        return _read_site_file(site, Path(named_file.replace("{site}", site)))
    if local_file and local_file.is_file():
        return _read_site_file(site, local_file)
    if path := environment.get(DATA_VARIABLE):
        return _require_path(SiteData(site, Path(path.replace("{site}", site)).expanduser()), f"${DATA_VARIABLE}")
    local_text = local_file or f"{LOCAL_FILE} in the local folder of the site (there is none)"
    raise DataError(
        f"site {site!r} has no location for its data. Looked for: the site file named by ${SITE_FILE_VARIABLE} (not "
        f"set); {local_text} (does not exist); the path in ${DATA_VARIABLE} (not set). Write 'data: /path/to/data' "
        "into the file, or set one of the variables."
    )


def write_site_files(folder: Path, sites: Iterable[SiteData]) -> str:
    """Write one site file per site, for the simulator.

    Args:
        folder: folder to write to; created if missing.
        sites: content of each file.

    Returns:
        The value of ``FLARE_SPARSE_SITE_FILE`` with which every site finds its own file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for site in sites:
        file = folder / f"{site.site}.json"
        # The owner's alone, before the text is in it: it names subjects.
        file.touch(mode=0o600)
        file.chmod(0o600)
        file.write_text(format_site_file(site))
    return str(folder.absolute() / "{site}.json")


def format_site_file(site: SiteData) -> str:
    """Return the content of a site file as JSON, which is also valid YAML."""
    fields = {name: getattr(site, name) for name in SAME_FIELDS}
    content = {"data": site.path.absolute(), "withdrawn": sorted(site.withdrawn), **fields}
    return SiteFile.model_validate(content).model_dump_json(exclude_defaults=True)


def _read_site_file(site: str, file: Path) -> SiteData:
    try:
        text = file.read_text(encoding="utf-8")
        content = SiteFile.model_validate(json.loads(text) if file.suffix == ".json" else yaml.safe_load(text))
    except ValidationError as error:
        raise DataError(f"{file}: {explain(error, SiteFile)}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{file}: cannot be read as a site file: {error}. Expected 'data: /path/to/data'") from error
    fields = {name: getattr(content, name) for name in SAME_FIELDS}
    path = file.parent / content.data.expanduser()
    return _require_path(SiteData(site, path, withdrawn=frozenset(content.withdrawn), **fields), str(file))


def _require_path(data: SiteData, source: str) -> SiteData:
    """Return ``data``; raise if its path does not exist."""
    try:
        exists = data.path.exists()
    except OSError as error:
        raise DataError(f"{source}: data is {data.path}, which cannot be accessed: {error.strerror}") from error
    if not exists:
        raise DataError(f"{source}: data is {data.path}; there is no such file or folder. Correct the path")
    return data
