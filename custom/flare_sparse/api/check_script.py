"""The check of a training script: its launcher, and one request at one site."""

import re
import shlex
import shutil
import tempfile
from pathlib import Path

from ..config.study import Study
from ..core.errors import ConfigError
from ..core.mask import Mask
from ..privacy.dp.account import PRIVACY_FOLDER
from ..tasks.task import SiteData
from ..training.script_exchange import ScriptFailed
from .local import open_script

LIMIT_S = 60.0
"""Seconds after which a script that still trains is stopped."""


def find_launcher(launch: str) -> str:
    """Return the program that starts a script.

    Raises:
        ConfigError: it is not installed here.
    """
    name = shlex.split(launch)[0]
    program = shutil.which(name)
    if program is None:
        raise ConfigError(f"task.launch: {name!r} is not found; install it, or correct the command")
    return program


def find_extra_training(script: Path) -> str:
    """Return what a script with differential privacy spends beyond its target; empty if nothing is known."""
    text = script.read_text(encoding="utf-8")
    if not re.search(r"^\s*(?:import|from) opacus|make_private\(", text, re.MULTILINE) or "is_evaluate" in text:
        return ""
    return (
        f"{script.name} trains with differential privacy and never asks flare.is_evaluate(): the last evaluation "
        "trains once more, beyond its epsilon; answer that request with metrics alone (docs/own-script.md)"
    )


def train_once(study: Study, data: SiteData) -> tuple[str, bool]:
    """Let a site's script train once from the initial model; return in words what changed, and whether anything did.

    Raises:
        ScriptFailed: the script failed, or sent nothing usable.
        ScriptTooSlow: it did not end in time, and was stopped.
    """
    from ..flare.script_process import OUTPUT

    assembly = study.assembly
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # An account of its own: what a check trains is sent to no one.
        site, process = open_script(study, assembly, data, folder, folder / PRIVACY_FOLDER, LIMIT_S)
        try:
            start, full = assembly.weights, Mask.full(assembly.layout.size)
            trained = site.train(start.clone(), full, study.config.method.config.training, 1)
            metrics = site.evaluate(start)
        except ScriptFailed as error:
            # The folder of the output is gone once this command ends.
            output = folder / OUTPUT
            lines = output.read_text(errors="replace").splitlines()[-5:] if output.is_file() else ["nothing"]
            error.happened = "\n".join([error.happened, "its output ends with:", *(f"  {line}" for line in lines)])
            error.output = ""
            raise
        finally:
            process.close()
    layout = assembly.layout
    before, after = layout.unflatten(start), layout.unflatten(trained)
    names = [spec.name for spec in layout.tensors if spec.role != "buffer"]
    moved = sum(not before[name].equal(after[name]) for name in names)
    if not moved:
        return (
            "the script sent the parameters that it received: it has not trained, or sends another network than the "
            "one that it trains"
        ), False
    value = metrics.get(assembly.task.metric.name)
    measured = "no metrics" if value is None else f"{assembly.task.metric.name} {value:.4g} before"
    return f"one request changed {moved} of {len(names)} tensors, n_k {site.num_examples}, {measured}", True
