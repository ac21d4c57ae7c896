"""Adaptation: methods that end with one gradient step at each target site."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self, TypeVar

from pydantic import Field, model_validator
from torch import Tensor

from ...core.errors import ConfigError, FlareSparseError, MetricsError
from ...core.exchange import Assignment, Patch, Request, Update
from ...core.mask import Mask
from ...core.needs import Need, Needs
from ...tasks.task import COUNTS
from ...training import Site, TrainingConfig
from ...training.loop import TrainingDiverged
from ..method import Method, MethodConfig, StateT


class PersonalTrainingDiverged(FlareSparseError):
    """A site's own training after the last round diverged from a received model that it could compute with."""

    code = "E_PERSONAL"


@contextmanager
def attribute_divergence(training: str, settings: str) -> Iterator[None]:
    """Attribute a divergence inside the block to this training; one in its first step is due to the received model.

    The server discards the commit of a model that most sites cannot compute with (docs/reliability.md); it must not do
    so because of settings of the training that follows.

    Args:
        training: its name, such as ``"fine-tuning"``.
        settings: the settings to lower.

    Raises:
        PersonalTrainingDiverged: a later step or the resulting model diverged.
        TrainingDiverged: the first step did.
    """
    try:
        yield
    except TrainingDiverged as error:
        if error.is_first_step:
            raise
        raise PersonalTrainingDiverged(_explain(training, error, settings)) from error
    except MetricsError as error:
        raise PersonalTrainingDiverged(_explain(training, error, settings)) from error


def require_finite(weights: Tensor) -> Tensor:
    """Return the weights ``(P,)`` of a finished training.

    Raises:
        TrainingDiverged: one is NaN or infinite; the last step has no loss that would show it.
    """
    if not bool(weights.isfinite().all()):
        raise TrainingDiverged("the last step ends in weights that are not finite")
    return weights


def _explain(training: str, error: Exception, settings: str) -> str:
    return f"the {training} after the last round diverged; lower {settings}: {error}"


ADAPT = "adapt"
"""The kind of the last request: adapt the model and report its metrics."""


class AdaptationConfig(MethodConfig):
    """Settings of these methods."""

    local_steps: int | None = Field(1, ge=1)
    """gradient steps of a site in a round; null: training.epochs"""
    adapt_lr: float = Field(0.1, gt=0)
    """learning rate of the one step at a target site"""
    adapt_batch: int | None = Field(None, ge=1)
    """examples of that step; null: all training examples at once"""
    targets: tuple[str, ...] = ()
    """sites that take no part in training and only adapt at the end; none: every site does both"""

    @model_validator(mode="after")
    def _check_epochs(self) -> Self:
        if self.local_steps is not None and self.training.epochs != 1:
            raise ValueError(
                f"training.epochs {self.training.epochs} has no effect with local_steps {self.local_steps}, which "
                "counts minibatches; leave it out or, in methods other than per_fedavg, set local_steps: null to train "
                "whole epochs"
            )
        return self

    def needs(self) -> Needs:
        return frozenset(
            {
                Need.MORE_READS.because("a site trains once more, to adapt, and the metrics of its model leave"),
                Need.PACKAGE_STEPS.because("a site takes a prescribed number of gradient steps"),
                Need.WHOLE_MODEL.because("each site adapts all of the model"),
                Need.OWN_MODEL.because("adapted at the site"),
            }
        )


AdaptationConfigT = TypeVar("AdaptationConfigT", bound=AdaptationConfig)


class AdaptationMethod(Method[AdaptationConfigT, StateT]):
    """A method whose target sites adapt the final model and report metrics; their personal models stay there."""

    final_kinds = frozenset({ADAPT})
    final_kind = ADAPT

    @property
    def named_sites(self) -> tuple[str, ...]:
        return self.config.targets

    @abstractmethod
    def train(self, request: Request, site: Site) -> Update:
        """Return a site's update of an ordinary round."""

    def select_sites(self, state: StateT, sites: Sequence[str]) -> list[str]:
        """Return the sites of the round, sampled from those that are not targets.

        Raises:
            ConfigError: all sites are targets.
        """
        training = [site for site in sites if site not in self.config.targets]
        if not training:
            raise ConfigError(
                f"method.targets: all sites present ({', '.join(sites)}) are targets; leave some to train"
            )
        return super().select_sites(state, training)

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind == ADAPT:
            return self._adapt_and_report(site, request.trainable)
        return self.train(request, site)

    def adapt(self, site: Site, trainable: Mask) -> Tensor:
        return take_one_step(site, site.weights, [trainable], self.config)

    def _adapt_and_report(self, site: Site, trainable: Mask) -> Update:
        """Return the metrics of the adapted model and, as ``..._before``, of the model received; no weights."""
        before = site.evaluate(site.weights)
        with attribute_divergence("adaptation", "method.adapt_lr"):
            metrics = site.evaluate(require_finite(self.adapt(site, trainable)))
        metrics |= {f"{name}_before": value for name, value in before.items() if name not in COUNTS}
        return Update(Patch.empty(site.layout.size), "metrics", site.num_examples, metrics)

    def ask_final(self, state: StateT, sites: Sequence[str]) -> dict[str, Assignment]:
        """Return the request to adapt, for the targets that are connected or, where there is none, for all sites."""
        return super().ask_final(state, [site for site in sites if site in self.config.targets] or sites)


def take_one_step(site: Site, weights: Tensor, stages: Sequence[Mask], config: AdaptationConfig) -> Tensor:
    """Return ``w - adapt_lr * grad L(w)`` ``(P,)``, with one step inside each stage, all on the same examples.

    Dropout and gate noise are off; ``training.clip_norm`` bounds this gradient, too.

    Args:
        site: has the examples.
        weights: ``(P,)`` w.
        stages: the entries of each step; empty ones are skipped.
        config: learning rate and batch size of the steps.
    """
    batch_size, clip_norm = config.adapt_batch or max(site.trainer.num_examples, 1), config.training.clip_norm
    step = TrainingConfig(optimizer="sgd", lr=config.adapt_lr, batch_size=batch_size, clip_norm=clip_norm)
    return site.trainer.step_in_stages(weights, [stage for stage in stages if stage.count], step)
