"""A site that trains with a script of the user; what leaves it is decided here, whatever the script does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Literal, final

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..core.errors import ConfigError, MetricsError, PolicyRefusal
from ..core.mask import Mask
from ..core.params import Layout, match_state_dict
from ..core.seeds import derive_seed
from ..tasks.task import Examples, Task
from .config import TrainingConfig
from .sample_usage import SampleUsage
from .script_exchange import (
    GRADIENTS,
    NUM_EXAMPLES,
    NUM_STEPS,
    ScriptFailed,
    ScriptReply,
    ScriptRequest,
    ScriptRunner,
    check_shape,
    read_count,
    read_tensors,
    to_float,
)
from .site import Site

WeighBy = Literal["steps", "examples", "equal"]

WEIGHT = "script_weight"
"""Name of n_k in the site's memory; it must survive a restart, because the server compares it between rounds."""
SCORES_BY_TRAINING = "scores_by_training"
"""Code of the notice that a site's scores are those of one local training, not of gradients."""


@final
class ScriptSite(Site):
    """A site whose script trains and evaluates.

    Entries that a request does not let train keep their bits, whatever the script sends. A site whose script sends no
    gradients scores an entry by one local training: ``|w * (w_before - w_after)|`` in place of ``|w * dL/dw|``.

    Args:
        name: name of the site in FLARE.
        task: builds the network and names the metric.
        layout: layout of the network.
        seed: seed of the run.
        runner: runs the script.
        rounds: number of rounds of the run.
        weigh_by: what n_k is.
    """

    def __init__(
        self, name: str, task: Task, layout: Layout, seed: int, runner: ScriptRunner, rounds: int, weigh_by: WeighBy
    ):
        no_examples = TensorDataset(torch.zeros(0))
        super().__init__(name, task, Examples(no_examples, no_examples), layout, seed)
        self._runner, self._rounds, self._weigh_by = runner, rounds, weigh_by
        self._round = 0
        self._batch_sizes = [1.0]
        self._usage = SampleUsage()
        # The script evaluates the received model before it trains; the metrics are used once that model is evaluated.
        self._evaluated: tuple[Tensor, dict[str, float]] | None = None

    @property
    def can_train(self) -> bool:
        return True

    @property
    def num_examples(self) -> int:
        """n_k, as the script reported it last; 0 before."""
        return int(self.memory[WEIGHT]) if WEIGHT in self.memory else 0

    @property
    def num_test_examples(self) -> int:
        """The metric ``test_examples`` of the script; 0 if it sends none."""
        return int(self._evaluated[1].get("test_examples", 0)) if self._evaluated else 0

    @property
    def usage(self) -> SampleUsage:
        """What the script reported for this update; examples that it did not report count as 0."""
        return self._usage

    def reset_usage(self) -> None:
        self._usage = SampleUsage()

    def train_entries(
        self,
        start: Tensor,
        trainable: Mask,
        config: TrainingConfig,
        t: int,
        *,
        steps: int | None = None,
        proximal_strength: float = 0.0,
        step_scale: Tensor | None = None,
        stream: str = "",
    ) -> Tensor:
        """Let the script train from ``start`` ``(P,)`` in round ``t``, as it decides; return the trainable values.

        Raises:
            ConfigError: the method asks for more than training.
            ScriptFailed: the script failed, or sent no usable tensors.
        """
        if steps is not None or proximal_strength or step_scale is not None or stream:
            raise ConfigError("the method prescribes how a site trains, which a training script decides itself")
        reply = self._ask("train", start, t, trainable)
        return trainable.take(self._keep_frozen(self._read_params(reply, start), start, trainable))

    def compute_gradients(
        self, weights: Tensor, batch_size: int, batches: int | None, t: int, *, batch_statistics: bool = True
    ) -> Iterator[Tensor]:
        """Yield the gradients ``(P,)`` that the script sends; else ``w_before - w_after`` of one local training.

        Raises:
            ScriptFailed: the script failed, or sent no usable tensors.
        """
        reply = self._ask("score", weights, t, Mask.full(self.layout.size))
        if GRADIENTS in reply.meta:
            self._batch_sizes = [float(size) for size in reply.meta[GRADIENTS]]
            yield from self._read_gradients(reply)
        else:
            self._batch_sizes, self.notices = [1.0], (SCORES_BY_TRAINING,)
            gradient = weights - self._read_params(reply, weights)
            gradient[self.layout.trainable_size :] = 0
            yield gradient

    def iterate_batch_weights(self, batch_size: int) -> Iterator[float]:
        """Yield, without end, the weights of the minibatches whose gradients :meth:`compute_gradients` yields."""
        # A generator: its first weight is read after the first gradient, when the sizes are known.
        yield from cycle([size / max(self._batch_sizes) for size in self._batch_sizes])

    def narrow(self, live: Mask) -> Site:
        if live.is_full:
            return self
        raise ConfigError("a training script trains the whole network; it cannot train a smaller one")

    def collect_linear_inputs(self, weights: Tensor, limit: int) -> dict[str, Tensor]:
        raise PolicyRefusal(
            "this site's policy: withhold_isolated needs the inputs of the training examples, which a training script "
            "reads itself"
        )

    def evaluate(self, weights: Tensor) -> dict[str, float]:
        """Return the script's metrics of ``weights``; empty if it sends none.

        A script that evaluates the received model before it trains is not asked twice.
        """
        self.evaluated = self.layout, weights
        if self._evaluated is None or not torch.equal(self._evaluated[0], weights):
            self._ask("evaluate", weights, self._round)
        assert self._evaluated is not None, "every reply has the metrics of the received model"
        return dict(self._evaluated[1])

    def _ask(
        self, kind: Literal["train", "evaluate", "score"], weights: Tensor, t: int, trainable: Mask | None = None
    ) -> ScriptReply:
        """Return the script's reply, and remember its numbers and metrics."""
        self._round = t
        self._model.load(weights)
        params = {name: value.detach().clone() for name, value in self._model.module.state_dict().items()}
        bits = {} if trainable is None or trainable.is_full else self.layout.unflatten(trainable.bits)
        bits = {sent: bits[own] for sent, own in match_state_dict(self._model.module).items() if own in bits}
        seed = derive_seed(self.seed, "script", self.name, kind, t)
        reply = self._runner.run(ScriptRequest(kind, params, max(t - 1, 0), self._rounds, bits, seed))
        self._record_counts(reply, needs_weight=kind != "evaluate")
        self._evaluated = weights.clone(), self._select_metrics(reply)
        return reply

    def _record_counts(self, reply: ScriptReply, *, needs_weight: bool) -> None:
        """Record n_k and the usage.

        Raises:
            ScriptFailed: the number that weighs the update is missing or is no whole number.
        """
        steps, examples = (read_count(reply.meta, key) for key in (NUM_STEPS, NUM_EXAMPLES))
        self._usage = SampleUsage(max(self._usage.examples, examples or 0), self._usage.batches + (steps or 0))
        weight = {"steps": steps, "examples": examples, "equal": 1}[self._weigh_by]
        if weight is not None:
            self.memory[WEIGHT] = torch.tensor(weight)
        elif needs_weight:
            key = NUM_STEPS if self._weigh_by == "steps" else NUM_EXAMPLES
            raise ScriptFailed(
                f"the script sent no {key}, by which task.weigh_by: {self._weigh_by} weighs this site: send "
                f'flare.FLModel(..., meta={{"{key}": ...}}), or set task.weigh_by: equal'
            )

    def _select_metrics(self, reply: ScriptReply) -> dict[str, float]:
        """Return the finite numbers among the metrics; the main metric may be in the meta, as MONAI's scripts send it.

        Raises:
            MetricsError: there are metrics, but not the one that compares rounds and models.
        """
        sent = dict(reply.metrics)
        name = self.task.metric.name
        if name not in sent and name in reply.meta:
            sent[name] = reply.meta[name]
        numbers_sent = {str(key): to_float(value) for key, value in sent.items()}
        metrics = {key: value for key, value in numbers_sent.items() if value is not None}
        if metrics and name not in metrics:
            raise MetricsError(
                f"the script's metrics have no finite {name!r}, by which rounds and models are compared; they are "
                f"{', '.join(sent)}. Set task.metric: {{name: ...}} to one of them, or leave metrics out"
            )
        return metrics

    def _read_params(self, reply: ScriptReply, start: Tensor) -> Tensor:
        """Return the trained vector ``(P,)``; tensors that the script does not send keep their values.

        Raises:
            ScriptFailed: there are no tensors, or one has another name or shape.
        """
        if not reply.params:
            raise ScriptFailed("the script sent no params for a training task: send flare.FLModel(params=...)")
        tensors = read_tensors(reply.params, self._model.module)
        trained = start.clone()
        for spec, offset in zip(self.layout.tensors, self.layout.offsets, strict=False):
            if spec.name not in tensors:
                continue
            value = check_shape(tensors[spec.name], spec.name, spec.shape)
            part = trained[offset : offset + spec.size]
            part.add_(value.reshape(-1)) if reply.is_delta else part.copy_(value.reshape(-1))
        return trained

    def _read_gradients(self, reply: ScriptReply) -> Iterator[Tensor]:
        tensors = read_tensors(reply.params or {}, self._model.module)
        batches = len(reply.meta[GRADIENTS])
        for batch in range(batches):
            gradient = torch.zeros(self.layout.size)
            for spec, offset in zip(self.layout.tensors, self.layout.offsets, strict=False):
                if spec.role != "buffer" and spec.name in tensors:
                    values = check_shape(tensors[spec.name], spec.name, (batches, *spec.shape))
                    gradient[offset : offset + spec.size] = values[batch].reshape(-1)
            yield gradient

    @staticmethod
    def _keep_frozen(trained: Tensor, start: Tensor, trainable: Mask) -> Tensor:
        """Return ``trained`` with the bits of ``start`` outside ``trainable``."""
        return trained if trainable.is_full else torch.where(trainable.bits, trained, start)
