"""Networks by name, built of MONAI and torch parts. A builder is a function of keyword settings."""

from __future__ import annotations

from .config import ModelConfig
from .registry import MODELS, build

__all__ = ["MODELS", "ModelConfig", "build"]
