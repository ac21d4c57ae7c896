"""Networks by name: errors name the wrong setting and the remedy."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from torch import nn

from flare_sparse.core.errors import ConfigError
from flare_sparse.tasks.models import MODELS, ModelConfig, build_model
from flare_sparse.tasks.models.registry import get_input_kind


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_network_is_built_from_a_section(name: str) -> None:
    shapes = {"volume": (69, 69, 69), "image": (3, 32, 32), "features": 7, "patch": (64, 64, 64)}
    given = shapes[get_input_kind(name)]
    section = ModelConfig.model_validate({"name": name})
    assert isinstance(section.build(**{get_input_kind(name): given}, outputs=2), nn.Module)
    assert ModelConfig.model_validate(section.model_dump(mode="json")) == section


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("alexnet", {}, "no model 'alexnet'; choose one of: .*Did you mean 'alexnet3d'?"),
        ("mlp", {"features": 3, "hiden": (2,)}, "model 'mlp': hiden: no such field. Did you mean 'hidden'?"),
        ("mlp", {"features": 3, "dropout": 1.0}, "dropout: Input should be less than 1, found 1.0"),
        ("mlp", {}, "features: Field required"),
        ("image_cnn", {"channels": ()}, "channels: Tuple should have at least 1 item"),
        ("alexnet3d", {"volume": (69, 69)}, "volume.2: Field required"),
    ],
)
def test_invalid_names_and_settings_are_explained(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(name, **settings)


def test_section_is_completed_with_defaults() -> None:
    section = ModelConfig.model_validate({"name": "mlp", "hidden": [8]})
    assert section.model_dump() == {"name": "mlp", "hidden": [8], "dropout": 0.0, "norm": None, "gates": None}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "mlp", "features": 3}, "'features' of a model is set by the task"),
        ({"name": "mpl"}, "Did you mean 'mlp'?"),
        ({"name": "mlp", "hidden": [0]}, "hidden.0: Input should be greater than or equal to 1, found 0"),
        ({}, "name"),
    ],
)
def test_invalid_sections_raise(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(section)
