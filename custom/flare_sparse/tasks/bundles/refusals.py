"""Items of a MONAI bundle that cannot be used: they are collected, so that one error names all of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

from ...core.errors import ConfigError

MISSING = "missing"
"""Start of the problem of an item that a bundle has not."""


class Refusal(ConfigError):
    """An item of a bundle that cannot be used.

    Args:
        source: where the item stands.
        path: its id.
        problem: what is wrong with it, and the remedy.
    """

    def __init__(self, source: str, path: str, problem: str):
        super().__init__(f"{source}: {path}: {problem}")
        self.path, self.problem = path, problem


@final
class Refusals:
    """The refused items of one bundle; :func:`collect_refusals` raises them.

    Args:
        source: name of the file or setting that holds the items, for errors.
        ids: id of each part in the bundle's own file, by the name that it has in a job.
    """

    def __init__(self, source: str, ids: Mapping[str, str] | None = None):
        self.source = source
        self._ids, self._found = ids or {}, dict[tuple[str, str], Refusal]()

    def refuse(self, path: str, problem: str) -> Refusal:
        """Return the error of an item."""
        part, separator, rest = path.partition("::")
        return Refusal(self.source, f"{self._ids.get(part, part)}{separator}{rest}", problem)

    @property
    def found(self) -> list[Refusal]:
        """What was collected."""
        return list(self._found.values())

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep a refusal, so that the next item is read.

        Two that name one item and problem are one, and an item that is refused is not missing, too.
        """
        try:
            yield
        except Refusal as refusal:
            if refusal.problem.startswith(MISSING) and any(r.path.startswith(refusal.path) for r in self.found):
                return
            self._found.setdefault((refusal.path.rpartition("::")[2], refusal.problem), refusal)

    def raise_all(self) -> None:
        """Raise what was collected; do nothing if that is nothing.

        Raises:
            ConfigError: the text names each refused item once.
        """
        refusals = self.found
        if len(refusals) == 1:
            raise refusals[0]
        if refusals:
            lines = "\n".join(f"  {refusal.path}: {refusal.problem}" for refusal in refusals)
            raise ConfigError(f"{self.source}: {len(refusals)} items of this bundle cannot be used:\n{lines}")
