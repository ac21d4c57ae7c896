"""The network of a training script, as a Python caller gives it: an instance, a class, or the name of a class."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..core.errors import ConfigError
from ..core.params import Layout

NetworkSource = nn.Module | type[nn.Module] | Mapping[str, Any] | str


def describe_network(model: NetworkSource) -> tuple[str, dict[str, Any]]:
    """Return the dotted path of a network's class and the arguments that build it.

    Args:
        model: a network, its class, the dotted path of its class, or ``{"class_path": ..., "args": {...}}``.

    Raises:
        ConfigError: ``model`` is none of these, its class cannot be imported at a site, or the class needs arguments
            that are not given.
    """
    if isinstance(model, str):
        return model, {}
    if isinstance(model, Mapping) and set(model) <= {"class_path", "args"}:
        path, args = model.get("class_path"), model.get("args", {})
        if isinstance(path, str) and isinstance(args, Mapping):
            return path, dict(args)
    network = model if isinstance(model, type) else type(model)
    if not issubclass(network, nn.Module):
        raise ConfigError(
            "model: expected a network such as Net(), its class Net, the class's dotted path 'model.Net', or "
            f'{{"class_path": "model.Net", "args": {{...}}}}, found {model!r}'
        )
    if network.__module__ == "__main__" or "<" in network.__qualname__:
        raise ConfigError(
            f"model: {network.__qualname__} is defined in the running script or notebook, which no site can import; "
            "move its class to a module beside the training script, such as model.py"
        )
    class_path = f"{network.__module__}.{network.__qualname__}"
    if network.__module__.startswith("peft."):
        raise ConfigError(
            f"model: {network.__qualname__} is what peft.get_peft_model returns; call it in the constructor of a class "
            "of your own, from which server and sites build the network (docs/lora.md)"
        )
    try:
        built = network()
        is_same = not isinstance(model, nn.Module) or (
            Layout.from_module(built).fingerprint == Layout.from_module(model).fingerprint
        )
    except TypeError:
        is_same = False
    if not is_same:
        effect = "fails" if isinstance(model, type) else "fails or builds another one"
        raise ConfigError(
            f"model: server and sites build the network from its class, and {class_path}() {effect}; give "
            f'its arguments: model={{"class_path": "{class_path}", "args": {{...}}}}'
        )
    return class_path, {}
