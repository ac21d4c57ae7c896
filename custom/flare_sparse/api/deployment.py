"""A study as a FLARE job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..config.study import Study
    from ..flare.recipe import SparseRecipe

Env = Literal["local", "sim", "poc", "prod"]


def build_recipe(study: Study) -> SparseRecipe:
    """Return the job; a user task travels as code, and then the package's source travels, too."""
    from ..flare.recipe import SparseRecipe

    config = study.config
    if study.user_code:
        config = config.model_copy(update={"deployment": config.deployment.model_copy(update={"packaging": "byoc"})})
    return SparseRecipe(config, modules=study.user_code)


def describe_start(study: Study, environment: str) -> str:
    """Return the line of text that says what starts where."""
    method = study.config.method
    return f"{study.config.name}: {method.name}, {method.config.rounds} rounds, {environment}"
