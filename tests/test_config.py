"""Configuration: settings are read as given, and all errors are reported together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from torch import nn

from flare_sparse.config.loading import build_method, dump_config, load_config, parse_job, serialize_job
from flare_sparse.config.schema import JobConfig, RunConfig, build_task
from flare_sparse.config.user_classes import import_class
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.params import Layout
from flare_sparse.methods.neurosfl import NeuroSFL
from flare_sparse.privacy.secure_aggregation.stage import SumRules
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.script import ScriptTask
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task, TaskConfig


class ToyConfig(TaskConfig):
    width: int = Field(3, ge=1, le=8, description="hidden units")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units left out")


class Toy(Task):
    Config = ToyConfig
    metric = Metric("error", "", "min")

    def model(self) -> nn.Module:
        assert isinstance(self.config, ToyConfig)
        return nn.Linear(2, self.config.width)

    def load(self, data: SiteData, seed: int) -> Examples:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        raise NotImplementedError


MINIMAL = """
name: trial
seed: 7
method:
  name: neurosfl
  sparsity: 0.8
  training: {lr: 1e-4, epochs: 2}
task:
  name: toy
  width: 5
simulator:
  sites: 4
  data: {phantom: {subjects: 10}}
"""


@pytest.fixture(autouse=True)
def _toy_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", Toy)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def load_problems(path: Path, *overrides: str) -> list[str]:
    """Return the lines of the error, one per problem."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:-1]]


def test_settings_are_read_and_defaults_filled_in(file: Path) -> None:
    config = load_config(file)
    assert (config.name, config.seed, config.method.name, config.task.name) == ("trial", 7, "neurosfl", "toy")
    assert config.method.config.model_dump()["sparsity"] == 0.8
    assert config.method.config.training.lr == 1e-4
    assert config.method.config.training.batch_size == 8
    assert config.wire.values == "float32"
    assert config.simulator is not None
    assert config.simulator.data.phantom is not None
    assert config.simulator.data.phantom.subjects == 10


def test_method_and_task_are_built_with_their_settings(file: Path) -> None:
    config = load_config(file)
    task = build_task(config)
    method = build_method(config, Layout.from_module(task.model()))
    assert isinstance(method, NeuroSFL)
    assert (method.layout.size, method.config.sparsity, method.seed) == (15, 0.8, 7)


def test_dumped_configuration_is_read_back_equal(file: Path) -> None:
    config = load_config(file, ["method.saliency_batches=null", "wire.values=bfloat16"])
    file.write_text(dump_config(config))
    assert load_config(file) == config


@pytest.mark.slow
@given(
    sparsity=st.floats(0, 1, exclude_max=True),
    lr=st.floats(1e-12, 1e6),
    seed=st.integers(0, 2**53 - 1),
    rounds=st.integers(1, 10**6),
)
def test_numbers_survive_yaml_and_json_unchanged(sparsity: float, lr: float, seed: int, rounds: int) -> None:
    job = JobConfig.model_validate(
        {
            "name": "n",
            "seed": seed,
            "method": {"name": "neurosfl", "sparsity": sparsity, "rounds": rounds, "training": {"lr": lr}},
            "task": {"name": "toy"},
        }
    )
    assert parse_job(json.loads(json.dumps(serialize_job(job)))) == job
    assert parse_job(yaml.safe_load(dump_config(job))) == job


def test_job_contains_neither_simulator_nor_paths(file: Path) -> None:
    job = serialize_job(load_config(file))
    assert set(job) == {"name", "seed", "method", "task", "wire", "federation", "privacy", "permit"}
    assert str(file.parent) not in json.dumps(job)
    assert parse_job(job) == load_config(file).job


def test_overrides_are_yaml_and_take_precedence(file: Path) -> None:
    config = load_config(file, ["method.sparsity=0.95", "method.training.lr=1e-5", "wire={values: float16}"])
    assert config.method.config.model_dump()["sparsity"] == 0.95
    assert config.method.config.training.lr == 1e-5
    assert config.wire.values == "float16"


def test_override_can_replace_a_whole_section(file: Path) -> None:
    assert load_config(file, ["method={name: fedavg, rounds: 3}"]).method.config.rounds == 3


def test_all_errors_are_listed_with_path_value_range_and_closest_name(file: Path) -> None:
    lines = load_problems(
        file,
        "method.sparsty=0.9",
        "method.sparsity=1.5",
        "method.training.optimizer=rmsprop",
        "method.training.lrr=1",
        "task.width=9",
        "simulator.data.phantom.subjcts=3",
        "federation.min_sites=0",
        "sed=3",
        "training={lr: 1}",
    )
    assert len(lines) == 9
    by_path = {line.split(":")[0]: line for line in lines}
    assert "no such field. Did you mean 'sparsity'?" in by_path["method.sparsty"]
    assert "found 1.5; expected a number, >= 0, < 1" in by_path["method.sparsity"]
    assert "found 'rmsprop'; expected one of sgd, adam, adamw" in by_path["method.training.optimizer"]
    assert "Did you mean 'lr'?" in by_path["method.training.lrr"]
    assert "Did you mean 'method.training'?" in by_path["training"]
    assert by_path["task.width"] == "task.width: found 9; expected a whole number, >= 1, <= 8 (hidden units)"
    assert "Did you mean 'subjects'?" in by_path["simulator.data.phantom.subjcts"]
    assert "found 0; expected a whole number, >= 1" in by_path["federation.min_sites"]
    assert "Did you mean 'seed'?" in by_path["sed"]


def test_error_names_the_file_and_the_remedy(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: 1 error, nothing was started") as caught:
        load_config(file, ["method.sparsity=-1"])
    assert str(caught.value).endswith("Correct the file, or override a setting with --set KEY.PATH=VALUE.")


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("method.name=neurosf", "method.name: found 'neurosf'; expected one of: "),
        ("method.name=neurosf", "Did you mean 'neurosfl'?"),
        ("task.name=toi", "Did you mean 'toy'?"),
        ("task.name=[1]", "task.name: found [1]; expected one of: "),
        ("task={name: table, scaling: far}", "task.scaling: found 'far'; expected one of site, federated, combat, "),
        ("task=brain_age", "task: expected a section such as {name: "),
        ("task={width: 3}", "task.name: missing; expected one of: "),
        ("simulator.data={path: x, partition: {kind: natral}}", "Did you mean 'natural'?"),
        ("simulator.data={path: x, partition: {kind: iid, alpha: 1}}", "simulator.data.partition.alpha: no such field"),
        ("simulator.data={path: x}", "simulator.data: partition is missing"),
        ("simulator.data.path=x", "simulator.data: give either phantom or path"),
        ("simulator.data={path: 'x/{site}', partition: {kind: iid}}", "omit it with phantom and with {site}"),
        ("simulator.sites=null", "simulator: sites is missing"),
        ("federation.min_sites=5", "federation.min_sites is 5, but simulator.sites only 4"),
        ("name=two words", "name: found 'two words'; expected text"),
        ("method.training.lr=.inf", "method.training.lr: expected a finite number"),
        ("method=null", "method: expected a section"),
    ],
)
def test_each_kind_of_mistake_is_explained(file: Path, assignment: str, expected: str) -> None:
    assert expected in "\n".join(load_problems(file, assignment))


def test_missing_section_is_described_as_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{name: study, task: {name: toy}}")
    with pytest.raises(ConfigError, match=r"method: missing; expected a section such as \{name: \.\.\.\} \(what is"):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        ("{name: toy, script: client.py, model: nets.Net}", "name and script"),
        ("{name: toy, class: my_tasks.Mine}", "name and class"),
    ],
)
def test_task_with_two_names_is_one_error(file: Path, task: str, keys: str) -> None:
    assert load_problems(file, f"task={task}") == [f"task: found {keys}; expected one of them"]


def find_refusal(path: Path, feature: str, *overrides: str) -> str:
    """Return the line of the error that starts with the name of a feature."""
    return next(line for line in load_problems(path, *overrides) if line.startswith(f"{feature}: "))


def test_quorum_below_what_a_sum_needs_is_refused(file: Path) -> None:
    overrides = ("wire.aggregation=masked", "method={name: neurosfl}")
    problem = find_refusal(file, "federation.min_sites below 3", *overrides, "federation.min_sites=2")
    assert "fewer than 3 of the sites commit a round, but wire.aggregation: masked" in problem
    assert problem.endswith("or set federation.min_sites to 3 or more")
    load_config(file, [*overrides, "federation.min_sites=3", "simulator.sites=3"])


TABLE = "{name: table, kind: %s, target: y, features: [x], scaling: %s, event: %s}"
PRIVATE = ("privacy={epsilon: 3}", "method={name: fedsparsify}", "task=" + TABLE % ("regression", "none", "null"))
MASKED = ("wire.aggregation=masked", "federation.min_sites=3", "method={name: neurosfl}")


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("method={name: scbf}", "method scbf"),
        ("method={name: fedavg_ft}", "method fedavg_ft: fine-tuning"),
        ("method.personal=norms", "method.personal"),
        ("method.training.precision=bfloat16", "method.training.precision: bfloat16"),
        ("method.training.compute=sparse", "method.training.compute: sparse"),
        ("task=" + TABLE % ("regression", "site", "null"), "task: task.scaling: site"),
        ("task=" + TABLE % ("regression", "federated", "null"), "task: task.scaling: federated"),
        ("task=" + TABLE % ("survival", "none", "e"), "task: task.loss: cox"),
        ("task=" + TABLE % ("binary", "none", "null, class_weights: [1, 4]"), "task: task.class_weights"),
        ("task={name: image_classification, classes: 2, class_weights: [1, 4]}", "task: task.class_weights"),
        ("task={name: text_classification, classes: 2, class_weights: [1, 4]}", "task: task.class_weights"),
    ],
)
def test_settings_outside_the_privacy_budget_are_refused(file: Path, override: str, cause: str) -> None:
    assert load_config(file, PRIVATE).privacy is not None
    load_config(file, [*PRIVATE, "method={name: neurosfl, scores: random, random_layers: erk}"])
    load_config(file, [*PRIVATE, "method={name: neurosfl}"])
    problem = find_refusal(file, "privacy", *PRIVATE, override)
    assert f"but {cause}" in problem
    assert problem.endswith("or leave privacy out")


def test_privacy_has_a_target_or_a_noise_and_not_both(file: Path) -> None:
    assert "set either epsilon" in load_problems(file, *PRIVATE, "privacy.noise_multiplier=1")[0]


def test_section_on_privacy_is_sent_with_a_job(file: Path) -> None:
    assert serialize_job(load_config(file))["privacy"] is None
    private = serialize_job(load_config(file, PRIVATE))
    assert private["privacy"]["epsilon"] == 3
    assert parse_job(private).privacy == load_config(file, PRIVATE).privacy


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("method={name: scbf}", "method scbf"),
        ("method={name: topk_ef}", "method topk_ef"),
        ("method={name: lora_a2}", "method lora_a2"),
        ("method={name: neurosfl, scores: individual_snip}", "method neurosfl: scores: individual_snip"),
        ("method={name: neurosfl, scores: individual_snip, random_site: true}", "neurosfl: scores: individual_snip"),
        ("wire.values=bfloat16", "wire.values: values are bfloat16"),
        ("wire.values=int8", "wire.values: values are int8"),
        ("federation.clip_norm=1.0", "federation.clip_norm"),
        ("federation.max_share=0.5", "federation.max_share"),
    ],
)
def test_settings_that_need_more_than_a_sum_are_refused_with_masked_sums(file: Path, override: str, cause: str) -> None:
    assert load_config(file, MASKED).stage == SumRules(64.0, 3)
    problem = find_refusal(file, "wire.aggregation: masked", *MASKED, override)
    assert f"but {cause}" in problem or f"but method {cause}" in problem
    assert problem.endswith("or set wire.aggregation to plain")


def test_bound_above_that_of_the_ring_is_refused(file: Path) -> None:
    assert "wire.bound" in "\n".join(load_problems(file, "wire.bound=2e6"))


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        ("{name: scbf}", "method scbf: aggregation sum"),
        ("{name: scbfwp}", "method scbfwp: aggregation sum"),
        ("{name: dssgd}", "method dssgd: aggregation sum"),
        ("{name: fedavg, server: {lr: 5}}", "method fedavg: server.lr 5.0"),
    ],
)
def test_methods_that_multiply_rounding_errors_are_refused_with_few_bits(file: Path, method: str, cause: str) -> None:
    assert load_config(file, [f"method={method}", "wire.values=bfloat16_zstd"]).wire.values == "bfloat16_zstd"
    for values in ("int8", "int4", "int2", "int1"):
        problem = load_problems(file, f"method={method}", f"wire.values={values}")[0]
        assert problem.startswith("wire.values: int8, int4, int2, int1: ")
        assert f"but {cause}" in problem


def test_selective_methods_that_average_may_have_few_bits(file: Path) -> None:
    assert load_config(file, ["method={name: scbf, aggregation: mean}", "wire.values=int4"]).wire.values == "int4"


def test_missing_sections_are_named(file: Path) -> None:
    file.write_text("name: x\n")
    assert [line.split(";")[0] for line in load_problems(file)] == ["method: missing", "task: missing"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [", "not YAML"),
        ("name: a\nname: b\n", "'name' is given twice"),
        ("- 1\n", "expected a section"),
        ("", "expected a section"),
    ],
)
def test_file_that_is_not_a_configuration_is_refused(file: Path, text: str, expected: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(file)


def test_missing_file_names_the_closest_file(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file\. Did you mean 'run\.yaml'\?"):
        load_config(file.with_name("rum.yaml"))


def test_malformed_overrides_are_listed_together(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["sparsity", "=3", "seed.deep=1", "seed=[", "seed=1"])
    starts = ["--set sparsity:", "--set =3:", "--set seed.deep=1:", "--set seed=[:"]
    assert [s for s in starts if s in str(caught.value)] == starts


def test_paths_are_relative_to_the_file_and_overrides_to_the_working_directory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    natural = "partition: {kind: natural}"
    file.write_text(MINIMAL.replace("{phantom: {subjects: 10}}", f"{{path: brains, {natural}}}"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    def data_path(*overrides: str) -> Path | None:
        simulator = load_config(file, overrides).simulator
        assert simulator is not None
        return simulator.data.path

    assert data_path() == tmp_path / "brains"
    assert data_path("simulator.data.path=mine") == elsewhere / "mine"
    assert data_path("simulator.data.path=/data/x") == Path("/data/x")


OWN = """
from flare_sparse.tasks.registry import TASKS

class MyConfig(TASKS["toy"].Config):
    depth: int = 2

class MyTask(TASKS["toy"]):
    Config = MyConfig
"""


def test_user_task_beside_the_file_is_loaded(file: Path) -> None:
    file.with_name("own_task_module.py").write_text(OWN)
    own = "task={class: own_task_module.MyTask, depth: 4}"
    config = load_config(file, [own])
    kind = import_class("task", "own_task_module.MyTask")
    assert config.task.config.model_dump(include={"width", "dropout", "depth"}) == {
        "width": 3,
        "dropout": 0.0,
        "depth": 4,
    }
    assert serialize_job(config)["task"]["class"] == "own_task_module.MyTask"
    assert type(build_task(config)) is kind
    assert parse_job(serialize_job(config), kind) == config.job
    assert "no such field. Did you mean 'depth'?" in load_problems(file, own, "task.deph=1")[0]


SCRIPT = "task={script: client.py, model: nets.Net, args: '--epochs 2', metric: {name: dice, unit: ''}}"


def test_script_is_a_task_with_settings_of_its_own(file: Path) -> None:
    config = load_config(file, ["method={name: fedavg}", SCRIPT])
    assert serialize_job(config)["task"] == {
        "script": "client.py",
        "model": "nets.Net",
        "model_args": {},
        "args": "--epochs 2",
        "launch": "",
        "metric": {"name": "dice", "mode": "max", "unit": ""},
        "weigh_by": "steps",
        "split": {"test": 0.2, "validation": 0.0, "folds": None, "fold": 1, "stable": False},
        "subgroups": [],
        "min_subgroup": 10,
    }
    assert parse_job(serialize_job(config), ScriptTask) == config.job
    with pytest.raises(ConfigError, match="built by load_task"):
        build_task(config)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("task.script=../client.py", "expected a file such as client.py, in the folder of the configuration"),
        ("task.script=/etc/client.py", "expected a file such as client.py"),
        ("task.script=client.sh", "expected a file such as client.py"),
        ("task.model=Net", "task.model"),
        ('task.args=--name "a b', "task.args: '--name \"a b': no closing quotation; expected a command line"),
        ("task.launch=python 'x", 'task.launch: "python \'x": no closing quotation; expected a command line'),
        ("task.weigh_by=size", "one of steps, examples, equal"),
        ("method.training.lr=0.5", "give the script its settings in task.args"),
        ("method={name: metagater, rounds: 1}", "but method metagater: "),
    ],
)
def test_what_a_script_cannot_do_is_refused_before_it_starts(file: Path, assignment: str, expected: str) -> None:
    problems = load_problems(file, "method={name: fedavg}", SCRIPT, assignment)
    assert expected in "\n".join(problems)


def test_dotted_path_in_a_job_is_never_imported(file: Path) -> None:
    for key in ("class", "name"):
        job = {**serialize_job(load_config(file)), "task": {key: "os.system", "command": "true"}}
        with pytest.raises(ConfigError, match=rf"task\.{key}: found 'os\.system'; expected one of: "):
            parse_job(job)


@pytest.mark.parametrize("dotted", ["nowhere.Task", "json.Missing", "json.dumps", "Toy", ""])
def test_class_that_is_not_a_task_is_refused(file: Path, dotted: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.class"):
        load_config(file, [f"task={{class: '{dotted}'}}"])


def test_text_that_looks_like_a_number_is_text_in_a_saved_configuration(file: Path, tmp_path: Path) -> None:
    table = "task={name: table, kind: classes, target: y, features: [x], classes: ['1e3', '2E+1', '0x1f', 'no']}"
    config = load_config(file, [table])
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_config(config), encoding="utf-8")
    assert load_config(saved) == config
    assert config.task.config.classes == ("1e3", "2E+1", "0x1f", "no")


def test_every_section_has_a_description() -> None:
    for model in (RunConfig, JobConfig):
        assert [name for name, field in model.model_fields.items() if not field.description and name != "data"] == []


def test_early_stopping_needs_validation_examples(file: Path) -> None:
    stopping = "federation.early_stopping={patience: 3}"
    assert "but federation.early_stopping: " in find_refusal(file, "task.split.validation: 0", stopping)
    assert load_config(file, [stopping, "task.split.validation=0.1"]).federation.early_stopping is not None


def test_choice_by_validation_needs_validation_examples(file: Path) -> None:
    choice = "method={name: fedavg, finetune: {proximal: [0.1, 1]}}"
    assert "but method fedavg: finetune.proximal" in find_refusal(file, "task.split.validation: 0", choice)
    load_config(file, [choice, "task.split.validation=0.1"])
    load_config(file, ["method={name: fedavg, finetune: {proximal: 0.1}}"])


def test_early_stopping_needs_the_validation_examples_of_all_sites_in_every_round(file: Path) -> None:
    settings = ["federation.early_stopping={patience: 3}", "task.split.validation=0.1"]
    problem = find_refusal(file, "federation.early_stopping", *settings, "method.participation=0.5")
    assert "but method.participation: 0.5" in problem


def test_early_stopping_and_the_rate_of_the_last_round_exclude_each_other(file: Path) -> None:
    settings = ["federation.early_stopping={patience: 3}", "task.split.validation=0.1"]
    for training in ("{lr_decay: 0.9}", "{schedule: {kind: cosine}}"):
        method = f"{{name: fedavg, training: {training}, finetune: "
        problem = find_refusal(file, "federation.early_stopping", *settings, f"method={method}{{epochs: 2}}}}")
        assert "but method fedavg: method.finetune.lr" in problem
        assert "set method.finetune.lr" in problem
        load_config(file, [*settings, f"method={method}{{lr: 0.001}}}}"])
        load_config(file, [f"method={method}{{epochs: 2}}}}"])
    load_config(file, [*settings, "method={name: fedavg, finetune: {epochs: 2}}"])


def test_early_stopping_waits_for_an_evaluated_model(file: Path) -> None:
    settings = ["federation.early_stopping={patience: 3}", "task.split.validation=0.1"]
    problem = load_problems(file, *settings, "method.evaluate_every=4")[0]
    assert "raise patience to 4 or more" in problem
    assert load_config(file, [*settings, "method.evaluate_every=3"]).method.config.evaluate_every == 3
