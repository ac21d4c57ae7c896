"""The task of a job whose sites train with a script of the user: its network and its metric; the script does the rest.

The script is an ordinary script on FLARE's Client API (``flare.receive``, ``flare.send``). It reads the site's data,
trains and evaluates; see :class:`flare_sparse.training.script_trainer.ScriptTrainer`.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

from pydantic import Field, field_validator
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.params import match_state_dict
from ..core.settings import Settings
from .task import Cohort, Examples, Metric, SiteData, Task, TaskConfig


class ScriptMetric(Settings):
    """Which of the script's metrics compares rounds and models."""

    name: str = Field("accuracy", min_length=1)
    """its key in the metrics that the script sends"""
    mode: Literal["min", "max"] = "max"
    """min: lower is better; max: higher is better"""
    unit: str = ""
    """its unit, for tables and plots"""


class ScriptConfig(TaskConfig):
    """Settings of a job with a training script."""

    model: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
    """dotted path of the network's class, such as model.Net"""
    model_args: dict[str, Any] = Field(default_factory=dict)
    """arguments of the network's class, by name"""
    args: str = ""
    """command line of the script, such as --epochs 2"""
    launch: str = ""
    """command that starts the script as a process of its own, such as python or torchrun --nproc_per_node=2; empty: in
    the site's process. Not for --env local"""
    metric: ScriptMetric = Field(default_factory=ScriptMetric)
    """metric that compares rounds and models"""
    weigh_by: Literal["steps", "examples", "equal"] = "steps"
    """n_k, the weight of a site: NUM_STEPS_CURRENT_ROUND or num_examples in the meta that the script sends, or the same
    for all sites"""

    @field_validator("args", "launch")
    @classmethod
    def _check_command(cls, value: str) -> str:
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{value!r}: {str(error).lower()}; expected a command line as in a shell") from error
        return value


@final
class ScriptTask(Task):
    """The network and the metric of a training script.

    Args:
        script: file of the script, relative to the configuration.
        config: the settings.
        model: a network of the class that the settings name, built from their arguments. FLARE builds it as a part of
            the job's component, so that the site's allow-list decides about its class.
    """

    Config = ScriptConfig
    config: ScriptConfig

    def __init__(self, script: str, config: ScriptConfig | Mapping[str, Any], model: nn.Module):
        super().__init__(config)
        self.script = script
        if not isinstance(model, nn.Module):
            raise ConfigError(f"task.model: {self.config.model} is {type(model).__name__}; expected a torch nn.Module")
        _check_state_dict(model, self.config.model)
        self.network_class = type(model)
        chosen = self.config.metric
        # The metric of a task is that of its class; here the settings name it. A script may send no metrics at all.
        self.metric = Metric(chosen.name, chosen.unit, chosen.mode, may_be_undefined=True)

    def model(self) -> nn.Module:
        return self.network_class(**self.config.model_args)

    def load(self, data: SiteData, seed: int) -> Examples:
        raise ConfigError("a training script reads the site's data itself; this command needs a task with load()")

    def cohort(self, path: Path) -> Cohort:
        raise ConfigError(
            "simulator.data.partition: a training script divides its data itself; set partition: {kind: shared}, give "
            "each site its own folder (path: data/{site}), or leave simulator.data out"
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise ConfigError("a training script computes the loss itself; this command needs a task with loss()")

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        raise ConfigError("a training script predicts itself; this command needs a task with predict()")

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        raise ConfigError("a training script computes its metrics itself; this command needs a task with metrics()")


def _check_state_dict(model: nn.Module, path: str) -> None:
    """Refuse a script that exchanges a ``state_dict()`` without one of the parameters.

    Raises:
        ConfigError: a script that exchanges ``state_dict()`` could not train one of the parameters.
    """
    given = set(match_state_dict(model).values())
    missing = [name for name, p in model.named_parameters() if p.requires_grad and name not in given]
    if missing:
        raise ConfigError(
            f"task.model: {path}.state_dict() gives {len(missing)} of the network's parameters neither by name nor "
            f"under another name, such as {missing[0]!r}; a script could not exchange them, and they would never "
            "train. Return the network's own tensors, not copies, and freeze what does not train: "
            "parameter.requires_grad_(False)"
        )
