"""A configuration as a FLARE recipe, which runs in the simulator, in POC mode or in production, or is exported."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from nvflare.app_common.widgets.metrics_artifact_writer import MetricsArtifactWriter
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe
from nvflare.utils.job_launcher_utils import PORTABLE_RESOURCE_DEFAULT_KEY
from torch import nn

import flare_sparse

from ..config.choice import Choice
from ..config.loading import parse_job, resolve_classes, serialize_job
from ..config.schema import DeploymentConfig, JobConfig, Packaging, RunConfig
from ..config.user_classes import list_user_code, load_task
from ..config.yaml_files import format_yaml
from ..core.errors import ConfigError
from ..core.params import Layout
from ..tasks.bundles.components import iterate_components
from ..tasks.bundles.task import BundleConfig, BundleTask
from ..tasks.script import ScriptConfig, ScriptTask
from .controller import FederatedController
from .executor import EncodeUpdate, SparseExecutor
from .job_settings import SERVER_SECTIONS, SITE_SECTIONS, show_settings
from .payload import HELLO, QUESTION, SUM, TASK
from .questions import QuestionController, QuestionExecutor, build_question
from .session import METHOD_ID, SITE_ID, TASK_ID, SiteSession, UserPart
from .tracking import TRACKER_ID, Tracker
from .workspace import JOB_FILE

NetworkSource = nn.Module | type[nn.Module] | Mapping[str, Any] | str


class _JobRecipe(Recipe):
    """A recipe whose participants have the package, and the settings of the job beside FLARE's own configuration."""

    def __init__(self, config: JobConfig):
        job = FedJob(name=config.name, min_clients=config.federation.min_sites)
        super().__init__(job)
        # Otherwise the job would carry all of the package, as code that sites may refuse.
        job.set_app_packages(["flare_sparse"])
        # FLARE copies added files only at export or submission, so they must exist as long as the recipe.
        self._staging = Path(tempfile.mkdtemp(prefix="flare-sparse-"))
        weakref.finalize(self, shutil.rmtree, self._staging, ignore_errors=True)
        (self._staging / JOB_FILE).write_text(format_yaml(serialize_job(config)))
        job.add_file_to_clients(str(self._staging / JOB_FILE), app_folder_type="config")


class QuestionRecipe(_JobRecipe):
    """A job that asks one question; it carries the study's settings and no code.

    Args:
        config: the study's settings, whose task reads the data.
        executor: answers at each site.
        controller: class that asks, and writes what the answers give.
    """

    def __init__(self, config: JobConfig, executor: QuestionExecutor, controller: type[QuestionController[Any]]):
        super().__init__(config)
        timeout_s = int(config.federation.task_timeout_s)
        self._job.to_server(controller(build_question(executor), timeout_s), id="controller")
        self._job.to_clients(executor, tasks=[QUESTION])


class SparseRecipe(_JobRecipe):
    """A FLARE recipe of any method, of this package or your own.

        recipe = SparseRecipe(load_config("app_configs/neurosfl_brain_age.yaml"))
        recipe.execute(SimEnv(num_clients=4))  # or PocEnv, ProdEnv; or recipe.export("jobs")

    Args:
        config: a validated configuration; only its job part goes into the job. With ``deployment.packaging: byoc`` the
            package's source travels in the app's ``custom/`` folder; without it no code travels, and every site has
            installed the wheel and allows its classes.
        modules: the user's files and package folders; those of a task or a method travel with ``"byoc"`` only, those of
            a training script always.
        tracker: component that sends the figures of rounds to a service; None: none.

    Raises:
        ConfigError: there are ``modules``, and the packaging is ``installed``.
    """

    recipe_algorithm = "sparse federated learning"
    recipe_privacy = ()
    recipe_framework_support = ("pytorch",)

    def __init__(self, config: RunConfig, *, modules: tuple[Path, ...] = (), tracker: Tracker | None = None):
        super().__init__(config)
        self._config, job = config, self._job
        if config.federation.gpus:
            job.job.add_resource_spec(PORTABLE_RESOURCE_DEFAULT_KEY, {"num_of_gpus": config.federation.gpus})
        job.to_server(FederatedController(**show_settings(config, SERVER_SECTIONS)), id="controller")
        job.to_server(MetricsArtifactWriter(), id="metrics_artifact_writer")
        if tracker is not None:
            job.to_server(tracker, id=TRACKER_ID)
        steps = [SUM] if config.stage.hides_values else []
        job.to_clients(SparseExecutor(**show_settings(config, SITE_SECTIONS)), tasks=[HELLO, TASK, *steps])
        job.to_clients(SiteSession(), id=SITE_ID)
        self.add_client_output_filter(EncodeUpdate(), tasks=[TASK])
        job.add_file_to_server(str(self._staging / JOB_FILE), app_folder_type="config")
        # FLARE builds them from their paths at each site, so that the site's allow-list decides about them.
        for name, part in describe_user_parts(config).items():
            job.to_server(UserPart(part), id=name)
            job.to_clients(UserPart(part), id=name)
        # Nested under "server", the only place where FLARE reads it.
        self.add_server_config({"server": {"task_request_interval": config.federation.request_interval_s}})
        if config.deployment.packaging == "byoc":
            # FLARE finds modules to send by tracing imports, which misses files of the package.
            self._add_module(job, Path(flare_sparse.__file__).parent, "docs", "app_configs")
        elif modules and config.task.key != "script":
            raise ConfigError(
                "modules: source files travel only with deployment.packaging: byoc; choose it, or install them at the "
                "sites"
            )
        for module in modules:
            self._add_module(job, module)

    @classmethod
    def from_script(
        cls,
        *,
        train_script: str | Path,
        model: NetworkSource,
        method: Mapping[str, Any] | str,
        rounds: int,
        min_clients: int = 1,
        train_args: str = "",
        packaging: Packaging = "byoc",
        **settings: Any,
    ) -> SparseRecipe:
        """Return the recipe of a training script on FLARE's Client API, as FLARE's ``FedAvgRecipe`` takes it.

            recipe = SparseRecipe.from_script(
                train_script="client.py", model=Net(), method={"name": "fedsparsify", "sparsity": 0.9}, rounds=10
            )
            recipe.execute(SimEnv(num_clients=2))

        Args:
            train_script: the script; modules beside it that it imports travel with the job.
            model: the network, its class, the dotted path ``"model.Net"`` of the class, or
                ``{"class_path": "model.Net", "args": {...}}`` if the class needs arguments. The run starts with the
                weights that the class draws with ``seed``; those of an instance are not used.
            method: name and settings of the method, such as ``{"name": "neurosfl", "sparsity": 0.9}``, or its name.
            rounds: number of rounds; not in ``method``.
            min_clients: quorum of a round.
            train_args: command line of the script.
            packaging: ``deployment.packaging``; the script travels with both.
            settings: further settings of a configuration: ``name``, ``seed``, sections such as ``wire={"values":
                "bfloat16"}``, and of the section ``task``: ``launch``, ``metric`` (its key in what the script sends, or
                ``name``, ``mode`` and ``unit``) and ``weigh_by``.

        Raises:
            ConfigError: the settings are invalid, or the network cannot be built from its class.
        """
        if packaging not in get_args(Packaging):
            raise ConfigError(f"packaging: expected one of {', '.join(get_args(Packaging))}, found {packaging!r}")
        script = Path(train_script).resolve()
        if "task" in settings:
            raise ConfigError(
                "task: from_script builds this section from its arguments; give task.args as train_args, and model, "
                "launch, metric and weigh_by under their own names"
            )
        method = {"name": method} if isinstance(method, str) else method
        if "rounds" in method:
            raise ConfigError("method.rounds: from_script has an argument rounds; leave rounds out of method")
        class_path, model_args = describe_network(model)
        own = {"launch", "metric", "weigh_by"} & settings.keys()
        task: dict[str, Any] = {name: settings.pop(name) for name in own}
        if isinstance(task.get("metric"), str):
            task["metric"] = {"name": task["metric"]}
        task |= {"script": script.name, "model": class_path, "model_args": model_args, "args": train_args}
        data = {"name": "sparse", "method": {**method, "rounds": rounds}, "task": task, **settings}
        data["federation"] = {"min_sites": min_clients, **settings.get("federation", {})}
        data, classes = resolve_classes(data, script.parent)
        config = parse_job(data, **classes)
        modules = list_user_code(config, script.parent)
        # Fail here and not in the running job: the path may name no class, or the arguments may not fit it.
        load_task(config, script.parent)
        return cls(RunConfig(**dict(config), deployment=DeploymentConfig(packaging=packaging)), modules=modules)

    def _add_module(self, job: FedJob, source: Path, *left_out: str) -> None:
        """Copy a file or a package into ``custom/``, under the name that it is imported by."""
        copy, folder = source, None
        if source.is_dir():
            copy, folder = self._staging / source.name, source.name
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc", *left_out)
            shutil.copytree(source, copy, ignore=ignored, dirs_exist_ok=True)
        for add in (job.add_file_to_server, job.add_file_to_clients):
            add(str(copy), dest_dir=folder, app_folder_type="custom")


def describe_user_parts(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Return the components of the user's task and method, by their ids; empty if the job has neither."""
    parts = {}
    if config.task.has_own_code:
        parts[TASK_ID] = describe_user_task(config)
    if config.method.key == "class":
        parts[METHOD_ID] = describe_user_class(config.method)
    return parts


def describe_user_task(config: JobConfig) -> dict[str, Any]:
    """Return the component of a user's task or script, from which FLARE builds it."""
    settings = config.task.config
    if isinstance(settings, BundleConfig):
        # FLARE builds an object of each class of the bundle's own; its declaration has the arguments.
        parts = {part["_target_"]: {**part} for part in iterate_components(settings.declaration)}
        own = {
            f"class_{i}": {"path": parts[name].pop("_target_"), "args": parts[name]}
            for i, name in enumerate(settings.code)
        }
        path = f"{BundleTask.__module__}.{BundleTask.__qualname__}"
        return {"path": path, "args": {"config": settings.model_dump(mode="json"), **own}}
    if not isinstance(settings, ScriptConfig):
        return describe_user_class(config.task)
    # The network is an argument, so that FLARE builds it, too, and the site's allow-list decides about its class.
    network = {"path": settings.model, "args": dict(settings.model_args)}
    path = f"{ScriptTask.__module__}.{ScriptTask.__qualname__}"
    args = {"script": config.task.name, "config": settings.model_dump(mode="json"), "model": network}
    return {"path": path, "args": args}


def list_user_classes(config: JobConfig) -> list[str]:
    """Return the paths of a job's classes of other packages, which a site allows by name."""

    def iterate_paths(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(path := value.get("path"), str) and "args" in value:
                yield path
            for part in value.values():
                yield from iterate_paths(part)

    own = f"{flare_sparse.__name__}."
    return [path for path in iterate_paths(describe_user_parts(config)) if not path.startswith(own)]


def describe_user_class(choice: Choice[Any]) -> dict[str, Any]:
    """Return the component of a user's task or method."""
    return {"path": choice.name, "args": {"config": choice.config.model_dump(mode="json")}}


def export_job(config: RunConfig, out: Path, modules: tuple[Path, ...] = ()) -> Path:
    """Write the job folder ``out/<name>``, replacing an older one, and return it."""
    SparseRecipe(config, modules=modules).export(str(out))
    return out / config.name


def describe_network(model: NetworkSource) -> tuple[str, dict[str, Any]]:
    """Return the dotted path of a network's class and the arguments that build it.

    Args:
        model: a network, its class, the dotted path of its class, or ``{"class_path": ..., "args": {...}}``.

    Raises:
        ConfigError: ``model`` is none of these, its class cannot be imported at a site, or the class needs arguments
            that are not given.
    """
    if isinstance(model, str):
        return model, {}
    if isinstance(model, Mapping) and set(model) <= {"class_path", "args"}:
        path, args = model.get("class_path"), model.get("args", {})
        if isinstance(path, str) and isinstance(args, Mapping):
            return path, dict(args)
    network = model if isinstance(model, type) else type(model)
    if not issubclass(network, nn.Module):
        raise ConfigError(
            "model: expected a network such as Net(), its class Net, the class's dotted path 'model.Net', or "
            f'{{"class_path": "model.Net", "args": {{...}}}}, found {model!r}'
        )
    if network.__module__ == "__main__" or "<" in network.__qualname__:
        raise ConfigError(
            f"model: {network.__qualname__} is defined in the running script or notebook, which no site can import; "
            "move its class to a module beside the training script, such as model.py"
        )
    class_path = f"{network.__module__}.{network.__qualname__}"
    if network.__module__.startswith("peft."):
        raise ConfigError(
            f"model: {network.__qualname__} is what peft.get_peft_model returns; call it in the constructor of a class "
            "of your own, from which server and sites build the network (docs/lora.md)"
        )
    try:
        built = network()
        is_same = not isinstance(model, nn.Module) or (
            Layout.from_module(built).fingerprint == Layout.from_module(model).fingerprint
        )
    except TypeError:
        is_same = False
    if not is_same:
        effect = "fails" if isinstance(model, type) else "fails or builds another one"
        raise ConfigError(
            f"model: server and sites build the network from its class, and {class_path}() {effect}; give "
            f'its arguments: model={{"class_path": "{class_path}", "args": {{...}}}}'
        )
    return class_path, {}
