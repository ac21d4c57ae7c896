"""Networks by name, built from MONAI and torch modules. A builder is a function of keyword settings."""

from .config import ModelConfig
from .registry import MODELS, build_model

__all__ = ["MODELS", "ModelConfig", "build_model"]
