"""Version of the running code. A job may carry its own copy of the package, so installed metadata may differ."""

VERSION = "0.1.0"
