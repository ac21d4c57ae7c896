"""Fine-tuning at each site after the last round, pulled to the global model; the fine-tuned model stays at the site.

Cheng et al. 2021, "Fine-tuning is Fine in Federated Learning", arXiv 2108.07313. The pull is that of Ditto (Li et al.
2021, arXiv 2012.04221); docs/algorithms.md, section 7.2.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Annotated

from pydantic import Field
from torch import Tensor

from ...core.errors import MetricsError
from ...core.mask import Mask
from ...core.needs import Need, Needs
from ...core.settings import Settings
from ...training import Site, TrainingConfig
from ...training.personal import PERSONAL
from .personal_training import PersonalTrainingDiverged, attribute_divergence, check_finite

_LOG = logging.getLogger(__name__)

FINE_TUNED = "fine-tuned at the site"
"""What a site's own model is."""
Strength = Annotated[float, Field(ge=0)]


class FineTuning(Settings):
    """Settings of the training at each site after the last round."""

    epochs: int = Field(1, ge=1, description="epochs of fine-tuning at each site after the last round")
    lr: float | None = Field(None, gt=0, description="learning rate of fine-tuning; null: that of the last round")
    proximal: Strength | Annotated[tuple[Strength, ...], Field(min_length=2)] | None = Field(
        None,
        description="pull towards the global model (Ditto's lambda); several: each site takes the one with the best "
        "model on its validation examples, or the global model itself; null: training.proximal",
    )

    @property
    def has_choice(self) -> bool:
        """Whether each site chooses among several strengths."""
        return isinstance(self.proximal, tuple)

    def needs(self, training: TrainingConfig) -> Needs:
        """Return what fine-tuning needs of the other parts of a run, after rounds with the settings ``training``."""
        needs = {
            Need.OWN_MODEL.because(FINE_TUNED),
            Need.MORE_READS.because("fine-tuning trains once more, and the metrics of its model leave"),
        }
        if self.has_choice:
            choice = "finetune.proximal has several strengths, and a site evaluates a model of each"
            needs.add(Need.PACKAGE_STEPS.because(choice, "give finetune.proximal one value"))
            needs.add(Need.VALIDATION.because("finetune.proximal: validation examples decide", "give one value"))
        if self.lr is None and not training.has_constant_rate:
            needs.add(
                Need.LAST_ROUND.because(
                    "method.finetune.lr is that of the last round, and method.training lowers the rate over rounds "
                    "that the run may leave out",
                    "set method.finetune.lr",
                )
            )
        return frozenset(needs)

    def list_trainings(self, training: TrainingConfig, t: int) -> list[TrainingConfig]:
        """Return the settings of one training for each strength of the pull, the strongest first.

        Args:
            training: settings of the last round.
            t: the round after the last one.
        """
        lr = training.compute_learning_rate(t - 1) if self.lr is None else self.lr
        # The rate is that of this round already.
        base = training.model_copy(update={"epochs": self.epochs, "lr": lr, "lr_decay": 1.0})
        if self.proximal is None:
            return [base]
        strengths = self.proximal if isinstance(self.proximal, tuple) else (self.proximal,)
        return [base.model_copy(update={"proximal": strength}) for strength in sorted(strengths, reverse=True)]


def fine_tune(site: Site, trainable: Mask, trainings: Sequence[TrainingConfig], t: int) -> Tensor:
    """Fine-tune the received model ``site.weights`` and return the site's own model ``(P,)``.

    With several trainings, the model with the best metric on the site's validation examples is returned, among the
    received one and the result of each training; of equally good ones the first. A site without validation examples
    takes the first training. One that diverges is no candidate. The site's memory then holds the personal tensors of
    the returned model.

    Args:
        site: trains on its own examples.
        trainable: entries that may change.
        trainings: settings of each training.
        t: the round after the last one; seeds the order of the examples, which is the same in all trainings.

    Raises:
        PersonalTrainingDiverged: the only training diverged.
        TrainingDiverged: the received model has no finite loss.
        MetricsError: nor finite metrics on the validation examples.
    """
    if len(trainings) == 1:
        return _train(site, trainable, trainings[0], t)
    personal = site.memory.get(PERSONAL)
    chosen, best = None, _measure_validation(site, site.weights)
    chosen_weights, chosen_personal = site.weights, personal
    for training in trainings:
        # Each training starts from the memory of the request, as if it were the only one.
        _set_personal(site, personal)
        try:
            weights = _train(site, trainable, training, t)
            value = _measure_validation(site, weights)
        except (PersonalTrainingDiverged, MetricsError) as error:
            _LOG.warning("site %s: method.finetune.proximal %g: %s", site.name, training.proximal, error)
            continue
        is_better = chosen is None if value is None or best is None else site.trainer.task.metric.is_better(value, best)
        if is_better:
            chosen, best, chosen_weights, chosen_personal = training, value, weights, site.memory.get(PERSONAL)
    _set_personal(site, chosen_personal)
    return chosen_weights


def _train(site: Site, trainable: Mask, training: TrainingConfig, t: int) -> Tensor:
    """Return the weights ``(P,)`` after one fine-tuning of the received model."""
    with attribute_fine_tuning():
        return check_finite(site.train(site.weights, trainable, training, t))


def attribute_fine_tuning() -> AbstractContextManager[None]:
    """Attribute a divergence inside the block to the fine-tuning."""
    return attribute_divergence("fine-tuning", "method.finetune.lr or method.finetune.proximal")


def _measure_validation(site: Site, weights: Tensor) -> float | None:
    """Return the task's metric on the site's validation examples; None if it is not defined there."""
    metrics = site.trainer.evaluate_validation(weights)
    return metrics.get(site.trainer.task.metric.name) if metrics else None


def _set_personal(site: Site, values: Tensor | None) -> None:
    """Set the personal tensors in a site's memory; None: the site has none, or has not trained yet."""
    if values is None:
        site.memory.pop(PERSONAL, None)
    else:
        site.memory[PERSONAL] = values
