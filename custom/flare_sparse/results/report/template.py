"""Pages from the templates of this package; they need no figures, and so no matplotlib."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def fill_template(name: str, content: Mapping[str, Any]) -> str:
    """Return the page of a template; every value in it is escaped."""
    loader = PackageLoader("flare_sparse.results.report", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(name).render(**content, version=version("flare-sparse"))
