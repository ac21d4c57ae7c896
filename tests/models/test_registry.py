"""Networks by name: what is wrong with a name or a setting is said with the way out."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from torch import nn

from flare_sparse.errors import ConfigError
from flare_sparse.models import MODELS, ModelConfig, build
from flare_sparse.models.registry import reads


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_network_is_built_from_a_section(name: str) -> None:
    given = {"volume": (69, 69, 69), "image": (3, 32, 32), "features": 7}[reads(name)]
    section = ModelConfig.model_validate({"name": name})
    assert isinstance(section.build(**{reads(name): given}, outputs=2), nn.Module)
    assert ModelConfig.model_validate(section.model_dump(mode="json")) == section


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("alexnet", {}, "no model 'alexnet'; choose one of: .*Did you mean 'alexnet3d'?"),
        ("mlp", {"features": 3, "hiden": (2,)}, "model 'mlp': no setting 'hiden'. Did you mean 'hidden'?"),
        ("mlp", {"features": 3, "dropout": 1.0}, "dropout: Input should be less than 1, found 1.0"),
        ("mlp", {}, "features: Field required"),
        ("image_cnn", {"channels": ()}, "channels: Tuple should have at least 1 item"),
        ("alexnet3d", {"volume": (69, 69)}, "volume.2: Field required"),
    ],
)
def test_each_mistake_is_explained(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **settings)


def test_a_section_is_resolved_with_all_defaults() -> None:
    section = ModelConfig.model_validate({"name": "mlp", "hidden": [8]})
    assert section.model_dump() == {"name": "mlp", "hidden": [8], "dropout": 0.0}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "mlp", "features": 3}, "'features' of a model is given by the task"),
        ({"name": "mpl"}, "Did you mean 'mlp'?"),
        ({"name": "mlp", "hidden": [0]}, "hidden.0: Input should be greater than or equal to 1, found 0"),
        ({}, "name"),
    ],
)
def test_a_wrong_section_is_refused(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(section)
