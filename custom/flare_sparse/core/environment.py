"""Variables of this process, which the processes that it starts inherit."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment while the block runs, and restore what they were."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
