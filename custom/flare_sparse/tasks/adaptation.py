"""Tasks that can start from a pre-trained network, and train either LoRA adapters or the whole network."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import nn

from ..core.seeds import seed_torch
from .models.adapters import AdapterConfig, add_adapters
from .models.base import Base, find_base_folder, load_base
from .task import Task, TaskConfig


class AdaptedTaskConfig(TaskConfig):
    """Base model and adapters of a task."""

    base: Base | None = None
    """folder of the base model in $FLARE_SPARSE_MODELS, or its folder, file and new tensors; null: randomly
    initialised"""
    base_seed: int = Field(0, ge=0)
    """seed of the randomly initialised frozen weights; independent of the run's seed, because server and sites must
    hold the same base model"""
    adapter: AdapterConfig | None = None
    """LoRA adapters, which alone are trained and exchanged, beside the tensors of base.new; null: the whole network"""


class AdaptableTask(Task, ABC):
    """A task whose network is randomly initialised, pre-trained, or a base model with adapters."""

    config: AdaptedTaskConfig

    @abstractmethod
    def build_network(self) -> nn.Module:
        """Return the architecture, randomly initialised."""

    def build_base(self) -> nn.Module:
        """Return the base model: pre-trained, or initialised from ``base_seed``.

        ``peft.PeftModel.from_pretrained(task.build_base(), folder)`` reads the adapters that :meth:`save` wrote.

        Raises:
            ConfigError: the base model is missing or belongs to another network.
        """
        with seed_torch(self.config.base_seed):
            network = self.build_network()
        if self.config.base is not None:
            load_base(network, find_base_folder(self.config.base.folder), self.config.base)
        return network

    def describe_base(self) -> str:
        """Return which tensors the base model has from its file, as one line; empty without a file.

        Raises:
            ConfigError: as :meth:`build_base`.
        """
        base = self.config.base
        return load_base(self.build_network(), find_base_folder(base.folder), base) if base else ""

    def model(self) -> nn.Module:
        """Return the network to train; without base and adapter, torch's global generator initialises it."""
        if self.config.adapter is not None:
            network, base = self.build_base(), self.config.base
            new = [] if base is None else base.list_new(name for name, _ in network.named_parameters())
            adapted: nn.Module = add_adapters(network, self.config.adapter, new)
            return adapted
        return self.build_network() if self.config.base is None else self.build_base()

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write adapters in peft's format; without adapters, write the whole network like any other task."""
        if self.config.adapter is None:
            super().save(model, folder)
        else:
            adapted: Any = model
            adapted.save_pretrained(folder)
