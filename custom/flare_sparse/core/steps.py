"""How far a site is within a training, in a file that stays where the site computes."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STEP_FILE = "flare_sparse_progress.json"
STEP_FOLDER = "progress"
"""Folder of a local run's result folder with a folder for each site's file, while the run goes on."""
EVERY_S = 1.0
"""Seconds between two writes."""


class StepFile:
    """Counts the steps of a site's trainings, and writes the count at most once a second.

    Args:
        file: is replaced at every write; its folder exists.
        site: name of the site.
    """

    def __init__(self, file: Path, site: str):
        self._file, self._site, self._written = file, site, 0.0

    def begin(self, number: int, steps: int, epochs: int) -> Callable[[], None]:
        """Note that the training of round ``number`` begins; return what to call after each of its steps."""
        count = 0
        self._write(number, count, steps, epochs)

        def after_step() -> None:
            nonlocal count
            count += 1
            if time.monotonic() - self._written >= EVERY_S:
                self._write(number, count, steps, epochs)

        return after_step

    def _write(self, number: int, step: int, steps: int, epochs: int) -> None:
        self._written = time.monotonic()
        line = {"site": self._site, "round": number, "step": step, "steps": steps, "epochs": epochs}
        part = self._file.with_suffix(".part")
        try:
            part.write_text(json.dumps(line), encoding="utf-8")
            part.replace(self._file)
        except OSError:
            # A full disk must not end a training for a line that nobody needs.
            return


def describe_step(line: Mapping[str, Any]) -> str:
    """Return how far a site is, as text; without steps, as of a script, only the round.

    >>> describe_step({"site": "a", "round": 3, "step": 7, "steps": 20, "epochs": 2})
    'a: round 3, epoch 1 of 2, step 7 of 20'
    """
    step, steps, epochs = (int(line[name]) for name in ("step", "steps", "epochs"))
    epoch = min(epochs, 1 + step * epochs // max(steps, 1))
    passes = f", epoch {epoch} of {epochs}" if epochs > 1 else ""
    return f"{line['site']}: round {line['round']}" + (f"{passes}, step {step} of {steps}" if step else ", began")
