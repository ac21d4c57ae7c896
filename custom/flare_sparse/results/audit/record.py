"""The record of an audit: ``audit.json`` in the result folder."""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...config.assemble import Assembly, open_site
from ...config.needs import AUDIT, find_conflicts
from ...core.checkpoint.writing import write_json
from ...core.errors import ConfigError, DataError
from ...core.seeds import limit_threads
from ...tasks.task import Examples, SiteData
from ..runs.load import load_study, read_run_model
from ..runs.results import AUDIT_FILE, AUDIT_FOLDER, RunResult
from .attacks import Attacker, AuditOptions, RunAttacks
from .result import AttackResult
from .server import Inversion, ServerAttacks
from .training import Retraining


def audit_run(
    run: RunResult,
    data: Mapping[str, SiteData],
    attackers: Collection[Attacker],
    options: AuditOptions,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Attack the final model of a run, write ``audit.json`` and return it.

    Args:
        run: the run.
        data: data of its sites.
        attackers: attackers whose attacks are made.
        options: what the audit does.
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
    with limit_threads(config.torch_threads):
        examples = _load_examples(run, data, lambda site: open_site(assembly, data[site]).trainer.examples)
        retraining = Retraining(run.path, config, data, examples)
        folder = run.path / AUDIT_FOLDER
        attacks = RunAttacks(assembly.task, model, retraining, run.identity, folder, options, on_progress)
        results, skipped = _make_attacks(attacks, attackers, on_progress)
        if "server" in attackers:
            inversions, reason = _invert_messages(assembly, data, examples, options, on_progress)
            results += [inversion.to_result(options.policy_name) for inversion in inversions]
            skipped += [{"attacker": "server", "attack": "inversion", "reason": reason}] if reason else []
    record = {
        "run": run.path.resolve().name,
        "run_id": run.summary["run"],
        "model_sha256": run.summary["model_sha256"],
        "method": run.summary["method"],
        "sparsity": run.summary["sparsity"],
        "seed": run.summary["seed"],
        "attackers": sorted(attackers),
        "options": options.to_dict(),
        "sites": sorted(examples),
        "members": int(attacks.examples.is_member.sum()),
        "non_members": int((~attacks.examples.is_member).sum()),
        "attacks": [result.to_dict() for result in results],
        "skipped": skipped,
        "seconds": round(time.monotonic() - started, 1),
    }
    write_json(run.path / AUDIT_FILE, record)
    return record


def _make_attacks(
    attacks: RunAttacks, attackers: Collection[Attacker], on_progress: Callable[[str], None]
) -> tuple[list[AttackResult], list[dict[str, str]]]:
    """Return the results, and the attacks that this run does not allow, with the reason."""
    results: list[AttackResult] = []
    skipped: list[dict[str, str]] = []
    for attacker, name, attack in (
        ("outsider", "loss threshold", attacks.attack_by_loss),
        ("outsider", "rmia", attacks.attack_by_rmia),
        ("outsider", "canaries", attacks.attack_by_canaries),
        ("outsider", "site of a prediction", attacks.attribute_predictions),
        ("member", "gradient classifier", attacks.attack_between_sites),
    ):
        if attacker not in attackers:
            continue
        on_progress(f"{attacker}: {name}")
        try:
            results.append(attack())
        except DataError as error:
            skipped.append({"attacker": attacker, "attack": name, "reason": str(error)})
    return results, skipped


def _invert_messages(
    assembly: Assembly,
    data: Mapping[str, SiteData],
    examples: Mapping[str, Examples],
    options: AuditOptions,
    on_progress: Callable[[str], None],
) -> tuple[list[Inversion], str]:
    """Return the inverted messages of the first site, and why there are none."""
    site = open_site(assembly, data[min(examples)])
    try:
        attacks = ServerAttacks(assembly, site, site.trainer.examples.test, options.policy, options.steps)
        return list(attacks.invert_messages(on_progress)), ""
    except DataError as error:
        return [], str(error)


def _load_examples(
    run: RunResult, data: Mapping[str, SiteData], load: Callable[[str], Examples]
) -> dict[str, Examples]:
    """Return the examples of the sites that contributed to the model."""
    contributed = [site for site, part in run.contributions.items() if part.contributed and site in data]
    if not contributed:
        raise DataError(f"{run.path}: no site of this data contributed to the model")
    return {site: load(site) for site in contributed}
