"""A site as the site part of a method uses it: a trainer, the model of the request, and a memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.exchange import Patch
from ..core.mask import Mask
from ..core.params import Layout
from ..core.steps import StepFile
from ..privacy.release import SiteRelease
from .config import TrainingConfig
from .trainer import Trainer, Training


class Site:
    """One site: it trains the model of a request, and evaluates models.

    Args:
        name: name of the site in FLARE.
        trainer: computes on the site's examples.
        site_settings: the method's settings from the site file; None if the job's settings apply.

    Attributes:
        weights: ``(P,)`` the vector of the server's last request, with the entries outside its patch filled in.
        live_patch: the patch that gives ``weights`` if it is written over zeros: its mask has every entry that may
            differ from 0. None: unknown. Code that assigns ``weights`` replaces it.
        release: what leaves in place of exact numbers about people; None: these leave.
        evaluated: layout and vector of the whole network that was evaluated last; None: none.
        step_file: counts the steps of each training; None: nobody looks.
    """

    def __init__(self, name: str, trainer: Trainer, site_settings: Any = None):
        self.name, self.trainer, self.site_settings = name, trainer, site_settings
        self.release: SiteRelease | None = None
        self.weights = torch.zeros(trainer.layout.size)
        self.live_patch: Patch | None = None
        self.evaluated: tuple[Layout, Tensor] | None = None
        self.step_file: StepFile | None = None
        self._received_memory: Mapping[str, Tensor] = {}

    @property
    def layout(self) -> Layout:
        """Layout of the model."""
        return self.trainer.layout

    @property
    def start(self) -> Tensor:
        """The model of the request ``(P,)`` where the site computes: ``weights`` themselves on a CPU."""
        return self.weights.to(self.trainer.device)

    @property
    def num_examples(self) -> int:
        """n_k: number of training examples, or what the site's release states in its place."""
        if self.release is None or not self.trainer.num_examples:
            return self.trainer.num_examples
        return self.release.numbers.train

    @property
    def memory(self) -> dict[str, Tensor]:
        """Tensors that the site keeps between rounds; see :class:`.trainer.Trainer`."""
        return self.trainer.memory

    def receive(self, memory: Mapping[str, Tensor]) -> None:
        """Start to answer a request, whose model is in ``weights``, with the memory from which the answer starts."""
        # A copy: a method may replace entries of its memory, and a retry starts from the memory of the first attempt.
        self._received_memory = dict(memory)
        self.memory.clear()
        self.memory.update(self._received_memory)

    def train(self, start: Tensor, trainable: Mask, config: TrainingConfig, t: int, **options: Any) -> Tensor:
        """Return the trained weights ``(P,)``; arguments as of :meth:`train_entries`, whose values they contain."""
        values = self.train_entries(start, trainable, config, t, **options)
        return values if trainable.is_full else trainable.put(values, start.to(values.device, copy=True))

    def train_entries(self, start: Tensor, trainable: Mask, config: TrainingConfig, t: int, **options: Any) -> Tensor:
        """Train in round ``t`` and return the values ``(trainable.count,)`` of the trainable entries.

        They lie where the site computes; a message copies what it sends to the CPU.
        Unlike :meth:`train`, it copies no entry that does not train. The arguments are fields of
        :class:`.trainer.Training`: ``options`` are ``steps``, ``proximal_strength``, ``tolerance``, ``step_scale`` and
        ``stream``.
        """
        patch = self.live_patch if start is self.weights else None
        training = Training(start, trainable, config, t, patch=patch, **options)
        if self.step_file is not None:
            count = config.count_steps(self.trainer.num_examples) if training.steps is None else training.steps
            training = replace(training, after_step=self.step_file.begin(t, count, config.epochs))
        return self.trainer.train(training)

    def narrow(self, live: Mask) -> Site:
        """Return this site with the smaller network of the ``live`` entries; the site itself if all entries are live.

        The smaller site's ``weights`` are the live entries of this site's.

        Raises:
            Untraceable: the network's channels cannot be traced.
            SelectionError: ``live`` removes entries other than those of complete units.
        """
        if live.is_full:
            return self
        site = Site(self.name, self.trainer.narrow(live), self.site_settings)
        site.weights, site.release, site.step_file = live.take(self.weights), self.release, self.step_file
        return site

    def evaluate(self, weights: Tensor) -> dict[str, float]:
        """Return the metrics of ``weights`` ``(P,)`` that may leave the site; see :meth:`.trainer.Trainer.evaluate`."""
        # The model of the request is evaluated as the site received it: with what the site kept before it trained.
        memory = self._received_memory if weights is self.weights else self.memory
        self.evaluated = self.trainer.complete(weights.cpu(), memory)
        return self.trainer.evaluate(weights, memory)
