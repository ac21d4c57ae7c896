"""Networks by name, built from MONAI and torch modules. A builder is a function of keyword settings."""

from .registry import MODELS, ModelConfig, build_model, require_input

__all__ = ["MODELS", "ModelConfig", "build_model", "require_input"]
