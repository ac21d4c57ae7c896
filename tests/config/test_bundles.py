"""``task: {bundle: DIR}``: from a folder to the settings of a job, a run, and a bundle again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from monai.bundle import ConfigParser, init_bundle

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import dump_config, load_config, parse_job, serialize_job
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.params import Layout
from flare_sparse.flare.recipe import SparseRecipe
from flare_sparse.results.runs.folder import copy_user_code
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.tasks.bundles.task import BundleTask
from flare_sparse.tasks.data.phantom import write_phantoms
from flare_sparse.tasks.task import SiteData

CROP = "RandCropByPosNegLabeld"
PAGE = Path(__file__).parents[2] / "docs" / "bundles.md"
TRAIN: str = PAGE.read_text().partition("```json\n")[2].partition("```")[0]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration beside a bundle that MONAI made, and not in the working directory."""
    (tmp_path / "study").mkdir()
    init_bundle(str(tmp_path / "study/unet"))
    (tmp_path / "study/unet/configs/train.json").write_text(TRAIN)
    return write_study(tmp_path / "study", {"bundle": "unet"})


def write_study(folder: Path, task: dict[str, Any], **method: Any) -> Path:
    settings = {
        "name": "study",
        "method": {"name": "neurosfl", "sparsity": 0.9, "rounds": 1, **method},
        "task": task,
        "simulator": {"sites": 2, "data": {"phantom": {"labels": True}}},
    }
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def test_bundle_becomes_settings_of_the_job(study: Path, tmp_path: Path) -> None:
    config = load_config(study)
    assert (config.task.name, config.task.key) == ("bundle", "name")
    assert "$" not in dump_config(config)
    assert "@" not in dump_config(config)
    expected = json.loads(TRAIN)
    declared = config.task.config.declaration
    assert declared["preprocessing"] == expected["train"]["fixed"] + expected["train"]["random"]
    assert (declared["network"], declared["loss"]) == (expected["network_def"], expected["loss"])
    assert declared["metric"] == {"val_mean_dice": {"_target_": "MeanDice", "include_background": False}}
    training = config.method.config.training
    assert (training.optimizer, training.lr, training.batch_size, training.epochs) == ("adamw", 0.01, 2, 1)
    # The job and the record of a run need the folder no more.
    copy = tmp_path / "config.yaml"
    copy.write_text(dump_config(config))
    (study.parent / "unet").rename(tmp_path / "gone")
    assert load_config(copy) == config
    assert parse_job(serialize_job(config)) == config.job


def test_settings_of_the_method_go_before_the_bundle(study: Path) -> None:
    training = load_config(study, ["method.training.lr=0.5"]).method.config.training
    assert (training.optimizer, training.lr) == ("adamw", 0.5)
    training = load_config(study, ["method.training.optimizer=sgd"]).method.config.training
    assert (training.optimizer, training.lr, training.batch_size) == ("sgd", 1e-3, 2)


def test_override_of_the_job_replaces_and_disables_items_of_the_bundle(study: Path) -> None:
    own = {"_target_": "scripts.Own", "keys": "image"}
    text = TRAIN.replace('{"_target_": "NormalizeIntensityd", "keys": "image"}', json.dumps(own))
    (study.parent / "unet/configs/train.json").write_text(text)
    override = {"train::fixed::2::_disabled_": True, "train#dataloader#batch_size": 1}
    config = load_config(write_study(study.parent, {"bundle": "unet", "override": override}))
    assert config.method.config.training.batch_size == 1
    targets = [transform["_target_"] for transform in config.task.config.declaration["preprocessing"]]
    assert targets == ["LoadImaged", "EnsureChannelFirstd", CROP]
    with pytest.raises(ConfigError, match=r"task.override: the bundle has no item train::fixed::9::keys"):
        load_config(write_study(study.parent, {"bundle": "unet", "override": {"train::fixed::9::keys": "image"}}))


def test_bundle_of_an_override_is_relative_to_the_working_directory(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(study, ["task.bundle=study/unet"]) == load_config(study)
    with pytest.raises(ConfigError, match=r"unet2: expected the folder of a MONAI bundle.*Did you mean 'unet'"):
        load_config(study, ["task.bundle=study/unet2"])


def test_yaml_and_json_configurations_are_the_same(study: Path) -> None:
    expected = load_config(study)
    (study.parent / "unet/configs/train.json").rename(study.parent / "unet/configs/train.yml")
    assert load_config(study) == expected
    (study.parent / "unet/configs/train.json").write_text(TRAIN)
    with pytest.raises(ConfigError, match=r"found train\.json, train\.yml"):
        load_config(study)
    for name in ("train.json", "train.yml"):
        (study.parent / "unet/configs" / name).rename(study.parent / f"unet/configs/multi_gpu.{name}")
    with pytest.raises(ConfigError, match=r"found inference\.json, metadata\.json, multi_gpu\.train\.json, .*\.yml\.$"):
        load_config(study)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"configs/train\.json: cannot be read as JSON"),
        ("[]", r"configs/train\.json: expected a section of items, found list"),
        (
            TRAIN.replace("UNet", "my.Net"),
            r"configs/train\.json: network_def::_target_: found 'my.Net', which is neither",
        ),
        (
            TRAIN.replace("0.01", '"$1 / 0"'),
            r"configs/train\.json: optimizer: MONAI cannot resolve it: ZeroDivisionError",
        ),
        (
            TRAIN.replace("0.01", '"@missing"'),
            r"optimizer: MONAI cannot resolve it: ValueError: .*`@missing` is not def",
        ),
        (TRAIN.replace("0.01", "NaN"), r"method.training.lr: expected a finite number"),
        (TRAIN.replace("AdamW", "Lion"), r"configs/train\.json: optimizer: found .*method.training.optimizer"),
    ],
)
def test_error_names_the_file_and_the_item(study: Path, text: str, message: str) -> None:
    (study.parent / "unet/configs/train.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(study)


def test_files_with_other_names_stay_in_the_folder(study: Path) -> None:
    expected = load_config(study)
    for name in ("multi_gpu.train.json", "._train.json", "logging.conf"):
        (study.parent / "unet/configs" / name).write_text("[loggers]")
    assert load_config(study) == expected


def test_bundle_and_name_exclude_each_other(study: Path) -> None:
    with pytest.raises(ConfigError, match="task: found bundle and name; expected one of them"):
        load_config(study, ["task.name=segmentation"])


NET = """
import torch

class Net(torch.nn.Conv3d):
    def __init__(self, out_channels):
        super().__init__(1, out_channels, 3, padding=1)
"""
OWN = "bundled.nets.Net"


@pytest.fixture
def own(study: Path) -> Path:
    """A configuration beside a bundle with a network of its own, and with an expression that calls its code."""
    package = study.parent / "unet/bundled"
    package.mkdir()
    (package / "nets.py").write_text(NET)
    (package / "sizes.py").write_text("SITES = ('a', 'b', 'c', 'd')")
    content = json.loads(TRAIN)
    content |= {
        "imports": ["$from bundled.sizes import SITES"],
        "network_def": {"_target_": OWN, "out_channels": "@channels"},
    }
    content["channels"] = "$len(SITES)"
    (study.parent / "unet/configs/train.json").write_text(json.dumps(content))
    return study


def test_own_code_of_a_bundle_travels_where_code_does(own: Path, tmp_path: Path) -> None:
    study = Study.load(own)
    assert study.config.task.config.declaration["network"] == {"_target_": OWN, "out_channels": 4}
    assert study.user_code == (own.parent / "unet/bundled",)
    with pytest.raises(ConfigError, match=r"source files travel only with deployment\.packaging: byoc"):
        SparseRecipe(study.config, modules=study.user_code)
    study = Study.load(study.file, ["deployment.packaging=byoc"])
    SparseRecipe(study.config, modules=study.user_code).export(str(tmp_path / "jobs"))
    app = tmp_path / "jobs/study/app"
    assert (app / "custom/bundled/nets.py").read_text() == NET
    client = json.loads((app / "config/config_fed_client.json").read_text())
    task = next(part for part in client["components"] if part["id"] == "task")["args"]["part"]
    # FLARE builds these, and thus asks the site's policy for each.
    assert task["path"] == "flare_sparse.tasks.bundles.task.BundleTask"
    assert task["args"]["class_0"] == {"path": OWN, "args": {"out_channels": 4}}
    assert isinstance(study.assembly.task, BundleTask)
    assert [tuple(value.shape) for value in study.assembly.task.model().parameters()] == [(4, 1, 3, 3, 3), (4,)]
    # The record of a run has the code beside it, not the lead's folder.
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(dump_config(study.config))
    copy_user_code(study.user_code, tmp_path / "run")
    assert str(own.parent) not in (tmp_path / "run/config.yaml").read_text()
    (own.parent / "unet").rename(tmp_path / "gone")
    assert Study.load(tmp_path / "run/config.yaml").run_id == study.run_id


def test_site_without_the_code_refuses_it_in_words(own: Path) -> None:
    sent = serialize_job(load_config(own))
    with pytest.raises(
        ConfigError, match=f"{OWN}: this is code of the bundle's own, and 0 of 1 classes have come with"
    ):
        assemble(parse_job(sent))
    for change, message in (
        ({"code": []}, "found 'bundled.nets.Net', which is neither on the list"),
        ({"code": [OWN, "os.system"]}, "task.code: os.system: the declaration names no such class"),
        ({"folder": "/tmp"}, "folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_job({**sent, "task": {**sent["task"], **change}})


@pytest.mark.slow
def test_bundle_of_monai_is_trained_at_90_percent_and_loaded_back_by_monai(study: Path, tmp_path: Path) -> None:
    """No code is sent: the job has no custom folder, and MONAI's own parser builds and loads what comes back."""
    config = load_config(study)
    SparseRecipe(config).export(str(tmp_path / "jobs"))
    assert [path.name for path in (tmp_path / "jobs/study").rglob("custom")] == []
    sent = yaml.safe_load((tmp_path / "jobs/study/app/config/flare_sparse.yaml").read_text())
    assembly = assemble(parse_job(sent))
    brains = [write_phantoms(tmp_path / site, 1, 5, seed, (26, 32, 26), labels=True) for seed, site in enumerate("ab")]
    sites = {site: open_site(assembly, SiteData(site, folder)) for site, folder in zip("ab", brains, strict=True)}
    outcome, _ = run_locally(assembly.method, assembly.weights, sites, assembly.task.metric)
    assert 0 < outcome.evaluation.overall["val_mean_dice"] < 1

    model = assembly.task.model()
    layout = Layout.from_module(model)
    trained = layout.unflatten(outcome.weights)
    model.load_state_dict(trained, strict=False)
    assembly.task.save(model, tmp_path / "trained")
    parser = ConfigParser()
    parser.read_config(tmp_path / "trained/configs/train.json")
    network = parser.get_parsed_content("network_def")
    network.load_state_dict(torch.load(tmp_path / "trained/models/model.pt", weights_only=True))
    weights = torch.cat([p.flatten() for name, p in network.named_parameters() if name.endswith("conv.weight")])
    assert 0.85 < float((weights == 0).float().mean()) < 0.95
    start = layout.unflatten(assembly.weights)
    assert any(not torch.equal(value, start[name]) for name, value in network.named_parameters())
