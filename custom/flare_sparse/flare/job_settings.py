"""Settings of a job as arguments of its controller and its executor, where an administrator who reviews JSON looks.

They are shown and not used: what runs is in the job's own file. A job whose arguments differ from it is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..config.loading import serialize_job
from ..config.schema import JobConfig
from ..core.errors import ConfigError
from .workspace import JOB_FILE

SITE_SECTIONS = ("method", "wire", "privacy", "audit", "permit")
"""Sections that decide what a site computes and sends."""
SERVER_SECTIONS = (*SITE_SECTIONS, "federation")


def show_settings(job: JobConfig, sections: Sequence[str]) -> dict[str, Any]:
    """Return the arguments ``method``, ``task`` and ``settings``: the values of some sections by dotted path."""
    content = serialize_job(job)
    chosen = {name: content[name] for name in sections if name in content}
    settings = dict(_flatten("", chosen))
    # These are the arguments before.
    settings.pop(f"method.{job.method.key}")
    return {"method": job.method.name, "task": job.task.name, "settings": settings}


def check_shown_settings(owner: object, job: JobConfig, sections: Sequence[str]) -> None:
    """Compare the arguments of a component with the job's own file.

    Args:
        owner: component with the attributes that :func:`show_settings` returns.
        job: what runs.
        sections: sections that the component shows.

    Raises:
        ConfigError: an argument differs, or is missing.
    """
    shown = {name: getattr(owner, name) for name in ("method", "task", "settings")}
    before, after = (dict(_flatten("", arguments)) for arguments in (shown, show_settings(job, sections)))
    for path in sorted({*before, *after}):
        if path not in before or path not in after or before[path] != after[path]:
            found, expected = (repr(values.get(path, "nothing")) for values in (before, after))
            raise ConfigError(
                f"{type(owner).__name__}: the job's JSON shows {found} for {path.removeprefix('settings.')}, but its "
                f"{JOB_FILE}, which runs, has {expected}; export the job again (flare-sparse export)"
            )


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each setting; of a list with sections its JSON, which FLARE takes for no component."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flatten(f"{path}.{key}".removeprefix("."), part)
    else:
        is_plain = not isinstance(value, list) or all(not isinstance(part, (list, dict)) for part in value)
        yield path, value if is_plain else json.dumps(value)
