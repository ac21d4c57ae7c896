"""What methods share that end with one gradient step at each target site: settings, the step, what is reported."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from ...errors import ConfigError
from ...exchange import Assignment, Patch, Request, Update
from ...mask import Mask
from ...training import Site, TrainingConfig
from ..method import MethodConfig, broadcast, sample_sites


class AdaptationConfig(MethodConfig):
    """Settings of these methods."""

    adapt_lr: float = Field(0.1, gt=0, description="learning rate of the one step at a target site")
    adapt_batch: int | None = Field(
        None, ge=1, description="examples of that step; null: all training examples at once"
    )
    targets: tuple[str, ...] = Field(
        (), description="sites that take no part in training and only adapt at the end; none: every site does both"
    )

    def asked(self, sites: Sequence[str], seed: int, t: int) -> list[str]:
        """The sites of round ``t``: drawn from those that are no targets.

        Raises:
            ConfigError: there are none.
        """
        learning = [site for site in sites if site not in self.targets]
        if not learning:
            raise ConfigError(
                f"method.targets: all sites present ({', '.join(sites)}) are targets; leave some to train"
            )
        return sample_sites(learning, self.participation, seed, t)


def take_one_step(site: Site, weights: Tensor, stages: Sequence[Mask], config: AdaptationConfig) -> Tensor:
    """``w - adapt_lr * grad L(w)`` ``(P,)``, once within each stage, on the same examples; no dropout, no gate noise.

    ``training.clip_norm`` bounds this gradient, too.
    """
    batch_size, clip = config.adapt_batch or max(site.num_examples, 1), config.training.clip_norm
    step = TrainingConfig(optimizer="sgd", lr=config.adapt_lr, batch_size=batch_size, clip_norm=clip)
    return site.step_in_stages(weights, [stage for stage in stages if stage.count], step)


def ask_to_adapt(model: Patch, sites: Sequence[str], config: AdaptationConfig) -> dict[str, Assignment]:
    """The last question: adapt, and say how good the result is. To the targets, or to all where none is present."""
    targets = [site for site in sites if site in config.targets]
    return broadcast(targets or sites, Assignment(Request("adapt", config.rounds + 1, model, model.mask)))


def report_adaptation(site: Site, adapted: Tensor) -> Update:
    """The metrics of the adapted model, and as ``..._before`` of the model that the site was sent; no weights."""
    before = site.evaluate(site.weights)
    before.pop("test_examples", None)
    metrics = {**site.evaluate(adapted), **{f"{name}_before": value for name, value in before.items()}}
    return Update(Patch.empty(site.layout.size), "metrics", site.num_examples, metrics)
