"""The version of this package, as it stands in the code that runs: a job may bring another than the one installed."""

from __future__ import annotations

VERSION = "0.1.0"
