"""A provisioned federation of benchmarks/faults for tests: its processes can be held and killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ports import find_free_ports

FAULTS = Path(__file__).parents[2] / "benchmarks" / "faults"


@contextmanager
def start_killable_federation(folder: Path, patience_s: float) -> Iterator[Any]:
    """Start a ``kills.federation.Federation`` in a folder and stop it at the end of the block.

    Args:
        folder: receives kits, data and faults.
        patience_s: longest wait for the sites to connect, in seconds.
    """
    sys.path.insert(0, str(FAULTS))
    from kills.federation import Federation, wait_for

    first = find_free_ports(2)
    federation = Federation(folder, (first, first + 1))
    federation.prepare()
    try:
        federation.start()
        wait_for(federation.is_connected, patience_s, "all sites connected", every=1)
        yield federation
    finally:
        federation.stop()
        sys.path.remove(str(FAULTS))
