"""The attacks on a finished run, each with the knowledge of its attacker."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn
from torch.utils.data import ConcatDataset, Subset

from ...config.policy.policy import Policy
from ...core.errors import DataError
from ...core.seeds import derive_seed
from ...tasks.task import Task
from .attribution import attack_between_sites, attribute_examples
from .membership import bound_epsilon, choose_scale, compute_rmia_scores, guess_below_mean
from .result import AttackResult, Ranking, guess_members, measure_rankings
from .training import (
    AuditedExamples,
    Canaries,
    Retraining,
    compute_gradient_features,
    compute_losses,
    compute_prediction_features,
    draw_reference_rows,
    join_examples,
    select_rows,
)

Attacker = Literal["outsider", "member", "server"]


@dataclass(frozen=True)
class AuditOptions:
    """What an audit does.

    Attributes:
        references: number of reference models of RMIA.
        canaries: number of canaries; 0: no run with canaries.
        epsilon: epsilon that the run claims; None: none.
        delta: delta of the claim.
        resamples: number of bootstrap resamples; 0: no intervals.
        steps: steps of the optimisation that inverts a message; 0: none.
        policy: policy of the sites whose messages are inverted; None: they have none.
        policy_name: its file or preset.
    """

    references: int = 4
    canaries: int = 100
    epsilon: float | None = None
    delta: float = 1e-5
    resamples: int = 1000
    steps: int = 200
    policy: Policy | None = None
    policy_name: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the options by name."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if not name.startswith("policy")}
        return {**values, "policy": self.policy_name}


class RunAttacks:
    """Attacks on one model.

    Args:
        task: task of the run.
        model: the attacked network.
        retraining: trains models of the same configuration.
        identity: names the run and its model in the files that an interrupted audit continues from.
        folder: receives these files.
        options: what the audit does.
        on_progress: called with a line before and after each training.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        retraining: Retraining,
        identity: str,
        folder: Path,
        options: AuditOptions,
        on_progress: Callable[[str], None],
    ):
        self._task, self._model, self._retraining, self._options = task, model, retraining, options
        self._identity, self._folder, self._on_progress = identity, folder, on_progress
        self._seed = retraining.config.seed
        self.examples = AuditedExamples.from_sites(retraining.examples)

    @cached_property
    def losses(self) -> np.ndarray:
        """Losses ``(n,)`` of the examples under the attacked model.

        Raises:
            DataError: the loss of a single example says nothing, as with Cox's partial likelihood.
        """
        losses = compute_losses(self._task, self._model, self.examples.dataset)
        if np.ptp(losses) == 0:
            raise DataError("the loss of every single example is the same; it is defined on several examples only")
        return losses

    def attack_by_loss(self) -> AttackResult:
        """Call examples of small loss members (Yeom et al. 2018, arXiv:1709.01604)."""
        guesses = guess_below_mean(self.losses, self.examples.is_member)
        return self._measure("outsider", "loss threshold", -self.losses, guesses)

    def attack_by_rmia(self) -> AttackResult:
        """Compare likelihood ratios with those of non-members (Zarifzadeh et al. 2024, arXiv:2312.03262).

        Raises:
            DataError: no reference models are allowed.
        """
        count, sites = self._options.references, self.examples.sites
        if not count:
            raise DataError("RMIA needs reference models; references is 0")
        is_in = np.stack([draw_reference_rows(sites, number, self._seed) for number in range(1, count + 1)])
        references = np.stack([self._compute_reference_losses(i + 1, is_in[i], count) for i in range(count)])
        scale = choose_scale(self._task.kind, references)
        scores = compute_rmia_scores(self.losses, references, is_in, scale)
        guesses = guess_members(scores, self.examples.is_member)
        return self._measure("outsider", "rmia", scores, guesses, {"references": count})

    def attack_by_canaries(self) -> AttackResult:
        """Train once more with half of the canaries, and bound epsilon (Steinke et al. 2023, arXiv:2305.08846).

        The attacker sees by how much the loss of each canary fell compared with the attacked model.

        Raises:
            DataError: canaries are not allowed, or the examples of the task have no targets to exchange.
        """
        options, sites, dataset = self._options, self.examples.sites, self.examples.dataset
        if not options.canaries:
            raise DataError("canaries is 0")
        generator = np.random.default_rng(derive_seed(self._seed, "audit canaries"))
        shuffled = generator.permutation(len(sites))
        # Non-members first: the examples that canaries are made of do not train the model.
        shuffled = shuffled[np.argsort(self.examples.is_member[shuffled], kind="stable")]
        rows = np.sort(shuffled[: options.canaries])
        try:
            canaries = Canaries(dataset, rows.tolist(), derive_seed(self._seed, "audit targets"))
        except TypeError as error:
            raise DataError(f"canaries need examples that are tuples of input and target, but {error}") from error
        is_included = generator.random(len(rows)) < 0.5
        file = self._folder / f"canaries-{len(rows)}.npz"
        losses = self._read_or_compute(file, lambda: self._train_on_canaries(canaries, rows, is_included))
        scores = compute_losses(self._task, self._model, canaries) - losses
        bound = bound_epsilon(scores, is_included, options.delta)
        claim = options.epsilon
        details = {
            "epsilon_lower_bound": bound.epsilon,
            "claimed_epsilon": claim,
            "delta": options.delta,
            "contradicts_claim": claim is not None and bound.epsilon > claim,
            "canaries": bound.canaries,
            "guesses": bound.guesses,
            "correct_guesses": bound.correct,
        }
        everything = np.arange(len(rows))
        ranking = Ranking(everything, scores, guess_members(scores, is_included))
        figures, intervals = measure_rankings([ranking], is_included, np.full(len(rows), ""), options.resamples)
        return AttackResult("outsider", "canaries", figures, intervals, details)

    def attribute_predictions(self) -> AttackResult:
        """Tell the site of an example from its target and the model's prediction, compared with the target alone.

        Raises:
            DataError: there are not two sites with enough examples.
        """
        features = compute_prediction_features(self._task, self._model, self.examples.dataset)
        result = attribute_examples(features, self.examples.sites, self._options.resamples, self._seed)
        if result is None:
            raise DataError("attribution needs two sites with at least five examples each")
        details = {"accuracy": result.accuracy, "chance": result.chance, "sites": result.sites}
        intervals = {"accuracy": result.interval} if result.interval else {}
        return AttackResult("outsider", "site of a prediction", {}, intervals, details)

    def attack_between_sites(self) -> AttackResult:
        """Each site attacks each other by a classifier of gradient features (arXiv:2105.02866, arXiv:2208.11669).

        Raises:
            DataError: there are not two sites with training and test examples.
        """
        examples = self.examples
        features = compute_gradient_features(self._task, self._model, examples.dataset)
        pairs = list(attack_between_sites(features, examples.is_member, examples.sites))
        if not pairs:
            raise DataError("attacks between sites need two sites with training and test examples")
        figures, intervals = measure_rankings(
            [pair.ranking for pair in pairs], examples.is_member, examples.sites, self._options.resamples
        )
        details = {
            "pairs": len(pairs),
            "above_half": sum(pair.accuracy > 0.5 for pair in pairs),
            "successful": sum(pair.is_successful for pair in pairs),
            "accuracies": [
                {"attacker": p.attacker, "target": p.target, "accuracy": p.accuracy, "p_value": p.p_value}
                for p in pairs
            ],
        }
        return AttackResult("member", "gradient classifier", figures, intervals, details, self._describe_counts())

    def _measure(
        self,
        attacker: Attacker,
        attack: str,
        scores: np.ndarray,
        guesses: np.ndarray,
        details: Mapping[str, object] | None = None,
    ) -> AttackResult:
        ranking = Ranking(np.arange(len(scores)), scores, guesses)
        examples = self.examples
        figures, intervals = measure_rankings([ranking], examples.is_member, examples.sites, self._options.resamples)
        return AttackResult(attacker, attack, figures, intervals, details or {}, self._describe_counts())

    def _describe_counts(self) -> tuple[str, ...]:
        members = int(self.examples.is_member.sum())
        others = len(self.examples.is_member) - members
        note = f"{members} members, {others} non-members"
        return (note,) if others >= 1000 else (f"{note}: at 0.1 % false positives none may be accused wrongly",)

    def _compute_reference_losses(self, number: int, chosen: np.ndarray, count: int) -> np.ndarray:
        def compute() -> np.ndarray:
            self._on_progress(f"reference model {number} of {count}: training")
            datasets = select_rows(join_examples(self._retraining.examples), self.examples.sites, chosen)
            model = self._retraining.train(datasets, derive_seed(self._seed, "audit model", number) >> 11)
            return compute_losses(self._task, model, self.examples.dataset)

        return self._read_or_compute(self._folder / f"reference-{number}.npz", compute)

    def _train_on_canaries(self, canaries: Canaries, rows: np.ndarray, is_included: np.ndarray) -> np.ndarray:
        """Return the losses of the canaries under a model that was trained with the included ones.

        An example and a canary made of it would contradict each other, so that neither would be learned by heart.
        """
        self._on_progress(f"canaries: training with {int(is_included.sum())} of {len(canaries)}")
        sites, remaining = self.examples.sites, self.examples.is_member.copy()
        remaining[rows] = False
        datasets = select_rows(join_examples(self._retraining.examples), sites, remaining)
        for site, dataset in datasets.items():
            included = np.flatnonzero(is_included & (sites[rows] == site)).tolist()
            datasets[site] = ConcatDataset([dataset, Subset(canaries, included)])
        model = self._retraining.train(datasets, derive_seed(self._seed, "audit canary model") >> 11)
        return compute_losses(self._task, model, canaries)

    def _read_or_compute(self, file: Path, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the losses in a file of this run, or compute and write them: a training takes minutes."""
        if file.is_file():
            with np.load(file) as stored:
                if str(stored["identity"]) == self._identity:
                    return np.asarray(stored["losses"])
        losses = compute()
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.stem}.part.npz")
        np.savez(part, losses=losses, identity=np.array(self._identity))
        part.replace(file)
        return losses
