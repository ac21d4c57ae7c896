"""Which method works with which feature, and why not: the table of needs as a page and as rows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ..methods.registry import METHODS
from .needs import AUDIT, CONTINUATION, FEATURES, Feature, match_needs
from .schema import JobConfig

_TITLE = """# Compatibility

Which method works with which feature, by default settings. A method declares what it needs, a feature what it takes
away ([new-method.md](new-method.md)); settings of a method may need more or less, and an error names them before a run
starts. `flare-sparse methods --matrix` prints the table; `python -m flare_sparse.config.compatibility` writes this
page.
"""


def list_columns() -> list[Feature]:
    """Return the features that some method does not work with by its default settings."""
    return [feature for feature in (*FEATURES.values(), CONTINUATION, AUDIT) if any(find_reasons(feature).values())]


def find_reasons(feature: Feature) -> dict[str, str]:
    """Return why each method does not work with a feature by its default settings; empty: it does."""
    missing = {name: match_needs(method.Config().needs(), feature, None) for name, method in METHODS.items()}
    return {name: " and ".join(dict.fromkeys(need.reason for need in needs)) for name, needs in missing.items()}


def list_pairs() -> Iterator[tuple[Feature, Feature, str]]:
    """Yield each two features that exclude each other, and why: what the first one takes away, the second one needs."""
    for second in FEATURES.values():
        job = None if second.name == "task.script" else _build_job(second)
        for first in FEATURES.values():
            missing = match_needs(second.needs(job), first, None)
            if missing and first is not second:
                yield first, second, missing[0].reason


def _build_job(feature: Feature) -> JobConfig:
    """Return a job with a feature, whose own conflicts do not matter here."""
    settings = {"name": "job", "method": {"name": "fedavg"}, "task": {"name": "brain_age"}}
    for section, values in feature.example.items():
        settings[section] = {**settings.get(section, {}), **values}  # type: ignore[dict-item]
    return JobConfig.model_validate(settings)


def format_page() -> str:
    """Return ``docs/compatibility.md``."""
    groups: dict[tuple[str, ...], list[Feature]] = {}
    for feature in list_columns():
        groups.setdefault(tuple(find_reasons(feature).values()), []).append(feature)
    titles = [", ".join(f"`{feature.name}`" for feature in features) for features in groups.values()]
    effects = ["; ".join(dict.fromkeys(feature.effect for feature in features)) for features in groups.values()]
    lines = [_TITLE, "## Methods", ""]
    for number, (title, effect) in enumerate(zip(titles, effects, strict=True), 1):
        lines += textwrap.wrap(f"{number}. {title}: {effect}", 120, subsequent_indent="   ", break_on_hyphens=False)
    lines += ["", f"| method | {' | '.join(map(str, range(1, len(groups) + 1)))} |", "| --- |" + " --- |" * len(groups)]
    for method, texts in zip(METHODS, zip(*groups, strict=True), strict=True):
        lines.append(f"| [`{method}`](algorithms.md) | {' | '.join('no' if text else 'yes' for text in texts)} |")
    lines += ["", "## Why not", ""]
    for texts, title in zip(groups, titles, strict=True):
        lines += [f"### {title}", ""]
        for reason in dict.fromkeys(filter(None, texts)):
            methods = ", ".join(f"`{name}`" for name, text in zip(METHODS, texts, strict=True) if text == reason)
            lines += textwrap.wrap(f"- {methods}: {reason}", 120, subsequent_indent="  ", break_on_hyphens=False)
        lines.append("")
    lines += ["## Features with features", ""]
    pairs: dict[tuple[str, str], list[str]] = {}
    for first, second, reason in list_pairs():
        pairs.setdefault((second.name, reason), []).append(f"`{first.name}`")
    for (name, reason), names in pairs.items():
        text = f"- `{name}` not with {', '.join(names)}: {reason}"
        lines += textwrap.wrap(text, 120, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    from pathlib import Path

    Path("docs/compatibility.md").write_text(format_page(), encoding="utf-8")
