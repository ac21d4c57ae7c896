"""The attacks on a finished run, each with the knowledge of its attacker, and their record: ``audit.json``."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ...config.assemble import open_site
from ...config.needs import AUDIT, find_conflicts
from ...core.checkpoint.writing import write_json
from ...core.errors import ConfigError, DataError
from ...core.seeds import derive_seed, limit_threads
from ...tasks.task import SiteData, Task
from ..runs.load import load_study, read_run_model
from ..runs.received import read_json
from ..runs.results import AUDIT_FILE, AUDIT_FOLDER, RunResult
from .membership import SIGNIFICANCE, attack_between_sites, choose_scale, compute_rmia_scores, guess_below_mean
from .result import Ranking, guess_members, measure_rankings
from .training import (
    AuditedExamples,
    Retraining,
    compute_gradient_features,
    compute_losses,
    draw_reference_rows,
    select_rows,
)

REFERENCES = 4
"""Reference models of RMIA, unless a number is given."""


@dataclass
class RunAttacks:
    """Attacks on one model.

    Attributes:
        task: task of the run.
        model: the attacked network.
        retraining: trains models of the same configuration.
        identity: names the run and its model in the files that an interrupted audit continues from.
        folder: receives these files.
        references: number of reference models of RMIA.
        on_progress: called with a line before each training.
    """

    task: Task
    model: nn.Module
    retraining: Retraining
    identity: str
    folder: Path
    references: int
    on_progress: Callable[[str], None]

    def __post_init__(self) -> None:
        self.examples = AuditedExamples.from_sites(self.retraining.examples)

    @cached_property
    def losses(self) -> np.ndarray:
        """Losses ``(n,)`` of the examples under the attacked model.

        Raises:
            DataError: the loss of a single example says nothing, as with Cox's partial likelihood.
        """
        losses = compute_losses(self.task, self.model, self.examples.dataset)
        if np.ptp(losses) == 0:
            raise DataError("the loss of every single example is the same; it is defined on several examples only")
        return losses

    def attack_by_loss(self) -> dict[str, Any]:
        """Call examples of small loss members (Yeom et al. 2018, arXiv:1709.01604)."""
        return self._measure("loss threshold", -self.losses, guess_below_mean(self.losses, self.examples.is_member))

    def attack_by_rmia(self) -> dict[str, Any]:
        """Compare likelihood ratios with those of non-members (Zarifzadeh et al. 2024, arXiv:2312.03262).

        Raises:
            DataError: no reference models are allowed.
        """
        count, sites, seed = self.references, self.examples.sites, self.retraining.config.seed
        if not count:
            raise DataError("RMIA needs reference models; references is 0")
        is_in = np.stack([draw_reference_rows(sites, number, seed) for number in range(1, count + 1)])
        references = np.stack([self._compute_reference_losses(i + 1, is_in[i]) for i in range(count)])
        scores = compute_rmia_scores(self.losses, references, is_in, choose_scale(self.task.kind, references))
        found = self._measure("rmia", scores, guess_members(scores, self.examples.is_member))
        return {**found, "references": count}

    def attack_between_sites(self) -> dict[str, Any]:
        """Each site attacks each other by a classifier of gradient features (arXiv:2105.02866, arXiv:2208.11669).

        Raises:
            DataError: there are not two sites with training and test examples.
        """
        examples = self.examples
        features = compute_gradient_features(self.task, self.model, examples.dataset)
        pairs = list(attack_between_sites(features, examples.is_member, examples.sites))
        if not pairs:
            raise DataError("attacks between sites need two sites with training and test examples")
        return {
            "attacker": "member",
            "attack": "gradient classifier",
            **measure_rankings([pair.ranking for pair in pairs], examples.is_member, examples.sites),
            "pairs": len(pairs),
            "above_half": sum(pair.accuracy > 0.5 for pair in pairs),
            "successful": sum(pair.p_value < SIGNIFICANCE for pair in pairs),
        }

    def _measure(self, attack: str, scores: np.ndarray, guesses: np.ndarray) -> dict[str, Any]:
        ranking = Ranking(np.arange(len(scores)), scores, guesses)
        figures = measure_rankings([ranking], self.examples.is_member, self.examples.sites)
        return {"attacker": "outsider", "attack": attack, **figures}

    def _compute_reference_losses(self, number: int, chosen: np.ndarray) -> np.ndarray:
        """Return the losses in a file of this run, or train, compute and write them: a training takes minutes."""
        file = self.folder / f"reference-{number}.json"
        stored = read_json(file)
        if stored.get("identity") == self.identity:
            return np.array(stored["losses"])
        self.on_progress(f"reference model {number} of {self.references}: training")
        seed = derive_seed(self.retraining.config.seed, "audit model", number) >> 11
        model = self.retraining.train(select_rows(self.examples, chosen), seed)
        losses = compute_losses(self.task, model, self.examples.dataset)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"identity": self.identity, "losses": losses.tolist()})
        return losses


def audit_run(
    run: RunResult,
    data: Mapping[str, SiteData],
    references: int = REFERENCES,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Attack the final model of a run, write ``audit.json`` and return it.

    Args:
        run: the run.
        data: data of its sites.
        references: number of reference models of RMIA; 0: the attack is not made.
        on_progress: called with a line per step.

    Raises:
        ConfigError: the run has no common model, or a script trained it.
        DataError: the data cannot be loaded.
    """
    started = time.monotonic()
    study = load_study(run.path)
    assembly, config = study.assembly, study.config
    if conflicts := find_conflicts(config, features=[AUDIT]):
        raise ConfigError(f"{run.path}: {conflicts[0]}")
    model = assembly.build_network(read_run_model(run.path, assembly, "final"))
    contributed = [site for site, part in run.contributions.items() if part.contributed and site in data]
    if not contributed:
        raise DataError(f"{run.path}: no site of this data contributed to the model")
    results, skipped = list[dict[str, Any]](), list[dict[str, str]]()
    with limit_threads(config.torch_threads):
        examples = {site: open_site(assembly, data[site]).trainer.examples for site in contributed}
        retraining, folder = Retraining(run.path, config, data, examples), run.path / AUDIT_FOLDER
        attacks = RunAttacks(assembly.task, model, retraining, run.identity, folder, references, on_progress)
        by_name = {
            "loss threshold": attacks.attack_by_loss,
            "rmia": attacks.attack_by_rmia,
            "gradient classifier": attacks.attack_between_sites,
        }
        for name, attack in by_name.items():
            on_progress(f"attack: {name}")
            try:
                results.append(attack())
            except DataError as error:
                skipped.append({"attack": name, "reason": str(error)})
    record = {
        "run": run.path.resolve().name,
        "run_id": run.summary["run"],
        "model_sha256": run.summary["model_sha256"],
        "method": run.summary["method"],
        "sparsity": run.summary["sparsity"],
        "seed": run.summary["seed"],
        "references": references,
        "sites": sorted(examples),
        "members": int(attacks.examples.is_member.sum()),
        "non_members": int((~attacks.examples.is_member).sum()),
        "attacks": results,
        "skipped": skipped,
        "seconds": round(time.monotonic() - started, 1),
    }
    write_json(run.path / AUDIT_FILE, record)
    return record
