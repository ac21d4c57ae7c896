"""Fill the templates of pages and documents, which are beside the modules that use them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...core.version import VERSION


def fill_template(name: str, content: Mapping[str, Any], clean: Callable[[Any], Any] | None = None) -> str:
    """Return the page or document of a template.

    Args:
        name: path of the template in :mod:`flare_sparse.results`; values in HTML are escaped, and in Markdown no two
            lines one after another are empty.
        content: its variables, beside the version of the package.
        clean: returns each value as the document may have it; None: as it is.
    """
    environment = Environment(
        loader=PackageLoader("flare_sparse.results", "."),
        autoescape=name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=clean,
    )
    text = environment.get_template(name).render(**content, version=VERSION)
    return text if environment.autoescape else re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"
