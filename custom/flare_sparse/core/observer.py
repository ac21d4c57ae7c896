"""What a caller hears of a run while it proceeds."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Observer:
    """Hears what happens in a run; this one ignores it.

    Examples:
        >>> import flare_sparse
        >>> class Log(Observer):
        ...     def see_round(self, line):
        ...         print(line["round"], line["sites_contributed"])
        >>> run = flare_sparse.run("study.yaml", out="observed", observer=Log())
        0 ['A', 'B']
        1 ['A', 'B']
        2 ['A', 'B']
        3 ['A', 'B']
    """

    def say(self, text: str) -> None:
        """Hear a line of text about the run."""

    def note(self, text: str) -> None:
        """Hear what was done to the data, such as sites that were renamed."""

    def warn(self, text: str) -> None:
        """Hear what may be wrong with the data, such as a folder without examples."""

    def see_round(self, line: dict[str, Any]) -> None:
        """Hear of a committed round.

        Args:
            line: a line of ``rounds.jsonl``.
        """

    def wait(self, text: str) -> AbstractContextManager[Any]:
        """Return a context that lasts as long as what the text describes."""
        return nullcontext()


SILENT = Observer()
