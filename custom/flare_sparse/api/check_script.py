"""The check of a training script: its launcher, and one request at one site."""

import re
import shlex
import shutil
import tempfile
from pathlib import Path
from threading import Event, Timer

from ..config.assemble import open_script_budget, open_script_trainer
from ..config.study import Study
from ..config.user_classes import find_script
from ..core.errors import ConfigError, FlareSparseError
from ..core.mask import Mask
from ..privacy.dp.account import PRIVACY_FOLDER
from ..tasks.script import ScriptConfig
from ..tasks.task import SiteData
from ..training.script_exchange import ScriptFailed

LIMIT_S = 60.0
"""Seconds after which a script that still trains is stopped."""


class ScriptTooSlow(FlareSparseError):
    """The script did not answer within :data:`LIMIT_S`, which says nothing about whether it works."""

    code = "E_SCRIPT"


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
    from ..flare.script_process import OUTPUT, ScriptProcess

    settings, assembly, config = study.config, study.assembly, study.config.task.config
    assert isinstance(config, ScriptConfig), "a script's task has these settings"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / OUTPUT
        script = find_script(settings, study.folder)
        runner = ScriptProcess(script, config.args, data, Path(folder), [study.folder], settings.federation.threads)
        # An account of its own: what a check trains is sent to no one.
        budget = open_script_budget(assembly, Path(folder) / PRIVACY_FOLDER)
        if budget is not None:
            runner.set_budget(budget)
        site = open_script_trainer(assembly, data, runner, config.weigh_by, budget)
        is_late = Event()

        def stop() -> None:
            is_late.set()
            runner.kill()

        timer = Timer(LIMIT_S, stop)
        timer.start()
        try:
            start, full = assembly.weights, Mask.full(assembly.layout.size)
            trained = site.train(start.clone(), full, settings.method.config.training, 1)
            metrics = site.evaluate(start)
        except FlareSparseError as error:
            if is_late.is_set():
                text = f"the script still ran after {LIMIT_S:.0f} s and was stopped: nothing else is known about it"
                raise ScriptTooSlow(text) from error
            if not isinstance(error, ScriptFailed):
                raise
            # The folder of the output is gone once this command ends.
            lines = output.read_text(errors="replace").splitlines()[-5:] if output.is_file() else ["nothing"]
            error.happened = "\n".join([error.happened, "its output ends with:", *(f"  {line}" for line in lines)])
            error.output = ""
            raise
        finally:
            timer.cancel()
            runner.close()
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
