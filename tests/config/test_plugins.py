"""Methods and tasks from outside the package: by class from the user's module, by name from a distribution."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy import ToyBench
from typer.testing import CliRunner

from flare_sparse.cli import app
from flare_sparse.config.loading import dump_config, load_config, parse_job, serialize_job
from flare_sparse.config.study import Study
from flare_sparse.config.yaml_files import CONFIGURATIONS
from flare_sparse.core.errors import CheckpointError, ConfigError
from flare_sparse.core.params import Layout
from flare_sparse.methods.method import ConfiguredMethod
from flare_sparse.rounds.local.run import run_locally

METHOD = """
from pydantic import Field
from flare_sparse.methods import MethodConfig
from flare_sparse.methods.fedavg import FedAvg
from helper_of_mine import SHARE

class Config(MethodConfig):
    share: float = Field(SHARE, gt=0, le=1, description="some share")

class Mine(FedAvg):
    name = "mine"
    Config = Config

class Nameless(FedAvg):
    name = None

class Settingless(FedAvg):
    Config = dict
"""
JOB = "name: job\nmethod: {class: my_methods.Mine, share: 0.5, rounds: 2}\ntask: {name: brain_age}\n"


@pytest.fixture(autouse=True)
def _forget_modules() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "my_methods.py").write_text(METHOD)
    (tmp_path / "helper_of_mine.py").write_text("SHARE = 0.25")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def install(folder: Path, distribution: str, kind: str, entry: str) -> None:
    """Write the metadata of an installed distribution with an entry point."""
    info = folder / f"{distribution}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[flare_sparse.{kind}]\n{entry}\n")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def test_class_of_the_users_module_is_the_method_and_its_code_is_listed(file: Path) -> None:
    study = Study.load(file)
    assert type(study.assembly.method).__name__ == "Mine"
    assert study.config.method.config.model_dump(include={"share", "rounds"}) == {"share": 0.5, "rounds": 2}
    assert [path.name for path in study.user_code] == ["helper_of_mine.py", "my_methods.py"]
    assert dump_config(study.config).splitlines()[2:4] == ["method:", "  class: my_methods.Mine"]
    assert load_config(file, ["method.share=1"]).method.config.share == 1
    with pytest.raises(ConfigError, match=r"method\.share: found 2; expected a number, > 0, <= 1"):
        load_config(file, ["method.share=2"])


def test_dotted_name_is_a_class_and_a_section_of_two_names_is_refused(file: Path) -> None:
    assert load_config(file, ["method={name: my_methods.Mine}"]).method.key == "class"
    for section in ("method", "task"):
        with pytest.raises(ConfigError, match=rf"{section}: found name and class; expected one of them"):
            load_config(file, [f"{section}={{name: my_methods.Mine, class: other.Mine}}"])


def test_site_takes_the_class_that_flare_has_built_and_imports_none(file: Path) -> None:
    config = load_config(file)
    sent = serialize_job(config)
    assert parse_job(sent, method=config.method.entry) == config.job
    for method in (sent["method"], {"class": "os.system", "command": "true"}):
        with pytest.raises(ConfigError, match=r"method\.class: found '.*'; expected one of: "):
            parse_job({**sent, "method": method})


def test_class_without_a_network_is_a_method_with_its_settings_only(file: Path) -> None:
    """As FLARE builds it from JSON; the author's ``__init__`` may need the layout."""
    mine = load_config(file).method.entry
    built = mine(config={"share": 0.75})
    assert isinstance(built, ConfiguredMethod)
    assert (built.method_class, built.config.share) == (mine, 0.75)
    method = mine(built.config, Layout(()), 3)
    assert (type(method), method.seed) == (mine, 3)


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("nowhere.Mine", "method.class: 'nowhere.Mine' cannot be imported: No module named 'nowhere'"),
        ("my_methods.Theirs", "'my_methods.Theirs' cannot be imported: .*no attribute 'Theirs'"),
        ("my_methods.Config", "expected a subclass of flare_sparse.methods.Method"),
        ("my_methods.Nameless", "does not define name, a text"),
        ("my_methods.Settingless", "has Config <class 'dict'>; expected a subclass of MethodConfig"),
        ("flare_sparse.methods.Method", r"does not define learn\(\), name, a text"),
    ],
)
def test_class_that_is_no_method_is_refused_with_a_remedy(file: Path, dotted: str, message: str) -> None:
    file.write_text(JOB.replace("my_methods.Mine", dotted))
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_state_that_no_checkpoint_can_hold_is_refused_before_the_first_round(file: Path) -> None:
    (file.parent / "my_states.py").write_text(
        "from dataclasses import dataclass\nfrom flare_sparse.methods.fedavg import FedAvg\n"
        "@dataclass(frozen=True)\nclass State:\n    round: int\n    seen: set\n"
        "class Mine(FedAvg):\n    def init(self, weights, sites):\n        return State(1, set(sites))\n"
    )
    file.write_text(JOB.replace("my_methods.Mine, share: 0.5", "my_states.Mine"))
    choice, bench = load_config(file).method, ToyBench()
    method = choice.entry(choice.config, bench.layout, 1)
    message = r"method fedavg: its state cannot be kept in a checkpoint: content\.seen: set cannot be kept"
    with pytest.raises(CheckpointError, match=message):
        run_locally(method, bench.weights, bench.sites(), bench.task.metric)


def test_plugin_is_named_by_its_class_in_the_job(file: Path) -> None:
    install(file.parent, "sparse_draws", "methods", "draws = my_methods:Mine")
    file.write_text(JOB.replace("class: my_methods.Mine", "name: draws"))
    config = load_config(file)
    assert (config.method.name, config.method.key) == ("my_methods.Mine", "class")
    # Settings of the file's method that the plugin lacks are left out, as for the package's methods.
    assert (
        load_config(CONFIGURATIONS / "neurosfl_brain_age.yaml", ["method.name=draws"]).method.name == "my_methods.Mine"
    )
    for words, expected in (
        (["settings"], "my_methods.Mine  sparse_draws 1.2"),
        (["settings", "draws"], "method.share"),
        (["settings", "my_methods.Mine"], "method.share"),
    ):
        shown = CliRunner().invoke(app, words, terminal_width=200)
        assert expected in " ".join(shown.output.split("\n")).replace("   ", "  "), shown.output


def test_task_of_a_distribution_reads_its_files_and_is_named_by_its_class(file: Path) -> None:
    install(file.parent, "their_tasks", "tasks", "heart = my_tasks:Heart")
    (file.parent / "my_tasks.py").write_text(
        "from flare_sparse.tasks.brain import BrainAge\n\nclass Config(BrainAge.Config):\n    @classmethod\n"
        "    def read_files(cls, settings, data):\n        return {**settings, 'age_mean': 33}\n\n"
        "class Heart(BrainAge):\n    Config = Config\n"
    )
    file.write_text("name: job\nmethod: {name: fedavg}\ntask: {name: heart}\n")
    task = load_config(file).task
    assert (task.name, task.key, task.config.age_mean) == ("my_tasks.Heart", "class", 33)


def test_name_of_two_distributions_or_of_the_package_is_refused_with_its_owners(file: Path) -> None:
    for distribution in ("first", "second"):
        install(file.parent, distribution, "methods", f"draws = {distribution}_module:Mine")
    install(file.parent, "third", "methods", "fedavg = third_module:Mine")
    for name, owners in (
        ("draws", r"first 1\.2 \(first_module\.Mine\) and second 1\.2 \(second_module\.Mine\)"),
        ("fedavg", r"flare-sparse itself and third 1\.2 \(third_module\.Mine\)"),
    ):
        file.write_text(JOB.replace("class: my_methods.Mine, share: 0.5", f"name: {name}"))
        with pytest.raises(ConfigError, match=f"method.name: '{name}' is the name of 2 methods, of {owners}; name one"):
            load_config(file)
