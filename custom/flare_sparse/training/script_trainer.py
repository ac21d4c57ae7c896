"""Training by a script of the user; what leaves the site is decided here, whatever the script does."""

import math
import numbers
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError, MetricsError, PolicyRefusal
from ..core.mask import Mask
from ..core.params import Layout, match_state_dict
from ..core.seeds import derive_seed, seed_torch
from ..privacy.dp.scripts import ScriptBudget
from ..tasks.task import Task
from .config import TrainingConfig
from .flat import FlatModel
from .sample_usage import SampleUsage
from .script_exchange import GRADIENTS, NUM_EXAMPLES, NUM_STEPS, ScriptFailed, ScriptReply, ScriptRequest, ScriptRunner
from .trainer import Trainer, Training

WeighBy = Literal["steps", "examples", "equal"]

WEIGHT = "script_weight"
"""Name of n_k in the site's memory; it must survive a restart, because the server compares it between rounds."""
SCORES_BY_TRAINING = "scores_by_training"
"""Code of the notice that a site's scores are those of one local training, not of gradients."""

_PEFT = "base_model.model."
"""Start of the names of the network that ``peft.get_peft_model`` has wrapped."""
_ADAPTER = re.compile(r"(?:(\.lora_\w+)|\.modules_to_save)\.[^.]+(?=\.|$)")
"""Name of an adapter, which peft leaves out of what it saves."""
_WRAPPED = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts that ``torch.compile``, Opacus, FSDP and checkpointing insert into the names of what they wrap."""
_MOST_WRAPPERS = 4
"""Most first parts that all names share, such as ``module.`` of ``DataParallel``, and are no part of the network's."""
_COUNTER = "n_averaged"
"""Number of averaged models beside the tensors of an averaged one."""


class ScriptTrainer(Trainer):
    """Lets a script train and evaluate.

    Entries that a request does not let train keep their bits, whatever the script sends. A script that sends no
    gradients scores an entry by one local training: ``|w * (w_before - w_after)|`` in place of ``|w * dL/dw|``.

    Args:
        name: name of the site in FLARE.
        task: builds the network and names the metric.
        layout: layout of the network.
        seed: seed of the run.
        runner: runs the script.
        rounds: the rounds as the script counts them. It counts requests for scores before the first one, too, so that
            what it builds in its round 0, such as a privacy engine, is built once and lasts for all that it trains.
        weigh_by: what n_k is.
        budget: what the script's engine charges; None: the job has no privacy section.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        layout: Layout,
        seed: int,
        runner: ScriptRunner,
        rounds: range,
        weigh_by: WeighBy,
        budget: ScriptBudget | None = None,
    ):
        super().__init__(layout)
        self.mechanism = self._budget = budget
        self.task, self._name, self._seed = task, name, seed
        # The weights drawn here are overwritten before use; seeding within a context leaves the global generator alone.
        with seed_torch(0):
            self._model = FlatModel(task.model(), layout)
        self._runner, self._rounds, self._weigh_by = runner, rounds, weigh_by
        self._round = 0
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
    def usage(self) -> SampleUsage:
        """What the script reported for this update; examples that it did not report count as 0."""
        return self._usage

    def reset_usage(self) -> None:
        self._usage = SampleUsage()

    def train(self, training: Training) -> Tensor:
        """Let the script train as it decides, and return the trainable values ``(training.trainable.count,)``.

        Raises:
            ConfigError: the method asks for more than training.
            ScriptFailed: the script failed, or sent no usable tensors.
        """
        if (
            training.steps is not None
            or training.proximal_strength
            or training.step_scale is not None
            or training.stream
        ):
            raise ConfigError("the method prescribes how a site trains, which a training script decides itself")
        start, trainable, t = training.start, training.trainable, training.round
        reply = self._ask_charged("train", start, t, trainable)
        return trainable.take(self._read_params(reply, start))

    def compute_gradients(
        self, weights: Tensor, batch_size: int, batches: int | None, t: int, *, batch_statistics: bool = True
    ) -> Iterator[tuple[Tensor, float]]:
        """Yield the gradients ``(P,)`` that the script sends; else ``w_before - w_after`` of one local training.

        Raises:
            ScriptFailed: the script failed, or sent no usable tensors.
        """
        reply = self._ask("score", weights, t, Mask.full(self.layout.size))
        if GRADIENTS in reply.meta:
            sizes = [float(size) for size in reply.meta[GRADIENTS]]
            for gradient, size in zip(self._read_gradients(reply), sizes, strict=True):
                yield gradient, size / max(sizes)
        else:
            self.notices = (SCORES_BY_TRAINING,)
            gradient = weights - self._read_params(reply, weights)
            gradient[self.layout.num_parameters :] = 0
            yield gradient, 1.0

    def collect_inputs(self, weights: Tensor, kind: type[nn.Module], limit: int | None = None) -> dict[str, Tensor]:
        raise PolicyRefusal(
            "this site's policy: withhold_isolated needs the inputs of the training examples, which a training script "
            "reads itself"
        )

    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the script's metrics of ``weights``; empty if it sends none.

        A script that evaluates the received model before it trains is not asked twice.
        """
        if self._evaluated is None or not torch.equal(self._evaluated[0], weights):
            self._ask("evaluate", weights, self._round)
        assert self._evaluated is not None, "every reply has the metrics of the received model"
        return dict(self._evaluated[1])

    def compute_private_gradient(
        self, weights: Tensor, entries: Mask, config: TrainingConfig, lots: int | None
    ) -> Tensor:
        """Return ``w_before - w_after`` of one training of the script, which it is charged for, on the entries.

        Raises:
            ScriptFailed: the script failed, sent gradients of minibatches, or trained without its engine.
        """
        reply = self._ask_charged("score", weights, 0, entries)
        if GRADIENTS in reply.meta:
            raise ScriptFailed("send_scores sends gradients without noise; with privacy, let the script train instead")
        self.notices = (SCORES_BY_TRAINING,)
        return (weights - self._read_params(reply, weights)).masked_fill(~entries.bits, 0)

    def _ask_charged(self, kind: Literal["train", "score"], weights: Tensor, t: int, trainable: Mask) -> ScriptReply:
        """Return the script's reply to a training, which its engine must have charged.

        Raises:
            ScriptFailed: the script failed, or trained without a charge.
        """
        before = None if self._budget is None else self._budget.count_charges()
        reply = self._ask(kind, weights, t, trainable)
        if self._budget is not None and self._budget.count_charges() == before:
            raise ScriptFailed(
                "privacy: the script sent a trained model and charged nothing; train with what "
                "flare_sparse.client.make_private returns"
            )
        return reply

    def _ask(
        self, kind: Literal["train", "evaluate", "score"], weights: Tensor, t: int, trainable: Mask | None = None
    ) -> ScriptReply:
        """Return the script's reply, and remember its numbers and metrics."""
        self._round = t
        self._model.load(weights)
        params = {name: value.detach().clone() for name, value in self._model.module.state_dict().items()}
        bits = {} if trainable is None or trainable.is_full else self.layout.unflatten(trainable.bits)
        bits = {sent: bits[own] for sent, own in match_state_dict(self._model.module).items() if own in bits}
        seed = derive_seed(self._seed, "script", self._name, kind, t)
        number = t - 1 + self._rounds.start if t else 0
        reply = self._runner.run(ScriptRequest(kind, params, number, self._rounds.stop, bits, seed))
        self._record_counts(reply, needs_weight=kind != "evaluate")
        metrics = self._select_metrics(reply)
        self._evaluated, self.num_test_examples = (weights.clone(), metrics), int(metrics.get("test_examples", 0))
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
        for name, part in self.layout.unflatten(trained).items():
            if name in tensors:
                value = require_shape(tensors[name], name, tuple(part.shape))
                # Parts are views of ``trained``.
                if reply.is_delta:
                    part.add_(value)
                else:
                    part.copy_(value)
        return trained

    def _read_gradients(self, reply: ScriptReply) -> Iterator[Tensor]:
        tensors = read_tensors(reply.params or {}, self._model.module)
        batches = len(reply.meta[GRADIENTS])
        parameters = {spec.name for spec in self.layout.tensors if spec.role != "buffer"} & tensors.keys()
        for batch in range(batches):
            gradient = torch.zeros(self.layout.size)
            for name, part in self.layout.unflatten(gradient).items():
                if name in parameters:
                    part.copy_(require_shape(tensors[name], name, (batches, *part.shape))[batch])
            yield gradient


def read_tensors(params: Mapping[str, Any], network: nn.Module) -> dict[str, Tensor]:
    """Return what a script sent as float32 tensors on the CPU, by the names of the network's parameters and buffers.

    Args:
        params: values by the names of the network's ``state_dict()``.
        network: a network of the class that the script trains.

    Raises:
        ScriptFailed: a name is not the network's, or a value is no tensor.
    """
    matches = match_state_dict(network)
    names = _match_names([str(name) for name in params], matches)
    params = {names[str(name)]: value for name, value in params.items() if str(name) in names}
    if unknown := sorted(params.keys() - matches.keys()):
        remedy = "call peft.get_peft_model in its class (docs/lora.md)" if ".lora_" in "".join(unknown) else ""
        raise ScriptFailed(
            f"params has {unknown[0]!r}, which the network {type(network).__name__} of task.model does not have; "
            + (
                remedy
                or "is it the network of the script? Where a wrapper (torch.compile, Opacus, an averaged model, "
                "Lightning) renames tensors, send the state_dict() of the network inside it: net.module.state_dict()"
            )
        )
    tensors: dict[str, Tensor] = {}
    for name, value in params.items():
        # Two names of a tied tensor: its own one decides.
        if matches[name] == name or matches[name] not in tensors:
            tensors[matches[name]] = _read_tensor(name, value)
    return tensors


def require_shape(value: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return ``value``.

    Raises:
        ScriptFailed: it has another shape.
    """
    # A transposed layer has as many entries, which would be read in the wrong order.
    if tuple(value.shape) != shape:
        raise ScriptFailed(f"params[{name!r}] has the shape {tuple(value.shape)}; the network's is {shape}")
    return value


def read_count(meta: Mapping[str, Any], key: str) -> int | None:
    """Return a number of steps or examples; None if the script sent none.

    Raises:
        ScriptFailed: it is no whole number from 0.
    """
    value = meta.get(key)
    if value is None:
        return None
    number = to_float(value)
    if number is None or number < 0 or number != int(number):
        raise ScriptFailed(f"meta[{key!r}] is {value!r}; expected a whole number from 0")
    return int(number)


def to_float(value: Any) -> float | None:
    """Return a finite number as float; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    return float(value)


def _match_names(sent: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Return the network's name of each tensor that a script sends; the names themselves if one has no such name.

    Beside the known wrappers, first parts that all names share are removed, such as ``module.`` of ``DataParallel`` and
    averaged models, or ``model.`` of a LightningModule. ``peft.get_peft_model_state_dict`` begins in the network that
    peft has wrapped, and names no adapter.
    """
    names = {name: {name} for name in known}
    for name in known:
        _, found, inner = name.partition(_PEFT)
        for alias in {found + inner, _ADAPTER.sub(r"\1", found + inner)} - set(known) if found else ():
            names.setdefault(alias, set()).add(name)
    rest = {name: name if name in known else _WRAPPED.sub("", name) for name in sent}
    rest = {name: part for name, part in rest.items() if name in known or part.rpartition(".")[2] != _COUNTER}
    for _ in range(_MOST_WRAPPERS + 1):
        # A name that two tensors share is that of neither.
        matches = {name: min(own) for name, part in rest.items() if len(own := names.get(part, set())) == 1}
        if len(set(matches.values())) == len(rest):
            return matches
        if len({part.partition(".")[0] for part in rest.values()}) > 1:
            break
        rest = {name: part.partition(".")[2] for name, part in rest.items()}
    return {name: min(own) if len(own := names.get(name, set())) == 1 else name for name in sent}


def _read_tensor(name: str, value: Any) -> Tensor:
    """Return a value as a float32 tensor on the CPU.

    Raises:
        ScriptFailed: it is no tensor, array or number.
    """
    try:
        return torch.as_tensor(value).detach().cpu().float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ScriptFailed(f"params[{name!r}] is {type(value).__name__}; expected a tensor or an array") from error
