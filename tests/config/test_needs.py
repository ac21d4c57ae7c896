"""Every pair of a method and a feature: it runs, or the error names both, as the one table of needs says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compatibility import (
    EXAMPLES,
    format_csv,
    list_pairs,
    tabulate_methods,
    tabulate_refusals,
)
from pydantic import ValidationError
from torch.utils.data import TensorDataset
from toy import Adapted, Toy

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.needs import FEATURES, Feature, list_compatible_methods
from flare_sparse.config.schema import RunConfig
from flare_sparse.core.needs import Need
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.support.lora import LoRAMethod
from flare_sparse.results.runs.local import run_assembly
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.script import ScriptTask
from flare_sparse.tasks.task import Examples, SiteData, Task, TaskConfig, build_examples

SITES = ("site-1", "site-2", "site-3")


class Loaded(Toy):
    """The toy task, with 24 examples drawn from the name of the site."""

    Config = TaskConfig

    def load(self, data: SiteData, seed: int) -> Examples:
        x = torch.randn(24, 12, generator=torch.Generator().manual_seed(int(data.site[-1])))
        y = x[:, :3].sum(1, keepdim=True)

        def build_dataset(names: Any) -> TensorDataset:
            rows = [int(name) for name in names]
            return TensorDataset(x[rows], y[rows])

        return build_examples(self.config.split.assign(map(str, range(24)), seed), build_dataset)


class LoadedAdapted(Loaded):
    model = Adapted.model


class Normless(Loaded):
    """The same by a network that private training accepts: without batch normalization."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.ReLU(), torch.nn.Linear(10, 1))


def merge(first: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings; later ones come first."""
    merged = dict(first)
    for other in others:
        for key, value in other.items():
            is_section = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge(merged[key], value) if is_section else value
    return merged


def build_config(*settings: Mapping[str, Any]) -> RunConfig:
    """Return the validated settings of a job of the toy task; the method takes one round."""
    data = merge({"name": "pair", "method": {"rounds": 1}, "task": {"class": "Loaded"}}, *settings)
    if "script" in data["task"]:
        del data["task"]["class"]
    tasks = {**TASKS, "Loaded": TaskConfig, "client.py": ScriptTask}
    return RunConfig.model_validate(data, context={"task": tasks})


PAIRS = [
    pytest.param(
        name,
        feature,
        marks=[pytest.mark.slow(rows=24)] if name in list_compatible_methods(feature) else [],
        id=f"{name}-{feature.name}",
    )
    for name in METHODS
    for feature in FEATURES.values()
    if feature.name in EXAMPLES
]


def choose_task(name: str, config: RunConfig) -> Task:
    task = LoadedAdapted if issubclass(METHODS[name], LoRAMethod) else Normless if config.privacy else Loaded
    return task(config.task.config)


@pytest.mark.parametrize(("name", "feature"), PAIRS)
def test_pair_runs_for_a_round_or_is_refused_with_both_names(name: str, feature: Feature) -> None:
    method = {"method": {"name": name}}
    if name not in list_compatible_methods(feature):
        with pytest.raises(ValidationError) as caught:
            build_config(EXAMPLES[feature.name], method)
        texts = [error["msg"] for error in caught.value.errors()]
        assert any(t.startswith(f"{feature.name}: ") and f"but method {name}: " in t for t in texts)
        return
    config = build_config(EXAMPLES[feature.name], method)
    assert feature.is_used(config)
    if config.task.key == "script":
        # Scripts are run by every method that the table allows in tests/training/test_script_trainer.py.
        return
    task = choose_task(name, config)
    assembly = assemble(config, task)
    sites = {site: open_site(assembly, SiteData(site, Path())) for site in SITES}
    outcome, _ = run_assembly(config, assembly, sites)
    assert sorted(outcome.evaluation.sites) == list(SITES)


def test_files_of_the_page_are_the_table() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for name, rows in (("methods", tabulate_methods()), ("reasons", tabulate_refusals())):
        text = (docs / f"compatibility_{name}.csv").read_text(encoding="utf-8")
        assert text == format_csv(rows), "python tests/support/compatibility.py"


def test_two_features_that_exclude_each_other_are_refused_with_both_names() -> None:
    pairs = [(first, second) for first, second, _ in list_pairs() if {first.name, second.name} <= set(EXAMPLES)]
    assert len(pairs) > 5
    for first, second in pairs:
        with pytest.raises(ValidationError) as caught:
            build_config({"method": {"name": "fedavg"}}, EXAMPLES[first.name], EXAMPLES[second.name])
        texts = [error["msg"] for error in caught.value.errors()]
        assert any(t.startswith(f"{first.name}: ") and f"but {second.name}: " in t for t in texts), (first, second)


def test_new_feature_and_new_method_meet_without_knowing_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gossip = Feature("gossip", lambda job: True, "turn gossip off", "no server exists", takes=[Need.NUMBER_OF_ROUNDS])
    monkeypatch.setitem(FEATURES, gossip.name, gossip)
    with pytest.raises(
        ValidationError, match=r"gossip: no server exists, but method fedsparsify: .* or turn gossip off"
    ):
        build_config({"method": {"name": "fedsparsify"}})
    assert build_config({"method": {"name": "fedavg"}}).method.name == "fedavg"
