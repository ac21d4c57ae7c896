"""Environment of commands that tests start as processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
"""The programs beside this interpreter come first."""
