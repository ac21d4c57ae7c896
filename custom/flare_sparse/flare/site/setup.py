"""A site made ready at once: where its data is, what may leave, which classes it builds, and no code in jobs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path

import yaml

from ...core.errors import ConfigError
from ...tasks.data.source import LOCAL_FILE, find_site_data
from .allow_list import allow_classes, find_local_folder
from .byoc import revoke_code_right
from .install import install_guards

UNIT_FILE = "flare-sparse-site.service"
_UNIT = """# A site of FLARE as a service. Copy it to /etc/systemd/system/, then: systemctl enable --now {name}
[Unit]
Description=NVIDIA FLARE site {site}
After=network-online.target
Wants=network-online.target

[Service]
Type=forking
User={user}
ExecStart={kit}/startup/start.sh
# FLARE's start script watches the site itself; systemd starts both again after a crash or a restart of the machine.
Restart=always
RestartSec=30
UMask=0077

[Install]
WantedBy=multi-user.target
"""


def set_up_site(kit: Path, data: Path | None, policy: Path | None, id_column: str | None = None) -> Iterator[str]:
    """Make a site ready; yield what was done, a line each. What is there already stays, and a second call adds nothing.

    Args:
        kit: the site's startup kit.
        data: folder or file of the site's data; None: keep the site file of the kit.
        policy: file or preset of what may leave; None: keep the policy in the kit.
        id_column: column of a table with the identifiers of subjects.

    Raises:
        ConfigError: there is no such kit or data, or the site file has other settings.
        DataError: the site has no location for its data.
    """
    local = find_local_folder(kit)
    file, settings = local / LOCAL_FILE, {"data": str(data.absolute())} if data else {}
    if id_column is not None:
        settings["id"] = id_column
    if settings and file.is_file() and yaml.safe_load(file.read_text(encoding="utf-8")) != settings:
        raise ConfigError(f"{file} has other settings already; change that file, and leave --data and --id out")
    if id_column is not None and data is None and not file.is_file():
        raise ConfigError(f"--id {id_column}: {file} does not exist yet; give --data, too")
    if data is not None and not data.exists():
        raise ConfigError(f"--data {data}: there is no such file or folder")
    if settings and not file.is_file():
        file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        file.chmod(0o600)
    yield f"data: {find_site_data(kit.resolve().name, local, {}).path}"
    in_force = install_guards(kit, policy).model_dump(exclude_defaults=True)
    yield f"policy: {'; '.join(f'{name}: {value}' for name, value in in_force.items()) or 'everything may leave'}"
    added, _ = allow_classes(kit, ())
    yield f"classes that jobs may name: {len(added)} added, by name"
    roles = revoke_code_right(kit)
    yield f"code in jobs: refused{', also from ' + ', '.join(roles) if roles else ''}"


def write_unit(kit: Path) -> Path:
    """Write a unit of systemd that starts the site with the machine; return the file.

    Raises:
        ConfigError: the kit has no start script.
    """
    folder = kit.resolve()
    if not (folder / "startup" / "start.sh").is_file():
        raise ConfigError(f"{folder} has no startup/start.sh: give the startup kit of a site")
    file = folder / UNIT_FILE
    text = _UNIT.format(name=UNIT_FILE, site=folder.name, user=getuser(), kit=shlex.quote(str(folder)))
    file.write_text(text, encoding="utf-8")
    return file
