"""Where a site's data lies: set at the site, never in the job.

A site says it with a *site file* (YAML or JSON), or with a path in an environment variable::

    data: brains          # folder or file, relative to the site file
    subset: [sub-01]      # optional: only these identifiers
    methods:              # optional: what this site chooses for itself, where a method lets it
      scbf: {rate: 0.1}
    checkpoints: /scratch # optional: where the site keeps what it needs after a crash; off: nowhere
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import DataError, suggest
from ..task import SiteData

SITE_FILE_VARIABLE = "FLARE_SPARSE_SITE_FILE"
DATA_VARIABLE = "FLARE_SPARSE_DATA"
LOCAL_FILE = "flare_sparse.yaml"


class SiteFile(BaseModel):
    """What a site file says; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: Path = Field(description="folder or file of the site's data, relative to the site file")
    subset: tuple[str, ...] | None = Field(None, description="identifiers that belong to the site; all when left out")
    methods: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="by method, settings that the site chooses for itself"
    )
    checkpoints: Path | Literal[False] | None = Field(
        None, description="folder for what the site needs to go on after a crash; off: nowhere"
    )


def site_data(site: str, local_dir: Path | None, environment: Mapping[str, str] = os.environ) -> SiteData:
    """Where the data of ``site`` lies; the first of three places that says so.

    1. the site file named by ``FLARE_SPARSE_SITE_FILE``; ``{site}`` in it becomes the site's name;
    2. ``flare_sparse.yaml`` in the site's local folder;
    3. the path in ``FLARE_SPARSE_DATA``; ``{site}`` in it likewise.

    Args:
        site: name of the site.
        local_dir: the site's local folder; None when there is none.
        environment: variables.

    Raises:
        DataError: no place says where, a site file is malformed, or nothing is where it points to.
    """
    named, local = environment.get(SITE_FILE_VARIABLE), local_dir / LOCAL_FILE if local_dir else None
    if named:
        return _from_file(site, Path(named.replace("{site}", site)))
    if local and local.is_file():
        return _from_file(site, local)
    if path := environment.get(DATA_VARIABLE):
        return _existing(SiteData(site, Path(path.replace("{site}", site)).expanduser()), f"${DATA_VARIABLE}")
    raise DataError(
        f"site {site!r} does not know where its data lies. Looked for: the site file named by ${SITE_FILE_VARIABLE} "
        f"(not set); {local or f'{LOCAL_FILE} in the local folder of the site (there is none)'} (not there); the path "
        f"in ${DATA_VARIABLE} (not set). Write 'data: /path/to/data' into the file, or set one of the variables."
    )


def write_site_files(folder: Path, sites: Iterable[SiteData]) -> str:
    """Write one site file for each site, as the simulator needs them.

    Args:
        folder: is made where it is not there.
        sites: what each file is to say.

    Returns:
        The value of ``FLARE_SPARSE_SITE_FILE`` with which every site finds its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for site in sites:
        (folder / f"{site.site}.json").write_text(site_file(site))
    return str(folder.absolute() / "{site}.json")


def site_file(site: SiteData) -> str:
    """The content of a site's site file, as JSON, which is YAML too."""
    own = {name: dict(settings) for name, settings in site.methods.items()}
    said = SiteFile(data=site.path.absolute(), subset=site.subset, methods=own)
    return said.model_dump_json(exclude_defaults=True)


def _from_file(site: str, file: Path) -> SiteData:
    try:
        text = file.read_text(encoding="utf-8")
        said = SiteFile.model_validate(json.loads(text) if file.suffix == ".json" else yaml.safe_load(text))
    except ValidationError as error:
        raise DataError(
            f"{file}: " + "; ".join(_problem(part["loc"], part["msg"]) for part in error.errors())
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{file}: cannot be read as a site file: {error}. Expected 'data: /path/to/data'") from error
    return _existing(SiteData(site, file.parent / said.data.expanduser(), said.subset, said.methods), str(file))


def _existing(data: SiteData, source: str) -> SiteData:
    try:
        there = data.path.exists()
    except OSError as error:
        raise DataError(f"{source}: data is {data.path}, which cannot be looked at: {error.strerror}") from error
    if not there:
        raise DataError(f"{source}: data is {data.path}; there is no such file or folder. Correct the path")
    return data


def _problem(location: tuple[int | str, ...], message: str) -> str:
    name = ".".join(str(part) for part in location)
    fields = SiteFile.model_fields
    hint = "" if name in fields or not name else suggest(name, fields) + f" It may have: {', '.join(fields)}"
    return f"{name or 'content'}: {message}.{hint}"
