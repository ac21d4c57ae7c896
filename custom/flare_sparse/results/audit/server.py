"""The attacks of a server on single messages: it inverts the message of a site that trained on few examples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from ...config.assemble import Assembly
from ...config.policy.isolation import MAX_EXAMPLES, withhold_isolated_units
from ...config.policy.policy import Policy, raise_refusals
from ...core.errors import DataError, PolicyRefusal
from ...core.exchange import Content, Patch
from ...core.mask import Mask
from ...core.seeds import derive_seed, make_generator
from ...privacy.dp.mechanism import clip_rows
from ...training import SampleUsage, Site
from .inversion import (
    Message,
    Reconstruction,
    build_message,
    choose_reconstruction,
    compute_saliency,
    list_parameters,
    optimize_inputs,
    read_linear_layer,
)
from .result import AttackResult

BATCH_SIZES = (1, 2, 4, 8)
"""Sizes of the minibatches whose messages are inverted."""
OTHERS = 64
"""Examples that the attacker knows the mean and the spread of."""


@dataclass(frozen=True)
class Inversion:
    """One inverted message.

    Attributes:
        message: what the message held.
        batch_size: number of examples that it was computed from.
        best: the best reconstruction; None: the policy refused the message, or nothing could be rebuilt.
        reason: why there is none.
    """

    message: Message
    batch_size: int
    best: Reconstruction | None
    reason: str = ""

    def to_result(self, policy: str) -> AttackResult:
        """Return the figures of the attack; ``policy`` names the policy of the site."""
        best = self.best
        details = {
            "message": self.message,
            "batch_size": self.batch_size,
            "policy": policy,
            "way": best.way if best else None,
            # JSON has no infinity: 200 dB is beyond float32.
            "psnr": min(best.psnr, 200.0) if best else None,
            "ssim": best.ssim if best else None,
            "psnr_of_mean": best.guess_psnr if best else None,
        }
        name = "inversion of an update" if self.message == "update" else "inversion of scores"
        return AttackResult("server", name, details=details, notes=(self.reason,) if self.reason else ())


class ServerAttacks:
    """Inverts the first message of a site: that of the initial model, which the server knows.

    Args:
        assembly: parts of the run.
        site: the attacked site.
        others: examples that did not train, whose mean is the attacker's first guess.
        policy: policy of the site; None: it has none.
        steps: steps of the optimisation; 0: the linear layer alone.
    """

    def __init__(self, assembly: Assembly, site: Site, others: Dataset[Any], policy: Policy | None, steps: int):
        self._assembly, self._site, self._policy, self._steps = assembly, site, policy, steps
        self._model = assembly.build_network(assembly.complete(assembly.weights))
        known = [others[i] for i in range(min(OTHERS, len(others)))]  # type: ignore[arg-type]
        if not known or not self._has_inputs(default_collate(known[:1])):
            raise DataError("inversion needs examples that are tuples whose first part is a tensor of numbers")
        self._others: Tensor = default_collate(known)[0].float()

    def invert_messages(
        self, on_progress: Callable[[str], None], sizes: Sequence[int] = BATCH_SIZES
    ) -> Iterator[Inversion]:
        """Yield the inversion of each message by each number of examples."""
        train = self._site.trainer.examples.train
        rows = np.random.default_rng(derive_seed(self._assembly.method.seed, "audit inversion")).permutation(
            self._site.num_examples
        )
        for message in ("update", "scores"):
            for size in sizes:
                if size > len(rows):
                    continue
                on_progress(f"server: inversion of {message} of {size} examples")
                inputs, *rest = default_collate([train[int(row)] for row in rows[:size]])
                batch = (inputs.float(), *rest)
                try:
                    yield Inversion(message, size, self._invert(message, batch))
                except (DataError, PolicyRefusal) as error:
                    yield Inversion(message, size, None, str(error))

    def _invert(self, message: Message, batch: Any) -> Reconstruction:
        model, task, true, others = self._model, self._assembly.task, batch[0], self._others
        received = self._apply_policy(message, self._build_message(message, batch), len(true))
        mean, found = others.mean(0), []
        linear = read_linear_layer(model, received, message)
        if linear is not None and linear.shape[1] == true[0].numel():
            linear = linear.reshape(len(linear), *true.shape[1:])
            # Scores show absolute values.
            shown = true.abs() if message == "scores" else true
            known = others.abs().mean(0) if message == "scores" else mean
            if len(linear):
                found.append(choose_reconstruction("linear layer", linear, shown, known))
        if self._steps:
            # The network's gradients are the same for all inputs equal to the mean: noise tells them apart.
            scale = float(others.std()) or 1.0
            noise = torch.randn(
                true.shape, generator=make_generator(self._assembly.method.seed, "audit start", len(true))
            )
            start = mean + 0.1 * scale * noise
            rebuilt = optimize_inputs(task, model, received, message, batch, start, self._steps, scale)
            found.append(choose_reconstruction("optimisation", rebuilt, true, mean))
        if not found:
            raise DataError("no input could be rebuilt from a first linear layer")
        return max(found, key=lambda one: one.psnr)

    def _build_message(self, message: Message, batch: Any) -> list[Tensor]:
        """Return the message; with differential privacy, it is computed from a step of clipped gradients and noise."""
        mechanism, task, model = self._site.trainer.mechanism, self._assembly.task, self._model
        if mechanism is None:
            return build_message(task, model, batch, message)
        count = len(batch[0])
        gradients = [build_message(task, model, [part[i : i + 1] for part in batch], "update") for i in range(count)]
        rows = torch.stack([torch.cat([value.flatten() for value in values]) for values in gradients])
        clip = mechanism.config.clip
        noise = torch.randn(rows.shape[1], generator=make_generator(self._assembly.method.seed, "audit noise", count))
        # Every example takes part: the attacker's best case, since a lot that is drawn at random hides some.
        noisy = ((clip_rows(rows, clip) + mechanism.noise_multiplier * clip * noise) / count).float()
        parts = noisy.split([value.numel() for value in gradients[0]])
        step = [part.view_as(value) for part, value in zip(parts, gradients[0], strict=True)]
        return step if message == "update" else compute_saliency(list_parameters(model), step)

    def _apply_policy(self, message: Message, values: list[Tensor], examples: int) -> list[Tensor]:
        """Return what the policy lets leave.

        Raises:
            PolicyRefusal: it refuses the message.
        """
        policy, layout = self._policy, self._assembly.network
        if policy is None:
            return values
        content: Content = "delta" if message == "update" else "scores"
        names = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        tensors = {spec.name: torch.zeros(spec.shape) for spec in layout.tensors}
        # A step of SGD moves against the gradient.
        sign = -1.0 if message == "update" else 1.0
        tensors |= {name: sign * value for name, value in zip(names, values, strict=True)}
        mask = Mask.full(layout.size)
        vector = policy.sanitize_values(content, Patch.from_vector(layout.flatten(tensors), mask), layout)
        # As at a site: what a change shows of the data decides nothing under a privacy budget.
        mechanism = self._site.trainer.mechanism
        is_bounded = mechanism is not None and mechanism.hides_subjects
        if policy.withhold_isolated and message == "update" and not is_bounded:
            inputs = self._site.trainer.collect_inputs(self._assembly.weights, nn.Linear, MAX_EXAMPLES)
            vector, _ = withhold_isolated_units(vector, mask, layout, inputs)
        raise_refusals(policy.find_refusals(content, SampleUsage(examples, 1), mask, vector, layout))
        sanitized = layout.unflatten(vector)
        return [sign * sanitized[name] for name in names]

    @staticmethod
    def _has_inputs(batch: Any) -> bool:
        is_tuple = isinstance(batch, (tuple, list)) and len(batch) > 1
        # Codes of 8 bits are inputs that the task makes floats of; other integers are indices of words.
        return (
            is_tuple
            and isinstance(batch[0], Tensor)
            and (batch[0].is_floating_point() or batch[0].dtype == torch.uint8)
        )
