"""Build a job's parts from its settings: task, model, method and run id.

Server and sites call the same functions, so that both endpoints of a run agree without exchanging these parts.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from ..core.checkpoint.store import Store
from ..core.errors import ConfigError
from ..core.needs import Need
from ..core.params import Layout
from ..core.seeds import seed_torch
from ..inputs.scaling import build_statistics_mask, find_site_tensors
from ..methods.method import SCORE, Method
from ..privacy.dp.account import Budget, PrivacyAccount
from ..privacy.dp.accounting import SamplingPlan
from ..privacy.dp.config import PrivacyConfig
from ..privacy.dp.mechanism import SiteMechanism
from ..privacy.dp.scripts import ScriptBudget
from ..rounds.local.run import Transport
from ..tasks.script import ScriptTask
from ..tasks.task import Examples, SiteData, Task, load_examples
from ..training import LocalTask, Site, SitePrivacy, build_site
from ..training.compute import can_use_kernels
from ..training.personal import select_personal
from ..training.private import SilentTrainer, check_private_network
from ..training.script_exchange import ScriptRunner
from ..training.script_trainer import ScriptTrainer
from ..training.trainer import Trainer
from .loading import build_method, serialize_job
from .needs import JobPart, find_conflicts
from .people import ReleaseGate
from .schema import JobConfig, build_task

_LOG = logging.getLogger(__name__)
STANDARDIZED = JobPart(
    "the network",
    frozenset(
        {
            Need.EXACT_STATISTICS.because(
                "the statistics by which it standardises its inputs travel in the clear as float32, without noise",
                "choose another task.scaling or task.model, such as task.model.standardize: false of voxel_mlp",
            )
        }
    ),
)
"""A network with a scaler of its inputs, among the parts of a job."""


@dataclass(frozen=True)
class Assembly:
    """Parts of one job, equal at both endpoints because they are built from the same settings.

    Attributes:
        task: the learning problem.
        method: the federated method.
        layout: layout of the tensors that are exchanged.
        weights: ``(P,)`` their initial values.
        run_id: name of the run.
        network: layout of the task's whole model: with the tensors that stay at the sites.
        personal: initial values of these tensors by name; empty: all tensors are exchanged.
        privacy: differential privacy of the sites' training; None: the job does not ask for it.
        job: name of the job.
    """

    task: Task
    method: Method[Any, Any]
    layout: Layout
    weights: Tensor
    run_id: str
    network: Layout
    personal: dict[str, Tensor]
    privacy: PrivacyConfig | None = None
    job: str = ""

    def complete(self, weights: Tensor) -> Tensor:
        """Return the vector of the whole model: ``weights`` ``(P,)`` and the initial values of what sites keep."""
        if not self.personal:
            return weights
        return self.network.flatten({**self.layout.unflatten(weights), **self.personal})

    def build_network(self, weights: Tensor) -> nn.Module:
        """Return the task's network with the weights of its whole model, ``(network.size,)``, in evaluation mode."""
        with seed_torch(0):
            model = self.task.model()
        # A class may override it, for other names than those of its parameters.
        nn.Module.load_state_dict(model, self.network.unflatten(weights), strict=False)
        return model.eval()


def assemble(job: JobConfig, user_task: Task | None = None, max_entries: int | None = None) -> Assembly:
    """Build the parts of a job.

    Args:
        job: validated settings.
        user_task: a user task, already built; None to build the registered task that the job names.
        max_entries: largest number of entries of the model; None: no limit.

    Raises:
        ConfigError: the model cannot be built from the settings, is too large, or the job's messages would change the
            statistics of an input scaler or carry what describes the sites' own data.
    """
    task = user_task or build_task(job)
    if max_entries is not None:
        _check_size(count_model_entries(task), max_entries)
    network, initial = build_initial_model(task, job.seed)
    if job.privacy is not None:
        assert network.skeleton is not None, "a layout of a module has one"
        check_private_network(network.skeleton)
    _check_size(network.size, max_entries)
    tensors = network.unflatten(initial)
    personal = {name: tensors.pop(name).clone() for name in select_personal(network, job.method.config.personal)}
    layout = network.drop(personal)
    # The statistics of an input scaler must travel as they are.
    if build_statistics_mask(layout).count and (conflicts := find_conflicts(job, [STANDARDIZED])):
        raise ConfigError("; ".join(conflicts))
    if exchanged := {spec.name for spec in layout.tensors} & set(find_site_tensors(layout)):
        raise ConfigError(
            f"task: {min(exchanged)} describes the data of one site and must stay there; set method.personal: site, or "
            "name it among the patterns"
        )
    weights = layout.flatten(tensors) if personal else initial
    run_id = compute_run_id(serialize_job(job), layout)
    method = build_method(job, layout)
    return Assembly(task, method, layout, weights, run_id, network, personal, job.privacy, job.name)


def build_transport(job: JobConfig) -> Transport:
    """Return how the messages of a job travel within one process."""
    return Transport(job.wire.values, job.stage, job.builds_initial)


def open_checkpoints(job: JobConfig, assembly: Assembly, root: Path, end: str) -> Store:
    """Open the checkpoint store of one endpoint of a job.

    The folder is named after the run id, so that another job finds no checkpoints there and starts from round 1.

    Args:
        job: settings of the job.
        assembly: its parts.
        root: folder that holds the checkpoints of all jobs.
        end: ``"server"`` or the name of a site.
    """
    owner = {"run": assembly.run_id, "layout": assembly.layout.fingerprint, "end": end, "job": serialize_job(job)}
    return Store(root / f"{job.name}-{assembly.run_id}" / end, owner, keep=job.federation.kept_commits)


def open_site(
    assembly: Assembly, data: SiteData, account: PrivacyAccount | None = None, gate: ReleaseGate | None = None
) -> Site:
    """Load a site's data and build the site.

    Args:
        assembly: parts of the job.
        data: location of the site's data.
        account: the site's secret and privacy ledger; None: new ones in memory.
        gate: decides what is said of people; None: exact numbers.

    Raises:
        ConfigError: the site file sets a setting that the method does not let sites choose, or an invalid value.
        DataError: the data is missing or invalid; the message names files and stays at the site.
        TaskFailed: the task's ``load`` raised an exception of its own.
    """
    method = assembly.method
    # Settings are checked before the data is loaded: loading may take minutes.
    site_settings = validate_site_settings(method, data)
    record = None if gate is None else gate.bind(assembly.task, data)
    examples = load_examples(assembly.task, data, method.seed if gate is None else gate.split_seed)
    if gate is not None:
        examples = gate.label(record, data, examples)
    # What describes the site's own examples; all other tensors start with the values that the seed gives every site.
    described = assembly.task.describe_site(examples.train) if examples.n_train else {}
    personal = {name: described.get(name, values) for name, values in assembly.personal.items()}
    hardware = method.config.training.select_hardware(data.device)
    _LOG.info("site %s computes on %s", data.site, hardware.device)
    local = LocalTask.open(data.site, assembly.task, examples, assembly.layout, method.seed, hardware)
    privacy = open_site_privacy(assembly, examples, account or PrivacyAccount())
    site = build_site(local, site_settings, personal=personal, privacy=privacy)
    site.release = None if gate is None else gate.build(record, assembly.task, examples)
    return site


def open_site_privacy(assembly: Assembly, examples: Examples, account: PrivacyAccount) -> SitePrivacy:
    """Return what the job's privacy section does at a site with these examples.

    Args:
        assembly: parts of the job.
        examples: the site's examples.
        account: the site's secret and privacy ledger.
    """
    config, method, names = assembly.privacy, assembly.method, (assembly.run_id, assembly.job)
    if config is None:
        return SitePrivacy()
    mechanism = None
    if examples.n_train:
        plan = plan_sampling(method, examples.count_train_subjects())
        mechanism = SiteMechanism(config, plan, account, *names)
    return SitePrivacy(mechanism, config.metrics != "none")


def check_kernels(method: Method[Any, Any]) -> None:
    """Check before a site trains that this machine has the sparse kernels, and compile them, if the job demands them.

    Raises:
        ConfigError: ``training.compute`` is ``sparse``, and numba is missing or the site computes on a GPU.
    """
    training = method.config.training
    if can_use_kernels(training.compute, training.select_hardware().device) and training.compute == "sparse":
        # numba is an optional dependency, which takes a second to import.
        from ..compute.kernels.preparation import prepare_loops

        prepare_loops()


def plan_sampling(method: Method[Any, Any], subjects: int) -> SamplingPlan:
    """Return the sampling of a method's trainings at a site with this number of subjects."""
    config = method.config.training
    plan = SamplingPlan.build(subjects, config.batch_size, config.epochs, method.config.rounds, config.accumulate)
    return replace(plan, score_steps=method.count_score_lots(plan.steps // config.epochs))


def open_script_budget(assembly: Assembly, folder: Path, limit: Budget | None = None) -> ScriptBudget | None:
    """Return the budget of a job whose script trains; None if the job has no privacy section.

    Args:
        assembly: parts of the job.
        folder: folder of the site's secret and ledger.
        limit: the site's own budget over all jobs; None: it has none.
    """
    if assembly.privacy is None:
        return None
    method = assembly.method
    trainings = method.config.rounds + method.count_requests(SCORE, 0)
    return ScriptBudget(assembly.privacy, PrivacyAccount(folder, limit), trainings, assembly.run_id, assembly.job)


def open_script_trainer(
    assembly: Assembly,
    data: SiteData,
    runner: ScriptRunner,
    budget: ScriptBudget | None = None,
    gate: ReleaseGate | None = None,
) -> Site:
    """Build a site that trains with a script; the script loads the site's data.

    Args:
        assembly: parts of the job.
        data: location of the site's data.
        runner: runs the script.
        budget: what the script's engine charges; None: the job has no privacy section.
        gate: as in :func:`open_site`.

    Raises:
        ConfigError: as :func:`open_site`.
    """
    if data.withdrawn:
        raise ConfigError(
            f"site {data.site}: {len(data.withdrawn)} subjects have withdrawn, and a training script reads its data by "
            "itself; remove them from the data, and then from the site's list"
        )
    method, task = assembly.method, assembly.task
    assert isinstance(task, ScriptTask), "only a script's task has a script"
    site_settings = validate_site_settings(method, data)
    first = method.count_requests(SCORE, 0)
    rounds = range(first, first + method.config.rounds)
    trainer: Trainer = ScriptTrainer(
        data.site, task, assembly.layout, method.seed, runner, rounds, task.config.weigh_by, budget
    )
    if assembly.privacy is not None and assembly.privacy.metrics == "none":
        trainer = SilentTrainer(trainer)
    site = Site(data.site, trainer, site_settings)
    if gate is not None:
        site.release = gate.build(gate.bind(task, data), task, None)
    return site


def validate_site_settings(method: Method[Any, Any], data: SiteData) -> BaseModel | None:
    """Return the method's settings from the site file; None if there are none."""
    settings = data.methods.get(method.name)
    if not settings:
        return None
    if method.SiteConfig is None:
        raise ConfigError(
            f"site {data.site}: methods.{method.name}: this method has no settings that a site may choose"
        )
    try:
        return method.SiteConfig.model_validate(settings)
    except ValidationError as error:
        problems = [f"methods.{method.name}.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        allowed = ", ".join(method.SiteConfig.model_fields)
        raise ConfigError(f"site {data.site}: {'; '.join(problems)}. A site may set: {allowed}") from error


def build_initial_model(task: Task, seed: int) -> tuple[Layout, Tensor]:
    """Return the layout of the task's model and its initial vector ``(P,)``, drawn from the run's seed."""
    with seed_torch(seed):
        module = task.model()
    layout = Layout.from_module(module)
    if not layout.size:
        raise ConfigError(f"task.model: {type(module).__name__} has no parameter to train")
    if hollow := [name for name, tensor in module.state_dict().items() if tensor.is_meta]:
        raise ConfigError(
            f"task.model: {hollow[0]!r} is on torch's meta device, without values; initialise it on the CPU"
        )
    return layout, layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))


def count_model_entries(task: Task) -> int:
    """Return the number of parameters of a task's model without allocating them; 0 if that is impossible."""
    try:
        with seed_torch(0), torch.device("meta"):
            return sum(parameter.numel() for parameter in task.model().parameters())
    # A model may read its own values while it is built, which tensors without memory do not have.
    except Exception:  # noqa: BLE001
        return 0


def _check_size(entries: int, max_entries: int | None) -> None:
    """Refuse a model with more entries than the policy allows.

    Raises:
        ConfigError: the model has more entries than the policy allows.
    """
    if max_entries is not None and entries > max_entries:
        raise ConfigError(
            f"the job's model has {entries} entries; the policy here allows max_model_entries {max_entries}"
        )


def compute_run_id(config: Mapping[str, Any], layout: Layout) -> str:
    """Return the run id, 16 hex digits: equal for equal settings and layouts."""
    return hashlib.sha256(json.dumps([config, layout.fingerprint], sort_keys=True).encode()).hexdigest()[:16]
